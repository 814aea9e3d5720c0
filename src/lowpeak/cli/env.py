"""`lowpeak env`: versions and hardware as text, for bug reports. A package that is missing is said to be missing."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from typing import Any

import lowpeak

PACKAGES = (
    "torch",
    "transformers",
    "accelerate",
    "datasets",
    "tokenizers",
    "huggingface_hub",
    "numpy",
    "peft",
    "bitsandbytes",
    "vllm",
    "deepspeed",
    "ninja",
    "triton",
    "psutil",
)


def report() -> str:
    """One `name: value` line for each thing worth knowing."""
    facts = {"lowpeak": lowpeak.__version__, "python": platform.python_version(), "platform": platform.platform()}
    facts |= {name: version(name) for name in PACKAGES}
    facts |= accelerators() | {"cpu": cpu(), "memory": memory()}
    return "".join(f"{name}: {value}\n" for name, value in facts.items())


def version(package: str) -> str:
    """The installed version of a package, without importing it; vLLM's CPU build goes by another name."""
    for name in (package, f"{package}-cpu"):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return "not installed"


def accelerators() -> dict[str, str]:
    """CUDA's version and each device with its memory, as torch sees them."""
    try:
        import torch
    except (ImportError, OSError) as error:
        return {"devices": f"unknown: torch does not import ({error})"}
    facts = {"CUDA of torch": str(torch.version.cuda or "none"), "ROCm of torch": str(torch.version.hip or "none")}
    facts |= {"process groups": backends()}
    if not torch.cuda.is_available():
        return facts | {"devices": "no GPU that torch can use"}
    for index in range(torch.cuda.device_count()):
        facts[f"device {index}"] = _device(torch.cuda.get_device_properties(index))
    return facts


def _device(properties: Any) -> str:
    capability = f"{properties.major}.{properties.minor}"
    return f"{properties.name}, {gibibytes(properties.total_memory)}, compute capability {capability}"


def backends() -> str:
    """What ranks can talk through, as torch was built."""
    import torch

    if not torch.distributed.is_available():
        return "none: torch was built without torch.distributed"
    found = {"nccl": torch.distributed.is_nccl_available(), "gloo": torch.distributed.is_gloo_available()}
    return ", ".join(name for name, there in found.items() if there) or "none"


def cpu() -> str:
    """How many cores the machine has, and how many this process may use."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, {usable} usable"


def memory() -> str:
    """Physical memory, where the system tells."""
    try:
        return gibibytes(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    except (AttributeError, OSError, ValueError):
        return "unknown"


def gibibytes(number: int) -> str:
    """Bytes as GiB with one decimal."""
    return f"{number / 2**30:.1f} GiB"

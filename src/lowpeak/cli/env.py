"""`lowpeak env`: versions and hardware as text, for bug reports."""

from __future__ import annotations

import os
import platform
from importlib import metadata

import psutil  # type: ignore[import-untyped]

import lowpeak
from lowpeak.cpu_cores import THREADS_VARIABLE, allowed_cores

PACKAGES = (
    *("torch", "transformers", "accelerate", "datasets", "tokenizers", "huggingface_hub", "numpy"),
    *("peft", "bitsandbytes", "vllm", "deepspeed", "ninja", "triton", "psutil"),
)


def environment_report() -> str:
    """Return one `name: value` line for each package and each part of the hardware."""
    facts = {"lowpeak": lowpeak.__version__, "python": platform.python_version(), "platform": platform.platform()}
    facts |= {name: installed_version(name) for name in PACKAGES} | _accelerators() | _fast_paths()
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    facts["cpu"] = f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, {usable} usable"
    facts["physical cores"] = f"{allowed_cores()} allowed by affinity and CPU quota"
    facts[THREADS_VARIABLE] = os.environ.get(THREADS_VARIABLE, "not set")
    facts["memory"] = _gibibytes(psutil.virtual_memory().total)
    return "".join(f"{name}: {value}\n" for name, value in facts.items())


def installed_version(package: str) -> str:
    """Return a package's installed version without importing it."""
    # The CPU build of vLLM has another name.
    for name in (package, f"{package}-cpu"):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return "not installed"


def _accelerators() -> dict[str, str]:
    """Return torch's CUDA and ROCm versions, its process group backends, and each device with its memory."""
    try:
        import torch
    except (ImportError, OSError) as error:
        return {"devices": f"unknown: torch does not import ({error})"}
    facts = {"CUDA of torch": str(torch.version.cuda or "none"), "ROCm of torch": str(torch.version.hip or "none")}
    dist = torch.distributed
    backends = [name for name in ("nccl", "gloo") if dist.is_available() and dist.is_backend_available(name)]
    facts["process groups"] = ", ".join(backends) or "none"
    if not torch.cuda.is_available():
        return facts | {"devices": "no GPU that torch can use"}
    for index in range(torch.cuda.device_count()):
        device = torch.cuda.get_device_properties(index)
        capability = f"compute capability {device.major}.{device.minor}"
        facts[f"device {index}"] = f"{device.name}, {_gibibytes(device.total_memory)}, {capability}"
    return facts


def _fast_paths() -> dict[str, str]:
    """Return whether a Llama of the installed transformers generates by the decode loop and trains without padding."""
    try:
        import torch
        from transformers import LlamaConfig, LlamaForCausalLM

        from lowpeak.attention import packing_unsupported_reason
        from lowpeak.training import describe_generation
    except (ImportError, OSError) as error:
        return {"generation": f"unknown: transformers does not import ({error})"}
    with torch.device("meta"):
        llama = LlamaForCausalLM(LlamaConfig(num_hidden_layers=1))
    layout = packing_unsupported_reason(llama) or "packed without padding"
    return {"generation (Llama)": describe_generation(llama, None), "layout (Llama)": layout}


def _gibibytes(number: int) -> str:
    return f"{number / 2**30:.1f} GiB"

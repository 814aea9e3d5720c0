"""`lowpeak env`: versions and hardware for bug reports, a model's paths, the command line of the self-test."""

from __future__ import annotations

import inspect
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from importlib import metadata
from typing import Any

import psutil  # type: ignore[import-untyped]

import lowpeak
from lowpeak.cli.arguments import ErrorParser
from lowpeak.cpu_cores import THREADS_VARIABLE, allowed_cores
from lowpeak.errors import ArgumentError, first_line

PACKAGES = (
    *("torch", "transformers", "accelerate", "datasets", "tokenizers", "huggingface_hub", "numpy"),
    *("peft", "bitsandbytes", "vllm", "deepspeed", "ninja", "triton", "psutil"),
)

# Options of the self-test and their effects.
SELFTEST_OPTIONS = {
    "--gpu": "adds the GPU to the self-test",
    "--rows": "chooses rows of the self-test",
    "--quick": "shortens the self-test to 3 minutes",
    "--format": "is text or json, alone; with other options it sets the format of the self-test's results",
}
_ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
# Compilers that parts of the stack call while they run.
_COMPILERS = {
    "gcc": "Triton and FlexAttention compile with a C compiler",
    "g++": "DeepSpeed's CPUAdam (zero3-offload) compiles with g++ and ninja",
}


def run_selftest(arguments: Sequence[str]) -> int:
    """Run `lowpeak env --selftest`: print the environment and the table, or one JSON document; return 1 if a row failed."""
    parser = ErrorParser("lowpeak env --selftest", description="Test this machine's GPUs and vLLM.", allow_abbrev=False)
    parser.add_argument("--selftest", action="store_true", help="test vLLM, on a CPU too")
    parser.add_argument("--gpu", action="store_true", help="test the GPU's kernels, and runs on it, too")
    rows = parser.add_mutually_exclusive_group()
    rows.add_argument("--rows", metavar="NAMES", help="groups and rows to run, separated by commas (docs/gpus.md)")
    rows.add_argument("--quick", action="store_true", help="run the first rows for a new card, within 3 minutes")
    parser.add_argument("--format", choices=("text", "json"), default="text", help="json: one document on stdout")
    options, others = parser.parse_known_args(list(arguments))
    if others:
        raise ArgumentError(f"`lowpeak env --selftest` takes no config; remove {' '.join(others)}.")
    names = [] if options.rows is None else [name.strip() for name in options.rows.split(",")]

    from lowpeak.selftest import choose_rows, run_rows, to_json

    selection = choose_rows(options.gpu, names, options.quick)
    facts = environment_facts()
    if options.format == "text":
        print(_to_lines(facts), flush=True)
        outcomes = run_rows(selection)
    else:
        outcomes = run_rows(selection, partial(print, file=sys.stderr, flush=True))
        print(to_json(facts, selection, outcomes))
    return int(any(outcome.result == "FAILED" for outcome in outcomes))


def environment_report(*, as_json: bool = False) -> str:
    """Return one `name: value` line for each package and each part of the hardware, or one JSON object."""
    facts = environment_facts()
    return f"{json.dumps(facts, indent=2)}\n" if as_json else _to_lines(facts)


def _to_lines(facts: dict[str, Any]) -> str:
    values = {name: f"{value:,}" if isinstance(value, int) else value for name, value in facts.items()}
    return "".join(f"{name}: {value}\n" for name, value in values.items())


def print_model(arguments: Sequence[str]) -> int:
    """Run `lowpeak env MODEL`: print how a model generates and trains, by its config alone."""
    parser = ErrorParser("lowpeak env MODEL", description="Show what lowpeak does with a model.", allow_abbrev=False)
    parser.add_argument("model", metavar="MODEL", help="a folder, a config.json or a hub name; only its config is read")
    parser.add_argument("--format", choices=("text", "json"), default="text", help="json: one document on stdout")
    parser.add_argument(
        "--trust_remote_code", choices=("true", "false"), default="false", help="run the model's own code"
    )
    options = parser.parse_args(list(arguments))
    facts = model_facts(options.model, options.trust_remote_code == "true")
    print(json.dumps(facts, indent=2) + "\n" if options.format == "json" else _to_lines(facts), end="")
    return 0


def model_facts(name: str, trust_remote_code: bool = False) -> dict[str, Any]:
    """Return a model's generation path, layout, kernels, adapter and cache, by name."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode
    from transformers import AutoConfig, AutoModelForCausalLM

    from lowpeak.attention import check_spans
    from lowpeak.models import expert_parameters, from_pretrained
    from lowpeak.plan import make_model
    from lowpeak.rollout.native import measure_cache

    config = from_pretrained(AutoConfig, name, trust_remote_code=trust_remote_code)
    with FakeTensorMode():
        model = make_model(AutoModelForCausalLM, config)
    check_spans(model)
    experts, cache = sorted(expert_parameters(model)), measure_cache(model, torch.bfloat16)
    adapted = f"without experts; lora_target_parameters={experts} adapts them" if experts else "yes"
    facts = {"model": name, "model type": config.model_type, **_fast_paths(model), **_recurrent_kernels(model)}
    facts |= {"LoRA on all-linear": adapted, "cache dtype": "bfloat16"}
    facts |= {"cache bytes per token": cache.by_window.get(None, 0)}
    facts |= {f"cache bytes per token of the last {size}": n for size, n in cache.by_window.items() if size}
    facts |= {"state bytes per sequence": cache.states}
    return facts if cache.is_measured else {**facts, "cache bytes": "an upper bound: the model's code reads values"}


def _recurrent_kernels(model: Any) -> dict[str, str]:
    """Return the packages whose kernels recurrent layers call; nothing for a model or a transformers without them."""
    from lowpeak.attention import mixers_of

    packages = set()
    for module in {sys.modules[type(mixer).__module__] for mixer in mixers_of(model)}:
        for function in vars(module).values():
            if inspect.isfunction(function):
                implementation = inspect.getclosurevars(function).nonlocals.get("implementation")
                packages |= {implementation.__module__.split(".")[0]} if callable(implementation) else set()
    words = {"transformers": "reference code of transformers, which is slow"}
    return {"recurrent kernels": ", ".join(words.get(each, each) for each in sorted(packages))} if packages else {}


def environment_facts() -> dict[str, str]:
    """Return the versions of packages, compilers and drivers, and the hardware, by name."""
    facts = {"lowpeak": lowpeak.__version__, "python": platform.python_version(), "platform": platform.platform()}
    versions = {name: installed_version(name) for name in PACKAGES}
    facts |= versions | _compilers() | _accelerators() | _describe_fast_paths()
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    facts["cpu"] = f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, {usable} usable"
    facts["physical cores"] = f"{allowed_cores()} allowed by affinity and CPU quota"
    facts[THREADS_VARIABLE] = os.environ.get(THREADS_VARIABLE, "not set")
    facts["memory"] = _gibibytes(psutil.virtual_memory().total)
    return facts


def _compilers() -> dict[str, str]:
    """Return each compiler's version, or the features that a missing one disables."""
    found = {name: _first_line(name, "--version") or f"does not run: {use}" for name, use in _COMPILERS.items()}
    if installed_version("ninja") == "not installed" and shutil.which("ninja") is None:
        found["ninja"] = f"not installed: {_COMPILERS['g++']}"
    return found


def _first_line(*command: str) -> str:
    """Return the first line that a command prints; "" if it is missing, fails, or takes 10 seconds."""
    try:
        ended = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return next(iter(ended.stdout.splitlines()), "")


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
    if "nccl" in backends:
        facts["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
    facts["cuDNN"] = str(torch.backends.cudnn.version() or "none")
    facts["PYTORCH_ALLOC_CONF"] = next(filter(None, map(os.environ.get, _ALLOCATOR_VARIABLES)), "not set")
    if not torch.cuda.is_available():
        return facts | {"devices": "no GPU that torch can use"}
    return facts | driver_facts() | _gpus()


def _gpus() -> dict[str, str]:
    import torch

    facts = {}
    for index in range(torch.cuda.device_count()):
        device = torch.cuda.get_device_properties(index)
        capability = f"compute capability {device.major}.{device.minor}"
        facts[f"device {index}"] = f"{device.name}, {_gibibytes(device.total_memory)}, {capability}"
    return facts


def _describe_fast_paths() -> dict[str, str]:
    """Return whether the installed transformers' Llama generates by the decode loop and trains without padding."""
    try:
        import torch
        from transformers import LlamaConfig, LlamaForCausalLM

        with torch.device("meta"):
            llama = LlamaForCausalLM(LlamaConfig(num_hidden_layers=1))
        return {f"{name} (Llama)": path for name, path in _fast_paths(llama).items()}
    # A report of versions must not fail because of one.
    except Exception as error:
        return {"generation (Llama)": f"unknown: {type(error).__name__}: {first_line(error)}"}


def _fast_paths(model: Any) -> dict[str, str]:
    from lowpeak.attention import packing_unsupported_reason
    from lowpeak.setup import describe_generation

    obstacle = packing_unsupported_reason(model)
    layout = "packed without padding" if obstacle is None else f"padded: {obstacle}"
    return {"generation": describe_generation(model, None), "layout": layout}


def driver_facts() -> dict[str, str]:
    """Return the driver's version and the free memory of each card, in MiB."""
    query = ("nvidia-smi", "--query-gpu=driver_version,memory.free,memory.total", "--format=csv,noheader,nounits")
    try:
        lines = subprocess.run(
            query, capture_output=True, text=True, errors="replace", timeout=30, check=True
        ).stdout.splitlines()
    except (OSError, subprocess.SubprocessError):
        return {"driver": "unknown: nvidia-smi does not answer"}
    # It also prints warnings, and sentences such as "No devices were found".
    cards = [fields for line in lines if len(fields := [field.strip() for field in line.split(",")]) == 3]
    facts = {"driver": cards[0][0] if cards else "unknown"}
    for index, (_, free, total) in enumerate(cards):  # in nvidia-smi's order, whatever CUDA_VISIBLE_DEVICES says
        facts[f"free memory of card {index}"] = f"{free} of {total} MiB"
    return facts


def _gibibytes(number: int) -> str:
    return f"{number / 2**30:.1f} GiB"

"""The Triton kernels compiled for GPUs that need not be there; prints what the assembler gave each, as lines of JSON."""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from all_pairs import all_pairs
from lowpeak.logprobs import triton_kernels
from lowpeak.optim import triton_step

CAPABILITIES = ("80", "89", "90")
FLAGS, POINTERS = ("none", "all"), ("aligned", "any")
LOW_BITS = ("16", "8", "0", "-1")
FLOATS = ("inner", "outer")
INTEGERS = ("stride", "narrow_stride", "num_ids")
READER = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
CHOSEN = {"WITH_BIAS", "WITH_CAP"}
STATISTICS = {"WITH_BIAS", "WITH_CAP", "WITH_DOT"}
GRADIENT = {"WITH_BIAS", "WITH_CAP", "WITH_ENTROPY", "WITH_NARROW"}


def usage(
    capability: int, kernel: triton.JITFunction, flags: dict[str, bool], aligned: bool, num_warps: int, block: int
) -> dict[str, Any]:
    """What one variant takes: registers a thread, bytes of its stack and local memory (both 0 unless registers spill),
    and shared bytes of a block.

    With `aligned`, pointers and sizes are multiples of 16, which a launch tells the compiler: loads are wider.
    """
    full = flags["WITH_BIAS"]
    pointers = {"bias": "*bf16" if full else "*fp32", "targets": "*i64", "narrow": "*bf16" if full else "*fp32"}
    constants = {**flags, **({"BLOCK": block} if "BLOCK" in kernel.arg_names else {})}
    signature = {
        name: pointers.get(name, "fp32" if name in FLOATS else "i32" if name in INTEGERS else "*fp32")
        for name in kernel.arg_names
    }
    signature |= dict.fromkeys(constants, "constexpr")
    return assembled(capability, kernel, signature, constants, aligned, num_warps)


def optimizer_usage(capability: int, low_bits: int, has_blocks: bool) -> dict[str, Any]:
    """What the optimizer's kernel takes: with this number of low bits (-1: fp32 weights), with 8-bit or fp32 states."""
    kernel = triton_step._update
    low, fp32 = {8: "*i8"}.get(low_bits, "*i16"), low_bits < 0
    pointers = {"weights": "*fp32" if fp32 else "*i16", "low": low, "gradients": "*fp32" if fp32 else "*i16"}
    if has_blocks:
        pointers |= {"first": "*i8", "second": "*u8"}
    width = 128 if has_blocks else triton_step._TILE
    constants = {
        "LOW_BITS": low_bits, "BF16_GRADIENTS": not fp32, "BLOCKS": has_blocks,
        "ROWS": triton_step._TILE // width, "WIDTH": width,
    }  # fmt: skip
    numbers = {"size": "i32", "block": "i32", "start": "i32", "key1": "i32", "key2": "i32"}
    names = ("first", "first_scale", "second", "second_scale")
    signature = {name: numbers.get(name, "fp32") for name in kernel.arg_names}
    signature |= {**dict.fromkeys(names, "*fp32"), **pointers, **dict.fromkeys(constants, "constexpr")}
    return assembled(capability, kernel, signature, constants, True, triton_step._NUM_WARPS)


def assembled(
    capability: int,
    kernel: triton.JITFunction,
    signature: dict[str, str],
    constants: dict[str, Any],
    aligned: bool,
    num_warps: int,
) -> dict[str, Any]:
    wide = [i for i, name in enumerate(kernel.arg_names) if signature[name][0] in "*i"] if aligned else []
    source = ASTSource(kernel, signature, constants, {(i,): [["tt.divisibility", 16]] for i in wide})
    target = GPUTarget("cuda", capability, 32)
    compiled = triton.compile(source, target=target, options={"num_warps": num_warps})
    report = read_report(compiled.asm["cubin"])
    found = {name.lower(): int(re.search(rf"{name}:(\d+)", report)[1]) for name in ("REG", "STACK", "LOCAL", "SHARED")}
    return {**found, "shared": max(found["shared"], compiled.metadata.shared)}


def read_report(cubin: bytes) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [READER, "--dump-resource-usage", file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout


def main() -> None:
    """Each pair of a GPU, a kernel, its flags and its alignment; and one variant that has too few registers."""
    kernels = {
        "_chosen": (triton_kernels._chosen, CHOSEN),
        "_statistics": (triton_kernels._statistics, STATISTICS),
        "_gradient": (triton_kernels._gradient, GRADIENT),
    }
    as_run = (triton_kernels._NUM_WARPS, triton_kernels._BLOCK)
    for case in all_pairs({"capability": CAPABILITIES, "kernel": [*kernels], "flags": FLAGS, "pointers": POINTERS}):
        kernel, names = kernels[case["kernel"]]
        flags = dict.fromkeys(names, case["flags"] == "all")
        found = usage(int(case["capability"]), kernel, flags, case["pointers"] == "aligned", *as_run)
        print(json.dumps({**case, "threads": 32 * as_run[0], **found}))
    for case in all_pairs({"capability": CAPABILITIES, "low_bits": LOW_BITS, "states": ("8 bits", "fp32")}):
        found = optimizer_usage(int(case["capability"]), int(case["low_bits"]), case["states"] == "8 bits")
        print(json.dumps({**case, "kernel": "optimizer", "threads": 32 * triton_step._NUM_WARPS, **found}))
    one_warp = usage(80, triton_kernels._statistics, dict.fromkeys(STATISTICS, True), True, 1, triton_kernels._BLOCK)
    print(json.dumps({"too few": one_warp}))


if __name__ == "__main__":
    main()

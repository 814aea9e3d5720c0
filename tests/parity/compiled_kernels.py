"""The Triton kernels compiled for GPUs that need not be there; prints what the assembler gave each, as lines of JSON."""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from lowpeak.logprobs import triton_kernels

CAPABILITIES = (80, 89, 90)
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
    """The plainest and the fullest variants of each, aligned or not; and one that has too few registers."""
    kernels = (
        (triton_kernels._chosen, CHOSEN),
        (triton_kernels._statistics, STATISTICS),
        (triton_kernels._gradient, GRADIENT),
    )
    for capability, (kernel, names), full, aligned in itertools.product(
        CAPABILITIES, kernels, (False, True), (False, True)
    ):
        as_run = (triton_kernels._NUM_WARPS, triton_kernels._BLOCK)
        found = usage(capability, kernel, dict.fromkeys(names, full), aligned, *as_run)
        print(json.dumps({"capability": capability, "kernel": kernel.__name__, "threads": 32 * as_run[0], **found}))
    one_warp = usage(80, triton_kernels._statistics, dict.fromkeys(STATISTICS, True), True, 1, triton_kernels._BLOCK)
    print(json.dumps({"too few": one_warp}))


if __name__ == "__main__":
    main()

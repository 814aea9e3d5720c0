"""The Triton kernels compiled for GPUs that need not be there; prints one line a target."""

from __future__ import annotations

import itertools

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from lowpeak.logprobs import triton_kernels

FLOATS = ("inner", "outer")
INTEGERS = ("stride", "narrow_stride", "num_ids")


def compile_for(capability: int, kernel: triton.JITFunction, flags: dict[str, bool], **pointers: str) -> int:
    """Bytes of the machine code of one variant."""
    constants = {**flags, **({"BLOCK": triton_kernels._BLOCK} if "BLOCK" in kernel.arg_names else {})}
    signature = {
        name: pointers.get(name, "fp32" if name in FLOATS else "i32" if name in INTEGERS else "*fp32")
        for name in kernel.arg_names
    }
    signature |= dict.fromkeys(constants, "constexpr")
    source = ASTSource(kernel, signature, constexprs=constants)
    target = GPUTarget("cuda", capability, 32)
    compiled = triton.compile(source, target=target, options={"num_warps": triton_kernels._NUM_WARPS})
    return len(compiled.asm["cubin"])


def main() -> None:
    """The plainest and the fullest variants of each, for Ampere and Hopper."""
    for capability, full in itertools.product((80, 90), (False, True)):
        flags = {"WITH_BIAS": full, "WITH_CAP": full}
        pointers = {"bias": "*bf16" if full else "*fp32", "targets": "*i64", "narrow": "*bf16" if full else "*fp32"}
        sizes = [
            compile_for(capability, triton_kernels._chosen, flags, bias=pointers["bias"], targets="*i64"),
            compile_for(capability, triton_kernels._statistics, {**flags, "WITH_DOT": full}, bias=pointers["bias"]),
            compile_for(
                capability, triton_kernels._gradient, {**flags, "WITH_ENTROPY": full, "WITH_NARROW": full}, **pointers
            ),
        ]
        assert all(sizes)
        print(f"sm_{capability} {'full' if full else 'plain'}: {sizes} bytes")


if __name__ == "__main__":
    main()

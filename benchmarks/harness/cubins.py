"""What the assembler gives the project's Triton kernels, compiled for GPUs that are not there."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from lowpeak.logprobs import triton_kernels, triton_programs
from lowpeak.optim import triton_step

# Bytes of shared memory that a block may have (CUDA C++ Programming Guide, "Compute Capabilities").
SHARED_MEMORY = {
    "8.0": 163 << 10,
    "8.6": 99 << 10,
    "8.9": 99 << 10,
    "9.0": 227 << 10,
    "10.0": 227 << 10,
    "12.0": 99 << 10,
}
_BLOCK_REGISTERS = 65_536  # on all of them

_READER = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
_FLOATS = ("inner", "outer", "teacher_inner", "teacher_outer", "beta")
_INTEGERS = ("stride", "narrow_stride", "extra_stride", "teacher_stride", "num_ids", "num_extra")
_NUM_WARPS = triton_kernels._NUM_WARPS
_FINISH = ("WITH_BIAS", "WITH_CAP")
_PAIR = (*_FINISH, "TEACHER_WITH_BIAS", "TEACHER_WITH_CAP", "IS_FORWARD", "IS_MIXTURE")
_LOG_PROB_KERNELS = {
    "chosen logits": (triton_programs.chosen, _FINISH),
    "softmax statistics": (triton_programs.statistics, (*_FINISH, "WITH_DOT")),
    "gradient of logits": (triton_programs.gradient, (*_FINISH, "WITH_ENTROPY", "WITH_NARROW", "WITH_EXTRA")),
    "divergences": (triton_programs.divergences, _PAIR),
    "gradient of divergences": (triton_programs.divergence_gradient, _PAIR),
}
_LOW_BITS = (16, 8, 0, -1)  # -1: fp32 weights


@dataclass(frozen=True)
class KernelResources:
    """What a kernel takes on one target: registers of a thread, its stack in bytes, and shared memory of a block.

    The stack is local memory; it is 0 unless registers spill.
    """

    kernel: str
    size: str
    variant: str
    capability: str
    num_warps: int
    registers: int
    stack_bytes: int
    shared_bytes: int

    @property
    def shared_limit(self) -> int:
        """Bytes of shared memory that the target gives a block."""
        return SHARED_MEMORY[self.capability]

    @property
    def fits(self) -> bool:
        """Whether a block can run on the target."""
        return self.shared_bytes <= self.shared_limit and self.registers * self.num_warps * 32 <= _BLOCK_REGISTERS


def read_resources(names: tuple[str, str, str], capability: str, compiled: Any) -> KernelResources:
    """Return the resources of a kernel compiled by Triton, given its name, size and variant."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [str(_READER), "--dump-resource-usage", file.name]
        report = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    found = {name: int(number) for name, number in re.findall(r"\b(REG|STACK|LOCAL|SHARED):(\d+)", report)}
    # Static shared memory is in the report, dynamic in Triton's metadata.
    shared = max(found["SHARED"], compiled.metadata.shared)
    stack = found["STACK"] + found["LOCAL"]
    return KernelResources(*names, capability, compiled.metadata.num_warps, found["REG"], stack, shared)


def target_of(capability: str) -> GPUTarget:
    """Return Triton's target of a compute capability."""
    return GPUTarget("cuda", int(capability.replace(".", "")), 32)


def project_kernels(capability: str, quick: bool) -> Iterator[KernelResources]:
    """Yield the resources of each variant of the project's kernels; `quick` omits most combinations.

    Aligned pointers and sizes are multiples of 16, which a launch tells the compiler: loads are wider.
    """
    for name, (_, flags) in _LOG_PROB_KERNELS.items():
        choices = list(product((False, True), repeat=len(flags)))
        for values, aligned in product(choices[:: len(choices) - 1] if quick else choices, (True, False)):
            yield logprob_kernel(name, dict(zip(flags, values, strict=True)), capability, aligned)
    for low_bits, has_blocks in product(_LOW_BITS, (True, False)):
        yield optimizer_kernel(low_bits, has_blocks, capability)


def logprob_kernel(
    name: str, flags: dict[str, bool], capability: str, aligned: bool, num_warps: int = _NUM_WARPS
) -> KernelResources:
    """Return the resources of a kernel of the log-prob head."""
    kernel, _ = _LOG_PROB_KERNELS[name]
    narrow = "*bf16" if flags["WITH_BIAS"] else "*fp32"
    pointers = {"bias": narrow, "teacher_bias": narrow, "targets": "*i64", "narrow": narrow}
    block = triton_kernels._PAIR_BLOCK if flags.keys() == set(_PAIR) else triton_kernels._BLOCK
    constants = {**flags, **({"BLOCK": block} if "BLOCK" in kernel.arg_names else {})}
    numbers = dict.fromkeys(_FLOATS, "fp32") | dict.fromkeys(_INTEGERS, "i32")
    signature = {each: (pointers | numbers).get(each, "*fp32") for each in kernel.arg_names}
    signature |= dict.fromkeys(constants, "constexpr")
    with_flags = ", ".join(flag.removeprefix("WITH_").lower() for flag, is_set in flags.items() if is_set)
    variant = f"{with_flags or 'plain'}{'' if aligned else ', unaligned'}"
    compiled = _compile(kernel, signature, constants, capability, num_warps, aligned)
    return read_resources((name, f"{block:,} ids at a time", variant), capability, compiled)


def optimizer_kernel(low_bits: int, has_blocks: bool, capability: str) -> KernelResources:
    """Return the resources of the optimizer's kernel with this number of low bits, and with 8-bit or fp32 states."""
    kernel, fp32 = triton_step._update, low_bits < 0
    weights = "*fp32" if fp32 else "*i16"
    pointers = {"weights": weights, "gradients": weights, "low": "*i8" if low_bits == 8 else "*i16"}
    pointers |= dict.fromkeys(("first", "first_scale", "second", "second_scale"), "*fp32")
    if has_blocks:
        pointers |= {"first": "*i8", "second": "*u8"}
    width = 128 if has_blocks else triton_step._TILE
    constants = {
        "LOW_BITS": low_bits, "BF16_GRADIENTS": not fp32, "BLOCKS": has_blocks,
        "ROWS": triton_step._TILE // width, "WIDTH": width,
    }  # fmt: skip
    numbers = dict.fromkeys(("size", "block", "start", "key1", "key2"), "i32")
    signature = {each: (numbers | pointers).get(each, "fp32") for each in kernel.arg_names}
    signature |= dict.fromkeys(constants, "constexpr")
    variant = f"{'fp32' if fp32 else f'{16 + low_bits} bit'} weights, {8 if has_blocks else 32} bit states"
    compiled = _compile(kernel, signature, constants, capability, triton_step._NUM_WARPS, True)
    return read_resources(("optimizer step", f"{triton_step._TILE:,} values", variant), capability, compiled)


def _compile(
    kernel: Any, signature: dict[str, str], constants: dict[str, Any], capability: str, num_warps: int, aligned: bool
) -> Any:
    wide = [i for i, name in enumerate(kernel.arg_names) if signature[name][0] in "*i"] if aligned else []
    source = ASTSource(kernel, signature, constants, {(i,): [["tt.divisibility", 16]] for i in wide})
    return triton.compile(source, target=target_of(capability), options={"num_warps": num_warps})

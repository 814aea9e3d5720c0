"""Registers, spills and shared memory of every Triton kernel: `python -m benchmarks.kernel_resources [--quick]`.

Compiled for six compute capabilities; no GPU is needed. The project's kernels need Triton, FlexAttention's, which torch
generates, a CUDA build of torch as well. About 13 minutes of one core; `--quick` compiles fewer variants, and attention for
bf16 heads of 128 alone.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING

import torch

from benchmarks.harness.report import print_result, require, versions

if TYPE_CHECKING:
    from benchmarks.harness.cubins import KernelResources

DTYPES = (torch.bfloat16, torch.float32)
WIDTHS = (64, 80, 96, 128, 192, 256)


def main() -> None:
    parser = argparse.ArgumentParser(description="Registers, spills and shared memory of every Triton kernel.")
    parser.add_argument("--quick", action="store_true", help="fewer variants; attention for bf16 heads of 128 alone")
    quick = parser.parse_args(sys.argv[1:]).quick
    require("triton", "pip install triton, which is published for Linux")
    rows = list(compile_all(quick))
    print("Most of all variants: registers of a thread / bytes that it spills / KiB of shared memory of a block.\n")
    print(table(rows))
    print_result(
        {
            "benchmark": "kernel_resources",
            "unit": "registers and stack bytes of a thread, shared bytes of a block",
            "kernels": [{**asdict(row), "shared_limit": row.shared_limit, "fits": row.fits} for row in rows],
            "all_fit": all(row.fits for row in rows),
            "versions": versions(),
        }
    )


def compile_all(quick: bool) -> Iterator[KernelResources]:
    """Yield each kernel's resources on each target."""
    from benchmarks.harness.cubins import SHARED_MEMORY, project_kernels

    for capability in SHARED_MEMORY:
        yield from project_kernels(capability, quick)
    if torch.version.cuda is None:
        print("FlexAttention's kernels are left out: this torch was built without CUDA.", file=sys.stderr)
        return
    from benchmarks.harness.flex_kernels import attention_kernels

    for dtype in DTYPES[:1] if quick else DTYPES:
        for width in (128,) if quick else WIDTHS:
            for capability in SHARED_MEMORY:
                with warnings.catch_warnings(action="ignore"):
                    yield from attention_kernels(capability, dtype, width)


def table(rows: Iterable[KernelResources]) -> str:
    """Return a markdown table: a row per kernel and size, a column per target; what does not fit is marked."""
    cells: dict[tuple[str, str], dict[str, list[KernelResources]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        cells[row.kernel, row.size][row.capability].append(row)
    targets = list(next(iter(cells.values())))
    lines = [f"| kernel | size | {' | '.join(targets)} |", "|---" * (2 + len(targets)) + "|"]
    for (kernel, size), found in cells.items():
        lines.append(f"| {kernel} | {size} | {' | '.join(_most(found[target]) for target in targets)} |")
    return "\n".join(lines)


def _most(rows: list[KernelResources]) -> str:
    registers, stack = max(row.registers for row in rows), max(row.stack_bytes for row in rows)
    shared = max(row.shared_bytes for row in rows) / 1024
    return f"{registers} / {stack} / {shared:.1f}{'' if all(row.fits for row in rows) else ': does not fit'}"


if __name__ == "__main__":
    main()

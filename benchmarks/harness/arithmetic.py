"""The machine's arithmetic peak: large matrix products on one thread, `python -m benchmarks.harness.arithmetic REQUEST`."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import torch

from benchmarks.harness.report import print_result


def gflops(dtype: torch.dtype, size: int, rounds: int) -> float:
    """The best of `rounds` products of two [size, size] matrices, in 1e9 operations a CPU second."""
    one, other = (torch.randn(size, size).to(dtype) for _ in range(2))
    out = one @ other
    best = float("inf")
    for _ in range(rounds):
        start = time.process_time()
        torch.mm(one, other, out=out)
        best = min(best, time.process_time() - start)
    return round(2 * size**3 / best / 1e9, 1)


def main(request: dict[str, Any]) -> None:
    """The dtypes asked for: a CPU without bf16 units takes minutes for one bf16 product."""
    size, rounds = request.get("size", 3072), request.get("rounds", 5)
    print_result({name: gflops(getattr(torch, name), size, rounds) for name in request["dtypes"]})


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))

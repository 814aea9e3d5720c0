"""How the self-test's rows measure: seconds of a call, the most memory of one, how far two results are apart."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import accumulate
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils.benchmark import Timer

Result = TypeVar("Result")


def milliseconds(call: Callable[[], object], repeats: int = 10) -> float:
    """Return the mean time of a call, after two that warm up, each waited for."""
    timer = Timer("call()", globals={"call": call})
    timer.timeit(2)
    return 1000 * timer.timeit(repeats).mean


def peak_of(call: Callable[[], Result], device: torch.device) -> tuple[Result, int]:
    """Call, and return the result and the most bytes of tensors that were alive above those alive before."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        result = call()
        return result, torch.cuda.max_memory_allocated(device) - before
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        result = call()
    events: Any = profile.profiler
    changes = [event for event in events.kineto_results.events() if event.name() == "[memory]"]
    changes.sort(key=lambda change: change.start_ns())
    return result, max(accumulate((change.nbytes() for change in changes), initial=0))


def distance(found: Iterable[Tensor], expected: Iterable[Tensor]) -> float:
    """Return the largest |found - expected| / |expected|, of norms of tensors; NaN if one is."""
    pairs = zip(found, expected, strict=True)
    return float(max((a.double() - b.double()).norm() / b.double().norm() for a, b in pairs))


def mib(num_bytes: float) -> str:
    """Write bytes as MiB."""
    return f"{num_bytes / 2**20:,.1f} MiB" if num_bytes < 10 << 20 else f"{num_bytes / 2**20:,.0f} MiB"

"""Whether passes over the logits that are not torch's compute what torch's do, on the device that they will run on."""

from __future__ import annotations

import logging
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from lowpeak.logprobs import softmax_passes as torch_rows
from lowpeak.logprobs.reference import ChunkSettings, HeadScale
from lowpeak.logprobs.softmax_passes import RowDerivatives

logger = logging.getLogger(__name__)

_ROWS, _IDS = 5, 3001
_ALLOWED = 1e-4  # of the greatest number: fp32 sums in another order


@cache
def cuda_passes(device: torch.device) -> Any:
    """Triton's passes where they are installed and agree with torch's on this device, which is tried once; else torch's."""
    if find_spec("triton") is None:
        return torch_rows
    try:
        from lowpeak.logprobs import triton_kernels
    except ImportError as error:
        logger.warning("The log-prob core runs without its Triton kernels: %s.", error)
        return torch_rows
    reason = passes_differ(triton_kernels, device)
    if reason is None:
        return triton_kernels
    logger.warning("The log-prob core runs without its Triton kernels: %s.", reason)
    return torch_rows


def triton_differs(device: torch.device) -> str | None:
    """Return how the Triton kernels' numbers differ from torch's on a device; None if they agree."""
    from lowpeak.logprobs import triton_kernels

    return passes_differ(triton_kernels, device)


def passes_differ(passes: Any, device: torch.device) -> str | None:
    """None where the passes' three functions give what `rows.py`'s do, with and without all they can; else why."""
    plain, full = ChunkSettings(_ROWS), ChunkSettings(_ROWS, 0.7, HeadScale(0.8, 2.5), entropy=True, entropy_grad=True)
    for settings in (plain, full):
        try:
            pairs = zip(_outcome(passes, settings, device), _outcome(torch_rows, settings, device), strict=True)
            largest = max(_distance(one, other) for one, other in pairs)
        except Exception as error:  # whatever a compiler or a driver raises
            return f"{type(error).__name__}: {next(iter(str(error).strip().splitlines()), 'no message')}"
        if not largest <= _ALLOWED:
            return f"they differ from torch's operations by {largest:.2g} of the greatest number"
    return None


def _outcome(passes: Any, settings: ChunkSettings, device: torch.device) -> list[Tensor]:
    """Log-probs, entropies where there are, and both gradients, of the same few logits each time."""
    generator = torch.Generator().manual_seed(0)
    raw, bias = (4 * torch.randn(*shape, generator=generator).to(device) for shape in ((_ROWS, _IDS), (_IDS,)))
    targets = torch.randint(_IDS, (_ROWS,), generator=generator).to(device)
    by_logprobs, by_entropy = (torch.randn(_ROWS, generator=generator).to(device) for _ in range(2))
    targets[0] = (raw[0] + bias).argmax()
    chosen = passes.chosen_logits(raw, bias, targets, settings)
    statistics = passes.row_statistics(raw, bias, settings)
    entropy = statistics.entropy()
    derivatives = RowDerivatives(by_logprobs, by_entropy if settings.entropy_grad else None, entropy)
    narrow = torch.empty_like(raw, dtype=torch.bfloat16)
    gradient = passes.row_gradient_(raw, bias, settings, targets, statistics, derivatives, narrow)
    rounded = torch.where((narrow - gradient).abs() <= 2**-7 * gradient.abs() + 1e-30, gradient, narrow)
    is_top1 = statistics.is_top1(chosen).float()
    return [statistics.logprobs(chosen), is_top1, gradient, rounded, *([] if entropy is None else [entropy])]


def _distance(one: Tensor, other: Tensor) -> float:
    """The largest difference over the greatest number; NaN where one is."""
    return float((one - other).abs().max() / other.abs().max())

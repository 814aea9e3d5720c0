"""What a step measured: read from the device once, checked, and turned into numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lowpeak.checkpoint.atomic import last_checkpoint
from lowpeak.errors import NonFiniteError
from lowpeak.memory.tracker import PhaseUse
from lowpeak.ranks import Ranks
from lowpeak.records import Metric, merge_metrics


@dataclass(frozen=True)
class Readout:
    """A step's loss and metrics: tensors on the device before `read_metrics`, numbers after."""

    loss: Tensor | float
    metrics: dict[str, Metric]
    grad_norm: float | None = None


def read_metrics(readout: Readout, grad_norm: Any, ranks: Ranks) -> Readout:
    """The same as numbers, over all ranks, with one read of the device."""
    names = list(readout.metrics)
    parts: list[Any] = [readout.loss, grad_norm if grad_norm is not None else 0.0]
    for name in names:
        parts += [readout.metrics[name].total, readout.metrics[name].count]
    device = readout.loss.device if isinstance(readout.loss, Tensor) else torch.device("cpu")
    stacked = torch.stack([torch.as_tensor(part, dtype=torch.float64, device=device).detach() for part in parts])
    loss, norm, *rest = stacked.tolist()
    metrics = {
        name: Metric(total, count, readout.metrics[name].kind)
        for name, total, count in zip(names, rest[::2], rest[1::2], strict=True)
    }
    loss = ranks.sum([loss])[0]
    merged: dict[str, Metric] = {}
    for share in ranks.gather(metrics):
        merged = merge_metrics(merged, share)
    return Readout(loss, merged, None if grad_norm is None else norm)


def finite_or_raise(numbers: Readout, model: nn.Module, step: int, output_dir: Path) -> None:
    """NonFiniteError, before the optimizer step, that says what was NaN or infinite and where the last good state is."""
    loss_is_finite = math.isfinite(float(numbers.loss))
    if loss_is_finite and (numbers.grad_norm is None or math.isfinite(numbers.grad_norm)):
        return
    what = f"the loss is {float(numbers.loss)}" if not loss_is_finite else f"the gradient norm is {numbers.grad_norm}"
    bad_weights = [name for name, p in model.named_parameters() if not bool(torch.isfinite(p).all())]
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    bad_gradients = [name for name, gradient in gradients.items() if not bool(torch.isfinite(gradient).all())]
    if bad_weights:
        what += f", and weights are already not finite ({_some(bad_weights)})"
    elif bad_gradients and len(bad_gradients) < len(gradients):  # clipping by a NaN norm makes all of them NaN
        what += f", from gradients of {_some(bad_gradients)}"
    raise NonFiniteError(f"step {step}: {what}. The optimizer step was not taken and {_left(output_dir)}")


def finite_weights_or_raise(weights: Mapping[str, Tensor], step: int, output_dir: Path) -> None:
    """NonFiniteError where one of these weights is NaN or infinite: such weights are never saved as good ones."""
    broken = [name for name, weight in weights.items() if not bool(torch.isfinite(weight).all())]
    if broken:
        where = _some(broken)
        raise NonFiniteError(
            f"after step {step}: weights are not finite ({where}). They were not saved, and {_left(output_dir)}"
        )


def _left(output_dir: Path) -> str:
    last = last_checkpoint(output_dir)
    where = f"the last good checkpoint is {last}" if last else "there is no checkpoint yet"
    return f"{where}. Lower the learning rate, check the rewards' scale, or train in fp32 (bf16=False)."


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def phase_metrics(uses: Mapping[str, PhaseUse]) -> dict[str, Metric]:
    """`time/<phase>` in seconds a step and `peak_memory/<phase>` in bytes."""
    metrics: dict[str, Metric] = {}
    for phase, use in uses.items():
        metrics[f"time/{phase}"] = Metric(use.seconds, 1.0)
        metrics[f"peak_memory/{phase}"] = Metric(float(use.peak_bytes), 1.0, "max")
    return metrics

"""What a step measured: read from the device once, agreed among ranks, checked, and turned into numbers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lowpeak.checkpoint import last_checkpoint
from lowpeak.errors import NonFiniteError
from lowpeak.memory import Phase, PhaseUse
from lowpeak.parallel import Strategy
from lowpeak.ranks import Ranks
from lowpeak.records import Metric, merge_metrics


@dataclass(frozen=True)
class Readout:
    """A step's loss and metrics: tensors on the device before `read_metrics`, numbers after."""

    loss: Tensor | float
    metrics: dict[str, Metric]
    grad_norm: float | None = None


@dataclass(frozen=True)
class Spent:
    """What a step took on the rank where it took most: seconds, and each phase's; and whether any rank was asked to stop."""

    seconds: float
    uses: dict[str, PhaseUse]
    stopping: bool


def read_metrics(readout: Readout, grad_norm: Any, ranks: Ranks) -> Readout:
    """The same as numbers, over all ranks, with one read of the device and one gather.

    The loss is summed, metrics reduced as they say; a gradient norm that is not finite on any rank is everybody's.
    """
    names = list(readout.metrics)
    parts: list[Any] = [readout.loss, grad_norm if grad_norm is not None else 0.0]
    for name in names:
        parts += [readout.metrics[name].total, readout.metrics[name].count]
    device = readout.loss.device if isinstance(readout.loss, Tensor) else torch.device("cpu")
    stacked = torch.stack([torch.as_tensor(part, dtype=torch.float64, device=device).detach() for part in parts])
    own_loss, own_norm, *rest = stacked.tolist()
    own = {
        name: Metric(total, count, readout.metrics[name].kind)
        for name, total, count in zip(names, rest[::2], rest[1::2], strict=True)
    }
    loss, norm, merged = 0.0, own_norm, dict[str, Metric]()
    for their_loss, their_norm, metrics in ranks.gather((own_loss, own_norm, own)):
        loss += their_loss
        norm = norm if math.isfinite(their_norm) else their_norm
        merged = merge_metrics(merged, metrics)
    return Readout(loss, merged, None if grad_norm is None else norm)


def read_spent(seconds: float, uses: Mapping[str, PhaseUse], stopping: bool, ranks: Ranks) -> Spent:
    """This rank's times, peaks and request to stop as the highest of all ranks, by one maximum."""
    known = [(uses[phase].seconds, uses[phase].peak_bytes) if phase in uses else (-1.0, -1) for phase in Phase]
    first = [float(stopping), seconds]
    most = ranks.max([*first, *(float(number) for pair in known for number in pair)])
    pairs = zip(Phase, most[2::2], most[3::2], strict=True)
    return Spent(most[1], {p.value: PhaseUse(time, int(peak), 1) for p, time, peak in pairs if time >= 0}, most[0] > 0)


def finite_or_raise(numbers: Readout, model: nn.Module, strategy: Strategy, step: int, output_dir: Path) -> None:
    """NonFiniteError, before the optimizer step, that says what was NaN or infinite and where the last good state is.

    Each rank looks at its shards; what any of them finds is told by all.
    """
    what = _not_finite(numbers)
    if what is None:
        return
    gradients = {name: _local(p.grad) for name, p in model.named_parameters() if p.grad is not None}
    found = strategy.ranks.gather((_broken(strategy.shards(model)), _broken(gradients), list(gradients)))
    bad_weights, bad_gradients, all_gradients = (_merged(names) for names in zip(*found, strict=True))
    if bad_weights:
        what += f", and weights are already not finite ({_some(bad_weights)})"
    elif bad_gradients and len(bad_gradients) < len(all_gradients):  # clipping by a NaN norm makes all of them NaN
        what += f", from gradients of {_some(bad_gradients)}"
    raise NonFiniteError(f"step {step}: {what}. The optimizer step was not taken and {_left(output_dir)}")


def _not_finite(numbers: Readout) -> str | None:
    """Which number of the step is NaN or infinite, as the start of a sentence."""
    if not math.isfinite(float(numbers.loss)):
        return f"the loss is {float(numbers.loss)}"
    if numbers.grad_norm is not None and not math.isfinite(numbers.grad_norm):
        return f"the gradient norm is {numbers.grad_norm}"
    return None


def finite_weights_or_raise(weights: Mapping[str, Tensor], step: int, output_dir: Path, ranks: Ranks) -> None:
    """NonFiniteError where one of these weights, of any rank, is NaN or infinite: such weights are never saved as good ones."""
    broken = _merged(ranks.gather(_broken(weights)))
    if broken:
        where = _some(broken)
        raise NonFiniteError(
            f"after step {step}: weights are not finite ({where}). They were not saved, and {_left(output_dir)}"
        )


def _local(tensor: Any) -> Tensor:
    """This rank's part of a tensor that FSDP2 cut."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _broken(tensors: Mapping[str, Tensor]) -> list[str]:
    return [name for name, tensor in tensors.items() if not bool(torch.isfinite(tensor).all())]


def _merged(names: Iterable[Sequence[str]]) -> list[str]:
    return list(dict.fromkeys(name for each in names for name in each))


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

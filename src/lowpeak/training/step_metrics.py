"""Metrics of a step: read from the device once, reduced over ranks, checked for NaN, turned into numbers."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lowpeak.algorithms import EFFECTIVE_SIZE
from lowpeak.checkpoint import last_checkpoint
from lowpeak.device_kind import widest_float
from lowpeak.errors import NonFiniteError, shorten_names
from lowpeak.memory import Phase, PhaseUse
from lowpeak.optim import gradient_of
from lowpeak.parallel import Strategy, trained_parameters
from lowpeak.ranks import Ranks
from lowpeak.records import Metric, merge_metrics

logger = logging.getLogger(__name__)

_LEAST_EFFECTIVE_SIZE = 0.5


@dataclass(frozen=True)
class StepMetrics:
    """A step's loss, metrics and gradient norm: tensors of one rank, or after `gather_metrics` numbers of all ranks.

    `tokens` has the log-probs of loss tokens of some records, and their entropies if known, by the record's index.
    """

    loss: Tensor | float
    metrics: dict[str, Metric]
    learning_rate: float = 0.0
    grad_norm: float | None = None
    tokens: Mapping[int, tuple[Tensor | Sequence[float], ...]] = field(default_factory=dict)

    def numbers(self) -> dict[str, float | None]:
        """Return the numbers beside the metrics, by their names in the journal."""
        return {"loss": float(self.loss), "grad_norm": self.grad_norm, "learning_rate": self.learning_rate}


@dataclass(frozen=True)
class StepUsage:
    """Seconds and peak memory of a step, the most of any rank, and a rank's request to stop."""

    seconds: float
    phases: dict[str, PhaseUse]
    stopping: bool


def gather_metrics(measured: StepMetrics, grad_norm: Any, ranks: Ranks) -> StepMetrics:
    """Return the metrics as numbers over all ranks, by one device read and one gather.

    The loss is summed, and metrics are reduced by their kind. A gradient norm that is not finite on one rank is
    returned on all.
    """
    local = _read(measured, grad_norm)
    loss, norm, merged, tokens = 0.0, local[1], dict[str, Metric](), dict[int, tuple[Sequence[float], ...]]()
    for rank_loss, rank_norm, metrics, rank_tokens in ranks.gather(local):
        loss += rank_loss
        norm = norm if math.isfinite(rank_norm) else rank_norm
        merged = merge_metrics(merged, metrics)
        tokens |= rank_tokens
    return replace(measured, loss=loss, metrics=merged, grad_norm=None if grad_norm is None else norm, tokens=tokens)


def _read(
    measured: StepMetrics, grad_norm: Any
) -> tuple[float, float, dict[str, Metric], dict[int, tuple[Sequence[float], ...]]]:
    """Return this rank's loss, gradient norm (0 for None), metrics and token values, by one device read."""
    if hasattr(grad_norm, "full_tensor"):  # under FSDP2 each rank has a part of it
        grad_norm = grad_norm.full_tensor()
    scalars: list[Any] = [measured.loss, grad_norm if grad_norm is not None else 0.0]
    for metric in measured.metrics.values():
        scalars += [metric.total, metric.count]
    device = measured.loss.device if isinstance(measured.loss, Tensor) else torch.device("cpu")
    columns = [torch.as_tensor(column) for values in measured.tokens.values() for column in values]
    read = _read_numbers([*scalars, *columns], device)
    loss, norm, *rest = read[: len(scalars)]
    metrics = {
        name: Metric(total, count, metric.kind)
        for (name, metric), total, count in zip(measured.metrics.items(), rest[::2], rest[1::2], strict=True)
    }
    return loss, norm, metrics, _split_columns(measured.tokens, read[len(scalars) :])


def _read_numbers(tensors: Sequence[Any], device: torch.device) -> list[float]:
    """Return the numbers of all tensors, unrounded; by one read of a device that has float64."""
    if widest_float(device) == torch.float32:
        tensors, device = [torch.as_tensor(each).cpu() for each in tensors], torch.device("cpu")
    flat = [torch.as_tensor(each, dtype=torch.float64, device=device).detach().reshape(-1) for each in tensors]
    numbers: list[float] = torch.cat(flat).tolist()
    return numbers


def _split_columns(
    tokens: Mapping[int, tuple[Tensor | Sequence[float], ...]], flat: Sequence[float]
) -> dict[int, tuple[Sequence[float], ...]]:
    """Return the columns of each record from one list of all their numbers."""
    numbers = iter(flat)
    return {index: tuple(list(islice(numbers, len(column))) for column in columns) for index, columns in tokens.items()}


def gather_usage(seconds: float, uses: Mapping[str, PhaseUse], stopping: bool, ranks: Ranks) -> StepUsage:
    """Return times, peaks and the request to stop as the maximum over ranks, by one collective."""
    local = [number for phase in Phase for number in _to_numbers(uses.get(phase))]
    most = ranks.max([float(stopping), seconds, *local])
    columns = zip(Phase, most[2::3], most[3::3], most[4::3], strict=True)
    phases = {
        phase.value: PhaseUse(time, int(peak), int(reserved) if reserved >= 0 else None)
        for phase, time, peak, reserved in columns
        if time >= 0
    }
    return StepUsage(most[1], phases, most[0] > 0)


def _to_numbers(use: PhaseUse | None) -> tuple[float, float, float]:
    """Return seconds, peak and reserved bytes, each -1 if there is none."""
    if use is None:
        return -1.0, -1.0, -1.0
    return use.seconds, float(use.peak_bytes), -1.0 if use.reserved_bytes is None else float(use.reserved_bytes)


def require_finite_step(
    numbers: StepMetrics, model: nn.Module, strategy: Strategy, step: int, output_dir: Path
) -> None:
    """Raise NonFiniteError, before the optimizer step, if the loss or the gradient norm is NaN or infinite.

    The error names weights and gradients of any rank that are not finite, and the last good checkpoint.
    """
    problem = _not_finite(numbers)
    if problem is None:
        return
    found = {name: gradient_of(p) for name, p in model.named_parameters()}
    gradients = {name: gradient for name, gradient in found.items() if gradient is not None}
    names = strategy.ranks.gather(
        (_not_finite_names(strategy.shards(model)), _not_finite_names(gradients), [*gradients])
    )
    bad_weights, bad_gradients, all_gradients = (_merged(lists) for lists in zip(*names, strict=True))
    if bad_weights:
        problem += f", and weights are already not finite ({shorten_names(bad_weights)})"
    elif bad_gradients and len(bad_gradients) < len(all_gradients):  # clipping by a NaN norm makes all of them NaN
        problem += f", from gradients of {shorten_names(bad_gradients)}"
    raise NonFiniteError(f"step {step}: {problem}. The optimizer step was not taken and {_remedy(output_dir, model)}")


def _not_finite(numbers: StepMetrics) -> str | None:
    if not math.isfinite(float(numbers.loss)):
        return f"the loss is {float(numbers.loss)}"
    if numbers.grad_norm is not None and not math.isfinite(numbers.grad_norm):
        return f"the gradient norm is {numbers.grad_norm}"
    return None


def require_finite_weights(model: nn.Module, strategy: Strategy, step: int, output_dir: Path) -> None:
    """Raise NonFiniteError if a trained weight of any rank is NaN or infinite, before it is saved as a good one."""
    shards = strategy.shards(model)
    names = _merged(
        strategy.ranks.gather(_not_finite_names({name: shards[name] for name in trained_parameters(model)}))
    )
    if names:
        raise NonFiniteError(
            f"after step {step}: weights are not finite ({shorten_names(names)}). They were not saved, and "
            f"{_remedy(output_dir, model)}"
        )


def _not_finite_names(tensors: Mapping[str, Tensor]) -> list[str]:
    return [name for name, tensor in tensors.items() if not bool(torch.isfinite(tensor).all())]


def _merged(lists: Iterable[Sequence[str]]) -> list[str]:
    return list(dict.fromkeys(name for names in lists for name in names))


def _remedy(output_dir: Path, model: nn.Module) -> str:
    in_bf16 = any(p.dtype == torch.bfloat16 for p in model.parameters() if p.requires_grad)
    in_fp32 = "train fp32 weights (without dtype bfloat16 and weight_bits)" if in_bf16 else "train in fp32 (bf16=False)"
    last = last_checkpoint(output_dir)
    checkpoint = f"the last good checkpoint is {last}" if last else "there is no checkpoint yet"
    return f"{checkpoint}. Lower the learning rate, check the rewards' scale, or {in_fp32}."


def usage_metrics(usage: StepUsage, num_new: int) -> dict[str, Metric]:
    """Return `time/<phase>` in seconds a step, `peak_memory/<phase>` in bytes, the step's time and its new tokens per second.

    On a device also `reserved_memory/<phase>`, the most bytes that torch's allocator reserved.
    """
    metrics = {"step_time": Metric(usage.seconds), "tokens_per_second": Metric(float(num_new), usage.seconds)}
    for phase, use in usage.phases.items():
        metrics[f"time/{phase}"] = Metric(use.seconds, 1.0)
        metrics[f"peak_memory/{phase}"] = Metric(float(use.peak_bytes), 1.0, "max")
        if use.reserved_bytes is not None:
            metrics[f"reserved_memory/{phase}"] = Metric(float(use.reserved_bytes), 1.0, "max")
    return metrics


def warn_of_small_size(values: Mapping[str, float], step: int) -> bool:
    """Warn, and return True, if the effective sample size of a step is below one half."""
    size = values.get(EFFECTIVE_SIZE, 1.0)
    if size >= _LEAST_EFFECTIVE_SIZE:
        return False
    logger.warning(
        "Step %d: the effective sample size is %.2f: the policy is far from the sampler of its completions. Lower the "
        "learning rate, the number of steps per rollout, or max_staleness if it is set. Logged once.",
        *(step, size),
    )
    return True

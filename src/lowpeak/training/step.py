"""One step, whole: score micro-batches without gradients; run them with gradients and a loss. One screen.

Nothing here reads a device (`.item()`, `.tolist()`, `bool(tensor)`): sizes come in as numbers and metrics leave as
tensors, so a phase can be rehearsed on fake tensors. Models, strategies and algorithms are seen through protocols.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from lowpeak.algorithms.algorithm import Algorithm
from lowpeak.attention.install import forward_arguments
from lowpeak.logprobs.head import HeadRequest
from lowpeak.records import Metric, MicroBatch, merge_metrics
from lowpeak.strategies.strategy import Strategy


@dataclass(frozen=True)
class Core:
    """How every pass runs the log-prob core: the same chunks in policy, old and reference passes, or ratios drift."""

    temperature: float
    chunk_size: int
    device: torch.device
    log_entropy: bool = True
    saving: Callable[[], AbstractContextManager[None]] = nullcontext  # around a forward whose activations are kept


@dataclass(frozen=True)
class Scored:
    """What a no-grad pass gives for the counted tokens of one micro-batch."""

    logprobs_T: Tensor
    entropy_T: Tensor | None


def score(model: nn.Module, micro_batches: Sequence[MicroBatch], core: Core, entropy: bool = False) -> list[Scored]:
    """Log-probs (and entropies) of the counted tokens, without gradients: station 8."""
    with torch.no_grad():
        return [_scored(_forward(model, batch.to(core.device), core, entropy=entropy)) for batch in micro_batches]


def run_step(
    model: nn.Module,
    micro_batches: Sequence[MicroBatch],
    algorithm: Algorithm,
    core: Core,
    strategy: Strategy,
    coefficients: Mapping[str, float],
) -> tuple[Tensor, dict[str, Metric]]:
    """Forward and backward of a step's micro-batches: this rank's share of the loss, and its metrics: station 11.

    loss = sum over micro-batches of sum(weights_U * loss_U). Ranks average gradients, so each backward is scaled by
    their number. What fails on its way leaves gradients of a part of the step: whoever goes on zeroes them first.
    """
    total = torch.zeros((), device=core.device)
    metrics: dict[str, Metric] = {}
    for number, batch in enumerate(micro_batches):
        last = number == len(micro_batches) - 1
        batch = _with_coefficients(batch.to(core.device), coefficients)
        with strategy.accumulate(model, last):
            with core.saving():
                loss, measured = loss_of(model, batch, algorithm, core, strategy.promised_scale)
            strategy.backward(loss * strategy.ranks.world_size, last)
        total += loss.detach()
        metrics = merge_metrics(metrics, measured)
    return total, metrics


def loss_of(
    model: nn.Module, batch: MicroBatch, algorithm: Algorithm, core: Core, promised_scale: float | None = None
) -> tuple[Tensor, dict[str, Metric]]:
    """The weighted loss of one micro-batch and its metrics: in one visit of the head where a token's loss is its own.

    With the `promised_scale` of a strategy the head's gradient is already in `.grad` (see HeadRequest).
    """
    tokens = batch.tokens

    def weighted(logprobs: Tensor, entropy: Tensor | None, start: int, stop: int) -> Tensor:
        part = tokens.slice(start, stop)
        used = entropy if algorithm.loss_entropy else None
        return (part.weights_U * algorithm.loss(logprobs, used, part)).sum()

    one_visit = algorithm.unit == "token" and not algorithm.coupled
    out = _forward(
        model,
        batch,
        core,
        entropy=algorithm.loss_entropy or core.log_entropy,
        entropy_grad=algorithm.loss_entropy,
        loss=weighted if one_visit else None,
        promised_scale=promised_scale,
    )
    logprobs_T, entropy_T = out["logprobs"], out.get("entropy")
    if one_visit:
        loss = out["loss"]
    else:
        loss_entropy_T = entropy_T if algorithm.loss_entropy else None
        loss = (tokens.weights_U * algorithm.loss(logprobs_T, loss_entropy_T, tokens)).sum()
    with torch.no_grad():
        seen_entropy_T = None if entropy_T is None else entropy_T.detach()
        return loss, algorithm.measure(logprobs_T.detach(), seen_entropy_T, tokens)


def _forward(model: nn.Module, batch: MicroBatch, core: Core, **wishes: object) -> dict[str, Tensor]:
    request = HeadRequest(
        positions_T=batch.positions_T,
        targets_T=batch.targets_T,
        temperature=core.temperature,
        chunk_size=core.chunk_size,
        **wishes,  # type: ignore[arg-type]
    )
    seen = {} if batch.forest is None else forward_arguments(batch.forest, core.device)
    return model(input_ids=batch.input_ids_BL, head_request=request, **seen)


def _scored(out: Mapping[str, Tensor]) -> Scored:
    return Scored(out["logprobs"], out.get("entropy"))


def _with_coefficients(batch: MicroBatch, coefficients: Mapping[str, float]) -> MicroBatch:
    return replace(batch, tokens=replace(batch.tokens, coefficients=coefficients)) if coefficients else batch

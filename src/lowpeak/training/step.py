"""One step, whole: score micro-batches without gradients; run them with gradients and a loss. One screen.

Nothing here reads a device (`.item()`, `.tolist()`, `bool(tensor)`): sizes come in as numbers and metrics leave as
tensors, so a phase can be rehearsed on fake tensors. Models, strategies and algorithms are seen through protocols.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial, reduce

import torch
from torch import Tensor, nn

from lowpeak.algorithms.algorithm import VALUES_GRADIENT, Algorithm, ValueTerm
from lowpeak.attention.install import forward_arguments, padded_rows
from lowpeak.logprobs.head import HeadRequest
from lowpeak.records import Metric, MicroBatch, TokenBatch, merge_metrics
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

    logprobs_T: Tensor | None
    entropy_T: Tensor | None
    values_T: Tensor | None


def score(
    model: nn.Module,
    micro_batches: Sequence[MicroBatch],
    core: Core,
    **wishes: bool,
) -> list[Scored]:
    """Log-probs of the counted tokens, without gradients: station 8.

    `wishes` are HeadRequest's: `entropy`, a critic's `values`, or values without `logprobs`.
    """
    with torch.no_grad():
        return [_scored(_forward(model, batch.to(core.device), core, **wishes)) for batch in micro_batches]


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


def measure_step(
    model: nn.Module, micro_batches: Sequence[MicroBatch], algorithm: Algorithm, core: Core
) -> tuple[Tensor, dict[str, Metric]]:
    """What `run_step` gives, without gradients: an evaluation's loss and metrics."""
    total, metrics = torch.zeros((), device=core.device), dict[str, Metric]()
    with torch.no_grad():
        for batch in micro_batches:
            loss, measured = loss_of(model, batch.to(core.device), algorithm, core)
            total += loss
            metrics = merge_metrics(metrics, measured)
    return total, metrics


def loss_of(
    model: nn.Module, batch: MicroBatch, algorithm: Algorithm, core: Core, promised_scale: float | None = None
) -> tuple[Tensor, dict[str, Metric]]:
    """The weighted loss of one micro-batch and its metrics: the policy's term, and that of values, where there are such.

    With the `promised_scale` of a strategy the head's gradient is already in `.grad` (see HeadRequest).
    """
    one_visit = algorithm.unit == "token" and not algorithm.coupled and algorithm.loss is not None
    out = _forward(
        model,
        batch,
        core,
        entropy=algorithm.loss_entropy or core.log_entropy,
        entropy_grad=algorithm.loss_entropy,
        loss=partial(_weighted, algorithm, batch.tokens) if one_visit else None,
        promised_scale=promised_scale,
        values=algorithm.values is not None,
        values_gradient=batch.tokens.coefficients.get(VALUES_GRADIENT, 1.0),
    )
    terms = [_policy_term(out, batch.tokens, algorithm)] if algorithm.loss is not None else []
    if algorithm.values is not None:
        terms.append(_value_term(out["values"], batch.tokens, algorithm.values))
    losses, metrics = zip(*terms, strict=True)
    return sum(losses[1:], losses[0]), reduce(merge_metrics, metrics)


def _policy_term(
    out: Mapping[str, Tensor], tokens: TokenBatch, algorithm: Algorithm
) -> tuple[Tensor, dict[str, Metric]]:
    """In one visit of the head where a token's loss is its own; from the log-probs elsewhere."""
    logprobs_T, entropy_T = out["logprobs"], out.get("entropy")
    loss = out["loss"] if "loss" in out else _weighted(algorithm, tokens, logprobs_T, entropy_T, 0, None)
    with torch.no_grad():
        seen_entropy_T = None if entropy_T is None else entropy_T.detach()
        return loss, algorithm.measure(logprobs_T.detach(), seen_entropy_T, tokens)


def _weighted(
    algorithm: Algorithm, tokens: TokenBatch, logprobs: Tensor, entropy: Tensor | None, start: int, stop: int | None
) -> Tensor:
    """The weighted sum of the losses of tokens [start, stop); of all where a unit is more than a token."""
    assert algorithm.loss is not None
    part = tokens if stop is None else tokens.slice(start, stop)
    return (part.weights_U * algorithm.loss(logprobs, entropy if algorithm.loss_entropy else None, part)).sum()


def _value_term(values_T: Tensor, tokens: TokenBatch, term: ValueTerm) -> tuple[Tensor, dict[str, Metric]]:
    loss = (tokens.weights_U * term.loss(values_T, tokens)).sum()
    with torch.no_grad():
        return loss, term.measure(values_T.detach(), tokens)


def _forward(model: nn.Module, batch: MicroBatch, core: Core, **wishes: object) -> dict[str, Tensor]:
    request = HeadRequest(
        positions_T=batch.positions_T,
        targets_T=batch.targets_T,
        temperature=core.temperature,
        chunk_size=core.chunk_size,
        **wishes,  # type: ignore[arg-type]
    )
    if batch.forest is not None:
        seen = forward_arguments(batch.forest, core.device)
        return model(input_ids=batch.input_ids_BL, head_request=request, **seen)
    with padded_rows():
        return model(input_ids=batch.input_ids_BL, head_request=request)


def _scored(out: Mapping[str, Tensor]) -> Scored:
    return Scored(out.get("logprobs"), out.get("entropy"), out.get("values"))


def _with_coefficients(batch: MicroBatch, coefficients: Mapping[str, float]) -> MicroBatch:
    return replace(batch, tokens=replace(batch.tokens, coefficients=coefficients)) if coefficients else batch

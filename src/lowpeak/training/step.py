"""The passes of a step: micro-batches are scored without gradients, or run with a loss and gradients.

Nothing here reads a device (`.item()`, `.tolist()`, `bool(tensor)`), except when several ranks agree on errors: sizes come in
as numbers and metrics leave as tensors, so a phase can be rehearsed on fake tensors. Models, strategies and algorithms are seen
through protocols.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial, reduce

import torch
from torch import Tensor, nn

from lowpeak.algorithms import (
    ENTROPY_COEF,
    VALUES_GRADIENT,
    Algorithm,
    DivergenceTerm,
    ValueTerm,
    check_losses,
    check_metrics,
    measure_top1,
)
from lowpeak.attention import forward_arguments, no_packing_detection
from lowpeak.heads import (
    HeadRequest,
    LoadBalance,
    RoutingRequest,
    Teaching,
    balance_loss,
    eval_mode,
    sequences_per_token,
)
from lowpeak.memory import AsyncHostMover
from lowpeak.parallel import Strategy
from lowpeak.ranks import Ranks
from lowpeak.records import Metric, MicroBatch, TokenBatch, merge_metrics
from lowpeak.training.guarded_passes import GuardedPasses, run_guarded


@dataclass(frozen=True)
class LogprobSettings:
    """How every pass computes log-probs.

    Policy, old and reference passes share it: with other chunks, ratios would drift from 1. `activation_context` is
    a context around a forward pass whose activations are kept; `load_balance` is that of a mixture of experts.
    """

    temperature: float
    chunk_size: int
    device: torch.device
    log_entropy: bool = True
    activation_context: Callable[[], AbstractContextManager[None]] = nullcontext
    load_balance: LoadBalance | None = None


@dataclass(frozen=True)
class TeacherStates:
    """A teacher's hidden states of a step's micro-batches, in host memory; `add_head` makes a teacher of them.

    Each micro-batch has one tensor or several, [T, E] together. `mover` brings them back to the device; None if the device's
    memory is the host's.
    """

    states: Sequence[Sequence[Tensor]]
    add_head: Callable[[Tensor], Teaching]
    mover: AsyncHostMover | None = None

    def of_batch(self, number: int, batch: MicroBatch, device: torch.device) -> Teaching:
        """Return the teacher of micro-batch `number`; one of zeros for a batch without weight that stands in for it."""
        pieces, num_tokens = self.states[number], len(batch.targets_T)
        if sum(map(len, pieces)) != num_tokens:
            return self.add_head(pieces[0].new_zeros(num_tokens, pieces[0].shape[1], device=device))
        if self.mover is not None:
            pieces = [self.mover.to_device(each) for each in pieces]
            for each in pieces:
                self.mover.wait(each)
        return self.add_head(pieces[0] if len(pieces) == 1 else torch.cat(list(pieces)))


def score(
    model: nn.Module,
    micro_batches: Sequence[MicroBatch],
    settings: LogprobSettings,
    guard: GuardedPasses | None = None,
    *,
    to_host: Callable[[Tensor], Tensor] | None = None,
    **request_fields: bool,
) -> list[dict[str, Tensor]]:
    """Return the log-probs of each micro-batch's loss tokens, by name and without gradients: stage 8.

    `request_fields` are fields of HeadRequest that add entropies (`entropy`), a critic's values (`values`) or hidden states
    (`states`), or leave the log-probs out (`logprobs=False`). `to_host` moves each micro-batch's results to host memory. With
    a `guard` all ranks raise the error of one of them.
    """

    def forward(batch: MicroBatch) -> dict[str, Tensor]:
        answer = _forward(model, batch.to(settings.device), settings, **request_fields)
        return answer if to_host is None else {name: to_host(values) for name, values in answer.items()}

    with torch.no_grad():
        return run_guarded(guard, forward, micro_batches)


def run_step(
    model: nn.Module,
    micro_batches: Sequence[MicroBatch],
    algorithm: Algorithm,
    settings: LogprobSettings,
    strategy: Strategy,
    coefficients: Mapping[str, float],
    guard: GuardedPasses | None = None,
    teacher: TeacherStates | None = None,
) -> tuple[Tensor, dict[str, Metric]]:
    """Run forward and backward of a step's micro-batches; return this rank's loss and metrics: stage 11.

    loss = sum over micro-batches of sum(weights_U * loss_U). Ranks average gradients, so each backward is scaled by
    their number. `teacher` has run on these micro-batches. After an error `.grad` holds gradients of a part of the step:
    discard them before another step. With a `guard` all ranks raise the error of one of them, MemoryExhaustedError if it ran
    out of memory.
    """
    total = torch.zeros((), device=settings.device)
    metrics: dict[str, Metric] = {}
    choices_E = _choices_of_step(model, micro_batches, settings, strategy.ranks, guard)

    def forward_and_backward(number: int, batch: MicroBatch) -> tuple[Tensor, dict[str, Metric]]:
        batch, last = _with_coefficients(batch, coefficients), number == len(micro_batches) - 1
        taught = None if teacher is None else teacher.of_batch(number, batch, settings.device)
        with strategy.micro_batch_context(model, last):
            with settings.activation_context():
                loss, measured = loss_of(
                    model, batch, algorithm, settings, strategy.inplace_grad_scale, choices_E, taught
                )
            strategy.backward(loss * strategy.ranks.world_size, last)
        return loss.detach(), measured

    for loss, measured in run_guarded(guard, forward_and_backward, micro_batches, range(len(micro_batches))):
        total += loss
        metrics = merge_metrics(metrics, measured)
    strategy.average_gradients(model)
    return total, metrics


def measure_step(
    model: nn.Module,
    micro_batches: Sequence[MicroBatch],
    algorithm: Algorithm,
    settings: LogprobSettings,
    ranks: Ranks,
    guard: GuardedPasses | None = None,
    teacher: TeacherStates | None = None,
) -> tuple[Tensor, dict[str, Metric]]:
    """Return the results of `run_step`, without gradients: the loss and metrics of an evaluation."""
    total, metrics = torch.zeros((), device=settings.device), dict[str, Metric]()
    choices_E = _choices_of_step(model, micro_batches, settings, ranks, guard)

    def forward(number: int, batch: MicroBatch) -> tuple[Tensor, dict[str, Metric]]:
        taught = None if teacher is None else teacher.of_batch(number, batch, settings.device)
        return loss_of(model, batch, algorithm, settings, choices_E=choices_E, teacher=taught)

    with torch.no_grad():
        for loss, measured in run_guarded(guard, forward, micro_batches, range(len(micro_batches))):
            total += loss
            metrics = merge_metrics(metrics, measured)
    return total, metrics


def loss_of(
    model: nn.Module,
    batch: MicroBatch,
    algorithm: Algorithm,
    settings: LogprobSettings,
    inplace_grad_scale: float | None = None,
    choices_E: Tensor | None = None,
    teacher: Teaching | None = None,
) -> tuple[Tensor, dict[str, Metric]]:
    """Return the weighted loss of one micro-batch and its metrics: terms of the policy, of values and of load balance.

    Only the terms that the run has. With the `inplace_grad_scale` of a strategy the head's gradient is already in `.grad`
    (see HeadRequest). `choices_E` are the whole step's choices of experts; None: the micro-batch is the whole step.
    """
    # A loss per token is formed inside the head's forward pass, chunk by chunk.
    in_head = algorithm.unit == "token" and not algorithm.needs_full_sequence and _trains_policy(algorithm)
    routing = _routing_request(batch, settings)
    batch = batch.to(settings.device)
    out = _forward(
        model,
        batch,
        settings,
        entropy=algorithm.entropy_bonus or settings.log_entropy,
        entropy_grad=algorithm.entropy_bonus,
        loss=partial(weighted_loss, algorithm, batch.tokens) if in_head else None,
        inplace_grad_scale=inplace_grad_scale,
        values=algorithm.values is not None,
        values_gradient=batch.tokens.coefficients.get(VALUES_GRADIENT, 1.0),
        top1=algorithm.top1,
        routing=routing,
        teacher=teacher,
        beta=1.0 if algorithm.divergence is None else algorithm.divergence.beta,
    )
    balance = []
    if settings.load_balance is not None:
        balance = [_balance_term(out["routing"], choices_E, batch.tokens, settings.load_balance)]
    return loss_of_outputs(out, batch.tokens, algorithm, *balance)


def loss_of_outputs(
    out: Mapping[str, Tensor], tokens: TokenBatch, algorithm: Algorithm, *more: tuple[Tensor, dict[str, Metric]]
) -> tuple[Tensor, dict[str, Metric]]:
    """Return the algorithm's weighted loss and its metrics from the log-probs, entropies and values of a forward pass.

    The sum of the policy's term and the values' term, if the algorithm has them, and of `more` terms.
    """
    terms = [_policy_term(out, tokens, algorithm)] if _trains_policy(algorithm) else []
    if algorithm.values is not None:
        terms.append(_value_term(out["values"], tokens, algorithm.values))
    losses, metrics = zip(*terms, *more, strict=True)
    return sum(losses[1:], losses[0]), reduce(merge_metrics, metrics)


def _choices_of_step(
    model: nn.Module,
    micro_batches: Sequence[MicroBatch],
    settings: LogprobSettings,
    ranks: Ranks,
    guard: GuardedPasses | None = None,
) -> Tensor | None:
    """Count how often the step's tokens choose each expert, [E]; None if one micro-batch is the whole step.

    The counts need a separate pass without gradients before the first backward.
    """
    if settings.load_balance is None or len(micro_batches) * ranks.world_size == 1:
        return None

    def count(batch: MicroBatch) -> Tensor:
        routing = _routing_request(batch, settings)
        return _forward(model, batch.to(settings.device), settings, logprobs=False, routing=routing)["routing"][0]

    with torch.no_grad(), eval_mode(model):
        counts = run_guarded(guard, count, micro_batches)
    return ranks.sum_tensor(reduce(torch.add, counts))


def _routing_request(batch: MicroBatch, settings: LogprobSettings) -> RoutingRequest | None:
    if settings.load_balance is None:
        return None
    sequences_N = sequences_per_token(batch).to(settings.device, non_blocking=True)
    return RoutingRequest(sequences_N, settings.load_balance.top_k)


def _trains_policy(algorithm: Algorithm) -> bool:
    """Return whether the policy's distributions have a loss: of log-probs, or of divergences from a teacher."""
    return algorithm.loss is not None or algorithm.divergence is not None


def _policy_term(
    out: Mapping[str, Tensor], tokens: TokenBatch, algorithm: Algorithm
) -> tuple[Tensor, dict[str, Metric]]:
    """Return the loss that the head has formed, or that of its log-probs, with the algorithm's metrics."""
    logprobs_T, entropy_T, divergence_T = out["logprobs"], out.get("entropy"), out.get("divergence")
    values = (logprobs_T, entropy_T, 0, None, divergence_T)
    loss = out["loss"] if "loss" in out else weighted_loss(algorithm, tokens, *values)
    with torch.no_grad():
        seen_entropy_T = None if entropy_T is None else entropy_T.detach()
        metrics = check_metrics(algorithm.measure(logprobs_T.detach(), seen_entropy_T, tokens), algorithm.measure)
        if algorithm.entropy_bonus:
            assert seen_entropy_T is not None, "an entropy bonus asks for entropies"
            policy_loss = loss.detach() + _entropy_bonus(seen_entropy_T, tokens)
            metrics["policy_loss"] = Metric(policy_loss, tokens.batch_share)
            metrics[ENTROPY_COEF] = Metric(tokens.coefficients[ENTROPY_COEF])
        if "top1" in out:
            metrics |= measure_top1(out["top1"], tokens)
        if algorithm.divergence is not None:
            metrics |= _measure_divergence(out, tokens, algorithm.divergence)
        return loss, metrics


def _measure_divergence(out: Mapping[str, Tensor], tokens: TokenBatch, term: DivergenceTerm) -> dict[str, Metric]:
    log_ratio_T = out["logprobs"].detach() - out["teacher_logprobs"]
    return check_metrics(term.measure(out["divergence"].detach(), log_ratio_T, tokens), term.measure)


def weighted_loss(
    algorithm: Algorithm,
    tokens: TokenBatch,
    logprobs: Tensor,
    entropy: Tensor | None,
    start: int = 0,
    stop: int | None = None,
    divergence: Tensor | None = None,
) -> Tensor:
    """Return `sum(weights_U * loss_U)` of tokens [start, stop), minus their entropy bonus; of all tokens without a stop.

    A divergence term's losses are added to the policy's.
    """
    part, losses = tokens if stop is None else tokens.slice(start, stop), []
    if algorithm.loss is not None:
        losses.append(check_losses(algorithm.loss(logprobs, part), algorithm.loss, part.weights_U, logprobs))
    if algorithm.divergence is not None:
        assert divergence is not None, "a divergence term has a teacher"
        of_term = algorithm.divergence.loss
        losses.append(check_losses(of_term(divergence, part), of_term, part.weights_U, divergence))
    loss = (part.weights_U * sum(losses[1:], losses[0])).sum()
    if not algorithm.entropy_bonus:
        return loss
    assert entropy is not None, "an entropy bonus asks for entropies"
    return loss - _entropy_bonus(entropy, tokens)


def _entropy_bonus(entropy_T: Tensor, tokens: TokenBatch) -> Tensor:
    """Return these tokens' share of `coefficient * mean entropy of the step's tokens`."""
    return tokens.coefficients[ENTROPY_COEF] * tokens.token_share * entropy_T.sum()


def _value_term(values_T: Tensor, tokens: TokenBatch, term: ValueTerm) -> tuple[Tensor, dict[str, Metric]]:
    losses_U = check_losses(term.loss(values_T, tokens), term.loss, tokens.weights_U, values_T)
    with torch.no_grad():
        metrics = check_metrics(term.measure(values_T.detach(), tokens), term.measure)
    return (tokens.weights_U * losses_U).sum(), metrics


def _balance_term(
    routing_2E: Tensor, choices_E: Tensor | None, tokens: TokenBatch, balance: LoadBalance
) -> tuple[Tensor, dict[str, Metric]]:
    step_choices_E = routing_2E[0].detach() if choices_E is None else choices_E
    loss = balance_loss(step_choices_E, routing_2E[1], balance.top_k)
    return balance.coefficient * loss, {"aux_loss": Metric(loss.detach(), tokens.batch_share)}


def _forward(
    model: nn.Module, batch: MicroBatch, settings: LogprobSettings, **request_fields: object
) -> dict[str, Tensor]:
    request = HeadRequest(
        positions_T=batch.positions_T,
        targets_T=batch.targets_T,
        temperature=settings.temperature,
        chunk_size=settings.chunk_size,
        **request_fields,  # type: ignore[arg-type]
    )
    if batch.forest is not None:
        seen = forward_arguments(batch.forest, settings.device)
        return model(input_ids=batch.input_ids_BL, head_request=request, **seen)
    with no_packing_detection():
        return model(input_ids=batch.input_ids_BL, head_request=request)


def _with_coefficients(batch: MicroBatch, coefficients: Mapping[str, float]) -> MicroBatch:
    return replace(batch, tokens=replace(batch.tokens, coefficients=coefficients)) if coefficients else batch

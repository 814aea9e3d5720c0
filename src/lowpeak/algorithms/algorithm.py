"""The interface of an algorithm: a record of pure functions, made once from resolved settings, without inheritance.

An algorithm knows no trainer, process group or device. The stages are those of docs/architecture.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from torch import Tensor

from lowpeak.arguments import OldPolicy
from lowpeak.errors import ArgumentError
from lowpeak.records import Metric, Record, TokenBatch, Unit

Need = Literal["old", "reference", "values", "entropy"]

# Names of coefficients that the training step reads.
ENTROPY_COEF = "entropy_coef"  # weight of the entropy bonus
VALUES_GRADIENT = "values_gradient"  # factor of the gradient from the values into a backbone shared with the policy


@dataclass(frozen=True)
class StepCounts:
    """Counts of a whole step over all ranks, which normalise its loss."""

    num_sequences: int
    num_tokens: int


@dataclass(frozen=True)
class Selection:
    """Result of stage 6: the records to train on, by index, and the number of dropped groups.

    If the unit is a pair, the two selected records of a group form it.
    """

    indices: tuple[int, ...]
    num_dropped_groups: int
    metrics: Mapping[str, Metric] = field(default_factory=dict)


@dataclass(frozen=True)
class Advantages:
    """Result of stage 9: float32 [C] advantages of each record, and metrics of the whole rollout.

    `returns` are the targets of a critic's values, in the same shape.
    """

    per_token: tuple[Tensor, ...]
    metrics: Mapping[str, Metric]
    returns: tuple[Tensor, ...] | None = None


@dataclass(frozen=True)
class ValueTerm:
    """Loss and metrics on a model's values: PPO's critic, or a reward model's scores.

    loss     (values_T, tokens) -> loss_U, added to the policy's under the same weights
    measure  the same arguments, detached -> metrics
    """

    loss: Callable[[Tensor, TokenBatch], Tensor]
    measure: Callable[[Tensor, TokenBatch], dict[str, Metric]]


@dataclass(frozen=True)
class DivergenceTerm:
    """Loss and metrics on the divergence of teacher and policy at each loss token; the algorithm's unit is then a token.

    beta     0: KL(teacher | policy), 1: KL(policy | teacher), between: the generalised JSD (arXiv 2306.13649)
    loss     (divergence_T, tokens) -> loss_T, added to the policy's under the same weights
    measure  (divergence_T, log_ratio_T, tokens), detached -> metrics; log_ratio is the policy's log-prob of each token minus the
             teacher's, infinite for ids that the teacher lacks
    """

    beta: float
    loss: Callable[[Tensor, TokenBatch], Tensor]
    measure: Callable[[Tensor, Tensor, TokenBatch], dict[str, Metric]]


@dataclass(frozen=True)
class Algorithm:
    """Pure functions of tensors and numbers that define GRPO, RLOO, PPO, Online DPO and the like.

    A sequence is a record of the rollout; shapes are T loss tokens of a micro-batch and U units. `coefficients` are the state
    and the schedule's numbers as one mapping: `advantages` gets them, and losses as `tokens.coefficients`.
    """

    name: str
    # What has one loss and one weight. Micro-batches never split a unit.
    unit: Unit
    # What stage 8 scores without gradients and fixes for the rollout.
    needs: frozenset[Need]
    # Records with rewards -> records to train on.
    select: Callable[[Sequence[Record]], Selection]
    # (records with rewards and scored log-probs, coefficients) -> advantages.
    advantages: Callable[[Sequence[Record], Mapping[str, float]], Advantages]
    # (loss tokens of a sequence or pair, counts of the step) -> weight of each of its units.
    reduction: Callable[[int, StepCounts], float]
    # (logprobs_T, tokens) -> loss_U: differentiable, no host synchronisation. None if other terms are the whole loss.
    loss: Callable[[Tensor, TokenBatch], Tensor] | None
    # (logprobs_T, entropy_T or None, tokens), detached -> metrics.
    measure: Callable[[Tensor, Tensor | None, TokenBatch], dict[str, Metric]]
    # Skip sequences whose advantages are all exactly zero, since they would not change the result.
    skip_zero_advantage: bool
    # Whose log-probs are `old_T` in losses; "old" in `needs` are the policy's in any case.
    old_policy: OldPolicy = "policy"
    # Subtract `coefficients[ENTROPY_COEF]` times the mean entropy of the step's tokens from the loss.
    entropy_bonus: bool = False
    # A token's loss depends on its whole sequence although the unit is a token: the head cannot form it chunk by chunk.
    needs_full_sequence: bool = False
    # Measure `mean_token_accuracy`, the share of tokens that are the policy's likeliest.
    top1: bool = False
    # The term on the values that the model returns beside its log-probs, or instead of them.
    values: ValueTerm | None = None
    # The term on the divergence from a teacher, which runs once per step, before the first backward.
    divergence: DivergenceTerm | None = None
    # The initial state: numbers that the step's metrics change (adaptive coefficients). Checkpoints store the state.
    state: Mapping[str, float] = field(default_factory=dict)
    # (state, the step's metrics as numbers) -> next state.
    update: Callable[[Mapping[str, float], Mapping[str, float]], Mapping[str, float]] = lambda state, metrics: state
    # (steps done, epochs done) -> coefficients that depend on progress only, so that a resumed run may change them.
    schedule: Callable[[int, float], Mapping[str, float]] = lambda step, epoch: {}
    # The step's metrics as numbers -> whether the rollout's remaining steps are skipped.
    stop_early: Callable[[Mapping[str, float]], bool] = lambda metrics: False

    def __post_init__(self) -> None:
        """Raise ArgumentError for a field whose value is of another kind."""
        for name, (is_kind, kind) in _KINDS.items():
            if not is_kind(getattr(self, name)):
                raise ArgumentError(
                    f"{name} of the algorithm {self.name!r} must be {kind}, got {getattr(self, name)!r}."
                )
        if self.loss is None and self.values is None and self.divergence is None:
            raise ArgumentError(
                f"the algorithm {self.name!r} has loss=None, values=None and divergence=None, and would train nothing: "
                "give one."
            )
        if self.divergence is not None and self.unit != "token":
            raise ArgumentError(
                f"the algorithm {self.name!r} has a divergence, which is of each token, and unit={self.unit!r}: use 'token'."
            )

    def coefficients(
        self, state: Mapping[str, float] | None = None, step: int = 0, epoch: float = 0.0
    ) -> dict[str, float]:
        """Return `state` (None: the initial one) and the schedule's numbers after `step` steps and `epoch` epochs."""
        scheduled = self.schedule(step, epoch)
        if not _is_state(scheduled) or scheduled.keys() & self.state.keys():
            raise ArgumentError(
                f"schedule of the algorithm {self.name!r} returned {scheduled!r}, and must return a dict of finite Python numbers, "
                "with other names than the state."
            )
        return {**(self.state if state is None else state), **scheduled}

    def unit_weight(self, num_tokens: int, counts: StepCounts) -> float:
        """Return `reduction(num_tokens, counts)`; raise ArgumentError unless it is a finite number."""
        weight = self.reduction(num_tokens, counts)
        if not isinstance(weight, int | float) or not math.isfinite(weight):
            raise ArgumentError(
                f"reduction of the algorithm {self.name!r} returned {weight!r}, and must return a finite Python number: the "
                "weight of a unit in the loss."
            )
        return weight

    def next_state(self, state: Mapping[str, float], metrics: Mapping[str, float]) -> Mapping[str, float]:
        """Return `update(state, metrics)`; raise ArgumentError unless it is a state with the initial one's names."""
        updated = self.update(state, metrics)
        if not _is_state(updated) or updated.keys() != self.state.keys():
            raise ArgumentError(
                f"update of the algorithm {self.name!r} returned {updated!r}, and must return a dict of finite Python numbers "
                f"with the names of the state: {', '.join(self.state) or 'none'}."
            )
        return updated


def _is_state(value: Any) -> bool:
    return isinstance(value, Mapping) and all(
        isinstance(name, str) and isinstance(number, int | float) and math.isfinite(number)
        for name, number in value.items()
    )


# What each field of Algorithm must be.
_KINDS: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "name": (lambda x: isinstance(x, str), "a string"),
    "unit": (lambda x: x in get_args(Unit), f"one of {', '.join(get_args(Unit))}"),
    "old_policy": (lambda x: x in get_args(OldPolicy), "'policy' or 'sampler'"),
    "needs": (
        lambda x: isinstance(x, frozenset) and x <= frozenset(get_args(Need)),
        f"a frozenset of {', '.join(get_args(Need))} or fewer",
    ),
    **dict.fromkeys(
        ("select", "advantages", "reduction", "measure", "update", "schedule", "stop_early"), (callable, "a function")
    ),
    "loss": (lambda x: x is None or callable(x), "a function or None"),
    "values": (lambda x: x is None or isinstance(x, ValueTerm), "a lowpeak.algorithms.ValueTerm or None"),
    "divergence": (
        lambda x: x is None or isinstance(x, DivergenceTerm),
        "a lowpeak.algorithms.DivergenceTerm or None",
    ),
    **dict.fromkeys(
        ("skip_zero_advantage", "entropy_bonus", "needs_full_sequence", "top1"),
        (lambda x: isinstance(x, bool), "True or False"),
    ),
    "state": (_is_state, "a dict of names and finite Python numbers"),
}

"""What an algorithm is: a record of pure functions, made once from resolved settings. No inheritance, no trainer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from lowpeak.records import Metric, Record, TokenBatch, Unit

Need = Literal["old", "reference", "values", "entropy"]
# The coefficient that says how much of the values' gradient reaches a backbone that is the policy's too (1: all of it).
VALUES_GRADIENT = "values_gradient"
ENTROPY_COEF = "entropy_coef"  # the weight of the entropy bonus


@dataclass(frozen=True)
class StepCounts:
    """Counts of a whole step over all ranks: what losses are normalised by, once."""

    num_rows: int
    num_tokens: int


@dataclass(frozen=True)
class Selection:
    """Station 6's answer: the rows to use, as indices into the records, how many groups were dropped, and numbers of it.

    Where the unit is a pair, the rows kept of a group are one.
    """

    rows: tuple[int, ...]
    num_missing_groups: int
    metrics: Mapping[str, Metric] = field(default_factory=dict)


@dataclass(frozen=True)
class Advantages:
    """Station 9's answer: per record one float32 [C] of advantages, and the statistics of the whole rollout.

    `returns` are what a critic's values are to become, as long as the advantages.
    """

    per_token: tuple[Tensor, ...]
    metrics: Mapping[str, Metric]
    returns: tuple[Tensor, ...] | None = None


@dataclass(frozen=True)
class ValueTerm:
    """What is trained on a model's values (PPO's critic, a reward model's scores).

    loss     (values_T, tokens) -> loss_U, added to the policy's under the same weights
    measure  the same, detached -> metrics
    """

    loss: Callable[[Tensor, TokenBatch], Tensor]
    measure: Callable[[Tensor, TokenBatch], dict[str, Metric]]


@dataclass(frozen=True)
class Algorithm:
    """GRPO, RLOO, PPO or Online DPO as functions of tensors and numbers.

    name        as users know it
    unit        what the loss's weights weigh: a token's own loss, a sequence's or a pair's; a unit is never cut
    needs       what station 8 scores, without gradients, and fixes for the rollout
    select      records with rewards -> rows to use
    advantages  (records with rewards and scored log-probs, state) -> advantages
    reduction   (counted tokens of a row, or of a pair, counts of the step) -> weight of each of its units
    loss        (logprobs_T, tokens) -> loss_U; differentiable, no host synchronisation; None where only values are trained
    measure     (logprobs_T, entropy_T or None, tokens), detached -> metrics
    entropy_bonus whether `coefficients[ENTROPY_COEF]` times the mean entropy of the step's tokens is taken off the loss
    top1        whether the share of tokens that are the policy's likeliest is measured, as `mean_token_accuracy`
    values      what is trained on the values that the model gives beside its log-probs, or in their place
    coupled     whether a token's loss needs its whole row, although the unit is a token: then it is not formed in one visit
    idle        whether a row whose advantages are all exactly zero changes nothing, so that it need not be trained on
    state       numbers of its own at the start, which its metrics move (adaptive coefficients); checkpointed
    update      (state, the step's metrics as numbers) -> next state
    schedule    (steps done, epochs done) -> numbers that follow from how far the run is, so that a resumed run may be told
                others. State and schedule together are what `advantages` gets, and losses as `tokens.coefficients`
    spent       (the step's metrics as numbers) -> whether its rollout shall serve no further step
    """

    name: str
    unit: Unit
    needs: frozenset[Need]
    select: Callable[[Sequence[Record]], Selection]
    advantages: Callable[[Sequence[Record], Mapping[str, float]], Advantages]
    reduction: Callable[[int, StepCounts], float]
    loss: Callable[[Tensor, TokenBatch], Tensor] | None
    measure: Callable[[Tensor, Tensor | None, TokenBatch], dict[str, Metric]]
    idle: bool
    entropy_bonus: bool = False
    coupled: bool = False
    top1: bool = False
    values: ValueTerm | None = None
    state: Mapping[str, float] = field(default_factory=dict)
    update: Callable[[Mapping[str, float], Mapping[str, float]], Mapping[str, float]] = lambda state, metrics: state
    schedule: Callable[[int, float], Mapping[str, float]] = lambda step, epoch: {}
    spent: Callable[[Mapping[str, float]], bool] = lambda metrics: False

    def coefficients(
        self, state: Mapping[str, float] | None = None, step: int = 0, epoch: float = 0.0
    ) -> dict[str, float]:
        """The algorithm's numbers for the step after `step` others: its state (None: the first), and what its schedule says."""
        return {**(self.state if state is None else state), **self.schedule(step, epoch)}

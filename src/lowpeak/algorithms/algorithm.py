"""What an algorithm is: a record of pure functions, made once from resolved settings. No inheritance, no trainer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from lowpeak.records import Metric, Record, TokenBatch

Need = Literal["old", "reference", "values", "entropy"]
Unit = Literal["token", "sequence", "pair"]


@dataclass(frozen=True)
class StepCounts:
    """Counts of a whole step over all ranks: what losses are normalised by, once."""

    num_rows: int
    num_tokens: int


@dataclass(frozen=True)
class Selection:
    """Station 6's answer: the rows to use, as indices into the records, and how many groups were dropped."""

    rows: tuple[int, ...]
    num_missing_groups: int


@dataclass(frozen=True)
class Advantages:
    """Station 9's answer: per record one float32 [C] of advantages, and the statistics of the whole rollout."""

    per_token: tuple[Tensor, ...]
    metrics: Mapping[str, Metric]


@dataclass(frozen=True)
class Algorithm:
    """GRPO, RLOO, PPO or Online DPO as functions of tensors and numbers.

    name        as users know it
    unit        what the loss's weights weigh: a token's own loss, or a whole sequence's; a unit is never cut
    needs       what station 8 scores, without gradients, and fixes for the rollout
    loss_entropy whether the loss uses the policy's entropy (so that its gradient is formed)
    select      records with rewards -> rows to use
    advantages  records with rewards and scored log-probs -> advantages
    reduction   (counted tokens of a row, counts of the step) -> weight of each of that row's units
    loss        (logprobs_T, entropy_T or None, tokens) -> loss_U; differentiable, no host synchronisation
    measure     the same inputs, detached -> metrics
    coupled     whether a token's loss needs its whole row, although the unit is a token: then it is not formed in one visit
    idle        whether a row whose advantages are all exactly zero changes nothing, so that it need not be trained on
    state       the algorithm's own numbers at the start (adaptive coefficients); handed to losses as
                `tokens.coefficients`, checkpointed
    update      (state, the step's metrics as numbers) -> next state
    """

    name: str
    unit: Unit
    needs: frozenset[Need]
    loss_entropy: bool
    select: Callable[[Sequence[Record]], Selection]
    advantages: Callable[[Sequence[Record]], Advantages]
    reduction: Callable[[int, StepCounts], float]
    loss: Callable[[Tensor, Tensor | None, TokenBatch], Tensor]
    measure: Callable[[Tensor, Tensor | None, TokenBatch], dict[str, Metric]]
    idle: bool
    coupled: bool = False
    state: Mapping[str, float] = field(default_factory=dict)
    update: Callable[[Mapping[str, float], Mapping[str, float]], Mapping[str, float]] = lambda state, metrics: state

"""A rollout, and station 10: the rows of one optimizer step as micro-batches, weighed by the whole step's counts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch

from lowpeak.algorithms import Algorithm, StepCounts, rows_by_group
from lowpeak.arguments import RolloutSettings
from lowpeak.batching import Budget, masked, num_counted, pack, share
from lowpeak.ranks import Ranks
from lowpeak.records import Metric, MicroBatch, Record, Unit


@dataclass(frozen=True)
class StepWork:
    """One optimizer step: this rank's micro-batches, and how many tokens of the step are new.

    `num_new` counts tokens of all ranks that no earlier step has seen: prompts, and what the policy wrote (a rollout's at its
    first step).
    """

    micro_batches: tuple[MicroBatch, ...]
    num_new: int

    @property
    def num_useful(self) -> int:
        """Tokens of the forward that change the result: no padding, and a prompt once."""
        return sum(batch.num_useful for batch in self.micro_batches)

    @property
    def num_computed(self) -> int:
        return sum(batch.input_ids_BL.numel() for batch in self.micro_batches)


def make_step_batches(
    records: Sequence[Record], rows: Sequence[int], algorithm: Algorithm, budget: Budget, ranks: Ranks
) -> tuple[MicroBatch, ...]:
    """This rank's micro-batches of `records[rows]`, at least one; idle rows count in the step and are left out."""
    counts = StepCounts(len(rows), sum(num_counted(records[i]) for i in rows))
    trained = [i for i in rows if not (algorithm.idle and _is_idle(records[i]))]
    batches = pack(
        records,
        share(records, trained, budget, ranks.world_size, algorithm.unit)[ranks.rank],
        budget,
        lambda num_tokens: algorithm.reduction(num_tokens, counts),
        unit=algorithm.unit,
    )
    return tuple(with_step_shares(matched(batches, budget, ranks, least=1), counts, ranks.world_size))


def with_step_shares(batches: Sequence[MicroBatch], counts: StepCounts, num_ranks: int) -> Iterator[MicroBatch]:
    """The micro-batches of a step, each with its tokens', rows' and its own share of the step."""
    for batch in batches:
        is_masked = not batch.record_indices
        tokens = replace(
            batch.tokens,
            token_share=0.0 if is_masked else 1.0 / counts.num_tokens,
            row_share=0.0 if is_masked else 1.0 / counts.num_rows,
            batch_share=1.0 / (len(batches) * num_ranks),
        )
        yield replace(batch, tokens=tokens)


def matched(batches: list[MicroBatch], budget: Budget, ranks: Ranks, least: int = 0) -> list[MicroBatch]:
    """As many micro-batches as the busiest rank has (and `least`), so that every forward is matched."""
    most = int(ranks.max([max(len(batches), least)])[0])
    return batches + [masked(budget)] * (most - len(batches))


def _is_idle(record: Record) -> bool:
    return record.advantages is not None and not bool(record.advantages.any())


@dataclass(frozen=True)
class Rollout:
    """The groups made from one set of weights, scored and with advantages; `number` counts rollouts from 0.

    `metrics`, `rows` (what the journal writes of each completion) and `num_tokens` are of all that was generated for it, and are
    said once, when the rollout is made.
    """

    number: int
    records: tuple[Record, ...]
    metrics: dict[str, Metric] = field(default_factory=dict)
    rows: tuple[dict[str, object], ...] = ()
    num_tokens: int = 0


def rows_of_step(
    rollout: Rollout, settings: RolloutSettings, seed: int, step: int, unit: Unit = "token"
) -> tuple[int, ...]:
    """Indices of the records that step `step` of a rollout (0 <= step < num_steps) trains on.

    Groups are shuffled by (seed, rollout number) and their rows stay together; each pass takes the same cut again. A
    rollout that dynamic sampling left short is cut evenly; pairs are never cut.
    """
    groups = _shuffled_groups(rollout, seed)
    items = groups if unit == "pair" else [[i] for group in groups for i in group]
    slot = step % settings.steps_per_pass
    start, stop = (len(items) * s // settings.steps_per_pass for s in (slot, slot + 1))
    return tuple(i for item in items[start:stop] for i in item)


def _shuffled_groups(rollout: Rollout, seed: int) -> list[list[int]]:
    groups = list(rows_by_group(rollout.records).values())
    generator = torch.Generator().manual_seed((seed * 1_000_003 + rollout.number) % (1 << 63))
    return [groups[g] for g in torch.randperm(len(groups), generator=generator).tolist()]

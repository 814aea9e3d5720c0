"""A rollout and the steps it serves: what is fixed for it, and which rows each step takes."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from lowpeak.algorithms.select import rows_by_group
from lowpeak.config.rollout import RolloutSettings
from lowpeak.records import Metric, Record, Unit


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

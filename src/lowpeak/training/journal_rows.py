"""Rows of a rollout's completions, for the journal and for tables."""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence

import torch

from lowpeak.algorithms import turn_ranges
from lowpeak.records import Completion, Record
from lowpeak.rewards import RewardedCompletions


def completion_rows(
    rewarded: RewardedCompletions, records: Sequence[Record], names: Sequence[str], policy_version: int
) -> tuple[dict[str, object], ...]:
    """Return one row per completion, for the journal and for tables; `policy_version` generated those that have no own.

    `turns` are a conversation's, or several of another completion; `extra` the values of `log_extra`; `columns` the dataset's.
    """
    rows = []
    for i, record in enumerate(records):
        counted = record.advantages[record.completion.loss_mask] if record.advantages is not None else torch.zeros(0)
        generated = rewarded.records[i].completion  # its loss mask is that of before stage 7
        turns = _turns(generated, len(rewarded.records[i].prompt_ids), policy_version)
        extra, columns = (_values_at(i, values) for values in (rewarded.extra, rewarded.columns))
        rows.append(
            {
                "group": record.group,
                "prompt": rewarded.prompts[i],
                "completion": rewarded.completions[i],
                "policy_version": turns[0]["policy_version"] if turns else policy_version,
                "num_tokens": generated.num_written,
                "finish_reason": record.completion.finish_reason,
                **({"turns": turns} if len(turns) > 1 or generated.conversation else {}),
                "rewards": dict(zip(names, map(_or_none, record.rewards), strict=True)),
                "reward": _or_none(record.reward),
                # Nine digits tell a float32 from all others.
                "advantage": float(f"{counted.mean().item():.9g}") if counted.numel() else 0.0,
                **({"extra": extra} if extra else {}),
                **({"columns": columns} if columns else {}),
            }
        )
    return tuple(rows)


def _turns(completion: Completion, num_prompt: int, policy_version: int) -> list[dict[str, object]]:
    """Return the policy version, first token and number of tokens of each range of tokens that the policy generated.

    Turns of a conversation also have the seconds of its environment's reply, their rewards if there are any, and the index of
    their `message` if a program drives. One that begins a branch has as `follows` the index of the turn that it forks from, or
    -1: it forks from the prompt.
    """
    versions = torch.full_like(completion.ids, policy_version)
    versions = versions if completion.policy_versions is None else completion.policy_versions
    ranges = _ranges(completion)
    rows: list[dict[str, object]] = [
        {"policy_version": int(versions[start]), "first_token": start, "num_tokens": stop - start}
        for start, stop in ranges
    ]
    # A turn whose tokens are all context, too, has no range.
    ended = {turn.last + 1: turn for turn in (completion.conversation.turns if completion.conversation else ())}
    for row, (_, stop) in zip(rows, ranges, strict=True):
        if (turn := ended.get(stop)) is not None:
            others = {"reward": turn.reward, "message": turn.message}
            row |= {"seconds": round(turn.seconds, 4)} | {k: v for k, v in others.items() if v is not None}
    for index, follows in _forks(completion, num_prompt, ranges):
        rows[index]["follows"] = follows
    return rows


def _forks(completion: Completion, num_prompt: int, ranges: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Yield the index of each turn that begins a branch, and of the turn that it forks from."""
    stops = [stop for _, stop in ranges]
    before = {branch.start: branch.after - num_prompt for branch in completion.branches}
    is_sampled = completion.loss_mask.tolist() if before else []
    for start, last in before.items():
        while last >= 0 and not is_sampled[last]:
            last = before.get(last, last - 1)
        yield bisect.bisect_right(stops, start), bisect.bisect_right(stops, last) if last >= 0 else -1


def _ranges(completion: Completion) -> list[tuple[int, int]]:
    """Return the first token of each turn, and the one after its last; turns of different branches may adjoin."""
    turns = completion.conversation.turns if completion.conversation else ()
    cuts = {branch.start for branch in completion.branches} | {turn.last + 1 for turn in turns}
    found: list[tuple[int, int]] = []
    for start, stop in turn_ranges(completion.loss_mask):
        inner = sorted(cut for cut in cuts if start < cut < stop)
        found += itertools.pairwise([start, *inner, stop])
    return found


def _values_at(index: int, columns: Mapping[str, Sequence[object]]) -> dict[str, object]:
    return {name: values[index] for name, values in columns.items()}


def _or_none(value: float) -> float | None:
    return None if math.isnan(value) else value

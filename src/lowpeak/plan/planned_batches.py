"""Rank 0's micro-batches of a planned run: of its steps and of its scoring passes, every record at its full length."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import torch

from lowpeak.batching import TokenBudget, assign_to_ranks, pack
from lowpeak.models import context_length
from lowpeak.records import Branch, Completion, MicroBatch, Record


def step_batches(inputs: Any, budget: TokenBudget) -> list[MicroBatch]:
    """Return all micro-batches of a step."""
    unit = inputs.algorithm.unit
    records = _selected_records(inputs, inputs.rows_per_step)
    mine = assign_to_ranks(records, range(len(records)), budget, inputs.request.world_size, unit)[0]
    return pack(records, mine, budget, lambda tokens: 1.0 / max(1, tokens), unit=unit)


def scored_batches(inputs: Any) -> list[MicroBatch]:
    """Return the micro-batches of a rollout, or of an offline run's step, that the policy scores."""
    records = _scored_records(inputs)
    return pack(records, _share_of_rank(inputs, records), inputs.budget)


def reference_batches(inputs: Any) -> list[MicroBatch]:
    """Return the micro-batches that the reference scores, or that the teacher of a divergence reads in a step.

    A teacher's prompts are longer by their privileged context; ranks are assigned by the policy's.
    """
    teaches = inputs.algorithm.divergence is not None
    records = _selected_records(inputs, inputs.rows_per_step) if teaches else _scored_records(inputs)
    if inputs.scores_mismatched:  # each prompt with its own completion and with another's
        records = [record for record in records for _ in range(2)]
    mine = _share_of_rank(inputs, records)
    length = teacher_prompt_tokens(inputs)
    if length:
        records = [replace(record, prompt_ids=(record.group,) * length) for record in records]
    return pack(records, mine, inputs.budget)


def longest_record(inputs: Any) -> int:
    """Return the most tokens of a prompt with all branches of its completion."""
    return int(inputs.request.prompt_tokens) + len(_completion(inputs))


def teacher_prompt_tokens(inputs: Any) -> int:
    """Return the tokens of a teacher's prompts, 0 for those of the policy's; a successful completion is a part of them."""
    request = inputs.request
    teacher, length = request.teacher, int(request.teacher_prompt_tokens)
    if length or teacher is None or not teacher.reads_successes:
        return length
    context = context_length(cast(Any, SimpleNamespace(config=request.config)))
    longest = request.prompt_tokens + inputs.completion_tokens
    return int(longest if context is None else min(longest, context - inputs.completion_tokens))


def _share_of_rank(inputs: Any, records: Sequence[Record]) -> Sequence[int]:
    return assign_to_ranks(records, range(len(records)), inputs.budget, inputs.request.world_size)[0]


def _scored_records(inputs: Any) -> list[Record]:
    count = inputs.settings.rollout.num_sequences if inputs.is_online else inputs.rows_per_step
    return _selected_records(inputs, count)


def _selected_records(inputs: Any, count: int) -> list[Record]:
    """Return those of `count` records that the algorithm selects: of each group a pair, if it trains on pairs."""
    records = _records(inputs, count)
    if inputs.algorithm.unit != "pair" or not inputs.is_online:
        return records
    return [record for index, record in enumerate(records) if index % inputs.group_size < 2]


def _records(inputs: Any, count: int) -> list[Record]:
    algorithm, completion = inputs.algorithm, _completion(inputs)
    values = completion.logprobs
    columns: dict[str, Any] = {name: values for name in algorithm.needs}
    if inputs.is_online and inputs.settings.rollout.num_steps == 1:
        columns.pop("old", None)
    columns |= {"returns": values} if algorithm.values is not None or inputs.request.kind == "kto" else {}
    columns |= {"reference": values} if inputs.frees_reference else {}
    columns |= {"advantages": values} if inputs.is_online else {}
    record = Record(0, (), completion, (1.0,), 1.0, **columns)
    groups = [index // inputs.group_size for index in range(count)]
    # Completions of different groups share no prompt.
    return [replace(record, group=group, prompt_ids=(group,) * inputs.request.prompt_tokens) for group in groups]


def _completion(inputs: Any) -> Completion:
    """Return a completion of maximal length, each of whose branches follows the prompt."""
    length, last = inputs.completion_tokens, inputs.request.prompt_tokens - 1
    size = length * (inputs.settings.tools.max_branches if inputs.is_online else 1)
    branches = tuple(Branch(start, last) for start in range(length, size, length))
    ids, mask = torch.ones(size, dtype=torch.int32), torch.ones(size, dtype=torch.bool)
    return Completion(ids, torch.zeros(size), mask, "stop", branches=branches)

"""Records as a few tensors, for checkpoints.

They are packed into ragged columns: the values of all sequences end to end, and each sequence's length, -1 for None.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, get_args

import torch
from torch import Tensor

from lowpeak.errors import CheckpointError
from lowpeak.records import Branch, Completion, FinishReason, Record

_FINISH_REASONS: tuple[FinishReason, ...] = get_args(FinishReason)
_PER_TOKEN = ("old", "reference", "values", "entropy", "advantages", "returns", "token_rewards")
_COMPLETION_FIELDS = ("completion.ids", "completion.logprobs", "completion.loss_mask", "completion.prompt_ids")
_VERSIONS = "completion.policy_versions"
_TEACHER_PROMPT = "teacher_prompt_ids"
_BRANCHES = "completion.branches"
_ADDED = (_VERSIONS, _TEACHER_PROMPT, _BRANCHES)  # missing in older checkpoints
_RAGGED = ("prompt_ids", *_COMPLETION_FIELDS, *_ADDED, "rewards", *_PER_TOKEN)


def pack_records(records: Sequence[Record]) -> tuple[dict[str, Tensor], list[dict[str, Any]]]:
    """Return records as named tensors, and each completion's `extra` for JSON. `unpack_records` is the inverse.

    A column X is two tensors, `X.values` and `X.lengths`, so a rollout is a few tensors and not thousands.
    """
    for index, record in enumerate(records):
        json_checked(f"record {index}: extra", record.completion.extra)
    reasons = [_FINISH_REASONS.index(record.completion.finish_reason) for record in records]
    tensors = {
        "group": torch.tensor([record.group for record in records], dtype=torch.int64),
        "reward": torch.tensor([record.reward for record in records], dtype=torch.float64),
        "finish_reason": torch.tensor(reasons, dtype=torch.uint8),
    }
    fields = [_ragged_fields(record) for record in records]
    for name in _RAGGED:
        tensors |= _pack_column(name, [each[name] for each in fields])
    return tensors, [dict(record.completion.extra) for record in records]


def _pack_column(name: str, column: Sequence[Tensor | None]) -> dict[str, Tensor]:
    present = [each for each in column if each is not None]
    lengths = [-1 if each is None else each.numel() for each in column]
    return {
        f"{name}.values": torch.cat(present) if present else torch.empty(0),
        f"{name}.lengths": torch.tensor(lengths, dtype=torch.int64),
    }


def _ragged_fields(record: Record) -> dict[str, Any]:
    completion = record.completion
    return {
        "prompt_ids": _id_tensor(record.prompt_ids),
        "completion.ids": completion.ids,
        "completion.logprobs": completion.logprobs,
        "completion.loss_mask": completion.loss_mask,
        "completion.prompt_ids": _id_tensor(completion.prompt_ids),
        _VERSIONS: completion.policy_versions,
        _TEACHER_PROMPT: _id_tensor(record.teacher_prompt_ids),
        _BRANCHES: _id_tensor([number for each in completion.branches for number in (each.start, each.after)]),
        "rewards": torch.tensor(record.rewards, dtype=torch.float64),
        **{name: getattr(record, name) for name in _PER_TOKEN},
    }


def unpack_records(tensors: Mapping[str, Tensor], extras: Sequence[Mapping[str, Any]]) -> tuple[Record, ...]:
    """Return the records that `pack_records` packed, bit for bit. Their tensors are views of the columns."""
    names = [name for name in _RAGGED if name not in _ADDED or f"{name}.values" in tensors]
    columns = {name: _unpack_column(tensors[f"{name}.values"], tensors[f"{name}.lengths"]) for name in names}
    groups, rewards = tensors["group"].tolist(), tensors["reward"].tolist()
    reasons = [_FINISH_REASONS[index] for index in tensors["finish_reason"].tolist()]
    fields = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    records = []
    for each, group, reward, reason, extra in zip(fields, groups, rewards, reasons, extras, strict=True):
        ids, logprobs, loss_mask, override = (each[name] for name in _COMPLETION_FIELDS)
        completion = Completion(ids, logprobs, loss_mask, reason, _ids(override), extra, each.get(_VERSIONS))
        numbers = _ids(each.get(_BRANCHES)) or ()
        completion = replace(completion, branches=tuple(map(Branch, numbers[::2], numbers[1::2])))
        record = Record(group, tuple(each["prompt_ids"].tolist()), completion, tuple(each["rewards"].tolist()), reward)
        values: dict[str, Any] = {name: each[name] for name in _PER_TOKEN}
        records.append(replace(record, teacher_prompt_ids=_ids(each.get(_TEACHER_PROMPT)), **values))
    return tuple(records)


def _id_tensor(ids: Sequence[int] | None) -> Tensor | None:
    return None if ids is None else torch.tensor(ids, dtype=torch.int32)


def _ids(values: Tensor | None) -> tuple[int, ...] | None:
    return None if values is None else tuple(values.tolist())


def _unpack_column(values: Tensor, lengths: Tensor) -> list[Tensor | None]:
    sizes: list[int] = lengths.tolist()
    pieces: Iterator[Tensor] = iter(values.split([size for size in sizes if size >= 0]))
    return [None if size < 0 else next(pieces) for size in sizes]


def json_checked(owner: str, mapping: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of the mapping; raise CheckpointError, naming the key, for a value that JSON cannot store."""
    for key, value in mapping.items():
        try:
            json.dumps(value)
        except (TypeError, ValueError) as error:
            raise CheckpointError(
                f"cannot save {owner}['{key}'] of type {type(value).__name__} in a checkpoint: JSON cannot store it. "
                "Use numbers, strings, lists and dicts of them."
            ) from error
    return dict(mapping)

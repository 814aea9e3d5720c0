"""The state of a run that lowpeak adds to a transformers checkpoint, to resume to the same bits.

    lowpeak_state.json             numbers and names; written by rank 0
    lowpeak_rollout.safetensors    the records of the rollout in use, if there is one; written by rank 0
    lowpeak_random_<rank>.pt       the random generators of one process; written by each rank

Records are packed into ragged columns: the values of all sequences end to end, and each sequence's length, -1 for None.
Dropout, data shuffling and users' rewards draw from the process's random generators. Sampling does not: its numbers come from
a hash."""

from __future__ import annotations

import io
import json
import logging
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import safetensors.torch
import torch
from torch import Tensor

from lowpeak.arguments import declaration
from lowpeak.checkpoint.folders import STATE_FILE
from lowpeak.checkpoint.manifest import explain_read_errors
from lowpeak.errors import CheckpointError
from lowpeak.records import Completion, FinishReason, Record

logger = logging.getLogger(__name__)

FORMAT_VERSION = 1
ROLLOUT_FILE = "lowpeak_rollout.safetensors"
ARGUMENTS = "arguments"  # the entry of a run's identity with the arguments that may change

_FINISH_REASONS: tuple[FinishReason, ...] = get_args(FinishReason)
_PLAIN = ("cursor", "algorithm_state", "resolved", "identity")
_PER_TOKEN = ("old", "reference", "values", "entropy", "advantages", "returns", "token_rewards")
# Arguments that change what is learned: those of these groups in `--help`, and these of transformers and vLLM. The others are
# part of the run's identity, are saved with the optimizer and the schedule, or may be secret.
_LEARNING_GROUPS = {"algorithm", "model", "data", "rewards", "generation", "training"}
_LEARNING_ARGUMENTS = {
    *("lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps", "max_steps", "num_train_epochs", "max_grad_norm"),
    *("optim", "vllm_structured_outputs_regex", "vllm_importance_sampling_correction", "vllm_importance_sampling_mode"),
    *("vllm_importance_sampling_clip_max", "vllm_importance_sampling_clip_min"),
}
_OTHER_ARGUMENTS = {
    *("num_generations", "num_iterations", "steps_per_generation", "generation_batch_size", "num_mini_batches"),
    *("learning_rate", "value_learning_rate", "shuffle_dataset", "remove_unused_columns", "eval_packing"),
    *("strict_arguments", "trust_remote_code", "model_init_kwargs", "reward_timeout"),
}
_COMPLETION_FIELDS = ("completion.ids", "completion.logprobs", "completion.loss_mask", "completion.prompt_ids")
_RAGGED = ("prompt_ids", *_COMPLETION_FIELDS, "rewards", *_PER_TOKEN)


@dataclass(frozen=True)
class SavedRollout:
    """A rollout between two of its steps. `number` counts the run's rollouts, `steps_used` its finished steps."""

    records: tuple[Record, ...]
    number: int
    steps_used: int


@dataclass(frozen=True)
class RunState:
    """A run after `policy_version` optimizer steps, without weights, optimizer and schedule.

    `cursor` is the position in the prompts, `identity` the algorithm, rewards, shape of rollouts and arguments, `resolved`
    the values that `auto` resolved to. They are stored as JSON: keys are strings, and tuples are loaded as lists. `random` are
    the generator states of one process; empty if its rank is beyond the `world_size` of the saved run.
    """

    policy_version: int
    cursor: Mapping[str, Any]
    random: Mapping[str, Any]
    rollout: SavedRollout | None = None
    algorithm_state: Mapping[str, float] = field(default_factory=dict)
    resolved: Mapping[str, int | float | str] = field(default_factory=dict)
    identity: Mapping[str, Any] = field(default_factory=dict)
    world_size: int = 1

    @property
    def in_rollout(self) -> bool:
        return self.rollout is not None and bool(self.rollout.records)


def learning_arguments(args: Any, storage: str, model: str) -> dict[str, Any]:
    """Return the arguments that change the learned weights, as JSON; those that JSON cannot store are left out.

    `storage` is the resolved format of weights and optimizer states, in words; of the path or name `model` the last part counts.
    """
    arguments: dict[str, Any] = {"storage": storage, "model": Path(model).name}
    for each in fields(args):
        name, declared = each.name, declaration(each)
        is_learning = declared.group in _LEARNING_GROUPS and not declared.alias_of
        if name in _LEARNING_ARGUMENTS or (is_learning and name not in _OTHER_ARGUMENTS):
            with suppress(TypeError, ValueError):
                arguments[name] = json.loads(json.dumps(getattr(args, name)))
    return arguments


def check_run_identity(saved: RunState, now: RunState, checkpoint: Path, *, strict: bool = False) -> None:
    """Raise CheckpointError if the algorithm changed, or, within a rollout, another value of the identity.

    Otherwise one warning names changed values, arguments that change what is learned, and data; `strict`: each is an error.
    """
    changed = _changes(saved.identity, now.identity)
    all_changed = changed | _changes(_arguments_and_data(saved), _arguments_and_data(now))
    if strict and all_changed:
        raise other_arguments_error(checkpoint, all_changed)
    if "algorithm" in changed or (saved.in_rollout and changed):
        raise CheckpointError(
            f"{checkpoint} is of another run: {_listed(all_changed)}. Resume with the arguments that it was made with, or start a "
            "new run from its weights (model=that folder)."
        )
    if all_changed:
        logger.warning(
            "%s is resumed with other arguments, whose new values act from here on: %s.",
            *(checkpoint, _listed(all_changed)),
        )


def other_arguments_error(checkpoint: Path, changed: Mapping[str, tuple[Any, Any]]) -> CheckpointError:
    """Return the error of `resume_from_checkpoint="auto"` for other arguments or data: saved and new values by name."""
    return CheckpointError(
        f"resume_from_checkpoint='auto': {checkpoint} is of a run with other arguments or data: {_listed(changed)}. Start with "
        "those of that run, choose another output_dir for a new run, or set resume_from_checkpoint=True to continue nevertheless."
    )


def _arguments_and_data(state: RunState) -> dict[str, Any]:
    """Return the values that may change on resume; earlier versions saved no digest of the data."""
    digest = state.cursor.get("digest")
    data = {} if digest is None else {"train_dataset": f"rows with digest {digest}"}
    return {**state.identity.get(ARGUMENTS, {}), **data}


def _changes(saved: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return the values that differ; those that an earlier version did not save are left out."""
    names = [name for name in now if name != ARGUMENTS and name in saved and saved[name] != now[name]]
    return {name: (saved[name], now[name]) for name in names}


def _listed(changed: Mapping[str, tuple[Any, Any]]) -> str:
    return ", ".join(f"{name} was {saved!r} and is {now!r}" for name, (saved, now) in changed.items())


def save_run_state(folder: Path, state: RunState, rank: int = 0) -> None:
    """Write `state` into a (staged) checkpoint: the random states on every rank, everything else on rank 0.

    Raises CheckpointError, naming the entry, for a value that JSON cannot store.
    """
    # Serialize in memory and let Python write, so that a full disk is a plain OSError.
    buffer = io.BytesIO()
    torch.save(dict(state.random), buffer)
    _random_file(folder, rank).write_bytes(buffer.getvalue())
    if rank != 0:
        return
    plain: dict[str, Any] = {
        "format": FORMAT_VERSION,
        "policy_version": state.policy_version,
        "world_size": state.world_size,
        **{name: _json_checked(name, getattr(state, name)) for name in _PLAIN},
        "rollout": None,
    }
    if state.rollout is not None:
        tensors, extras = pack_records(state.rollout.records)
        (folder / ROLLOUT_FILE).write_bytes(safetensors.torch.save(tensors))
        plain["rollout"] = {
            "number": state.rollout.number,
            "steps_used": state.rollout.steps_used,
            "extras": extras,
        }
    (folder / STATE_FILE).write_text(json.dumps(plain), encoding="utf-8")


def load_run_state(folder: Path, rank: int = 0) -> RunState:
    """Return the state that `save_run_state` wrote, with the random states of `rank`.

    Raises CheckpointError if a file is missing or damaged, or if a newer version of lowpeak wrote it.
    """
    with explain_read_errors(folder / STATE_FILE):
        plain = json.loads((folder / STATE_FILE).read_text(encoding="utf-8"))
        if plain["format"] > FORMAT_VERSION:
            raise CheckpointError(
                f"checkpoint {folder} has format {plain['format']}, and this version of lowpeak reads up to {FORMAT_VERSION}. "
                "Upgrade lowpeak to the version that wrote it."
            )
        shared = {name: plain[name] for name in (*_PLAIN, "policy_version")}
        packed, world_size = plain["rollout"], plain.get("world_size", 1)
    rollout = None
    if packed is not None:
        with explain_read_errors(folder / ROLLOUT_FILE):
            tensors = safetensors.torch.load((folder / ROLLOUT_FILE).read_bytes())
            rollout = SavedRollout(unpack_records(tensors, packed["extras"]), packed["number"], packed["steps_used"])
    random: dict[str, Any] = {}
    if rank < world_size:
        with explain_read_errors(_random_file(folder, rank)):
            random = torch.load(io.BytesIO(_random_file(folder, rank).read_bytes()), weights_only=True)
    return RunState(**shared, rollout=rollout, random=random, world_size=world_size)


def pack_records(records: Sequence[Record]) -> tuple[dict[str, Tensor], list[dict[str, Any]]]:
    """Return records as named tensors, and each completion's `extra` for JSON. `unpack_records` is the inverse.

    A column X is two tensors, `X.values` and `X.lengths`, so a rollout is a few tensors and not thousands.
    """
    for index, record in enumerate(records):
        _json_checked(f"record {index}: extra", record.completion.extra)
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
        "rewards": torch.tensor(record.rewards, dtype=torch.float64),
        **{name: getattr(record, name) for name in _PER_TOKEN},
    }


def unpack_records(tensors: Mapping[str, Tensor], extras: Sequence[Mapping[str, Any]]) -> tuple[Record, ...]:
    """Return the records that `pack_records` packed, bit for bit. Their tensors are views of the columns."""
    columns = {name: _unpack_column(tensors[f"{name}.values"], tensors[f"{name}.lengths"]) for name in _RAGGED}
    groups, rewards = tensors["group"].tolist(), tensors["reward"].tolist()
    reasons = [_FINISH_REASONS[index] for index in tensors["finish_reason"].tolist()]
    fields = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    records = []
    for each, group, reward, reason, extra in zip(fields, groups, rewards, reasons, extras, strict=True):
        ids, logprobs, loss_mask, override = (each[name] for name in _COMPLETION_FIELDS)
        prompt_ids = None if override is None else tuple(override.tolist())
        completion = Completion(ids, logprobs, loss_mask, reason, prompt_ids, extra)
        record = Record(group, tuple(each["prompt_ids"].tolist()), completion, tuple(each["rewards"].tolist()), reward)
        records.append(replace(record, **{name: each[name] for name in _PER_TOKEN}))
    return tuple(records)


def _id_tensor(ids: Sequence[int] | None) -> Tensor | None:
    return None if ids is None else torch.tensor(ids, dtype=torch.int32)


def _unpack_column(values: Tensor, lengths: Tensor) -> list[Tensor | None]:
    sizes: list[int] = lengths.tolist()
    pieces: Iterator[Tensor] = iter(values.split([size for size in sizes if size >= 0]))
    return [None if size < 0 else next(pieces) for size in sizes]


def _random_file(folder: Path, rank: int) -> Path:
    return folder / f"lowpeak_random_{rank}.pt"


def _json_checked(owner: str, mapping: Mapping[str, Any]) -> dict[str, Any]:
    for key, value in mapping.items():
        try:
            json.dumps(value)
        except (TypeError, ValueError) as error:
            raise CheckpointError(
                f"cannot save {owner}['{key}'] of type {type(value).__name__} in a checkpoint: JSON cannot store it. "
                "Use numbers, strings, lists and dicts of them."
            ) from error
    return dict(mapping)


def capture_rng_state() -> dict[str, Any]:
    """Return the states of Python's, numpy's and torch's global generators, as plain types and tensors.

    CUDA generators are included if this process uses CUDA; CUDA is not initialized for them.
    """
    algorithm, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    return {
        "python": random.getstate(),
        "numpy": (algorithm, torch.from_numpy(np.asarray(keys, np.int64)), int(position), int(has_gauss), float(gauss)),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [],
    }


def restore_rng_state(state: Mapping[str, Any]) -> None:
    """Restore captured generator states; log a warning if the number of CUDA devices differs.

    An empty state belongs to a rank that the saved run did not have: its generators stay as they were seeded.
    """
    if not state:
        logger.warning("No random states were saved for this rank: its dropout and random rewards start from the seed.")
        return
    algorithm, keys, position, has_gauss, gauss = state["numpy"]
    random.setstate(state["python"])
    np.random.set_state((algorithm, keys.numpy().astype(np.uint32), position, has_gauss, gauss))
    torch.set_rng_state(state["torch"])
    num_devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for device, cuda in enumerate(state["cuda"][:num_devices]):
        torch.cuda.set_rng_state(cuda, device)
    if state["cuda"] and len(state["cuda"]) != num_devices:
        logger.warning(
            "Random states of %d CUDA devices were saved, and there are %d devices now: dropout will differ.",
            len(state["cuda"]),
            num_devices,
        )


@contextmanager
def preserve_rng_state() -> Iterator[None]:
    """Restore the global generators after the block, so that an evaluation does not change training."""
    state = capture_rng_state()
    try:
        yield
    finally:
        restore_rng_state(state)

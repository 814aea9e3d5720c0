"""The state of a run that lowpeak adds to a transformers checkpoint, to resume to the same bits.

    lowpeak_state.json               numbers and names; written by rank 0
    lowpeak_rollout.safetensors      the records of the rollout in use, if there is one; written by rank 0
    lowpeak_rollout_<n>.safetensors  the finished groups of rollout n, if it is in flight; written by rank 0
    lowpeak_random_<rank>.pt         the random generators of one process; written by each rank

Format 1, which is read, has no rollouts in flight and no policy versions of tokens. Dropout, data shuffling and users' rewards
draw from the process's random generators. Sampling does not: its numbers come from a hash."""

from __future__ import annotations

import io
import json
import logging
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch

from lowpeak.arguments import declaration
from lowpeak.checkpoint.folders import STATE_FILE
from lowpeak.checkpoint.manifest import explain_read_errors
from lowpeak.checkpoint.packed_records import json_checked, pack_records, unpack_records
from lowpeak.errors import CheckpointError
from lowpeak.records import Record

logger = logging.getLogger(__name__)

FORMAT_VERSION = 2
ROLLOUT_FILE = "lowpeak_rollout.safetensors"
ARGUMENTS = "arguments"  # the entry of a run's identity with the arguments that may change

_SHAPE = {"num_generations", "completions of a rollout"}  # the entries with the shape of rollouts
_PLAIN = ("cursor", "algorithm_state", "resolved", "identity")
# Arguments that change what is learned: those of these groups in `--help`, and these of transformers and vLLM. The others are
# part of the run's identity, are saved with the optimizer and the schedule, or may be secret.
_LEARNING_GROUPS = {"algorithm", "model", "data", "rewards", "generation", "training"}
_LEARNING_ARGUMENTS = {
    *("lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps", "max_steps", "num_train_epochs", "max_grad_norm"),
    *("optim", "vllm_structured_outputs_regex", "vllm_importance_sampling_correction", "vllm_importance_sampling_mode"),
    *("vllm_importance_sampling_clip_max", "vllm_importance_sampling_clip_min", "max_staleness"),
}
_OTHER_ARGUMENTS = {
    *("num_generations", "num_iterations", "steps_per_generation", "generation_batch_size", "num_mini_batches"),
    *("learning_rate", "value_learning_rate", "shuffle_dataset", "remove_unused_columns", "eval_packing"),
    *("strict_arguments", "trust_remote_code", "model_init_kwargs", "reward_timeout"),
}


@dataclass(frozen=True)
class SavedRollout:
    """A rollout between two of its steps. `number` counts the run's rollouts, `steps_used` its finished steps."""

    records: tuple[Record, ...]
    number: int
    steps_used: int


@dataclass(frozen=True)
class RolloutInFlight:
    """A rollout under generation: its `num_prompts` prompts are drawn again from `cursor`, the state before their draw.

    `records` are those of its finished groups, without rewards; a record's `group` is the index of its prompt in the draw.
    `results` are those of the functions that its conversations called.
    """

    number: int
    policy_version: int
    cursor: Mapping[str, Any]
    num_prompts: int
    records: tuple[Record, ...]
    results: Mapping[str, Any] = field(default_factory=dict)


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
    in_flight: tuple[RolloutInFlight, ...] = ()
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
    """Raise CheckpointError if the algorithm changed, or within a rollout another value, or with one in flight its shape.

    Otherwise one warning names changed values, arguments that change what is learned, and data; `strict`: each is an error.
    """
    changed = _changes(saved.identity, now.identity)
    all_changed = changed | _changes(_arguments_and_data(saved), _arguments_and_data(now))
    if strict and all_changed:
        raise other_arguments_error(checkpoint, all_changed)
    resized = saved.in_flight and not _SHAPE.isdisjoint(changed)
    if "algorithm" in changed or (saved.in_rollout and changed) or resized:
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
        **{name: json_checked(name, getattr(state, name)) for name in _PLAIN},
        "rollout": None,
    }
    if state.rollout is not None:
        plain["rollout"] = {
            "number": state.rollout.number,
            "steps_used": state.rollout.steps_used,
            "extras": _write_records(folder / ROLLOUT_FILE, state.rollout.records),
        }
    if state.in_flight:
        plain["in_flight"] = [
            # Without empty results, so that lowpeak 0.2.0 can read the checkpoint.
            {name: value for name, value in vars(each).items() if name != "results" or value}
            | {"records": _write_records(_in_flight_file(folder, each.number), each.records)}
            for each in state.in_flight
        ]
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
        packed, others, world_size = plain["rollout"], plain.get("in_flight", []), plain.get("world_size", 1)
    rollout = None
    if packed is not None:
        records = _read_records(folder / ROLLOUT_FILE, packed["extras"])
        rollout = SavedRollout(records, packed["number"], packed["steps_used"])
    in_flight = tuple(
        RolloutInFlight(**each | {"records": _read_records(_in_flight_file(folder, each["number"]), each["records"])})
        for each in others
    )
    random: dict[str, Any] = {}
    if rank < world_size:
        with explain_read_errors(_random_file(folder, rank)):
            random = torch.load(io.BytesIO(_random_file(folder, rank).read_bytes()), weights_only=True)
    return RunState(**shared, rollout=rollout, in_flight=in_flight, random=random, world_size=world_size)


def check_none_in_flight(state: RunState, checkpoint: Path) -> None:
    """Raise CheckpointError for rollouts in flight, which a run without any ahead does not continue."""
    if state.in_flight:
        numbers = ", ".join(str(each.number) for each in state.in_flight)
        raise CheckpointError(
            f"{checkpoint} has rollouts that were generated ahead ({numbers}), which max_staleness=0 would discard: resume with "
            "max_staleness=1 or more."
        )


def _write_records(path: Path, records: Sequence[Record]) -> list[dict[str, Any]]:
    """Write the records' tensors, and return the part of them that JSON stores."""
    tensors, extras = pack_records(records)
    path.write_bytes(safetensors.torch.save(tensors))
    return extras


def _read_records(path: Path, extras: Sequence[Mapping[str, Any]]) -> tuple[Record, ...]:
    with explain_read_errors(path):
        return unpack_records(safetensors.torch.load(path.read_bytes()), extras)


def _in_flight_file(folder: Path, number: int) -> Path:
    return folder / f"lowpeak_rollout_{number}.safetensors"


def _random_file(folder: Path, rank: int) -> Path:
    return folder / f"lowpeak_random_{rank}.pt"


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

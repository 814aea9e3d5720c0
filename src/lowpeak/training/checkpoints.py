"""Saving and loading: a checkpoint is staged, synced and renamed, and only then the oldest one is removed.

Ranks write it together. A part of it that waits for all ranks ends in `Ranks.together`, so that an error of one is every one's.
"""

from __future__ import annotations

import logging
import os
import pickle
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME, TRAINING_ARGS_NAME
from transformers.trainer_callback import ExportableState

from lowpeak.checkpoint import SLICE_BYTES, RunState, prune, save_run_state, staged, write_settings, write_weights
from lowpeak.errors import CheckpointError, LowpeakError, first_line
from lowpeak.memory import is_exhaustion
from lowpeak.models import is_peft, name_damaged_file
from lowpeak.parallel import (
    WEIGHT,
    Strategy,
    TrainingState,
    active_adapters,
    adapter_state,
    has_shards,
    load_shards,
    plain_name,
    read_saved,
    save_shards,
)
from lowpeak.ranks import Ranks, is_lost_connection


def save_checkpoint(trainer: Any, trial: Any, state: RunState) -> Path:
    """Write `checkpoint-<step>` of a trainer, by all ranks, whole or not at all; returns its folder."""
    args, ranks = trainer.args, trainer.run.strategy.ranks.processes
    run_dir = Path(trainer._get_output_dir(trial=trial))
    final = run_dir / f"checkpoint-{trainer.state.global_step}"
    trainer.store_flos()
    with staged(final, ranks) as stage:
        export_model(trainer, stage)
        if not args.save_only_model:
            _save_training(trainer, stage)
        trainer.save_more(stage)
        save_run_state(stage, replace(state, world_size=ranks.world_size), ranks.rank)
        _note_best(trainer, run_dir, final)
        _note_callbacks(trainer)
        if ranks.rank == 0:
            trainer.state.save_to_json(os.fspath(stage / "trainer_state.json"))
    with ranks.together():
        if args.push_to_hub:
            trainer._push_from_checkpoint(os.fspath(final))
        best = trainer.state.best_model_checkpoint
        if ranks.rank == 0:
            prune(run_dir, trainer.acting_args.save_total_limit, [Path(best)] if best else [])
    return final


def _save_training(trainer: Any, stage: Path) -> None:
    """Optimizer states, schedule and loss scale: each rank its own part, or all of it by rank 0."""
    strategy, folder = trainer.run.strategy, os.fspath(stage)
    with strategy.ranks.together():
        if strategy.cuts_states:
            strategy.save_state(stage, trainer.model_wrapped, trainer.optimizer)
        else:
            trainer._save_optimizer_and_scheduler(folder)
    if strategy.cuts_states and strategy.ranks.processes.rank == 0 and not _is_deepspeeds(trainer.lr_scheduler):
        torch.save(trainer.lr_scheduler.state_dict(), stage / SCHEDULER_NAME)
    trainer._save_scaler(folder)


def load_training(trainer: Any, checkpoint: Path) -> None:
    """Weights, optimizer states, schedule and loss scale that ranks wrote together, on the ranks that are now."""
    strategy = trainer.run.strategy
    strategy.load_state(checkpoint, trainer.model_wrapped, trainer.optimizer)
    if not _is_deepspeeds(trainer.lr_scheduler):
        saved = torch.load(checkpoint / SCHEDULER_NAME, weights_only=True)
        trainer.lr_scheduler.load_state_dict(_for_groups(saved, len(trainer.optimizer.param_groups)))
    trainer._load_scaler(os.fspath(checkpoint))


def _for_groups(schedule: Mapping[str, Any], number: int) -> dict[str, Any]:
    """A schedule's state for so many groups of parameters, where its own have all the same: tensor parallelism divides them."""
    lists = {key: value for key, value in schedule.items() if isinstance(value, list) and value}
    alike = {key: value[:1] * number for key, value in lists.items() if all(each == value[0] for each in value)}
    return {**schedule, **alike}


def _is_deepspeeds(schedule: Any) -> bool:
    """Whether DeepSpeed moves the schedule and saves it; by name, as accelerate has the class only where DeepSpeed is."""
    return type(schedule).__name__ == "DeepSpeedSchedulerWrapper"


def check_kind(checkpoint: Path, strategy: Strategy) -> None:
    """CheckpointError for a checkpoint that holds no states which this strategy's ranks could take up."""
    if has_shards(checkpoint):
        return
    lacking = [name for name in (OPTIMIZER_NAME, SCHEDULER_NAME) if not (checkpoint / name).exists()]
    if lacking:
        raise CheckpointError(
            f"{checkpoint} has no {lacking[0]} (save_only_model writes none): start a new run from its weights (model=that "
            "folder), or resume from another checkpoint."
        )
    if strategy.cuts_states:
        raise CheckpointError(
            f"{checkpoint} holds no optimizer states that could be shared out among ranks: it was written on one device, under "
            "DDP, or with save_only_model. Resume as it was written, or start a new run from its weights (model=that folder)."
        )


def check_groups(optimizer: Any) -> None:
    """ValueError for groups of another optimizer: torch loads them, and fails at its first step."""
    missing = [key for group in optimizer.param_groups for key in optimizer.defaults if key not in group]
    if missing:
        raise ValueError(f"they have no {missing[0]}")


@contextmanager
def fitting(checkpoint: str, what: str, remedy: str) -> Iterator[None]:
    """Raise CheckpointError if a checkpoint's tensors are damaged, or belong to something else."""
    try:
        with name_damaged_file(checkpoint, CheckpointError, "resume from another checkpoint"):
            yield
    except LowpeakError:
        raise
    except (EOFError, pickle.UnpicklingError) as error:
        raise CheckpointError(
            f"the {what} in {checkpoint} are damaged (cut off or changed): resume from another checkpoint."
        ) from error
    except (KeyError, ValueError, RuntimeError) as error:
        if is_exhaustion(error) or is_lost_connection(error):
            raise
        reason = first_line(error)
        raise CheckpointError(
            f"the {what} in {checkpoint} do not fit this run ({reason}): resume with the same {remedy}, or start a new run."
        ) from error


def export_model(trainer: Any, folder: Path, *, merged: bool = False) -> None:
    """The model in the Hugging Face layout, streamed slice by slice; an adapter alone, or `merged` into the whole model."""
    strategy = trainer.run.strategy
    model: Any = trainer.accelerator.unwrap_model(trainer.model, keep_torch_compile=False)
    first = strategy.ranks.processes.rank == 0
    if is_peft(model) and not merged:
        _export_adapter(trainer, model, folder)
        return
    base: Any = model.get_base_model() if is_peft(model) else model
    if not isinstance(base, PreTrainedModel) or getattr(base, "_hf_peft_config_loaded", False):
        trainer._save(os.fspath(folder))
        return
    layout = strategy.layout(trainer.model_wrapped)
    with strategy.ranks.together():
        if first:
            folder.mkdir(parents=True, exist_ok=True)
            write_settings(folder, base, layout)
            _save_beside(trainer, folder)
    with strategy.ranks.together():
        slices = strategy.slices(trainer.model_wrapped, SLICE_BYTES, None)
        write_weights(folder if first else None, base, layout, slices)


def _export_adapter(trainer: Any, model: Any, folder: Path) -> None:
    """The adapter as peft saves it. Where it is sharded it is gathered, slice by slice, on rank 0; its base is not."""
    strategy = trainer.run.strategy
    if not strategy.cuts_states:
        with strategy.ranks.together():
            trainer._save(os.fspath(folder))
        return
    found: dict[str, list[torch.Tensor]] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for piece in strategy.slices(trainer.model_wrapped, SLICE_BYTES, None, "adapter"):
        if strategy.ranks.processes.rank == 0:
            found.setdefault(piece.name, []).append(piece.values.to("cpu", copy=True))
            shapes[piece.name] = piece.shape
    with strategy.ranks.together():
        if strategy.ranks.processes.rank == 0:
            whole = {name: torch.cat(parts).view(shapes[name]) for name, parts in found.items()}
            folder.mkdir(parents=True, exist_ok=True)
            model.save_pretrained(
                folder, state_dict=adapter_state(model, whole), selected_adapters=active_adapters(model)
            )
            _save_beside(trainer, folder)


def _save_beside(trainer: Any, folder: Path) -> None:
    if trainer.processing_class is not None:
        trainer.processing_class.save_pretrained(folder)
    torch.save(trainer.args, folder / TRAINING_ARGS_NAME)


@contextmanager
def policys_adapter_alone(model: Any) -> Iterator[None]:
    """Let `save_pretrained` write the adapters in use alone: not one that is only the reference, nor the critic's.

    They are not hidden from peft meanwhile: it leaves out the tensors of those adapters that it knows.
    """
    if not is_peft(model):
        yield
        return
    model.save_pretrained = partial(model.save_pretrained, selected_adapters=active_adapters(model))
    try:
        yield
    finally:
        del model.save_pretrained


def _note_best(trainer: Any, run_dir: Path, final: Path) -> None:
    """`best_model_checkpoint`, as the base class sets it: the folder of the best step, once that exists."""
    step = trainer.state.best_global_step
    if step:
        best = run_dir / f"checkpoint-{step}"
        if best == final or best.is_dir():
            trainer.state.best_model_checkpoint = os.fspath(best)


def _note_callbacks(trainer: Any) -> None:
    """The states of callbacks that have one, as the base class keeps them."""
    holders = [h for h in (*trainer.callback_handler.callbacks, trainer.control) if isinstance(h, ExportableState)]
    for holder in holders:
        name, state = type(holder).__name__, holder.state()
        kept = trainer.state.stateful_callbacks.get(name)
        if isinstance(kept, list):
            kept.append(state)
        else:
            trainer.state.stateful_callbacks[name] = state


REFERENCE_FOLDER = "reference"
CRITIC_FOLDER = "critic"
_WITHOUT = {
    REFERENCE_FOLDER: "the checkpoint was written without sync_ref_model; resume without it.",
    CRITIC_FOLDER: "the checkpoint holds no critic; resume from one that PPO wrote.",
}


def save_apart(checkpoint: Path, folder: str, parameters: Mapping[str, nn.Parameter], ranks: Ranks) -> None:
    """Write each rank's ranges into a folder of a (staged) checkpoint, on all ranks together."""
    save_shards(checkpoint, _state(parameters), ranks.processes, folder)


def load_apart(checkpoint: Path, folder: str, parameters: Mapping[str, nn.Parameter], ranks: Ranks) -> None:
    """Copy what `save_apart` wrote into this rank's ranges; CheckpointError where it is missing or of another model."""
    if not (checkpoint / folder).is_dir():
        raise CheckpointError(f"{checkpoint / folder} is missing: {_WITHOUT[folder]}")
    state = _state(parameters)
    saved = read_saved(checkpoint, ranks.processes, folder)
    load_shards(checkpoint, saved, state.fragments, folder)
    state.put_back()


def _state(parameters: Mapping[str, nn.Parameter]) -> TrainingState:
    state = TrainingState()
    for name, parameter in parameters.items():
        state.add_range(f"{WEIGHT}/{plain_name(name)}", state.range_of(parameter))
    return state


logger = logging.getLogger(__name__)

_RATE = "learning_rate"

# What optimizers and schedules keep of arguments in their states. Other entries move as a run goes on.
_OF_GROUP = {"weight_decay": ("weight_decay",), "betas": ("adam_beta1", "adam_beta2"), "eps": ("adam_epsilon",)} | {
    name: (f"optim's {name}",)
    for name in ("momentum", "dampening", "nesterov", "alpha", "centered", "amsgrad", "fused")
}
_OF_SCHEDULE = ("factor", "patience", "threshold", "cooldown", "warmup", "min_lrs", "max_lrs")


Settings = dict[tuple[str, int], Any]


@contextmanager
def telling_of_held(trainer: Any, checkpoint: str) -> Iterator[None]:
    """Warn, once the block has loaded the states of `checkpoint`, of arguments that have no effect because of them."""
    asked = _settings(trainer)
    yield
    held = _settings(trainer)
    changed = [key for key in asked if key in held and asked[key] != held[key]]
    told = dict.fromkeys(
        f"{_named(key[0], asked[key], trainer)}={asked[key]!r} ({held[key]!r} acts)" for key in changed
    )
    if told:
        logger.warning(
            "The optimizer and the schedule go on as %s holds them, so arguments of this run have no effect: %s. To change them, "
            "start a new run from its weights (model=that folder).",
            checkpoint,
            ", ".join(told),
        )


def _settings(trainer: Any) -> Settings:
    """What the states have of each argument, by its name and the number of the group of parameters."""
    schedule = trainer.lr_scheduler
    found: Settings = {(_RATE, i): rate for i, rate in enumerate(getattr(schedule, "base_lrs", ()))}
    for i, group in enumerate(trainer.optimizer.param_groups):
        for key, names in _OF_GROUP.items():
            if key in group:
                value = tuple(group[key]) if isinstance(group[key], list) else group[key]
                values = value if isinstance(value, tuple) and len(value) == len(names) else [value] * len(names)
                found |= {(name, i): each for name, each in zip(names, values, strict=True)}
    own = {(f"lr_scheduler_kwargs' {key}", 0): getattr(schedule, key) for key in _OF_SCHEDULE if hasattr(schedule, key)}
    return found | own


def _named(name: str, value: Any, trainer: Any) -> str:
    """Under PPO the critic's groups have a rate of their own, where one is given."""
    critics = getattr(trainer.acting_args, "value_learning_rate", None)
    return "value_learning_rate" if name == _RATE and value == critics != trainer.acting_args.learning_rate else name

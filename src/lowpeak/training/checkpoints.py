"""Checkpoints of a run: staged by all ranks, synced and renamed; only then the oldest one is removed.

Parts that wait for all ranks are inside `Ranks.propagate_errors`, which raises one rank's error on all.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME, TRAINING_ARGS_NAME

from lowpeak.checkpoint import (
    RunState,
    prune_checkpoints,
    save_run_state,
    stage_checkpoint,
    write_configs,
    write_weights,
)
from lowpeak.errors import CheckpointError, LowpeakError, first_line, shorten_names
from lowpeak.heads import belongs_to_critic, is_peft
from lowpeak.memory import is_out_of_memory
from lowpeak.models import name_damaged_file
from lowpeak.parallel import (
    WEIGHT,
    TrainingState,
    active_adapters,
    adapter_state_dict,
    clean_parameter_name,
    has_shards,
    load_shards,
    read_saved_state,
    save_shards,
)
from lowpeak.ranks import Ranks, is_lost_connection
from lowpeak.records import SLICE_BYTES, TensorAssembler
from lowpeak.training.run import Run


class ExportedModel(Protocol):
    """The part of a trainer that exports its model; `_save` is transformers'."""

    run: Run
    args: Any
    accelerator: Any
    model: Any
    model_wrapped: nn.Module
    processing_class: Any

    def _save(self, output_dir: str) -> None: ...


class TrainingStates(Protocol):
    """The part of a trainer with optimizer states, schedule and loss scale; the methods are transformers'."""

    run: Run
    model_wrapped: nn.Module
    optimizer: Any
    lr_scheduler: Any

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None: ...

    def _save_scaler(self, output_dir: str) -> None: ...

    def _load_scaler(self, checkpoint: str) -> None: ...


class CheckpointedTrainer(ExportedModel, TrainingStates, Protocol):
    """The part of a trainer that writes and loads checkpoints; names with an underscore and `store_flos` are transformers'."""

    acting_args: Any
    state: Any

    def save_extra(self, folder: Path) -> None: ...

    def record_callbacks(self) -> None: ...

    def store_flos(self) -> None: ...

    def _get_output_dir(self, trial: Any) -> str: ...

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None: ...


def save_checkpoint(trainer: CheckpointedTrainer, trial: Any, state: RunState) -> Path:
    """Write `checkpoint-<step>` on all ranks, completely or not at all; return its folder."""
    args, ranks = trainer.args, trainer.run.strategy.ranks.processes
    run_dir = Path(trainer._get_output_dir(trial=trial))
    final = run_dir / f"checkpoint-{trainer.state.global_step}"
    trainer.store_flos()
    with stage_checkpoint(final, ranks) as stage:
        export_model(trainer, stage)
        if not args.save_only_model:
            _save_training(trainer, stage)
        trainer.save_extra(stage)
        save_run_state(stage, replace(state, world_size=ranks.world_size), ranks.rank)
        _record_best(trainer, run_dir, final)
        trainer.record_callbacks()
        if ranks.rank == 0:
            trainer.state.save_to_json(os.fspath(stage / "trainer_state.json"))
    with ranks.propagate_errors():
        if args.push_to_hub:
            trainer._push_from_checkpoint(os.fspath(final))
        best = trainer.state.best_model_checkpoint
        if ranks.rank == 0:
            prune_checkpoints(run_dir, trainer.acting_args.save_total_limit, [Path(best)] if best else [])
    return final


def _save_training(trainer: TrainingStates, stage: Path) -> None:
    """Write optimizer states, schedule and loss scale: each rank its shard, or rank 0 all of it."""
    strategy, folder = trainer.run.strategy, os.fspath(stage)
    with strategy.ranks.propagate_errors():
        if trainer.run.writes_shards:
            strategy.save_state(stage, trainer.model_wrapped, trainer.optimizer)
        else:
            trainer._save_optimizer_and_scheduler(folder)
    if trainer.run.writes_shards and strategy.ranks.processes.rank == 0 and not _is_deepspeeds(trainer.lr_scheduler):
        torch.save(trainer.lr_scheduler.state_dict(), stage / SCHEDULER_NAME)
    trainer._save_scaler(folder)


def load_training(trainer: TrainingStates, checkpoint: Path) -> None:
    """Load sharded weights and optimizer states, schedule and loss scale, on any number of ranks."""
    strategy = trainer.run.strategy
    strategy.load_state(checkpoint, trainer.model_wrapped, trainer.optimizer)
    if not _is_deepspeeds(trainer.lr_scheduler):
        saved = torch.load(checkpoint / SCHEDULER_NAME, weights_only=True)
        trainer.lr_scheduler.load_state_dict(_for_groups(saved, len(trainer.optimizer.param_groups)))
    trainer._load_scaler(os.fspath(checkpoint))


def _for_groups(schedule: Mapping[str, Any], number: int) -> dict[str, Any]:
    """Return a schedule's state for `number` parameter groups, if its groups have equal values."""
    # Tensor parallelism divides the groups, so their number differs from a run without it.
    lists = {key: value for key, value in schedule.items() if isinstance(value, list) and value}
    resized = {key: value[:1] * number for key, value in lists.items() if all(each == value[0] for each in value)}
    return {**schedule, **resized}


def _is_deepspeeds(schedule: Any) -> bool:
    """Return whether DeepSpeed steps and saves the schedule."""
    # By name: accelerate defines the class only if DeepSpeed is installed.
    return type(schedule).__name__ == "DeepSpeedSchedulerWrapper"


def check_training_state(checkpoint: Path, run: Run) -> None:
    """Raise CheckpointError for a checkpoint without training states that this run can load."""
    if has_shards(checkpoint):
        return
    missing = [name for name in (OPTIMIZER_NAME, SCHEDULER_NAME) if not (checkpoint / name).exists()]
    if missing:
        raise CheckpointError(
            f"{checkpoint} has no {missing[0]} (save_only_model writes none): start a new run from its weights (model=that "
            "folder), or resume from another checkpoint."
        )
    if run.loads_only_shards:
        raise CheckpointError(
            f"{checkpoint} has no sharded optimizer states: it was written on one device, under DDP, or with save_only_model. "
            "Resume with the strategy that wrote it, or start a new run from its weights (model=that folder)."
        )


def check_loaded_names(model: nn.Module, loaded: Any) -> None:
    """Raise ValueError if a checkpoint's weights lack parameters of the model, or have others; `loaded` is torch's result.

    Tied parameters have one name, and a critic has its own file.
    """
    parameters = {name for name, _ in model.named_parameters() if not belongs_to_critic(name)}
    missing = [name for name in loaded.missing_keys if name in parameters]
    for names, problem in ((missing, "they lack"), (loaded.unexpected_keys, "this model lacks")):
        if names:
            raise ValueError(f"{problem} {shorten_names(names)}")


@contextmanager
def explain_load_errors(checkpoint: str, content: str, remedy: str) -> Iterator[None]:
    """Raise CheckpointError if loading fails because files are damaged or their tensors belong to another run."""
    try:
        with name_damaged_file(checkpoint, CheckpointError, "resume from another checkpoint"):
            yield
    except LowpeakError:
        raise
    except (EOFError, pickle.UnpicklingError) as error:
        raise CheckpointError(
            f"the {content} in {checkpoint} are damaged (truncated or changed): resume from another checkpoint."
        ) from error
    except (KeyError, ValueError, RuntimeError) as error:
        if is_out_of_memory(error) or is_lost_connection(error):
            raise
        reason = first_line(error)
        raise CheckpointError(
            f"the {content} in {checkpoint} do not fit this run ({reason}): resume with the same {remedy}, or start a new run."
        ) from error


def load_converted(model: Any, folder: Path) -> Any:
    """Load the weights that `export_model` wrote, which transformers converts; return torch's result.

    For a moment host memory has the weights once more.
    """
    saved = type(model).from_pretrained(folder, dtype=model.dtype)
    return model.load_state_dict(saved.state_dict(), strict=False)


def export_model(trainer: ExportedModel, folder: Path, *, merged: bool = False) -> None:
    """Write the model in the Hugging Face layout, slice by slice: an adapter alone, or `merged` into the full model."""
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
    with strategy.ranks.propagate_errors():
        if first:
            folder.mkdir(parents=True, exist_ok=True)
            write_configs(folder, base, layout)
            _save_tokenizer_and_arguments(trainer, folder)
    with strategy.ranks.propagate_errors():
        slices = strategy.slices(trainer.model_wrapped, SLICE_BYTES, None)
        write_weights(folder if first else None, base, layout, slices)


def _export_adapter(trainer: ExportedModel, model: Any, folder: Path) -> None:
    """Write the adapter as peft does; gather a sharded one on rank 0, slice by slice, without its base."""
    strategy = trainer.run.strategy
    if not strategy.shards_states:
        with strategy.ranks.propagate_errors():
            trainer._save(os.fspath(folder))
        return
    assembler = TensorAssembler()
    tensors: dict[str, torch.Tensor] = {}
    for piece in strategy.slices(trainer.model_wrapped, SLICE_BYTES, None, "adapter"):
        if strategy.ranks.processes.rank == 0:
            complete = assembler.add(piece.name, piece.shape, piece.start, piece.values)
            tensors |= {} if complete is None else {piece.name: complete}
    with strategy.ranks.propagate_errors():
        if strategy.ranks.processes.rank == 0:
            folder.mkdir(parents=True, exist_ok=True)
            model.save_pretrained(
                folder, state_dict=adapter_state_dict(model, tensors), selected_adapters=active_adapters(model)
            )
            _save_tokenizer_and_arguments(trainer, folder)


def _save_tokenizer_and_arguments(trainer: ExportedModel, folder: Path) -> None:
    if trainer.processing_class is not None:
        trainer.processing_class.save_pretrained(folder)
    torch.save(trainer.args, folder / TRAINING_ARGS_NAME)


@contextmanager
def only_policy_adapters(model: Any) -> Iterator[None]:
    """Let `save_pretrained` write only the adapters in use: not the reference's, nor the critic's."""
    if not is_peft(model):
        yield
        return
    # Peft still knows the other adapters: it leaves out only the tensors of adapters that it knows.
    model.save_pretrained = partial(model.save_pretrained, selected_adapters=active_adapters(model))
    try:
        yield
    finally:
        del model.save_pretrained


def _record_best(trainer: CheckpointedTrainer, run_dir: Path, final: Path) -> None:
    """Set `best_model_checkpoint`, as transformers does, to the folder of the best step if it exists."""
    step = trainer.state.best_global_step
    if step:
        best = run_dir / f"checkpoint-{step}"
        if best == final or best.is_dir():
            trainer.state.best_model_checkpoint = os.fspath(best)


REFERENCE_FOLDER = "reference"
CRITIC_FOLDER = "critic"
_MISSING_REASONS = {
    REFERENCE_FOLDER: "the checkpoint has no moving reference; resume without sync_ref_model or teacher_model_kind='ema'.",
    CRITIC_FOLDER: "the checkpoint has no critic; resume from one that PPO wrote.",
}


def save_extra_weights(checkpoint: Path, folder: str, parameters: Mapping[str, nn.Parameter], ranks: Ranks) -> None:
    """Write each rank's shards of `parameters` into a folder of a (staged) checkpoint, on all ranks together."""
    save_shards(checkpoint, _state(parameters), ranks.processes, folder)


def load_extra_weights(checkpoint: Path, folder: str, parameters: Mapping[str, nn.Parameter], ranks: Ranks) -> None:
    """Load a checkpoint's folder into this rank's shards; CheckpointError if it is missing or of another model."""
    if not (checkpoint / folder).is_dir():
        raise CheckpointError(f"{checkpoint / folder} is missing: {_MISSING_REASONS[folder]}")
    state = _state(parameters)
    saved = read_saved_state(checkpoint, ranks.processes, folder)
    load_shards(checkpoint, saved, state.fragments, folder)
    state.copy_back()


def _state(parameters: Mapping[str, nn.Parameter]) -> TrainingState:
    state = TrainingState()
    for name, parameter in parameters.items():
        state.add_fragment(f"{WEIGHT}/{clean_parameter_name(name)}", state.fragment_of_parameter(parameter))
    return state

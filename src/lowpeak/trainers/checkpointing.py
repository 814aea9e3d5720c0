"""transformers' Trainer with checkpoints that any strategy writes and reads, and exports slice by slice.

docs/architecture.md lists the overridden methods with the reasons.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

from torch import nn
from transformers import Trainer
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import TrainOutput

from lowpeak.checkpoint import RunState, restore_rng_state, stage_files
from lowpeak.memory import Phase
from lowpeak.optim import clear_low_bits, loading_states
from lowpeak.parallel import has_shards
from lowpeak.setup import clear_output_dir, num_restarts, warn_of_overridden_arguments
from lowpeak.trainers.model_card import ModelCardMixin, describe_start
from lowpeak.training import (
    Run,
    apply_recorded_sizes,
    check_loaded_names,
    explain_load_errors,
    export_model,
    load_converted,
    load_training,
    only_policy_adapters,
    require_finite_weights,
    save_checkpoint,
)
from lowpeak.watchdog import detect_failures

logger = logging.getLogger(__name__)


class FinishedRunError(Exception):
    """Ends `train()` of transformers when a resumed run has no step left: it would log, evaluate and call callbacks."""


class CheckpointingTrainer(ModelCardMixin, Trainer):
    """transformers' Trainer whose checkpoints have the state of a run.

    run                     the parts of the run
    resumed                 the checkpoint's state, until training has restored it
    resumes_strictly        whether other arguments than the checkpoint's are an error
    was_finished            whether the last train() resumed a finished run
    """

    run: Run
    resumed: RunState | None = None
    resumes_strictly = False
    was_finished = False

    def run_state(self) -> RunState:
        """Return the state that a checkpoint needs beside weights, optimizer and schedule."""
        raise AssertionError("a trainer defines its state")

    def with_in_flight(self, state: RunState) -> RunState:
        """Return the state with the rollouts under generation, if there are any; all ranks call it."""
        return state

    def save_extra(self, folder: Path) -> None:
        """Write other files of a checkpoint into its staged folder."""
        self.create_model_card(stage=folder, folder=folder)

    def record_callbacks(self) -> None:
        """Store the states of callbacks in the trainer's state, as transformers does."""
        for callback in (*self.callback_handler.callbacks, self.control):
            if not isinstance(callback, ExportableState):
                continue
            name, stored = type(callback).__name__, self.state.stateful_callbacks
            if isinstance(stored.get(name), list):
                stored[name].append(callback.state())
            else:
                stored[name] = callback.state()

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the model, or the adapter alone, with tokenizer and config for `from_pretrained`, slice by slice."""
        self._export(Path(output_dir or self.args.output_dir))
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def save_merged_model(self, output_dir: str) -> None:
        """Write the full model with its adapter merged in, slice by slice: no merged model is ever in memory."""
        self._export(Path(output_dir), merged=True)

    def _export(self, folder: Path, *, merged: bool = False) -> None:
        ranks, tracker = self.run.strategy.ranks, self.run.tracker
        staging = stage_files(folder, ranks.processes)
        with detect_failures(ranks, lambda: tracker.current_phase), tracker.phase(Phase.SAVE), staging as stage:
            export_model(self, stage, merged=merged)
            self.create_model_card(stage=stage, folder=folder)

    def _prepare_for_training(self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: str | None) -> Any:
        """Load sharded states, on any number of ranks, and clear the output folder for the run.

        The folder is cleared when all ranks have loaded: a resume that fails leaves it as it was.
        """
        ranks, resumed = self.run.strategy.ranks, self.resumed
        sharded = resume_from_checkpoint is None or has_shards(Path(resume_from_checkpoint))
        with self.run.strategy.preparing(self.model):
            states = None if sharded else resume_from_checkpoint
            prepared = super()._prepare_for_training(max_steps, train_dataloader, states)
        if sharded:
            self.run.strategy.place_optimizer(self.model, self.optimizer, self.run.storage)
        if sharded and resume_from_checkpoint is not None:
            warned = warn_of_overridden_arguments(self, resume_from_checkpoint, self.resumes_strictly)
            with ranks.propagate_errors(), warned:
                self.load_states(Path(resume_from_checkpoint))
        step = None if resumed is None else resumed.policy_version
        if step is not None and step >= max_steps:
            raise FinishedRunError
        ranks.call_on_first(lambda: self._begin_files(step))
        apply_recorded_sizes(self, is_new=step is None and not num_restarts())
        return prepared

    def _begin_files(self, step: int | None) -> None:
        clear_output_dir(Path(self.args.output_dir), self.run.journal, step)
        self.run.journal.write_run(step or 0, describe_start(self))

    def restore_finished(self) -> TrainOutput:
        """Restore the run's last state, or its best weights if it loads them; say that no step is left."""
        assert self.resumed is not None
        restore_rng_state(self.resumed.random)
        self.resumed, self.was_finished = None, True
        if self.args.load_best_model_at_end and self.state.best_model_checkpoint is not None:
            self._load_best_model()
        step = self.state.global_step
        logger.warning("The run in %s is finished: it has all of its %d steps.", self.args.output_dir, step)
        return TrainOutput(step, 0.0, {"epoch": self.state.epoch or 0.0})

    def load_states(self, checkpoint: Path) -> None:
        with explain_load_errors(os.fspath(checkpoint), "states", "model, optim and trained parameters"):
            load_training(self, checkpoint)

    def _load_best_model(self) -> None:
        """Load the best checkpoint; warn, and keep the last weights, if its folder was removed."""
        best = Path(self.state.best_model_checkpoint)
        if self.run.strategy.ranks.call_on_first(best.is_dir):
            self.load_best(best)
            return
        logger.warning("load_best_model_at_end: the best checkpoint, %s, was removed; the last weights stay.", best)
        self.state.best_model_checkpoint = None  # otherwise transformers would look for it again

    def load_best(self, best: Path) -> None:
        if has_shards(best):
            self.load_states(best)
            return
        with explain_load_errors(os.fspath(best), "weights", "model"):
            if self.run.converts_weights:
                self._issue_warnings_after_load(load_converted(self.model, best))
            else:
                super()._load_best_model()
        clear_low_bits(self.optimizer)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        if self.run.loads_only_shards:  # `_prepare_for_training` loads them
            return
        explained = explain_load_errors(resume_from_checkpoint, "weights", "model")
        with self.run.strategy.ranks.propagate_errors(), explained:
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        check_loaded_names(self.model, load_result)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        self.run.strategy.place_optimizer(self.model, self.optimizer, self.run.storage)
        explained = explain_load_errors(checkpoint, "optimizer states", "optim, optim_args and trained parameters")
        warned = warn_of_overridden_arguments(self, checkpoint, self.resumes_strictly)
        loading = loading_states(self.optimizer)
        with self.run.strategy.ranks.propagate_errors(), explained, warned, loading:
            super()._load_optimizer_and_scheduler(checkpoint)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        self.write_checkpoint(trial, self.run_state())

    def write_checkpoint(self, trial: Any, state: RunState) -> None:
        with self.run.strategy.ranks.propagate_errors():
            self._check_weights()
        state = self.with_in_flight(state)
        with self.run.tracker.phase(Phase.SAVE):
            self.run.journal.sync()
            save_checkpoint(self, trial, state)

    def _check_weights(self) -> None:
        require_finite_weights(self.model, self.run.strategy, self.state.global_step, Path(self.args.output_dir))

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        with only_policy_adapters(self.model):
            super()._save(output_dir, state_dict)

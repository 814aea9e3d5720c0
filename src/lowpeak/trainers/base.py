"""The seam to transformers' Trainer: one mapping per optimizer step, run whole in `training_step`.

What is overridden, and why, stands in docs/architecture.md. Subclasses say what a step is (`next_step`) and what of
their own a checkpoint must hold (`run_state`, `take_run_state`).
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import Trainer

from lowpeak.checkpoint import (
    RunState,
    check_identity,
    load_run_state,
    only_run,
    restore_random,
    staged_files,
    verify_manifest,
)
from lowpeak.errors import DataError, EngineError
from lowpeak.memory import Phase
from lowpeak.parallel import has_shards, trained
from lowpeak.records import Metric, merge_metrics
from lowpeak.setup import check_name, clear_folder, require_same_arguments, require_same_data, take_up
from lowpeak.trainers.model_card import ModelCardMixin
from lowpeak.training import (
    STOPS,
    WISHES,
    Readout,
    Run,
    Sizes,
    Spent,
    StepWork,
    agree_on,
    check_groups,
    check_kind,
    export_model,
    finite_or_raise,
    finite_weights_or_raise,
    fitting,
    load_training,
    phase_metrics,
    policys_adapter_alone,
    read_metrics,
    read_spent,
    run_step,
    save_checkpoint,
    saved_where_it_waits,
    telling_of_held,
)
from lowpeak.watchdog import watched

logger = logging.getLogger(__name__)


class StepTrainer(ModelCardMixin, Trainer):
    """transformers' Trainer whose step is a list of micro-batches under weights of the whole step's counts."""

    run: Run
    control: Any
    step_began_with: RunState | None = None  # while the work of a step is made

    def num_steps_per_epoch(self) -> int | None:
        """Optimizer steps in which each row of the data is used once; None where the data has no length."""
        raise AssertionError("a trainer says how long an epoch is")

    def next_step(self) -> StepWork:
        raise AssertionError("a trainer says what a step is")

    def run_state(self) -> RunState:
        """What of the run a checkpoint must hold besides weights, optimizer and schedule."""
        raise AssertionError("a trainer says what its state is")

    def take_run_state(self, state: RunState, checkpoint: Path) -> None:
        """Go on from what `run_state` gave when `checkpoint` was written."""
        raise AssertionError("a trainer takes its state back")

    def use_sizes(self, sizes: Sizes) -> None:
        """Run every pass within these sizes."""
        self.run.sizes = sizes
        self.run.core = replace(self.run.core, chunk_size=sizes.logprob_chunk_size)

    def identity(self) -> dict[str, Any]:
        """What must be the same for a resumed run to be the same run, as JSON."""
        return {"algorithm": self.run.algorithm.name}

    def save_more(self, folder: Path) -> None:
        """Write what else a checkpoint needs into its (staged) folder."""

    def evaluate_one(self, data: Any, prefix: str) -> dict[str, float]:
        """The metrics of one data set, their names under `prefix`."""
        raise AssertionError("a trainer says how it evaluates")

    # the loop

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """Train, or go on from a checkpoint (True: the last whole one of output_dir); first Ctrl-C saves and stops."""
        output_dir, ranks = Path(self.args.output_dir), self.run.strategy.ranks
        # Signals are given back last: a SIGTERM must not end rank 0 before `watched` has said which rank died.
        with ExitStack() as signals, ExitStack() as stack:
            stack.enter_context(watched(ranks, lambda: self.run.tracker.where))
            require_same_arguments(self.args, ranks)
            require_same_data({"train_dataset": self.train_dataset, "eval_dataset": self.eval_dataset}, ranks)
            ranks.first(lambda: stack.enter_context(only_run(output_dir)))
            checkpoint = self._start(output_dir, resume_from_checkpoint)
            signals.enter_context(self.run.interrupts.watched())
            try:
                with saved_where_it_waits(self, output_dir):
                    result = super().train(None if checkpoint is None else os.fspath(checkpoint), *args, **kwargs)
                    self._agree_to_stop(0.0)
            except EngineError:
                self._check_weights()  # broken weights are why an engine fails: say so, and where good ones are
                raise
        self.run.interrupts.raise_if_stopped(output_dir, self.state.global_step)
        return result

    def _start(self, output_dir: Path, resume_from_checkpoint: str | bool | None) -> Path | None:
        """Forget what a run that was cut off left in this process; take up the checkpoint, and return it, if any."""
        self.run.noted, self.run.metrics, self.run.readout = {}, {}, None
        self.run.tracker.take()
        ranks = self.run.strategy.ranks
        ranks.first(self.run.journal.check)
        checkpoint = ranks.first(lambda: take_up(output_dir, resume_from_checkpoint))
        self.run.resumed = None
        if checkpoint is not None:
            verify_manifest(checkpoint, ranks.processes)
            with ranks.together():
                self.run.resumed = load_run_state(checkpoint, self.args.process_index)
                check_name(checkpoint, output_dir, self.run.resumed.policy_version)
                check_kind(checkpoint, self.run.strategy)
                check_identity(self.run.resumed.identity, self.identity(), checkpoint, self.run.resumed.in_rollout)
                self.take_run_state(self.run.resumed, checkpoint)
        return checkpoint

    def get_train_dataloader(self) -> DataLoader:
        """A stand-in that counts steps: prompts are drawn by the cursor. Its own generator keeps torch's untouched."""
        steps = self.num_steps_per_epoch() or self.args.max_steps
        counter: Any = range(max(1, steps))
        return DataLoader(counter, batch_size=1, generator=torch.Generator())

    def get_batch_samples(self, epoch_iterator: Iterator, num_batches: int, device: torch.device) -> tuple[list, None]:
        """One mapping with the whole step's micro-batches; on resume, the random states come back here first."""
        if next(epoch_iterator, None) is None:
            return [], None
        if self.run.resumed is not None:
            restore_random(self.run.resumed.random)
            self.run.resumed = None
        if self.state.global_step >= self.state.max_steps:  # the base would take one more step of a finished run
            self.control.should_training_stop = True
            return [], None
        start = time.perf_counter()
        self.step_began_with = self.run_state()
        work = self.next_step()
        self.step_began_with = None
        return [{"step": work, "start": start}], None

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Nothing: `get_batch_samples` has restored them, before the rollout that draws from them."""

    def training_step(self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None) -> Tensor:
        model.train()
        if callable(getattr(self.optimizer, "train", None)):
            self.optimizer.train()
        work: StepWork = inputs["step"]
        with self.run.tracker.phase(Phase.TRAIN):
            loss, metrics = run_step(
                model, work.micro_batches, self.run.algorithm, self.run.core, self.run.strategy, self.coefficients()
            )
        useful = Metric(float(work.num_useful), float(work.num_computed))
        self.run.readout = Readout(loss, {**metrics, "useful_tokens/train": useful})
        self.run.step_seconds, self.run.num_new = time.perf_counter() - inputs["start"], work.num_new
        return loss * self.run.strategy.ranks.world_size

    def coefficients(self) -> dict[str, float]:
        done = self.state
        return self.run.algorithm.coefficients(self.run.algorithm_state, done.global_step, done.epoch or 0.0)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        """The gradient norm; and the step's one read of the device: a NaN stops here, before the optimizer."""
        own = self.run.strategy.own_grad_norm()
        grad_norm = super()._get_grad_norm(model, grad_norm=grad_norm) if own is None else own
        if hasattr(grad_norm, "full_tensor"):  # FSDP2's is a part of it on each rank
            grad_norm = grad_norm.full_tensor()
        assert self.run.readout is not None
        strategy, step = self.run.strategy, self.state.global_step + 1
        numbers = read_metrics(self.run.readout, grad_norm, strategy.ranks)
        finite_or_raise(numbers, self.model, strategy, step, Path(self.args.output_dir))
        self.run.readout = numbers
        return numbers.grad_norm if own is not None else grad_norm

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        """6 operations per parameter and token (Kaplan et al. 2020)."""
        return 6 * inputs["step"].num_useful * self.run.num_parameters

    def _track_num_input_tokens(self, inputs: dict[str, Any]) -> None:
        self.state.num_input_tokens_seen += inputs["step"].num_new

    # what a step leaves behind

    def finish_step(self) -> dict[str, float]:
        """Station 13: fold the step's metrics into those to be logged, and write its record into the journal; they are returned."""
        numbers = self.run.readout
        assert numbers is not None
        self.run.readout = None
        noted, self.run.noted = self.run.noted, {}
        spent = self._agree_to_stop(self.run.step_seconds)
        metrics = merge_metrics(merge_metrics(noted, numbers.metrics), phase_metrics(spent.uses))
        metrics["step_time"] = Metric(spent.seconds)
        metrics["tokens_per_second"] = Metric(float(self.run.num_new), spent.seconds)
        metrics["num_tokens"] = Metric(float(self.state.num_input_tokens_seen), 1.0, "max")
        values = {name: metric.value() for name, metric in metrics.items()}
        self.run.algorithm_state = self.run.algorithm.update(self.run.algorithm_state, values)
        row = {"loss": float(numbers.loss), "grad_norm": numbers.grad_norm, **values}
        self.run.journal.write_step(self.state.global_step, {**row, "epoch": self.state.epoch})
        self.run.metrics = merge_metrics(self.run.metrics, metrics)
        return values

    def _agree_to_stop(self, seconds: float) -> Spent:
        """What the step took, over all ranks; and by the same maximum, whether any of them was asked to stop."""
        interrupts = self.run.interrupts
        spent = read_spent(seconds, self.run.tracker.take(), interrupts.stopping, self.run.strategy.ranks)
        if spent.stopping and not interrupts.stopping and not interrupts.agreed:
            logger.warning("Another rank was asked to stop: saving after this step.")
        interrupts.agreed = spent.stopping
        return spent

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        """The base's way, on all ranks where the callbacks of one ask for it."""
        ranks = self.run.strategy.ranks
        agree_on(self.control, WISHES, ranks)
        more = self.control.should_evaluate or self.control.should_save
        super()._maybe_log_save_evaluate(*args, **kwargs)
        if more:  # whose callbacks may ask to stop
            agree_on(self.control, STOPS, ranks)

    def note(self, metrics: Mapping[str, Metric]) -> None:
        self.run.noted = merge_metrics(self.run.noted, metrics)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log; a training log, and a run's last one, have the metrics of all steps since the log before."""
        if "loss" in logs or "train_runtime" in logs:
            metrics, self.run.metrics = self.run.metrics, {}
            values = {name: metric.value() for name, metric in metrics.items()}
            logs = {**logs, **{name: value for name, value in values.items() if math.isfinite(value)}}
        super().log(logs, start_time)

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: Any = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """The metrics of one data set, or of each of several under its name."""
        data = eval_dataset if eval_dataset is not None else self.eval_dataset
        if isinstance(data, dict):
            found: dict[str, float] = {}
            for name, one in data.items():
                found |= self.evaluate(one, ignore_keys, f"{metric_key_prefix}_{name}")
            return found
        if data is None:
            raise DataError("there is nothing to evaluate on: pass eval_dataset to the trainer or to evaluate().")
        metrics = self.evaluate_one(data, metric_key_prefix)
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    # checkpoints

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the model, or an adapter alone, with tokenizer and config as `from_pretrained` reads them, slice by slice."""
        self._export(Path(output_dir or self.args.output_dir))
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def save_merged_model(self, output_dir: str) -> None:
        """Write the whole model with its adapter merged in, slice by slice: no merged model is ever in memory."""
        self._export(Path(output_dir), merged=True)

    def _export(self, folder: Path, *, merged: bool = False) -> None:
        ranks, tracker = self.run.strategy.ranks, self.run.tracker
        staging = staged_files(folder, ranks.processes)
        with watched(ranks, lambda: tracker.where), tracker.phase(Phase.SAVE), staging as stage:
            export_model(self, stage, merged=merged)

    def _prepare_for_training(self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: str | None) -> Any:
        """The base's way; what ranks wrote together is loaded here, by ranks of any number.

        The folder is cleared for the run when all ranks have loaded: a resume that fails leaves it as it was.
        """
        ranks, resumed = self.run.strategy.ranks, self.run.resumed
        if resume_from_checkpoint is None or not has_shards(Path(resume_from_checkpoint)):
            prepared = super()._prepare_for_training(max_steps, train_dataloader, resume_from_checkpoint)
        else:
            prepared = super()._prepare_for_training(max_steps, train_dataloader, None)
            with ranks.together(), telling_of_held(self, resume_from_checkpoint):
                self.take_weights(Path(resume_from_checkpoint))
        step = None if resumed is None else resumed.policy_version
        ranks.first(lambda: clear_folder(Path(self.args.output_dir), self.run.journal, step))
        return prepared

    def take_weights(self, checkpoint: Path) -> None:
        with fitting(os.fspath(checkpoint), "states", "model, optim and trained parameters"):
            load_training(self, checkpoint)

    def _load_best_model(self) -> None:
        """The base's way; a folder that was removed leaves the run with its last weights, which is said."""
        best = Path(self.state.best_model_checkpoint)
        if self.run.strategy.ranks.first(best.is_dir):
            self.take_best(best)
            return
        logger.warning(
            "load_best_model_at_end: the best checkpoint, %s, was removed; the last step's weights stay.", best
        )
        self.state.best_model_checkpoint = None  # the base would look for it again

    def take_best(self, best: Path) -> None:
        if has_shards(best):
            self.take_weights(best)
        else:
            with fitting(os.fspath(best), "weights", "model"):
                super()._load_best_model()

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """The base's way; weights of another shape are told in one sentence. What ranks wrote together is loaded later."""
        if self.run.strategy.cuts_states:
            return
        with self.run.strategy.ranks.together(), fitting(resume_from_checkpoint, "weights", "model"):
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """The base's way; states of another optimizer are told in one sentence."""
        if checkpoint is None:
            return
        fits = fitting(checkpoint, "optimizer states", "optim, optim_args and trained parameters")
        with self.run.strategy.ranks.together(), fits, telling_of_held(self, checkpoint):
            super()._load_optimizer_and_scheduler(checkpoint)
            check_groups(self.optimizer)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        self.save_state(trial, self.run_state())

    def save_state(self, trial: Any, state: RunState) -> None:
        with self.run.strategy.ranks.together():
            self._check_weights()
        with self.run.tracker.phase(Phase.SAVE):
            self.run.journal.sync()
            save_checkpoint(self, trial, state)

    def _check_weights(self) -> None:
        shards = self.run.strategy.shards(self.model)
        weights = {name: shards[name] for name in trained(self.model)}
        step, ranks = self.state.global_step, self.run.strategy.ranks
        finite_weights_or_raise(weights, step, Path(self.args.output_dir), ranks)

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        """The base's way, without adapters that are only the reference, or the critic's."""
        with policys_adapter_alone(self.model):
            super()._save(output_dir, state_dict)

"""The base of all trainers: transformers' Trainer with one mapping per optimizer step, run in `training_step`.

docs/architecture.md lists the overridden methods with the reasons. Subclasses define a step (`next_step`) and what a
checkpoint needs besides the model (`run_state`, `restore_run_state`).
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from accelerate import PartialState
from accelerate.utils import convert_outputs_to_fp32
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lowpeak.algorithms import with_effective_size
from lowpeak.checkpoint import (
    ARGUMENTS,
    RunState,
    capture_rng_state,
    check_run_identity,
    learning_arguments,
    load_run_state,
    lock_run_folder,
    preserve_rng_state,
    restore_rng_state,
)
from lowpeak.data import num_rows
from lowpeak.errors import DataError, EngineError, MemoryExhaustedError, StoppedError
from lowpeak.memory import Phase
from lowpeak.parallel import check_is_sharded, clip_grad_norm, override_forward, remove_sums
from lowpeak.records import Metric, merge_metrics
from lowpeak.setup import (
    check_best_metric,
    check_checkpoint_name,
    choose_undamaged,
    find_resume_checkpoints,
    require_same_arguments,
    require_same_data,
)
from lowpeak.trainers.attributes import TrainerAttributes
from lowpeak.trainers.checkpointing import CheckpointingTrainer, FinishedRunError
from lowpeak.trainers.overrides import check_overrides
from lowpeak.training import (
    CONTROL_FLAGS,
    STOP_FLAGS,
    GuardedPasses,
    Run,
    StepBatches,
    StepCallback,
    StepMetrics,
    StepScratch,
    StepUsage,
    agree_on_flags,
    attempts,
    check_training_state,
    explain_out_of_memory,
    gather_metrics,
    gather_usage,
    require_finite_step,
    run_step,
    run_teacher,
    shorten_console,
    usage_metrics,
)
from lowpeak.watchdog import detect_failures

logger = logging.getLogger(__name__)


class StepTrainer(TrainerAttributes, CheckpointingTrainer):
    """transformers' Trainer whose step is a list of micro-batches, weighted by the counts of the whole step.

    scratch             numbers of the step under way
    algorithm_state     the algorithm's numbers that change during the run, such as an adaptive KL coefficient
    unlogged_metrics    metrics of the steps since the last log
    rows_per_step       rows (completions, if the trainer generates them) of an optimizer step, over all ranks
    """

    control: Any
    model_wrapped: Any
    scratch: StepScratch
    algorithm_state: Mapping[str, float]
    unlogged_metrics: Mapping[str, Metric]
    rows_per_step: int

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        check_overrides(cls)

    def num_steps_per_epoch(self) -> int | None:
        """Return the optimizer steps that use each row of the data once; None for data without a length."""
        raise AssertionError("a trainer defines an epoch")

    def next_step(self) -> StepBatches:
        raise AssertionError("a trainer defines a step")

    def restore_run_state(self, state: RunState, checkpoint: Path) -> None:
        """Continue from the `run_state` of `checkpoint`."""
        raise AssertionError("a trainer restores its state")

    def identity(self) -> dict[str, Any]:
        """Return, as JSON, the values that must not change when a run is resumed."""
        storage, model = self.parts.settings.model.storage_name, self.model.config._name_or_path
        arguments = learning_arguments(self.acting_args, storage, model)
        return {"algorithm": self.run.algorithm.name, "rows of a step": self.rows_per_step, ARGUMENTS: arguments}

    def evaluate_one(self, data: Any, prefix: str) -> dict[str, float]:
        """Return the metrics of one dataset, their names under `prefix`."""
        raise AssertionError("a trainer defines an evaluation")

    def start_run(self, run: Run) -> None:
        """Keep the parts of the run, with the state that it starts with."""
        self.run, self.scratch = run, StepScratch()
        self.algorithm_state, self.unlogged_metrics = dict(run.algorithm.state), {}
        self.model.add_model_tags(["lowpeak", run.algorithm.name])
        shorten_console(self.callback_handler.callbacks, self.parts.settings.log_all)
        self.add_callback(StepCallback(lambda: self.run, self.finish_step))

    def create_accelerator_and_postprocess(self) -> None:
        """Create the accelerator and set its device's index, which accelerate omits in a single process."""
        super().create_accelerator_and_postprocess()
        # accelerate copies the second state from the first whenever it makes one.
        for state in (PartialState(), self.accelerator.state):
            state.device = self.args.device

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """Train, or resume from a checkpoint; Ctrl-C saves and stops.

        None means the config's argument, False a new run. A finished run loads its weights and changes no file.
        """
        output_dir, ranks = Path(self.args.output_dir), self.run.strategy.ranks
        # Signal handlers are restored last: a SIGTERM must not end rank 0 before `detect_failures` has reported which rank died.
        with ExitStack() as signals, ExitStack() as stack:
            stack.enter_context(detect_failures(ranks, lambda: self.run.tracker.current_phase))
            stack.callback(setattr, self, "is_in_train", False)  # transformers leaves it True if training fails
            stack.callback(lambda: remove_sums(self.model.parameters()))  # a user's model has no hooks after an error
            with ranks.propagate_errors():
                self.take_changed_arguments()
            require_same_arguments(self.args, ranks)
            require_same_data({"train_dataset": self.train_dataset, "eval_dataset": self.eval_dataset}, ranks)
            ranks.call_on_first(lambda: stack.enter_context(lock_run_folder(output_dir)))
            checkpoint = self._start(output_dir, resume_from_checkpoint)
            if self.is_deepspeed_enabled and self.model_wrapped is not self.model:
                # transformers destroys the engine of an earlier run, and would go on with it.
                self.model_wrapped, self.optimizer = self.model, cast(Any, None)
            signals.enter_context(self.run.interrupts.watched())
            try:
                with self._save_when_run_fails(output_dir):
                    result = super().train(None if checkpoint is None else os.fspath(checkpoint), *args, **kwargs)
                    self._agree_to_stop(0.0)
            except FinishedRunError:
                result = self.restore_finished()
            except EngineError:
                self._check_weights()  # an engine can fail because of NaN weights: then report those, with the last good ones
                raise
        self.run.interrupts.raise_if_stopped(output_dir, self.state.global_step)
        if not self.was_finished:
            ranks.call_on_first(self.create_model_card)
        return result

    def _start(self, output_dir: Path, resume_from_checkpoint: str | bool | None) -> Path | None:
        """Clear the state that an aborted run left in this process; restore the checkpoint, and return it, if any."""
        self.scratch, self.unlogged_metrics = StepScratch(), {}
        self.run.tracker.pop_uses()
        ranks = self.run.strategy.ranks
        ranks.call_on_first(self.run.journal.begin_run)
        found = ranks.call_on_first(lambda: find_resume_checkpoints(self.args, resume_from_checkpoint))
        self.resumed, self.was_finished, (self.resumes_strictly, checkpoints) = None, False, found
        checkpoint = choose_undamaged(checkpoints, ranks.processes)
        if checkpoint is not None:
            with ranks.propagate_errors():
                self.resumed = load_run_state(checkpoint, self.args.process_index)
                check_checkpoint_name(checkpoint, output_dir, self.resumed.policy_version)
                check_training_state(checkpoint, self.run)
                check_run_identity(self.resumed, self.run_state(), checkpoint, strict=self.resumes_strictly)
                self.restore_run_state(self.resumed, checkpoint)
        if self.resumes_strictly:
            logger.info("resume_from_checkpoint='auto': %s.", checkpoint or "no checkpoint, a new run")
        return checkpoint

    @contextmanager
    def _save_when_run_fails(self, output_dir: Path) -> Iterator[None]:
        """Save if the smallest sizes ran out of memory, or a rank that waits for an engine must stop.

        The saved state is that before the step under way. Prompts of a rollout that is not complete are drawn again on resume.
        """
        self.scratch.start_state = None
        try:
            yield
        except MemoryExhaustedError as error:
            if error.is_resumable:
                is_training = bool(self.scratch.random)
                state = self.state_before_step() if is_training else self.scratch.start_state or self.run_state()
                self.write_checkpoint(None, replace(state, resolved=self.run.sizes.as_dict()))
                self.callback_handler.on_save(self.args, self.state, self.control)
            raise
        except (EngineError, StoppedError) as error:
            if not self.run.strategy.ranks.max([float(isinstance(error, StoppedError))])[0]:
                raise
            self._stop_in_step(output_dir)
        except (MemoryError, RuntimeError):
            if self.run.tracker.current_phase == f"phase {Phase.OPTIMIZER}":  # transformers makes the step
                with explain_out_of_memory(Phase.OPTIMIZER, self):
                    raise
            raise

    def _stop_in_step(self, output_dir: Path) -> None:
        """Save the state before the present step, unless it is saved; end the run as after a request to stop."""
        step = self.state.global_step
        self.run.interrupts.agreed = True
        if step and not self.run.strategy.ranks.call_on_first(lambda: (output_dir / f"checkpoint-{step}").is_dir()):
            self.write_checkpoint(None, self.scratch.start_state or self.run_state())
            self.callback_handler.on_save(self.args, self.state, self.control)
        self.callback_handler.on_train_end(self.args, self.state, self.control)
        self.run.interrupts.raise_if_stopped(output_dir, step)

    def get_train_dataloader(self) -> DataLoader[int]:
        """Return a stand-in that counts steps: the cursor draws the data."""
        counter: Any = range(max(1, self.num_steps_per_epoch() or self.args.max_steps))
        # A separate generator leaves torch's random state untouched.
        return DataLoader(counter, batch_size=1, generator=torch.Generator())

    def num_examples(self, dataloader: DataLoader[Any]) -> int:
        """Return the rows of the data that the dataloader stands for; of a stream, all rows of the run."""
        if not isinstance(dataloader.dataset, range):
            return int(super().num_examples(dataloader))
        return num_rows(self.train_dataset) or len(dataloader) * self.rows_per_step

    def set_initial_training_values(self, args: Any, dataloader: DataLoader[Any]) -> tuple[Any, ...]:
        """Return transformers' numbers of a run, with the rows of its steps as samples."""
        *counts, _, _, steps_in_epoch, max_steps = super().set_initial_training_values(args, dataloader)
        return (*counts, max_steps * self.rows_per_step, self.rows_per_step, steps_in_epoch, max_steps)

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], None]:
        """Return one mapping with the whole step's micro-batches."""
        if next(epoch_iterator, None) is None:
            return [], None
        if self.resumed is not None:
            restore_rng_state(self.resumed.random)
            self.resumed = None
        start = time.perf_counter()
        self.scratch = StepScratch(start_state=self.run_state())
        return [{"step": self.next_step(), "start": start}], None

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Do nothing: `get_batch_samples` restores random states, before the rollout that draws from them."""

    def training_step(self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None) -> Tensor:
        model.train()
        if callable(getattr(self.optimizer, "train", None)):
            self.optimizer.train()
        step, coefficients = inputs["step"], self.coefficients()
        self.scratch.random = capture_rng_state()
        for attempt in attempts(self, Phase.TRAIN):
            if attempt.is_retry:
                step = self.repack_step(step)
                restore_rng_state(self.scratch.random)
                model.train()
            with attempt:
                guard = attempt.guard(self.run.algorithm.unit)
                loss, metrics = self._run_passes(model, step, coefficients, guard)  # stage 11
        metrics["useful_tokens/train"] = Metric(float(step.num_useful), float(step.num_computed))
        self.scratch.measured = StepMetrics(loss, metrics, self._get_learning_rate(), tokens=step.observer.values)
        self.scratch.seconds, self.scratch.num_new = time.perf_counter() - inputs["start"], step.num_new
        return loss * self.run.strategy.ranks.world_size

    def _run_passes(
        self, model: nn.Module, step: StepBatches, coefficients: Mapping[str, float], guard: GuardedPasses
    ) -> tuple[Tensor, dict[str, Metric]]:
        run, batches = self.run, step.micro_batches
        algorithm = step.observer.attach(run.algorithm)
        teacher = run_teacher(self, batches, guard, step.records)
        with run.tracker.phase(Phase.TRAIN):
            found = run_step(
                model, batches, algorithm, run.logprob_settings, run.strategy, coefficients, guard, teacher
            )
            del teacher  # its head and states, before the update
            return found

    def state_before_step(self) -> RunState:
        """Return the state with which a resumed run takes the step under way again."""
        assert self.scratch.start_state is not None
        return self.scratch.start_state

    def repack_step(self, step: StepBatches) -> StepBatches:
        """Return the same step in micro-batches of the run's present sizes."""
        return StepBatches.pack(self.run, step.records, step.indices, step.num_new, step.observed)

    def coefficients(self) -> dict[str, float]:
        """Return the algorithm's scheduled and adaptive coefficients at this point of the run."""
        return self.run.algorithm.coefficients(self.algorithm_state, self.state.global_step, self.state.epoch or 0.0)

    def _clip_grad_norm(self, model: nn.Module) -> Any:
        if self.run.storage is None:
            return super()._clip_grad_norm(model)
        return clip_grad_norm(model.parameters(), self.args.max_grad_norm or math.inf, self.args.device)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        """Return the gradient norm, after the step's only read of the device; raise NonFiniteError for a NaN."""
        strategy, step = self.run.strategy, self.state.global_step + 1
        engine_norm = strategy.deepspeed_grad_norm()
        if grad_norm is None and self.run.storage is not None:  # max_grad_norm=0: not clipped
            grad_norm = self._clip_grad_norm(model)
        grad_norm = super()._get_grad_norm(model, grad_norm=grad_norm) if engine_norm is None else engine_norm
        assert self.scratch.measured is not None
        self.scratch.measured = gather_metrics(self.scratch.measured, grad_norm, strategy.ranks)
        require_finite_step(self.scratch.measured, self.model, strategy, step, Path(self.args.output_dir))
        return self.scratch.measured.grad_norm

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        """Return 6 operations per parameter and token (Kaplan et al. 2020)."""
        return 6 * inputs["step"].num_useful * self.run.num_parameters

    def _track_num_input_tokens(self, inputs: dict[str, Any]) -> None:
        self.state.num_input_tokens_seen += inputs["step"].num_new

    def finish_step(self) -> dict[str, float]:
        """Stage 13: write the step's metrics into the journal, keep them for the next log, and return them."""
        scratch, self.scratch = self.scratch, StepScratch()
        measured = scratch.measured
        assert measured is not None
        used = usage_metrics(self._agree_to_stop(scratch.seconds), scratch.num_new)
        metrics = with_effective_size(merge_metrics(merge_metrics(scratch.metrics, measured.metrics), used))
        metrics["num_tokens"] = Metric(float(self.state.num_input_tokens_seen), 1.0, "max")
        values = {name: metric.value() for name, metric in metrics.items()}
        self.algorithm_state = self.run.algorithm.next_state(self.algorithm_state, values)
        row = {**measured.numbers(), **values, **self.run.memory_row(values), "epoch": self.state.epoch}
        self.run.journal.write_step(self.state.global_step, row)
        self.unlogged_metrics = merge_metrics(self.unlogged_metrics, metrics)
        return values

    def _agree_to_stop(self, seconds: float) -> StepUsage:
        """Return the step's usage over all ranks; the same collective tells every rank if any was asked to stop."""
        interrupts = self.run.interrupts
        usage = gather_usage(seconds, self.run.tracker.pop_uses(), interrupts.stopping, self.run.strategy.ranks)
        if usage.stopping and not interrupts.stopping and not interrupts.agreed:
            logger.warning("Another rank was asked to stop: saving after this step.")
        interrupts.agreed = usage.stopping
        return usage

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        """Log, save and evaluate on all ranks if the callbacks of one request it."""
        ranks = self.run.strategy.ranks
        agree_on_flags(self.control, CONTROL_FLAGS, ranks)
        calls_back = self.control.should_evaluate or self.control.should_save
        super()._maybe_log_save_evaluate(*args, **kwargs)
        if calls_back:  # callbacks of a save or an evaluation may request a stop
            agree_on_flags(self.control, STOP_FLAGS, ranks)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log; logs of training, and the last one of a run, contain the metrics of all steps since the previous log."""
        if "loss" in logs or "train_runtime" in logs:
            logs["epoch"] = self.state.epoch  # train() returns this mapping
            metrics, self.unlogged_metrics = self.unlogged_metrics, {}
            logs = {**logs, **{name: x for name, metric in metrics.items() if math.isfinite(x := metric.value())}}
        super().log(logs, start_time)

    @contextmanager
    def evaluation_context(self) -> Iterator[None]:
        """Keep the random state, and watch the other ranks; before `train()` the model computes in its precision, too."""
        strategy, tracker = self.run.strategy, self.run.tracker
        check_is_sharded(strategy, self.model_wrapped)
        with ExitStack() as stack, detect_failures(strategy.ranks, lambda: tracker.current_phase), preserve_rng_state():
            with strategy.ranks.propagate_errors():
                if not self.is_in_train:
                    self.take_changed_arguments()
            if not self.accelerator._models:  # accelerate does the same when train() prepares the model
                in_precision = convert_outputs_to_fp32(self.accelerator.autocast()(self.model.forward))
                override_forward(stack, self.model, in_precision)
            yield

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: Any = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Return the metrics of one dataset, or of each of several under its name."""
        data = eval_dataset if eval_dataset is not None else self.eval_dataset
        if isinstance(data, dict):
            each = [self.evaluate(one, ignore_keys, f"{metric_key_prefix}_{name}") for name, one in data.items()]
            metrics = {name: value for measured in each for name, value in measured.items()}
        elif data is None:
            raise DataError("there is nothing to evaluate on: pass eval_dataset to the trainer or to evaluate().")
        else:
            metrics = self.evaluate_one(data, metric_key_prefix)
            self.log(metrics)
            self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        check_best_metric(self, metric_key_prefix, metrics)
        return metrics

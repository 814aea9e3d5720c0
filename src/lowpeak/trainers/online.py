"""The base of online trainers: rollouts and the steps they serve, for any algorithm."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from torch import nn
from transformers import AutoModelForCausalLM
from transformers.trainer_utils import PredictionOutput

from lowpeak.algorithms import Algorithm
from lowpeak.arguments import OnlineSettings, Sampling, require
from lowpeak.checkpoint import RunState, SavedRollout, capture_rng_state, check_none_in_flight
from lowpeak.data import environment_datasets, read_eval_prompts
from lowpeak.errors import ArgumentError, CheckpointError, RewardError
from lowpeak.plan import start_plan
from lowpeak.ranks import Ranks
from lowpeak.records import Record
from lowpeak.rewards import as_list
from lowpeak.setup import (
    OnlineInputs,
    check_adapter,
    check_data,
    check_online_row,
    check_optimizer,
    connect_online,
    describe_run,
    prepare_online,
    silence_nonzero_ranks,
)
from lowpeak.trainers.configs import OnlineConfig
from lowpeak.trainers.constructor import (
    base_arguments,
    check_kinds,
    check_optimized,
    make_arguments,
    reject_unsupported,
    reject_virtual_tokens,
)
from lowpeak.trainers.reference import ReferenceTrainer
from lowpeak.training import (
    Evaluation,
    Rollout,
    StepBatches,
    choose_evenly,
    evaluate_prompts,
    print_completions,
    records_of_step,
    run_with_sizes,
    score_rollout,
    staleness_metrics,
    start_pipeline,
    token_rows,
    track_completions,
    trained_records,
    warn_of_small_size,
)

logger = logging.getLogger(__name__)


class OnlineTrainer(ReferenceTrainer):
    """Trains a language model on its own completions, with TRL's constructor.

    model                   name, path or instance of a causal language model (or peft model)
    reward_funcs            a function, a reward model, or a list of these
    quantization_config     as in `model_init_kwargs`, for a model that is given by name or path
    tools                   functions that the policy calls by their schemas, from annotations and docstrings
    rollout_func            `rollout_func(prompts, trainer) -> dict` returns the completions
    environment_factory     a function that makes an environment, or a mapping of these by the column `environment`
    ref_model               name, path or instance of the reference (None: the untrained model, or the one without its adapter)
    unsupported             other arguments of TRL's trainers: each raises ArgumentError with a remedy
    """

    config_class: ClassVar[type[OnlineConfig]]
    has_warned_of_size: bool = False  # of a small effective sample size
    last_table_span: int | None = None  # number of the last span of log_completions_steps with a table

    rollout_func_sampling: Sampling | None = None  # of the call, while a rollout_func runs

    @staticmethod
    def make_algorithm(args: Any, settings: OnlineSettings) -> Algorithm:
        raise ArgumentError("The trainer has no algorithm: define make_algorithm(args, settings) in its class.")

    def attach_extra_modules(self, policy: nn.Module, origin: Any, args: Any) -> None:
        """Add other trained modules, such as PPO's critic, to a policy that was loaded from `origin`."""

    def __init__(
        self,
        model: Any,
        reward_funcs: Any = None,
        args: Any = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        reward_processing_classes: Any = None,
        callbacks: list[Any] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        quantization_config: Any = None,
        peft_config: Any = None,
        tools: Any = None,
        rollout_func: Callable[..., Mapping[str, Any]] | None = None,
        environment_factory: Any = None,
        ref_model: Any = None,
        **unsupported: Any,
    ) -> None:
        reject_unsupported(self, unsupported)
        check_kinds(reward_processing_classes=reward_processing_classes, rollout_func=rollout_func, ref_model=ref_model)
        check_kinds(callbacks=callbacks, optimizers=optimizers)
        self.note_reference(ref_model)
        has_tools = bool(tools) or environment_factory is not None
        require(not (rollout_func and has_tools), "rollout_func generates: remove it, tools and environment_factory.")
        reject_virtual_tokens(model, peft_config)
        passed, args = args, make_arguments(self.config_class, args, model, quantization_config)
        silence_nonzero_ranks(args)
        with Ranks(args.device).propagate_errors():
            train_dataset, eval_dataset = environment_datasets(train_dataset, eval_dataset, environment_factory)
            check_row = partial(check_online_row, reward_funcs, rollout_func, has_tools)
            check_data(train_dataset, eval_dataset, args, "a 'prompt' column", check_row)
            check_optimizer(args, optimizers)
            check_adapter(peft_config, model, AutoModelForCausalLM, args)
            models = model, reward_funcs, processing_class, reward_processing_classes, peft_config, ref_model
            inputs = OnlineInputs(*models, as_list(tools), environment_factory, has_tools or rollout_func is not None)
            parts = prepare_online(inputs, args, self.make_algorithm, self.attach_extra_modules)
            if parts.toolset is not None:
                parts.toolset.check_rows(train_dataset, eval_dataset)
        check_optimized(optimizers[0], parts.policy)
        super().__init__(
            model=parts.policy,
            args=base_arguments(parts.args, parts.policy),
            data_collator=list,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=parts.tokenizer,
            callbacks=callbacks,
            optimizers=optimizers,
        )
        self.watch_arguments(passed, parts)
        self.parts = parts
        run, collectors = connect_online(self, parts, rollout_func, start_plan)
        self.collector, self.pipeline = collectors[0], start_pipeline(collectors)
        self.rows_per_step = self.collector.settings.rollout.rows_per_step
        self.keep_rewards(self.collector.panel, run.reference, rollout_func)
        self.rollout: Rollout | None = None
        self.steps_used = 0
        self.observed: tuple[int, ...] = ()  # records of the step under way whose token values go into the journal
        self.start_run(run)

    @property
    def num_generations(self) -> int:
        """Completions per prompt of a rollout; inside a `rollout_func`, those that it must return."""
        return (self.rollout_func_sampling or self.parts.settings.sampling).num_generations

    @property
    def num_generations_eval(self) -> int:
        """Completions per prompt of an evaluation; inside its `rollout_func`, those that it must return."""
        evaluates = self.rollout_func_sampling is not None and not self.model.training
        return self.num_generations if evaluates else self.parts.settings.evaluation.num_generations

    # a run

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train as the base class does, then close the engine and environments; a later use opens them again."""
        require(
            self.parts.settings.evaluation.samples,
            "do_sample=False in generation_kwargs: equal completions teach nothing; remove it, or call evaluate().",
        )
        self.steps_used = self.collector.settings.rollout.num_steps  # an earlier run's rollout is not gone on with
        try:
            return super().train(*args, **kwargs)
        except RewardError as error:
            raise error.with_traceback(None) from error.__cause__  # lowpeak's frames would hide the reward's
        finally:
            if self.pipeline is not None:
                self.pipeline.close()
            self.collector.engine.close()
            self.parts.close_environments()

    # a step

    def num_steps_per_epoch(self) -> int | None:
        prompts, rollout = self.collector.cursor.rows_per_epoch, self.collector.settings.rollout
        if prompts is None:
            return None
        return max(1, prompts // rollout.num_prompts) * rollout.num_steps

    def next_step(self) -> StepBatches:
        """Stages 1 to 10: collect a new rollout if the last one has served its steps; return the micro-batches."""
        settings = self.collector.settings.rollout
        if self.rollout is None or self.steps_used >= settings.num_steps:
            self._collect_rollout()  # stages 1 to 9
        rollout, step, run = self._rollout(), self.steps_used, self.run  # collecting may have replaced the run
        self.steps_used += 1
        indices = records_of_step(rollout, settings, self.acting_args.seed, step, run.algorithm.unit)
        self.observed, num_new = (self._choose_observed(rollout, indices), rollout.num_tokens) if step == 0 else ((), 0)
        if self.pipeline is not None:
            records = [rollout.records[i] for i in indices]
            self.scratch.metrics = self.scratch.metrics | staleness_metrics(records, self.state.global_step)
        return StepBatches.pack(run, rollout.records, indices, num_new, self.observed)  # stage 10

    def _collect_rollout(self) -> None:
        number = 0 if self.rollout is None else self.rollout.number + 1
        self.rollout = None
        self.model.train()
        if self.pipeline is None:
            self.rollout = self.collector.collect(number, self.state.global_step, self.state, self.coefficients())
        else:
            num_steps = self.collector.settings.rollout.num_steps
            last = number - 1 + math.ceil((self.state.max_steps - self.state.global_step) / num_steps)
            self.rollout = self.pipeline.collect(number, self.state.global_step, last, self.state, self.coefficients())
        self.steps_used = 0
        self.scratch.metrics = self.rollout.metrics
        self.run.journal.write_rollout(self.state.global_step + 1, self.rollout.rows)

    def _rollout(self) -> Rollout:
        assert self.rollout is not None, "a step has a rollout"
        return self.rollout

    def state_before_step(self) -> RunState:
        rollout = self._rollout()
        saved = SavedRollout(rollout.records, rollout.number, self.steps_used - 1)
        return replace(self.run_state(), rollout=saved, random=self.scratch.random)

    def repack_step(self, step: StepBatches) -> StepBatches:
        """Pack the step again; score its rollout again, too, while the weights are those that generated it."""
        rollout, settings = self._rollout(), self.collector.settings.rollout
        if self.steps_used == 1 and self.run.algorithm.needs:
            records, _ = score_rollout(self, rollout.records, self.coefficients(), settings)
            self.rollout = rollout = replace(rollout, records=records)
        return super().repack_step(replace(step, records=rollout.records))

    def _choose_observed(self, rollout: Rollout, indices: Sequence[int]) -> tuple[int, ...]:
        most = self.collector.settings.num_completions_with_tokens
        if not most or not rollout.rows:  # a resumed run has no rows, and wrote the values before
            return ()
        # Of a record that the step skips only the engine's values are known.
        trained = trained_records(rollout.records, indices, self.run.algorithm)
        return choose_evenly(trained or indices, most, rollout.number)

    def finish_step(self) -> dict[str, float]:
        """Stage 13; then skip the rollout's other steps if the algorithm stops early."""
        measured = self.scratch.measured
        values = super().finish_step()
        if self.observed and self.is_world_process_zero():
            assert measured is not None
            rollout = self._rollout()
            records = {index: rollout.records[index] for index in self.observed}
            rows = token_rows(records, rollout.selected, measured.tokens, self._decode_tokens)
            self.run.journal.write_tokens(self.state.global_step, rows)
        self.has_warned_of_size = self.has_warned_of_size or warn_of_small_size(values, self.state.global_step)
        if self.run.algorithm.stop_early(values):
            self.steps_used = self.collector.settings.rollout.num_steps
        return values

    def _decode_tokens(self, ids: list[int]) -> str:
        return self.parts.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        metrics, table = self.unlogged_metrics, self.collector.settings.table
        super().log(logs, start_time)
        if (
            metrics
            and self.unlogged_metrics is not metrics
            and table is not None
            and self._table_is_due(table.log_completions_steps)
            and self.rollout is not None
            and self.is_world_process_zero()
        ):
            rows_of_step = self.rollout.rows, self.state.global_step
            print_completions(*rows_of_step, most=table.num_completions_to_print, unique=table.log_unique_prompts)
            track_completions(*rows_of_step, self.callback_handler.callbacks, unique=table.log_unique_prompts)

    def _table_is_due(self, steps: int) -> bool:
        """Return whether to print a table: one in each span of `steps`, starting with the first log."""
        span = self.state.global_step // steps
        due = span != self.last_table_span
        self.last_table_span = span
        return due

    def dry_run(self) -> dict[str, Any]:
        """Return the resolved arguments, without training: model, data, rollout, sizes, micro-batches."""
        return describe_run(self, self.model, self.collector, self.num_steps_per_epoch())

    # evaluation

    def evaluate_one(self, data: Any, prefix: str) -> dict[str, float]:
        return self._evaluate_prompts(data, prefix).metrics

    def predict(self, test_dataset: Any, ignore_keys: Any = None, metric_key_prefix: str = "test") -> PredictionOutput:
        """Return completions of a dataset as rows of text and rewards, with the metrics of `evaluate`."""
        result = self._evaluate_prompts(test_dataset, metric_key_prefix)
        return PredictionOutput(predictions=list(result.rows), label_ids=None, metrics=result.metrics)

    def _evaluate_prompts(self, data: Any, prefix: str) -> Evaluation:
        ranks = self.run.strategy.ranks
        with self.evaluation_context():
            self.model_wrapped.eval()
            with ranks.propagate_errors():
                prompts = read_eval_prompts(data, self.collector.new_reader())
            try:
                collector = self.collector if self.pipeline is None else self.pipeline.evaluator()
                return evaluate_prompts(collector, prompts, self.parts.success, prefix, self.state, self.coefficients())
            except RewardError as error:
                raise error.with_traceback(None) from error.__cause__
            finally:
                if not self.is_in_train:
                    self.parts.close_environments()

    # checkpoints

    def run_state(self) -> RunState:
        in_use = None
        if self.rollout is not None:
            is_used_up = self.steps_used >= self.collector.settings.rollout.num_steps
            in_use = SavedRollout(() if is_used_up else self.rollout.records, self.rollout.number, self.steps_used)
        return RunState(
            policy_version=self.state.global_step,
            cursor=self.collector.cursor.state_dict(),
            random=capture_rng_state(),
            rollout=in_use,
            algorithm_state=dict(self.algorithm_state),
            resolved=self.run.sizes.as_dict(),
            identity=self.identity(),
        )

    def identity(self) -> dict[str, Any]:
        rollout = self.collector.settings.rollout
        return {
            **super().identity(),
            "reward_funcs": list(self.collector.panel.names),
            "num_generations": rollout.num_generations,
            "completions of a rollout": rollout.num_sequences,
            "num_iterations": rollout.num_iterations,
        }

    def restore_run_state(self, state: RunState, checkpoint: Path) -> None:
        next_number = 0 if state.rollout is None else state.rollout.number + 1
        if self.pipeline is None:
            check_none_in_flight(state, checkpoint)
        else:
            self.pipeline.restore(state.in_flight, next_number)
        self.collector.cursor.load_state_dict(state.cursor)
        start, saved = self.run.algorithm.state, state.algorithm_state
        self.algorithm_state = {name: saved.get(name, value) for name, value in start.items()}
        if start and self.is_world_process_zero():
            values = ", ".join(f"{name}={value:.4g}" for name, value in self.algorithm_state.items())
            logger.info("The algorithm continues with the checkpoint's numbers: %s.", values)
        self.run = run_with_sizes(self, self.run.sizes.resumed(state.resolved, self.collector.settings.memory))
        self.rollout, self.steps_used = None, 0
        if state.rollout is not None:
            self._check_records(state.rollout.records, checkpoint)
            self.rollout = Rollout(state.rollout.number, state.rollout.records)
            # A used-up rollout stays so, even if the arguments now let a rollout serve more steps.
            self.steps_used = (
                state.rollout.steps_used if state.in_rollout else self.collector.settings.rollout.num_steps
            )
        self.load_extra_weights(checkpoint)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        super()._load_from_checkpoint(resume_from_checkpoint, model)
        self._note_changed_weights()

    def _note_changed_weights(self) -> None:
        for collector in (self.collector,) if self.pipeline is None else self.pipeline.collectors:
            collector.weight_sync.weights_changed = True

    def with_in_flight(self, state: RunState) -> RunState:
        return state if self.pipeline is None else replace(state, in_flight=self.pipeline.save())

    def load_states(self, checkpoint: Path) -> None:
        super().load_states(checkpoint)
        self._note_changed_weights()

    def load_best(self, best: Path) -> None:
        super().load_best(best)
        self._note_changed_weights()

    def _check_records(self, records: tuple[Record, ...], checkpoint: Path) -> None:
        """Raise CheckpointError if the checkpoint's rollout lacks a score that the algorithm needs with these arguments."""
        missing = [need for need in sorted(self.run.algorithm.needs) if any(getattr(r, need) is None for r in records)]
        if missing:
            raise CheckpointError(
                f"{checkpoint} is in the middle of a rollout without {missing[0]}, which these arguments need: resume with "
                "the arguments of the checkpoint's run, or from a checkpoint between two rollouts."
            )

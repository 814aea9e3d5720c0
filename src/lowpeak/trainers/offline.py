"""The base of offline trainers: steps over the rows of a dataset, for any algorithm."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, ClassVar

from torch import nn
from transformers import AutoModelForCausalLM, EvalPrediction
from transformers.trainer_utils import PredictionOutput

from lowpeak.algorithms import Algorithm
from lowpeak.arguments import OfflineSettings, RunFacts, run_facts
from lowpeak.checkpoint import RunState, capture_rng_state
from lowpeak.data import RowReader, make_cursor, read_all, with_prepared_columns, without_prepared_columns
from lowpeak.errors import ArgumentError, LowpeakError, fail_on_exit
from lowpeak.memory import Phase
from lowpeak.models import LOGPROB_HEAD, HeadKind, load_policy
from lowpeak.parallel import detect_strategy
from lowpeak.plan import start_plan
from lowpeak.ranks import Ranks
from lowpeak.records import Metric, MicroBatch, Record
from lowpeak.setup import (
    OfflineInputs,
    RunParts,
    check_adapter,
    check_data,
    check_optimizer,
    computes_in_fp32,
    describe_offline,
    make_reference,
    make_run,
    prepare_offline,
    report_effects,
    silence_nonzero_ranks,
)
from lowpeak.trainers.configs import CommonConfig
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
    GuardedPasses,
    StepBatches,
    attempts,
    measure_batches,
    run_with_sizes,
    score_records,
)


class OfflineTrainer(ReferenceTrainer):
    """Trains a model on the rows of a dataset, with TRL's constructor.

    model                   name, path or instance of the model (or peft model)
    compute_metrics         `compute_metrics(EvalPrediction) -> dict`, added to what an evaluation measures; see `predict_rows`
    quantization_config     as in `model_init_kwargs`, for a model that is given by name or path
    unsupported             other arguments of TRL's trainers: each raises ArgumentError with a remedy

    ref_model               name, path or instance of the reference, if the algorithm has one (None: the untrained model, or the
                            one without its adapter)

    A subclass resolves its settings, reads a row and names its algorithm. `parts` has the settings and models.
    """

    config_class: ClassVar[type[CommonConfig]]
    columns: ClassVar[str]  # columns of its data, for the error if there is no dataset
    head: ClassVar[HeadKind] = LOGPROB_HEAD
    auto_class: ClassVar[Any] = AutoModelForCausalLM  # transformers' class that loads the model by name
    parts: RunParts
    reader: Any

    @staticmethod
    def resolve(args: Any) -> OfflineSettings:
        raise AssertionError("a subclass resolves its settings")

    @staticmethod
    def load_model(model: Any, peft_config: Any, args: Any, settings: Any) -> nn.Module:
        """Return the model of a name, path or instance; with `peft_config`, under an adapter."""
        return load_policy(
            model,
            settings.model,
            peft_config=peft_config,
            model_parallel=args.model_parallel,
            device=None if args.fsdp else args.device,
        )

    @staticmethod
    def make_algorithm(settings: Any) -> Algorithm:
        raise AssertionError("a subclass names its algorithm")

    @staticmethod
    def set_pad_token(tokenizer: Any, policy: nn.Module) -> Any:
        """Return the tokenizer with the pad token that the model needs, and set it in the model's config."""
        return tokenizer

    def make_reader(self) -> RowReader[Any]:
        """Return the reader that turns a row into an item of `records_of`."""
        raise AssertionError("a subclass reads its rows")

    def check_row(self, row: Any, where: str, settings: Any) -> None:
        """Raise DataError for a row without the columns that the reader needs."""
        raise AssertionError("a subclass names the columns of its rows")

    @staticmethod
    def records_of(items: Sequence[Any]) -> list[Record]:
        return list(items)

    def measure(self, batches: Sequence[MicroBatch], guard: GuardedPasses) -> dict[str, float]:
        """Return the loss and the algorithm's finite metrics over all ranks, with `num_tokens` trained on so far."""
        self.model_wrapped.eval()
        numbers = measure_batches(self, batches, guard)
        values = {name: value for name, metric in numbers.metrics.items() if math.isfinite(value := metric.value())}
        return {"loss": float(numbers.loss), **values, "num_tokens": float(self.state.num_input_tokens_seen)}

    def predict_rows(self, step: StepBatches, records: Sequence[Record]) -> EvalPrediction:
        """Return the predictions and labels for `compute_metrics`, the same on every rank."""
        raise AssertionError("a subclass predicts its rows")

    def __init__(
        self,
        model: Any,
        args: Any = None,
        data_collator: Any = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        compute_metrics: Callable[[EvalPrediction], dict[str, float]] | None = None,
        callbacks: list[Any] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        optimizer_cls_and_kwargs: tuple[type, dict[str, Any]] | None = None,
        preprocess_logits_for_metrics: Any = None,
        quantization_config: Any = None,
        peft_config: Any = None,
        *,
        ref_model: Any = None,
        **unsupported: Any,
    ) -> None:
        unsupported |= {"data_collator": data_collator, "preprocess_logits_for_metrics": preprocess_logits_for_metrics}
        reject_unsupported(self, unsupported)
        check_kinds(
            compute_metrics=compute_metrics,
            callbacks=callbacks,
            optimizers=optimizers,
            optimizer_cls_and_kwargs=optimizer_cls_and_kwargs,
            ref_model=ref_model,
        )
        reject_virtual_tokens(model, peft_config)
        self.note_reference(ref_model)

        def check_inputs(args: Any, settings: Any) -> None:
            check_data(train_dataset, eval_dataset, args, self.columns, partial(self.check_row, settings=settings))
            check_optimizer(args, (optimizers[0] or optimizer_cls_and_kwargs, optimizers[1]))
            check_adapter(peft_config, model, self.auto_class, args)

        passed, args = args, make_arguments(self.config_class, args, model, quantization_config)
        silence_nonzero_ranks(args)
        inputs = OfflineInputs(model, processing_class, peft_config, optimizer_cls_and_kwargs is not None, ref_model)
        with Ranks(args.device).propagate_errors():
            self.parts = parts = prepare_offline(inputs, args, self, check_inputs)
            check_optimized(optimizers[0], parts.policy)
        super().__init__(
            model=parts.policy,
            args=base_arguments(parts.args, parts.policy),
            data_collator=list,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=parts.tokenizer,
            compute_metrics=compute_metrics,
            callbacks=callbacks,
            optimizers=optimizers,
            optimizer_cls_and_kwargs=optimizer_cls_and_kwargs,
        )
        self.watch_arguments(passed, parts)
        self._build(detect_strategy(self.accelerator), train_dataset, eval_dataset)

    def _build(self, strategy: Any, train_dataset: Any, eval_dataset: Any) -> None:
        """Make the run, and the cursor over the training data; datasets are shown with TRL's prepared columns."""
        parts, args, ranks = self.parts, self.acting_args, strategy.ranks
        self.reader = self.make_reader()
        self.train_dataset = with_prepared_columns(train_dataset, self.reader)
        self.eval_dataset = with_prepared_columns(eval_dataset, self.reader)
        self.rows_per_step = args.per_device_train_batch_size * args.gradient_accumulation_steps * ranks.world_size
        with ranks.propagate_errors():
            report_effects(parts, self._facts())
        reference = make_reference(self, parts, strategy)
        if reference is not None:
            self.ref_model = reference.model
        self.start_run(make_run(self, parts, strategy, start_plan, reference, head=self.head))
        with ranks.propagate_errors():
            self.cursor = make_cursor(train_dataset, self.reader, args, parts.settings.shuffle_dataset)
            parts.row_effects.report()

    def _facts(self) -> RunFacts:
        args = self.acting_args
        passed = "class" if self.optimizer_cls_and_kwargs else "instance" if self.optimizer is not None else None
        return replace(
            run_facts(args),
            in_fp32=computes_in_fp32(args, self.parts.policy, self.parts.reference_model),
            frozen=self.parts.reference_model is not None,
            passed_optimizer=passed,
            passed_schedule=self.lr_scheduler is not None,
        )

    def num_steps_per_epoch(self) -> int | None:
        """Return the steps that use each row once; the last one is filled from the next epoch."""
        rows = self.cursor.rows_per_epoch
        return None if rows is None else max(1, -(-rows // self.rows_per_step))

    def next_step(self) -> StepBatches:
        with self.run.strategy.ranks.propagate_errors():
            drawn = self.records_of(self.cursor.take(self.rows_per_step))
        records, self.scratch.metrics = self.with_scores(drawn, Phase.SCORE)
        return self._step_batches(records)

    def with_scores(self, records: Sequence[Record], phase: Phase) -> tuple[Sequence[Record], dict[str, Metric]]:
        """Return a step's records with the scores and values that the loss reads, and the passes' metrics."""
        return score_records(self, tuple(records), self.run.algorithm.needs, phase)

    def dry_run(self) -> dict[str, Any]:
        """Return the resolved arguments, without training: model, data, sizes, micro-batches."""
        steps, longest = self.num_steps_per_epoch(), self.reader.max_length
        items = map(self.reader.read, without_prepared_columns(self.train_dataset), count())
        first = self.records_of([next(item for item in items if item is not None)])[0]
        return describe_offline(self, self.model, self.cursor, steps, self.rows_per_step, longest, first)

    def evaluate_one(self, data: Any, prefix: str) -> dict[str, float]:
        return self._measure_and_predict(data, prefix, predicts=self.compute_metrics is not None).metrics or {}

    def predict(self, test_dataset: Any, ignore_keys: Any = None, metric_key_prefix: str = "test") -> PredictionOutput:
        """Return the predictions and labels of a dataset, as `compute_metrics` gets them, with the metrics of `evaluate`."""
        return self._measure_and_predict(test_dataset, metric_key_prefix, predicts=True)

    def _measure_and_predict(self, data: Any, prefix: str, predicts: bool) -> PredictionOutput:
        ranks, tracker = self.run.strategy.ranks, self.run.tracker
        with self.evaluation_context(), tracker.phase(Phase.EVALUATE):
            with ranks.propagate_errors():
                records: Sequence[Record] = self.records_of(read_all(without_prepared_columns(data), self.reader))
            start = time.perf_counter()
            records, _ = self.with_scores(records, Phase.EVALUATE)
            for attempt in attempts(self, Phase.SCORE):
                step = self._step_batches(records)  # within the run's present sizes
                with attempt:
                    measured = self.measure(step.micro_batches, attempt.guard(self.run.algorithm.unit))
            predictions = self.predict_rows(step, records) if predicts else EvalPrediction(None, None)
            if self.compute_metrics is not None:
                with ranks.propagate_errors(), fail_on_exit(LowpeakError, "compute_metrics"):
                    measured = {**measured, **_named_numbers(self.compute_metrics(predictions))}
            measured["runtime"] = time.perf_counter() - start
            metrics = {f"{prefix}_{name.removeprefix(f'{prefix}_')}": number for name, number in measured.items()}
            return PredictionOutput(predictions.predictions, predictions.label_ids, metrics)

    def _step_batches(self, records: Sequence[Record]) -> StepBatches:
        return StepBatches.pack(self.run, records, range(len(records)), self.num_tokens(records))

    def num_tokens(self, records: Sequence[Record]) -> int:
        return sum(record.num_tokens for record in records)

    def run_state(self) -> RunState:
        return RunState(
            policy_version=self.state.global_step,
            cursor=self.cursor.state_dict(),
            random=capture_rng_state(),
            resolved=self.run.sizes.as_dict(),
            identity=self.identity(),
        )

    def restore_run_state(self, state: RunState, checkpoint: Path) -> None:
        self.cursor.load_state_dict(state.cursor)
        self.load_extra_weights(checkpoint)
        self.run = run_with_sizes(self, self.run.sizes.resumed(state.resolved, self.parts.settings.memory))


def _named_numbers(computed: Any) -> Mapping[str, float]:
    """Return the result of compute_metrics; raise ArgumentError if it is not a mapping."""
    if not isinstance(computed, Mapping):
        raise ArgumentError(
            f"compute_metrics returned {computed!r:.80} of type {type(computed).__name__}; return a dict of names and numbers."
        )
    return computed

"""The base of offline trainers: steps over the rows of a dataset, for any algorithm."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from torch import nn
from transformers import AutoModelForCausalLM, EvalPrediction, set_seed
from transformers.trainer_utils import PredictionOutput

from lowpeak.algorithms import Algorithm
from lowpeak.arguments import (
    OfflineSettings,
    RunFacts,
    TokenizerSettings,
    check_and_reset_arguments,
    report_idle_arguments,
    run_facts,
)
from lowpeak.checkpoint import (
    ARGUMENTS,
    RunState,
    capture_rng_state,
    learning_arguments,
    preserve_rng_state,
)
from lowpeak.data import RowReader, check_special_tokens, make_cursor, padding_id
from lowpeak.errors import ArgumentError, LowpeakError, fail_on_exit
from lowpeak.heads import num_embeddings, transformers_model
from lowpeak.memory import Phase
from lowpeak.models import LOGPROB_HEAD, HeadKind, context_length, convert_trainable, disable_dropout, load_tokenizer
from lowpeak.parallel import check_devices, check_is_sharded, detect_strategy
from lowpeak.plan import start_plan
from lowpeak.ranks import Ranks
from lowpeak.records import MicroBatch, Record
from lowpeak.setup import (
    check_adapter,
    check_data,
    check_optimizer,
    check_outputs,
    computes_in_fp32,
    describe_offline,
    make_run,
    silence_nonzero_ranks,
)
from lowpeak.trainers.base import StepTrainer
from lowpeak.trainers.configs import CommonConfig
from lowpeak.trainers.constructor import (
    base_arguments,
    check_kinds,
    check_optimized,
    make_arguments,
    reject_unsupported,
    reject_virtual_tokens,
)
from lowpeak.training import (
    GuardedPasses,
    StepBatches,
    StepMetrics,
    attempts,
    gather_metrics,
    measure_step,
    run_with_sizes,
)
from lowpeak.watchdog import detect_failures


class OfflineTrainer(StepTrainer):
    """Trains a model on the rows of a dataset, with TRL's constructor.

    model                   name, path or instance of the model (or peft model)
    compute_metrics         `compute_metrics(EvalPrediction) -> dict`, added to what an evaluation measures; see `predict_rows`
    quantization_config     as in `model_init_kwargs`, for a model that is given by name or path
    unsupported             other arguments of TRL's trainers: each raises ArgumentError with a remedy

    A subclass resolves its settings, loads its model, reads a row and names its algorithm.
    """

    config_class: ClassVar[type[CommonConfig]]
    columns: ClassVar[str]  # columns of its data, for the error if there is no dataset
    head: ClassVar[HeadKind] = LOGPROB_HEAD
    auto: ClassVar[Any] = AutoModelForCausalLM  # the class of transformers that makes a model of a name
    settings: Any  # the record that `resolve` returns
    reader: Any

    @staticmethod
    def resolve(args: Any) -> OfflineSettings:
        raise AssertionError("a subclass resolves its settings")

    def load_model(self, model: Any, peft_config: Any) -> nn.Module:
        raise AssertionError("a subclass loads its model")

    def make_algorithm(self) -> Algorithm:
        raise AssertionError("a subclass names its algorithm")

    def make_reader(self, policy: nn.Module, tokenizer: Any) -> RowReader[Any]:
        """Return the reader that turns a row into an item of `records_of`."""
        raise AssertionError("a subclass reads its rows")

    def check_row(self, row: Any, where: str) -> None:
        """Raise DataError for a row without the columns that the reader needs."""
        raise AssertionError("a subclass names the columns of its rows")

    @staticmethod
    def records_of(items: Sequence[Any]) -> list[Record]:
        return list(items)

    def read(self, data: Any) -> list[Record]:
        """Return the records of a whole dataset; log how many rows are left out."""
        raise AssertionError("a subclass reads an evaluation's data")

    def measure(self, batches: Sequence[MicroBatch], guard: GuardedPasses) -> dict[str, float]:
        """Return the loss and the algorithm's metrics over all ranks, with `num_tokens` trained on so far."""
        run = self.run
        ranks = run.strategy.ranks
        self.model_wrapped.eval()
        loss, metrics = measure_step(self.model_wrapped, batches, run.algorithm, run.logprob_settings, ranks, guard)
        numbers = gather_metrics(StepMetrics(loss, metrics), None, ranks)
        values = {name: metric.value() for name, metric in numbers.metrics.items()}
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
        **unsupported: Any,
    ) -> None:
        unsupported |= {"data_collator": data_collator, "preprocess_logits_for_metrics": preprocess_logits_for_metrics}
        reject_unsupported(self, unsupported)
        check_kinds(
            compute_metrics=compute_metrics,
            callbacks=callbacks,
            optimizers=optimizers,
            optimizer_cls_and_kwargs=optimizer_cls_and_kwargs,
        )
        reject_virtual_tokens(model, peft_config)
        self.user_args = args = make_arguments(self.config_class, args, model, quantization_config)
        check_devices(bool(args.fsdp), args.model_parallel.tensor > 1)
        silence_nonzero_ranks(args)
        with Ranks(args.device).propagate_errors():
            self.acting_args = args = check_and_reset_arguments(args)
            self.settings = settings = self._resolve(args, optimizer_cls_and_kwargs)
            set_seed(args.seed)  # before anything is made: the first weights of an adapter, or a new head, are random
            check_data(train_dataset, eval_dataset, args, self.columns, self.check_row)
            check_outputs(args)
            check_optimizer(args, (optimizers[0] or optimizer_cls_and_kwargs, optimizers[1]))
            check_adapter(peft_config, model, self.auto, args)
            policy, tokenizer = self.load(model, processing_class, peft_config)
            check_optimized(optimizers[0], policy)
        super().__init__(
            model=policy,
            args=base_arguments(args, policy),
            data_collator=list,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=tokenizer,
            compute_metrics=compute_metrics,
            callbacks=callbacks,
            optimizers=optimizers,
            optimizer_cls_and_kwargs=optimizer_cls_and_kwargs,
        )
        report_idle_arguments(self.user_args, self._facts(args, policy))
        strategy = detect_strategy(self.accelerator)
        pad_id = padding_id(tokenizer)
        algorithm = self.make_algorithm()
        self.start_run(make_run(self, args, settings, algorithm, strategy, policy, pad_id, start_plan, head=self.head))
        self.reader = self.make_reader(policy, tokenizer)
        with strategy.ranks.propagate_errors():
            self.cursor = make_cursor(train_dataset, self.reader, args, settings.shuffle_dataset)

    def _resolve(self, args: Any, optimizer_cls_and_kwargs: Any) -> Any:
        """Return the settings, without a storage format for an optimizer that was passed in: it has one."""
        settings = self.resolve(args)
        if optimizer_cls_and_kwargs is None:
            return settings
        return replace(settings, model=settings.model.with_users_optimizer())

    def _facts(self, args: Any, policy: nn.Module) -> RunFacts:
        passed = "class" if self.optimizer_cls_and_kwargs else "instance" if self.optimizer is not None else None
        return replace(
            run_facts(args),
            in_fp32=computes_in_fp32(args, policy),
            passed_optimizer=passed,
            passed_schedule=self.lr_scheduler is not None,
        )

    def load(self, model: Any, processing_class: Any, peft_config: Any) -> tuple[nn.Module, Any]:
        """Return the model, ready to train, and its tokenizer."""
        settings = self.settings
        policy = self.load_model(model, peft_config)
        tokenizer = load_tokenizer(processing_class, model, settings.model.trust_remote_code)
        tokenizer = change_tokenizer(tokenizer, transformers_model(policy), settings.tokenizer)
        check_special_tokens(tokenizer, num_embeddings(policy))
        convert_trainable(policy, settings.model)
        if settings.model.disable_dropout:
            disable_dropout(policy)
        return policy, tokenizer

    @property
    def rows_per_step(self) -> int:
        """Rows of the dataset in an optimizer step, over all ranks."""
        args = self.acting_args
        return args.per_device_train_batch_size * args.gradient_accumulation_steps * self.run.strategy.ranks.world_size

    def num_steps_per_epoch(self) -> int | None:
        """Return the steps that use each row once; the last one is filled from the next epoch."""
        rows = self.cursor.rows_per_epoch
        return None if rows is None else max(1, -(-rows // self.rows_per_step))

    def next_step(self) -> StepBatches:
        with self.run.strategy.ranks.propagate_errors():
            records = self.records_of(self.cursor.take(self.rows_per_step))
        return self._step_batches(records)

    def dry_run(self) -> dict[str, Any]:
        """Return the resolved arguments, without training: model, data, sizes, micro-batches."""
        steps, longest = self.num_steps_per_epoch(), self.reader.max_length
        return describe_offline(self, self.model, self.cursor, steps, self.rows_per_step, longest)

    def evaluate_one(self, data: Any, prefix: str) -> dict[str, float]:
        return self._measure_and_predict(data, prefix, predicts=self.compute_metrics is not None).metrics or {}

    def predict(self, test_dataset: Any, ignore_keys: Any = None, metric_key_prefix: str = "test") -> PredictionOutput:
        """Return the predictions and labels of a dataset, as `compute_metrics` gets them, with the metrics of `evaluate`."""
        return self._measure_and_predict(test_dataset, metric_key_prefix, predicts=True)

    def _measure_and_predict(self, data: Any, prefix: str, predicts: bool) -> PredictionOutput:
        ranks, tracker = self.run.strategy.ranks, self.run.tracker
        check_is_sharded(self.run.strategy, self.model_wrapped)
        with detect_failures(ranks, lambda: tracker.current_phase), preserve_rng_state(), tracker.phase(Phase.EVALUATE):
            with ranks.propagate_errors():
                records = self.read(data)
            start = time.perf_counter()
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

    def _step_batches(self, records: list[Record]) -> StepBatches:
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

    def identity(self) -> dict[str, Any]:
        arguments = learning_arguments(self.acting_args, self.settings.model.storage_name)
        return {**super().identity(), "rows of a step": self.rows_per_step, ARGUMENTS: arguments}

    def restore_run_state(self, state: RunState, checkpoint: Path) -> None:
        self.cursor.load_state_dict(state.cursor)
        self.run = run_with_sizes(self, self.run.sizes.resumed(state.resolved, self.settings.memory))


def _named_numbers(computed: Any) -> Mapping[str, float]:
    """Return the result of compute_metrics; raise ArgumentError if it is not a mapping."""
    if not isinstance(computed, Mapping):
        raise ArgumentError(
            f"compute_metrics returned {computed!r:.80}, a {type(computed).__name__}; it must return a dict of names and numbers."
        )
    return computed


def change_tokenizer(tokenizer: Any, model: Any, settings: TokenizerSettings) -> Any:
    """Return the tokenizer, or a copy with the changes that the settings ask for, which the model's configs get too.

    The new end-of-sequence token ends a completion, and so do those that ended it before.
    """
    chosen = {"eos_token": settings.eos_token, "pad_token": settings.pad_token}
    tokens = {name: token for name, token in chosen.items() if token is not None}
    if not tokens and settings.chat_template_path is None:
        return tokenizer
    changed = copy.deepcopy(tokenizer)
    for name, token in tokens.items():
        if token not in tokenizer.get_vocab():
            raise ArgumentError(f"{name}={token!r} is not in the tokenizer's vocabulary: name a token that it has.")
        setattr(changed, name, token)
        setattr(model.config.get_text_config(), f"{name}_id", tokenizer.convert_tokens_to_ids(token))
    if "eos_token" in tokens:
        _add_end_token(model, changed.eos_token_id)
    if settings.chat_template_path is not None:
        changed.chat_template = _read_template(settings.chat_template_path)
    return changed


def _add_end_token(model: Any, end_id: int) -> None:
    generation = getattr(model, "generation_config", None)
    if generation is not None:
        before = generation.eos_token_id if isinstance(generation.eos_token_id, list) else [generation.eos_token_id]
        generation.eos_token_id = [end_id, *(number for number in before if number not in (None, end_id))]


def _read_template(name: str) -> str:
    path = Path(name)
    if path.suffix in (".jinja", ".j2") and not path.is_file():
        raise ArgumentError(f"chat_template_path={name!r} is not an existing file.")
    if path.suffix not in (".jinja", ".j2"):
        raise ArgumentError(
            f"chat_template_path={name!r} must be a .jinja or .j2 file; to take another tokenizer's template, set chat_template on "
            "the tokenizer that is passed as processing_class."
        )
    return path.read_text(encoding="utf-8")


def longest_row(max_length: int | None, policy: nn.Module, reserved: int = 0) -> int | None:
    """Return the most tokens of a sequence: `max_length`, or the model's context minus `reserved`; None for no limit."""
    context = context_length(policy)
    limits = [max_length, None if context is None else context - reserved]
    return min((limit for limit in limits if limit is not None), default=None)

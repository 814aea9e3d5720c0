"""Supervised training on the same log-prob core: loss = -mean of the counted tokens' log-probs over the whole step."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from torch import nn

from lowpeak.algorithms.supervised import make_supervised
from lowpeak.batching.counted import num_counted
from lowpeak.checkpoint.atomic import check_writable
from lowpeak.checkpoint.resume import capture_random, keep_random
from lowpeak.checkpoint.state import RunState
from lowpeak.config.resolve import resolve_common
from lowpeak.data.cursor import PromptCursor
from lowpeak.data.prompts import check_end, num_rows, padding_id, usable_rows
from lowpeak.data.supervised import SupervisedReader, read_records
from lowpeak.errors import DataError
from lowpeak.memory.phases import Phase
from lowpeak.ranks import Ranks
from lowpeak.records import Record
from lowpeak.strategies.detect import check_devices, detect_strategy
from lowpeak.training.arguments import SFTConfig, check_class
from lowpeak.training.assembly import make_run
from lowpeak.training.describe import describe_supervised
from lowpeak.training.interrupt import StepCallback
from lowpeak.training.models import (
    context_length,
    disable_dropout,
    load_policy,
    load_tokenizer,
    num_embeddings,
    upcast_trainable,
)
from lowpeak.training.sizes import Sizes
from lowpeak.training.start import quiet_replicas
from lowpeak.training.step import score
from lowpeak.training.step_trainer import StepTrainer, base_arguments
from lowpeak.training.work import StepWork, step_batches
from lowpeak.watch.watch import watched


class SFTTrainer(StepTrainer):
    """Trains a language model on prompt-completion, conversational or text rows; TRL's constructor.

    from lowpeak import SFTConfig, SFTTrainer

    SFTTrainer(model="Qwen/Qwen2.5-0.5B", args=SFTConfig(output_dir="out"), train_dataset=data).train()
    """

    def __init__(
        self,
        model: Any,
        args: Any = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        callbacks: list[Any] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        peft_config: Any = None,
    ) -> None:
        args = args if args is not None else SFTConfig(output_dir="sft-output")
        check_class(args, SFTConfig)
        check_devices(bool(args.fsdp), args.cut.tensor > 1)
        quiet_replicas(args)
        with Ranks(args.device).together():
            self.memory = resolve_common(args)
            check_data(train_dataset, args)
            policy, tokenizer = _load(model, args, processing_class, peft_config)
        super().__init__(
            model=policy,
            args=base_arguments(args),
            data_collator=list,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=tokenizer,
            callbacks=callbacks,
            optimizers=optimizers,
        )
        self.user_args = args
        strategy = detect_strategy(self.accelerator)
        self.run = make_run(self, args, make_supervised(), strategy, policy, self.memory)
        self.budget = self.run.sizes.budget(self.memory, padding_id(tokenizer), policy.config)
        self.reader = _reader(args, policy, tokenizer)
        with strategy.ranks.together():
            self.cursor = _cursor(train_dataset, self.reader, args)
        self.add_callback(StepCallback(self))

    @property
    def rows_per_step(self) -> int:
        """Rows of an optimizer step, over all ranks."""
        args = self.user_args
        return args.per_device_train_batch_size * args.gradient_accumulation_steps * self.run.strategy.ranks.world_size

    def num_steps_per_epoch(self) -> int | None:
        """Steps in which each row is used once; the last one is filled from the next epoch."""
        rows = self.cursor.prompts_per_epoch
        return None if rows is None else max(1, -(-rows // self.rows_per_step))

    def next_step(self) -> StepWork:
        """The next rows as micro-batches."""
        with self.run.strategy.ranks.together():
            records = self.cursor.take(self.rows_per_step)
        return self._work(records)

    def dry_run(self) -> dict[str, Any]:
        """What the arguments resolved to, without training: model, data, sizes, micro-batch plan."""
        return describe_supervised(self)

    def evaluate_one(self, data: Any, prefix: str) -> dict[str, float]:
        """`<prefix>_loss`: minus the mean log-prob of the counted tokens."""
        ranks, tracker = self.run.strategy.ranks, self.run.tracker
        with watched(ranks, lambda: tracker.where), keep_random(), tracker.phase(Phase.EVALUATE):
            with ranks.together():
                records = read_records(data, self.reader)
            return self._measured(records, prefix)

    def _measured(self, records: list[Record], prefix: str) -> dict[str, float]:
        start = time.perf_counter()
        ranks = self.run.strategy.ranks
        work = self._work(records)
        self.model_wrapped.eval()
        scored = score(self.model_wrapped, work.micro_batches, self.run.core)
        kept = [result for batch, result in zip(work.micro_batches, scored, strict=True) if batch.record_indices]
        total = ranks.sum([sum(float(result.logprobs_T.sum()) for result in kept)])[0]
        count = sum(num_counted(record) for record in records)
        return {f"{prefix}_loss": -total / max(1, count), f"{prefix}_runtime": time.perf_counter() - start}

    def _work(self, records: list[Record]) -> StepWork:
        rows = range(len(records))
        batches = step_batches(records, rows, self.run.algorithm, self.budget, self.run.strategy.ranks)
        return StepWork(batches, sum(record.num_tokens for record in records))

    def run_state(self) -> RunState:
        """Cursor, generators, what `auto` became."""
        return RunState(
            policy_version=self.state.global_step,
            cursor=self.cursor.state_dict(),
            random=capture_random(),
            resolved=self.run.sizes.as_dict(),
            identity=self.identity(),
        )

    def take_run_state(self, state: RunState, checkpoint: Path) -> None:
        """Go on where the checkpoint was written, with what `auto` had become then."""
        self.cursor.load_state_dict(state.cursor)
        self.use_sizes(self.run.sizes.resumed(state.resolved, self.memory))

    def use_sizes(self, sizes: Sizes) -> None:
        """Run every pass within these sizes."""
        super().use_sizes(sizes)
        self.budget = sizes.within(self.budget)


def check_data(dataset: Any, args: Any) -> None:
    """Refuse a run without rows, without an end, or whose folder cannot be written, before anything is loaded."""
    if args.process_index == 0:
        check_writable(Path(args.output_dir))
    if dataset is None:
        raise DataError("train_dataset is None: pass a data set with prompt and completion, messages, or text.")
    check_end(dataset, args.max_steps)


def _load(model: Any, args: Any, processing_class: Any, peft_config: Any) -> tuple[nn.Module, Any]:
    """The model to train, and its tokenizer."""
    policy = load_policy(
        model,
        args.model_init_kwargs,
        trust_remote_code=args.trust_remote_code,
        peft_config=peft_config,
        cut=args.cut,
    )
    tokenizer = load_tokenizer(processing_class, model, args.trust_remote_code)
    upcast_trainable(policy)
    if args.disable_dropout:
        disable_dropout(policy)
    return policy, tokenizer


def _reader(args: Any, policy: Any, tokenizer: Any) -> SupervisedReader:
    limits = [limit for limit in (args.max_length, context_length(policy)) if limit is not None]
    return SupervisedReader(
        tokenizer,
        max_length=min(limits, default=None),
        completion_only=args.completion_only_loss,
        assistant_only=args.assistant_only_loss,
        chat_template_kwargs=args.chat_template_kwargs,
        text_field=args.dataset_text_field,
        num_embeddings=num_embeddings(policy),
    )


def _cursor(dataset: Any, reader: SupervisedReader, args: Any) -> PromptCursor[Record]:
    if num_rows(dataset) is not None:
        dataset = usable_rows(dataset, reader)
    seed = args.seed if args.data_seed is None else args.data_seed
    return PromptCursor(dataset, reader, shuffle=args.shuffle_dataset, seed=seed)

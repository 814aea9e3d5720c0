"""The base of DPO and KTO: offline training on preferences with a reference."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from transformers import EvalPrediction

from lowpeak.arguments import PreferenceSettings
from lowpeak.data import check_text_only, num_rows, read_items, without_prepared_columns
from lowpeak.errors import ArgumentError
from lowpeak.heads import causal_lm, media_token_ids, num_embeddings, transformers_model
from lowpeak.memory import Phase
from lowpeak.records import Metric, Record
from lowpeak.setup import longest_row
from lowpeak.trainers.offline import OfflineTrainer
from lowpeak.trainers.reference_sums import digest_of, load_sums, reference_sum, save_sums, with_reference_sum
from lowpeak.training import StepBatches, score_records

_ITEMS_AT_A_TIME = 256
_SUMS_FILE = "reference_log_probs.safetensors"


class PreferenceTrainer(OfflineTrainer):
    """Trains on preferences, with TRL's constructor; the reference scores each step before its first backward.

    `compute_metrics` gets implicit rewards, `beta * log_ratio`: see `predict_rows`.
    """

    # The reference's log-probs of the data's completions, with precompute_ref_log_probs, by a digest of their tokens.
    reference_sums: dict[bytes, float]
    has_scored_data = False

    def __init__(
        self,
        model: Any,
        ref_model: Any = None,
        args: Any = None,
        data_collator: Any = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        compute_metrics: Callable[[EvalPrediction], dict[str, float]] | None = None,
        callbacks: list[Any] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        quantization_config: Any = None,
        peft_config: Any = None,
        **others: Any,
    ) -> None:
        super().__init__(
            model,
            args,
            data_collator,
            train_dataset,
            eval_dataset,
            processing_class,
            compute_metrics,
            callbacks,
            optimizers,
            quantization_config=quantization_config,
            peft_config=peft_config,
            ref_model=ref_model,
            **others,
        )

    def _build(self, strategy: Any, train_dataset: Any, eval_dataset: Any) -> None:
        evaluated = eval_dataset.values() if isinstance(eval_dataset, dict) else [eval_dataset]
        datasets = [each for each in (train_dataset, *evaluated) if each is not None]
        if self.parts.settings.precompute_ref_log_probs and any(num_rows(each) is None for each in datasets):
            raise ArgumentError(
                "precompute_ref_log_probs=True scores all data before the first step, and a stream has no end: remove it."
            )
        self.reference_sums = {}
        reference: Any = self.parts.reference_model or self.parts.policy
        self.reference_name = str(getattr(transformers_model(causal_lm(reference)).config, "_name_or_path", ""))
        super()._build(strategy, train_dataset, eval_dataset)

    def save_extra(self, folder: Path) -> None:
        super().save_extra(folder)
        if self.reference_sums:
            file, name = folder / _SUMS_FILE, self.reference_name
            self.run.strategy.ranks.call_on_first(lambda: save_sums(file, self.reference_sums, name))

    def load_extra_weights(self, checkpoint: Path) -> None:
        super().load_extra_weights(checkpoint)
        if self.parts.settings.precompute_ref_log_probs and (checkpoint / _SUMS_FILE).exists():
            self.reference_sums = load_sums(checkpoint / _SUMS_FILE, self.reference_name)

    def reader_settings(self) -> dict[str, Any]:
        """Return the arguments of the reader that both algorithms share."""
        settings: PreferenceSettings = self.parts.settings
        return {
            "max_length": longest_row(settings.max_length, self.parts.policy),
            "chat_template_kwargs": settings.chat_template_kwargs,
            "num_embeddings": num_embeddings(self.parts.policy),
            "media_token_ids": media_token_ids(self.parts.policy),
            "report_idle": self.parts.row_effects.add,
        }

    @staticmethod
    def records_of(items: Sequence[Any]) -> list[Record]:
        return [record for item in items for record in item]

    def check_row(self, row: Any, where: str, settings: Any) -> None:
        check_text_only(row, where)

    def with_scores(self, records: Sequence[Record], phase: Phase) -> tuple[Sequence[Record], dict[str, Metric]]:
        if not self.parts.settings.precompute_ref_log_probs:
            return super().with_scores(records, phase)
        if not self.has_scored_data:
            self._score_data()
            self._free_reference()
            self.has_scored_data = True
        return [with_reference_sum(record, self.reference_sums) for record in records], {}

    def predict_rows(self, step: StepBatches, records: Sequence[Record]) -> EvalPrediction:
        """Return each completion's implicit reward, and its label; of pairs, rewards [pairs, 2] and labels of 0.

        A pair's chosen completion, the first one, is the better one.
        """
        scored, _ = score_records(self, tuple(records), frozenset({"old"}), Phase.EVALUATE)
        beta: float = self.parts.settings.objective.beta
        rewards = np.array([beta * _log_ratio(*each) for each in zip(scored, records, strict=True)], dtype=np.float32)
        if self.run.algorithm.unit == "pair":
            return EvalPrediction(rewards.reshape(-1, 2), np.zeros(len(records) // 2, dtype=np.int64))
        return EvalPrediction(rewards, np.array([is_desirable(record) for record in records], dtype=np.int64))

    def _score_data(self) -> None:
        """Add the reference's weighted log-prob of each completion of the data that no checkpoint has given."""
        evaluated = self.eval_dataset if isinstance(self.eval_dataset, dict) else {"": self.eval_dataset}
        for dataset in (self.train_dataset, *evaluated.values()):
            items = iter(()) if dataset is None else read_items(without_prepared_columns(dataset), self.reader)
            unscored = (item for _, item in items if item is not None and not self._has_sums(item))
            while True:
                with self.run.strategy.ranks.propagate_errors():
                    records = tuple(self.records_of(list(islice(unscored, _ITEMS_AT_A_TIME))))
                if not records:
                    break
                scored, _ = score_records(self, records, frozenset({"reference"}), Phase.SCORE)
                self.reference_sums |= {digest_of(record): reference_sum(record) for record in scored}

    def _has_sums(self, records: Sequence[Record]) -> bool:
        return all(digest_of(record) in self.reference_sums for record in records)

    def _free_reference(self) -> None:
        self.run, self.parts = replace(self.run, reference=None), replace(self.parts, reference_model=None)
        self.__dict__["ref_model"] = None
        gc.collect()


def is_desirable(record: Record) -> bool:
    """Return whether the reader marked the completion as the better one, or as desirable."""
    assert record.advantages is not None
    return bool(record.advantages[0] > 0)


def _log_ratio(scored: Record, record: Record) -> float:
    """Return the weighted log-ratio of a completion that the policy and the reference have scored."""
    assert scored.old is not None
    assert record.reference is not None
    assert record.advantages is not None
    weights = record.advantages.abs() / record.advantages.abs().max()
    return float((weights * (scored.old - record.reference)).sum())

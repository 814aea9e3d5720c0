"""The base of DPO and KTO: offline training on preferences beside a reference."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from transformers import EvalPrediction

from lowpeak.arguments import PreferenceSettings
from lowpeak.data import check_text_only
from lowpeak.heads import media_token_ids, num_embeddings
from lowpeak.memory import Phase
from lowpeak.records import Record
from lowpeak.setup import longest_row
from lowpeak.trainers.offline import OfflineTrainer
from lowpeak.training import StepBatches, score_records


class PreferenceTrainer(OfflineTrainer):
    """Trains on preferences, with TRL's constructor; the reference is scored once per step, before its first backward.

    `compute_metrics` gets implicit rewards, `beta * log_ratio`: see `predict_rows`.
    """

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

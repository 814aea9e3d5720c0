"""The base of DPO and KTO: offline training on preferences beside a reference."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers import EvalPrediction

from lowpeak.arguments import PreferenceSettings
from lowpeak.data import check_text_only
from lowpeak.errors import ArgumentError
from lowpeak.heads import media_token_ids, num_embeddings
from lowpeak.records import Record
from lowpeak.setup import longest_row
from lowpeak.trainers.offline import OfflineTrainer
from lowpeak.training import StepBatches


class PreferenceTrainer(OfflineTrainer):
    """Trains on preferences, with TRL's constructor; the reference is scored once per step, before its first backward."""

    def __init__(
        self,
        model: Any,
        ref_model: Any = None,
        args: Any = None,
        data_collator: Any = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        compute_metrics: Any = None,
        callbacks: list[Any] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        quantization_config: Any = None,
        peft_config: Any = None,
        **others: Any,
    ) -> None:
        if compute_metrics is not None:
            raise ArgumentError(
                "compute_metrics is not supported: TRL passes it logits, which are never formed here; evaluate() returns the loss "
                "and the metrics of preferences."
            )
        super().__init__(
            model,
            args,
            data_collator,
            train_dataset,
            eval_dataset,
            processing_class,
            None,
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
        raise ArgumentError(f"a {type(self).__name__} predicts nothing: evaluate() returns its metrics.")

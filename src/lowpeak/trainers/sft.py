"""Supervised training: loss = -mean of the loss tokens' log-probs over the whole step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial, reduce
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import EvalPrediction
from transformers.trainer_pt_utils import nested_concat, nested_numpify

from lowpeak.algorithms import Algorithm, make_supervised
from lowpeak.arguments import SupervisedSettings, resolve_supervised
from lowpeak.data import SupervisedReader, check_supervised_columns, check_text_only
from lowpeak.errors import ArgumentError, LowpeakError, fail_on_exit
from lowpeak.heads import media_token_ids, num_embeddings
from lowpeak.records import Record
from lowpeak.setup import longest_row
from lowpeak.trainers.configs import CommonConfig, SFTConfig
from lowpeak.trainers.constructor import check_kinds
from lowpeak.trainers.offline import OfflineTrainer
from lowpeak.training import StepBatches

_PREPROCESS = (
    "preprocess_logits_for_metrics: the logits of a whole dataset are too large to keep, so pass a function that reduces "
    "those of a row, such as `lambda logits, labels: logits.argmax(-1)`"
)


class SFTTrainer(OfflineTrainer):
    """Trains a language model on prompt-completion, conversational, text or tokenized rows, with TRL's constructor.

    from lowpeak import SFTConfig, SFTTrainer

    SFTTrainer(model="Qwen/Qwen2.5-0.5B", args=SFTConfig(output_dir="out"), train_dataset=data).train()

    `formatting_func(row)` returns the text that is trained on. `compute_metrics` needs `preprocess_logits_for_metrics(logits,
    labels)`, which gets one row at a time ([1, L, V] and [1, L], -100 for tokens without loss) in an extra forward pass.
    """

    config_class: ClassVar[type[CommonConfig]] = SFTConfig
    columns: ClassVar[str] = "prompt and completion, messages, conversations, text, or input_ids"

    def __init__(
        self,
        model: Any,
        args: Any = None,
        data_collator: Any = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        compute_loss_func: Any = None,
        compute_metrics: Callable[[EvalPrediction], dict[str, float]] | None = None,
        callbacks: list[Any] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        optimizer_cls_and_kwargs: tuple[type, dict[str, Any]] | None = None,
        preprocess_logits_for_metrics: Callable[[Tensor, Tensor], Any] | None = None,
        quantization_config: Any = None,
        peft_config: Any = None,
        formatting_func: Callable[[Mapping[str, Any]], str] | None = None,
        **unsupported: Any,
    ) -> None:
        check_kinds(
            compute_metrics=compute_metrics,
            preprocess_logits_for_metrics=preprocess_logits_for_metrics,
            formatting_func=formatting_func,
        )
        if compute_metrics is not None and preprocess_logits_for_metrics is None:
            raise ArgumentError(f"compute_metrics needs {_PREPROCESS}.")
        self.formatting_func = formatting_func
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
            optimizer_cls_and_kwargs,
            quantization_config=quantization_config,
            peft_config=peft_config,
            compute_loss_func=compute_loss_func,
            **unsupported,
        )
        self.preprocess_logits_for_metrics = preprocess_logits_for_metrics

    @staticmethod
    def resolve(args: Any) -> SupervisedSettings:
        return resolve_supervised(args)

    @staticmethod
    def make_algorithm(settings: SupervisedSettings) -> Algorithm:
        return make_supervised(settings.loss_type)

    def make_reader(self) -> SupervisedReader:
        settings: SupervisedSettings = self.parts.settings
        return SupervisedReader(
            self.parts.tokenizer,
            max_length=longest_row(settings.max_length, self.parts.policy),
            completion_only=settings.completion_only_loss,
            assistant_only=settings.assistant_only_loss,
            chat_template_kwargs=settings.chat_template_kwargs,
            text_field=settings.dataset_text_field,
            num_embeddings=num_embeddings(self.parts.policy),
            media_token_ids=media_token_ids(self.parts.policy),
            formatting_func=self.formatting_func,
            report_idle=self.parts.row_effects.add,
        )

    def check_row(self, row: Any, where: str, settings: SupervisedSettings) -> None:
        check_text_only(row, where)
        if self.formatting_func is None:
            check_supervised_columns(row, settings.dataset_text_field, where)

    def predict_rows(self, step: StepBatches, records: Sequence[Record]) -> EvalPrediction:
        """Return the preprocessed logits of every row, and its labels; rows are padded with -100, as in transformers."""
        ranks, device = self.run.strategy.ranks, self.run.logprob_settings.device
        preprocess: Any = self.preprocess_logits_for_metrics
        if preprocess is None:
            raise ArgumentError(f"predict() needs {_PREPROCESS}.")
        local: dict[int, tuple[Any, Any]] = {}
        for first in range(0, len(records), ranks.world_size):
            # A rank without a row left repeats row 0: a sharded model's forward needs all ranks.
            row = first + ranks.rank if first + ranks.rank < len(records) else 0
            ids_1L, labels_1L = (each.to(device) for each in _ids_and_labels(records[row]))
            with torch.no_grad():
                logits = self.model_wrapped(input_ids=ids_1L).logits
                with fail_on_exit(LowpeakError, "preprocess_logits_for_metrics"):
                    preprocessed = preprocess(logits, labels_1L)
                local[row] = (_arrays(preprocessed), nested_numpify(labels_1L))
        by_row = reduce(lambda merged, part: {**merged, **part}, ranks.gather(local))
        rows = [by_row[row] for row in range(len(records))]
        while len(rows) > 1:  # merge in pairs: appending one by one would copy each row many times
            rows = [reduce(partial(nested_concat, padding_index=-100), rows[i : i + 2]) for i in range(0, len(rows), 2)]
        return EvalPrediction(*rows[0])


def _arrays(preprocessed: Any) -> Any:
    """Return the result of preprocess_logits_for_metrics as arrays; ArgumentError if it has no tensors."""
    try:
        return nested_numpify(preprocessed)
    except (AttributeError, TypeError) as error:
        raise ArgumentError(
            f"preprocess_logits_for_metrics returned {preprocessed!r:.80}, a {type(preprocessed).__name__}; return a tensor, "
            "or a tuple or a dict of tensors."
        ) from error


def _ids_and_labels(record: Record) -> tuple[Tensor, Tensor]:
    """Return a row's token ids, and its labels with -100 for tokens without loss: [1, L] each."""
    prompt, completion = torch.tensor(record.prompt_ids), record.completion
    labels = torch.where(completion.loss_mask, completion.ids.long(), -100)
    ids_L = torch.cat([prompt, completion.ids.long()])
    return ids_L[None], torch.cat([torch.full_like(prompt, -100), labels])[None]

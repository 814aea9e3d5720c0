"""Reward models: a classifier with one label learns to score the chosen completion above the rejected one."""

from __future__ import annotations

import copy
import logging
from collections.abc import Sequence
from functools import reduce
from typing import Any, ClassVar

import numpy as np
from torch import nn
from transformers import AutoModelForSequenceClassification, EvalPrediction

from lowpeak.algorithms import Algorithm, make_reward_model
from lowpeak.arguments import NOT_PARALLEL, ModelSettings, RewardModelSettings, resolve_reward_model
from lowpeak.data import PreferenceReader, check_preference_columns, check_text_only, flatten_pairs
from lowpeak.errors import ArgumentError, ModelError
from lowpeak.heads import classifier_of, media_token_ids, num_embeddings
from lowpeak.models import SCORE_HEAD, HeadKind, from_pretrained, load_policy, log_rounding
from lowpeak.records import Record
from lowpeak.setup import longest_row
from lowpeak.trainers.configs import CommonConfig, RewardConfig
from lowpeak.trainers.offline import OfflineTrainer
from lowpeak.training import StepBatches, score

logger = logging.getLogger(__name__)

_HEAD = "score."  # how names of a score head's tensors begin


class RewardTrainer(OfflineTrainer):
    """Trains a reward model on rows with `chosen` and `rejected`, with TRL's constructor.

    from lowpeak import RewardConfig, RewardTrainer

    RewardTrainer(model="Qwen/Qwen2.5-0.5B", args=RewardConfig(output_dir="out"), train_dataset=data).train()

    It saves a sequence classifier in the Hugging Face layout, for `reward_funcs="out"`. `compute_metrics` gets
    `predictions` [pairs, 2], the scores of chosen and rejected, and `label_ids` [pairs] of zeros: the chosen one is better.
    """

    config_class: ClassVar[type[CommonConfig]] = RewardConfig
    columns: ClassVar[str] = "chosen and rejected, with or without prompt"
    auto_class: ClassVar[Any] = AutoModelForSequenceClassification
    head: ClassVar[HeadKind] = SCORE_HEAD

    @staticmethod
    def resolve(args: Any) -> RewardModelSettings:
        return resolve_reward_model(args)

    @staticmethod
    def load_model(model: Any, peft_config: Any, args: Any, settings: RewardModelSettings) -> nn.Module:
        """Load the classifier by name, path or instance; with `peft_config`, under an adapter.

        A checkpoint without a score head, such as a causal language model's, gets a new one, random by `seed`.
        """
        if args.model_parallel != NOT_PARALLEL:
            raise ArgumentError("reward models are not trained under tensor parallelism: use fsdp2 or zero3.")
        if getattr(peft_config, "task_type", None) == "CAUSAL_LM":
            raise ArgumentError(
                "a reward model is a classifier: set task_type='SEQ_CLS' in peft_config in place of 'CAUSAL_LM'."
            )
        if isinstance(model, str):
            of_base = settings.model if peft_config is None else settings.model.of_base()
            loaded, is_new = _load_named(model, of_base, args.seed)
            log_rounding(model, loaded, of_base)
            if is_new and peft_config is not None and peft_config.task_type != "SEQ_CLS":  # peft does it for this task
                peft_config = copy.copy(peft_config)
                peft_config.modules_to_save = sorted({*(peft_config.modules_to_save or ()), "score"})
                logger.warning(
                    "The new head is trained and saved, too: modules_to_save=%s.", peft_config.modules_to_save
                )
            policy = load_policy(loaded, peft_config=peft_config)
        else:
            policy = load_policy(model, settings.model, peft_config=peft_config)
        classifier_of(policy)  # raises for a model without a score head
        return policy

    @staticmethod
    def make_algorithm(settings: RewardModelSettings) -> Algorithm:
        return make_reward_model(settings.center_rewards_coefficient)

    @staticmethod
    def set_pad_token(tokenizer: Any, policy: nn.Module) -> Any:
        """Set the same pad token in both: a classifier reads its score at the last token before the padding."""
        if tokenizer.pad_token_id is None:
            tokenizer = copy.deepcopy(tokenizer)
            tokenizer.pad_token = tokenizer.eos_token
        classifier_of(policy).config.get_text_config().pad_token_id = tokenizer.pad_token_id
        return tokenizer

    def make_reader(self) -> PreferenceReader:
        """Return the reader of two records per row; each takes one more position of the context, for its score."""
        parts = self.parts
        return PreferenceReader(
            parts.tokenizer,
            max_length=longest_row(parts.settings.max_length, parts.policy, reserved=1),
            chat_template_kwargs=parts.settings.chat_template_kwargs,
            num_embeddings=num_embeddings(parts.policy),
            media_token_ids=media_token_ids(parts.policy),
            report_idle=parts.row_effects.add,
        )

    @staticmethod
    def records_of(items: Sequence[Any]) -> list[Record]:
        return flatten_pairs(items)

    def num_tokens(self, records: Sequence[Record]) -> int:
        return super().num_tokens(records) - len(records)

    def check_row(self, row: Any, where: str, settings: RewardModelSettings) -> None:
        check_text_only(row, where)
        check_preference_columns(row, where)

    def predict_rows(self, step: StepBatches, records: Sequence[Record]) -> EvalPrediction:
        """Return the scores of every pair, from a forward pass besides that of the loss."""
        scored = score(self.model_wrapped, step.micro_batches, self.run.logprob_settings, values=True, logprobs=False)
        local: dict[int, float] = {}
        for batch, result in zip(step.micro_batches, scored, strict=True):
            local |= zip(batch.record_indices, result["values"].tolist(), strict=False)  # a masked batch has no record
        by_row = reduce(lambda merged, part: {**merged, **part}, self.run.strategy.ranks.gather(local))
        scores = np.array([by_row[row] for row in range(len(records))], dtype=np.float32).reshape(-1, 2)
        return EvalPrediction(predictions=scores, label_ids=np.zeros(len(scores), dtype=np.int64))


def _load_named(name: str, settings: ModelSettings, seed: int) -> tuple[nn.Module, bool]:
    """Load the classifier of a name or path; return it and whether its head is new, which is logged."""
    options = settings.load_kwargs
    loaded = from_pretrained(
        AutoModelForSequenceClassification, name, may_lack=_HEAD, num_labels=1, output_loading_info=True, **options
    )
    model, report = loaded if isinstance(loaded, tuple) else (loaded, {"missing_keys": (), "mismatched_keys": ()})
    num_labels = [shape[0] for key, shape, _ in report["mismatched_keys"] if key.startswith(_HEAD)]
    if num_labels and not options.get("ignore_mismatched_sizes", False):
        raise ModelError(
            f"{name!r} cannot be loaded as a classifier with one label: its score head has {num_labels[0]} outputs; choose a model "
            "with one label, or one without a head."
        )
    is_new = bool(num_labels) or any(key.startswith(_HEAD) for key in report["missing_keys"])
    if is_new:
        logger.warning("%r has no score head: it starts with a new one, random by seed %d.", name, seed)
    return model, is_new

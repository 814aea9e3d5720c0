"""Reward models: a classifier with one label learns to score the chosen answer above the rejected one."""

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
from lowpeak.arguments import WHOLE, CommonConfig, RewardConfig
from lowpeak.data import PreferenceReader, check_preference_columns, flat, read_pairs
from lowpeak.errors import ArgumentError, ModelError
from lowpeak.logprobs import classifier_of
from lowpeak.models import SCORES, Head, from_pretrained, load_policy, num_embeddings
from lowpeak.records import Record
from lowpeak.trainers.offline import OfflineTrainer, longest_row
from lowpeak.training import StepWork, score

logger = logging.getLogger(__name__)

_HEAD = "score."  # how names of a score head's tensors begin


class RewardTrainer(OfflineTrainer):
    """Trains a reward model on rows with `chosen` and `rejected`; TRL's constructor.

    from lowpeak import RewardConfig, RewardTrainer

    RewardTrainer(model="Qwen/Qwen2.5-0.5B", args=RewardConfig(output_dir="out"), train_dataset=data).train()

    What it saves is a sequence classifier in the Hugging Face layout: `reward_funcs="out"` judges with it. `compute_metrics` gets
    `predictions` [pairs, 2], the scores of chosen and rejected, and `label_ids` [pairs] of zeros: the chosen one is the better.
    """

    config_class: ClassVar[type[CommonConfig]] = RewardConfig
    columns: ClassVar[str] = "chosen and rejected, with or without prompt"
    auto: ClassVar[Any] = AutoModelForSequenceClassification
    head: ClassVar[Head] = SCORES

    @staticmethod
    def load_model(model: Any, args: Any, peft_config: Any) -> nn.Module:
        """The classifier to train, by name, path or instance; with `peft_config`, under an adapter.

        A checkpoint without a score head (a causal language model's) starts one: it gets a new head, drawn from `seed`.
        """
        if args.cut != WHOLE:
            raise ArgumentError("reward models are not trained under tensor parallelism: use fsdp2 or zero3.")
        if getattr(peft_config, "task_type", None) == "CAUSAL_LM":
            raise ArgumentError(
                "a reward model is a classifier: set task_type='SEQ_CLS' in peft_config in place of 'CAUSAL_LM'."
            )
        is_new = False
        if isinstance(model, str):
            model, is_new = _load_named(model, args)
            policy = load_policy(model, None, trust_remote_code=False, peft_config=peft_config)
        else:
            trusted = args.trust_remote_code
            policy = load_policy(model, args.model_init_kwargs, trust_remote_code=trusted, peft_config=peft_config)
        classifier = classifier_of(policy)
        if is_new and not any(weight.requires_grad for weight in classifier.score.parameters()):
            raise ArgumentError(
                "the checkpoint has no score head, and the adapter would leave the new one as it was drawn: pass "
                "LoraConfig(modules_to_save=['score'], ...)."
            )
        return policy

    @staticmethod
    def make_algorithm(args: Any) -> Algorithm:
        return make_reward_model(args.center_rewards_coefficient or 0.0)

    def load(self, model: Any, args: Any, processing_class: Any, peft_config: Any) -> tuple[nn.Module, Any]:
        """The base's way; tokenizer and model agree on what pads rows, because a classifier looks for the last token before it."""
        policy, tokenizer = super().load(model, args, processing_class, peft_config)
        if tokenizer.pad_token_id is None:
            tokenizer = copy.deepcopy(tokenizer)
            tokenizer.pad_token = tokenizer.eos_token
        classifier_of(policy).config.get_text_config().pad_token_id = tokenizer.pad_token_id
        return policy, tokenizer

    def make_reader(self, args: Any, policy: nn.Module, tokenizer: Any) -> PreferenceReader:
        """Two records a row; the slot of each takes one place of the context."""
        return PreferenceReader(
            tokenizer,
            max_length=longest_row(args, policy, reserved=1),
            chat_template_kwargs=args.chat_template_kwargs,
            num_embeddings=num_embeddings(policy),
        )

    @staticmethod
    def records_of(items: Sequence[Any]) -> list[Record]:
        return flat(items)

    def num_tokens(self, records: Sequence[Record]) -> int:
        return super().num_tokens(records) - len(records)

    def check_row(self, args: Any, row: Any, where: str) -> None:
        check_preference_columns(row, where)

    def read(self, data: Any) -> list[Record]:
        return read_pairs(data, self.reader)

    def predict_rows(self, work: StepWork, records: Sequence[Record]) -> EvalPrediction:
        """Return the scores of every pair, formed in a forward pass beside that of the loss."""
        scored = score(self.model_wrapped, work.micro_batches, self.run.core, values=True, logprobs=False)
        own: dict[int, float] = {}
        for batch, result in zip(work.micro_batches, scored, strict=True):
            own |= zip(batch.record_indices, result["values"].tolist(), strict=False)  # a masked batch has no record
        found = reduce(lambda merged, part: {**merged, **part}, self.run.strategy.ranks.gather(own))
        scores = np.array([found[row] for row in range(len(records))], dtype=np.float32).reshape(-1, 2)
        return EvalPrediction(predictions=scores, label_ids=np.zeros(len(scores), dtype=np.int64))


def _load_named(name: str, args: Any) -> tuple[nn.Module, bool]:
    """The classifier of a name or path, and whether its head is new, which the log says."""
    given = {"dtype": "auto", "trust_remote_code": args.trust_remote_code, **(args.model_init_kwargs or {})}
    found = from_pretrained(
        AutoModelForSequenceClassification, name, may_lack=_HEAD, num_labels=1, output_loading_info=True, **given
    )
    model, report = found if isinstance(found, tuple) else (found, {"missing_keys": (), "mismatched_keys": ()})
    others = [there[0] for key, there, _ in report["mismatched_keys"] if key.startswith(_HEAD)]
    if others and not given.get("ignore_mismatched_sizes", False):
        raise ModelError(
            f"{name!r} cannot be loaded as a classifier with one label: its score head gives {others[0]} numbers; choose a model "
            "with one label, or one without a head."
        )
    is_new = bool(others) or any(key.startswith(_HEAD) for key in report["missing_keys"])
    if is_new:
        logger.warning("%r has no score head: it starts with a new one, drawn from seed %d.", name, args.seed)
    return model, is_new

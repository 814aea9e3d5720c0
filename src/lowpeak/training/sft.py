"""Supervised training on the same log-prob core: loss = -mean of the counted tokens' log-probs over the whole step."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import nn

from lowpeak.algorithms.algorithm import Algorithm
from lowpeak.algorithms.supervised import make_supervised
from lowpeak.data.supervised import SupervisedReader, read_records
from lowpeak.records import Record
from lowpeak.training.arguments import CommonConfig, SFTConfig
from lowpeak.training.models import load_policy
from lowpeak.training.offline_trainer import OfflineTrainer, longest_row
from lowpeak.wrapped import num_embeddings


class SFTTrainer(OfflineTrainer):
    """Trains a language model on prompt-completion, conversational, text or tokenized rows; TRL's constructor.

    from lowpeak import SFTConfig, SFTTrainer

    SFTTrainer(model="Qwen/Qwen2.5-0.5B", args=SFTConfig(output_dir="out"), train_dataset=data).train()
    """

    config_class: ClassVar[type[CommonConfig]] = SFTConfig
    columns: ClassVar[str] = "prompt and completion, messages, text, or input_ids"

    @staticmethod
    def load_model(model: Any, args: Any, peft_config: Any) -> nn.Module:
        """A causal language model."""
        return load_policy(
            model,
            args.model_init_kwargs,
            trust_remote_code=args.trust_remote_code,
            peft_config=peft_config,
            cut=args.cut,
            device=None if args.fsdp else args.device,
        )

    @staticmethod
    def make_algorithm(args: Any) -> Algorithm:
        """Maximum likelihood."""
        return make_supervised()

    @staticmethod
    def make_reader(args: Any, policy: nn.Module, tokenizer: Any) -> SupervisedReader:
        """One record a row."""
        return SupervisedReader(
            tokenizer,
            max_length=longest_row(args, policy),
            completion_only=args.completion_only_loss,
            assistant_only=args.assistant_only_loss,
            chat_template_kwargs=args.chat_template_kwargs,
            text_field=args.dataset_text_field,
            num_embeddings=num_embeddings(policy),
        )

    def read(self, data: Any) -> list[Record]:
        """The rows of which a token counts."""
        return read_records(data, self.reader)

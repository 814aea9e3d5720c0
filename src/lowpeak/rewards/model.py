"""A reward that is a model: a sequence classifier with one label reads prompt and completion and gives its logit.

It differs from TRL in how rows are batched (by length, under a token budget, instead of all at once), and in that a
checkpoint without a trained classification head is an error instead of a warning.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lowpeak.errors import ArgumentError, LowpeakError, ModelError, first_line
from lowpeak.logprobs import evaluated
from lowpeak.memory import is_exhaustion
from lowpeak.models import check_dtype, check_shapes, name_damaged_file, num_embeddings, reads_weights, without_weights
from lowpeak.ranks import Ranks

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class ModelReward:
    """The logit of a one-label sequence classifier, `model(tokenizer(prompt + completion)).logits[:, 0]`, per row.

    `model` is an instance, a name or a path; without a tokenizer it is loaded from where the model came from. A batch
    has at most `max_tokens` tokens, padding included, unless one row alone has more. The model stays as it is passed
    in: its mode and its config's padding token are restored after each call. `use` replaces it by its prepared
    (placed, sharded) form; with the `device` that it will be prepared for, rank 0 alone may read it (`reads_weights`).

    Raises:
        ModelError: the name or path has no sequence classifier with a trained head, or no tokenizer.
        ArgumentError: an instance has more than one label, or no tokenizer and no name to load one from.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | nn.Module,
        tokenizer: PreTrainedTokenizerBase | None = None,
        name: str | None = None,
        *,
        max_tokens: int = 16384,
        model_kwargs: Mapping[str, Any] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        device: torch.device | None = None,
    ) -> None:
        options = dict(model_kwargs or {})
        self.model = model if isinstance(model, nn.Module) else load_classifier(os.fspath(model), options, device)
        origin = str(getattr(_config(self.model), "_name_or_path", "")) if isinstance(model, nn.Module) else str(model)
        self.name = name or origin.rstrip("/").split("/")[-1] or type(self.model).__name__
        if getattr(_config(self.model), "num_labels", 1) != 1:
            raise ArgumentError(
                f"Reward model '{self.name}' has {_config(self.model).num_labels} labels; a reward is one number: "
                "load it with num_labels=1."
            )
        self.tokenizer = load_tokenizer(origin, self.name, options) if tokenizer is None else tokenizer
        self.max_tokens = max_tokens
        self.ranks: Ranks | None = None
        self._template_kwargs = dict(chat_template_kwargs or {})
        self._continues = bool(self._template_kwargs.pop("continue_final_message", False))
        self._pad = _pad_id(self.tokenizer, self.name, num_embeddings(self.model))
        self._ready: Callable[[], AbstractContextManager[Any]] = nullcontext
        self._device: torch.device | None = None

    def use(self, frozen: Any, ranks: Ranks | None = None, device: torch.device | None = None) -> None:
        """Judge with the model's prepared form: `frozen.model`, while its context `frozen.ready()` is open.

        `device` is where it computes where its parameters wait on another kind of device, or nowhere; else theirs.
        Where its weights are shared by `ranks`, each of them has to make every call, also with no rows.
        """
        self.model, self._ready, self.ranks, self._device = frozen.model, frozen.ready, ranks, device

    def __call__(
        self, prompts: Sequence[Any], completions: Sequence[Any], completion_ids: Sequence[list[int]], **columns: Any
    ) -> list[float | None]:
        """Return one logit per row; rows of messages are read through the tokenizer's chat template."""
        with self.ranks.together() if self.ranks else nullcontext():
            ids = self._ids(prompts, completions, columns.get("chat_template_kwargs"))
        rewards: list[float | None] = [None] * len(ids)
        with self._ready(), _judging(self.model, self._pad):
            for batch in batches_by_length([len(row) for row in ids], self.max_tokens):
                logits = self._logits([ids[row] for row in batch]).tolist()
                for row, logit in zip(batch, logits, strict=True):
                    rewards[row] = logit
        return rewards

    def _ids(
        self, prompts: Sequence[Any], completions: Sequence[Any], options: Sequence[Any] | None = None
    ) -> list[list[int]]:
        rows = zip(prompts, completions, options or [None] * len(prompts), strict=True)
        texts = [self._text(*row) for row in rows]
        return self.tokenizer(texts, add_special_tokens=False)["input_ids"] if texts else []

    def _text(self, prompt: Any, completion: Any, options: Mapping[str, Any] | None) -> str:
        if isinstance(prompt, str):
            return prompt + completion
        if not getattr(self.tokenizer, "chat_template", None):
            raise ModelError(f"The tokenizer of reward model '{self.name}' has no chat template for rows of messages.")
        # The completion repeats the message that it continues, which a row's options may ask for.
        continues = (options or {}).get("continue_final_message")
        continues = self._continues if continues is None else continues
        begun = continues and bool(prompt) and prompt[-1]["role"] == "assistant"
        messages = [*(prompt[:-1] if begun else prompt), *completion]
        return str(self.tokenizer.apply_chat_template(messages, tokenize=False, **self._template_kwargs))

    def _logits(self, ids: Sequence[Sequence[int]]) -> Tensor:
        device = next(self.model.parameters()).device
        if self._device is not None and device.type != self._device.type:
            device = self._device
        lengths_B = torch.tensor([len(row) for row in ids])
        mask_BL = torch.arange(int(lengths_B.max())) < lengths_B[:, None]
        input_ids_BL = torch.full(mask_BL.shape, self._pad)
        input_ids_BL[mask_BL] = torch.tensor([token for row in ids for token in row])
        output = self.model(input_ids=input_ids_BL.to(device), attention_mask=mask_BL.long().to(device))
        return output.logits[:, 0].float()


def batches_by_length(lengths: Sequence[int], max_tokens: int) -> Iterator[list[int]]:
    """Yield indices of rows of like length, longest first, so that rows times longest stays within `max_tokens`."""
    batch: list[int] = []
    for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
        if batch and (len(batch) + 1) * lengths[batch[0]] > max_tokens:
            yield batch
            batch = []
        batch.append(row)
    if batch:
        yield batch


def load_classifier(name: str, options: Mapping[str, Any], device: torch.device | None = None) -> nn.Module:
    """Return the one-label sequence classifier of a name or path, in its dtype; without weights where rank 0 hands them out."""
    from transformers import AutoModelForSequenceClassification

    check_dtype(options)
    with _reading(name, f"Reward model '{name}' cannot be loaded"):
        if device is not None and not reads_weights(device):
            return without_weights(AutoModelForSequenceClassification, name, {"num_labels": 1, **options})
        reporting = {"ignore_mismatched_sizes": True, "output_loading_info": True}
        model, report = AutoModelForSequenceClassification.from_pretrained(
            name, num_labels=1, **reporting, **{"dtype": "auto", **options}
        )
    check_shapes(name, report)
    if report["missing_keys"]:
        raise ModelError(
            f"'{name}' is no reward model: its checkpoint lacks {', '.join(sorted(report['missing_keys']))}, "
            "which would be random."
        )
    return model.eval()


def load_tokenizer(origin: str, name: str, options: Mapping[str, Any]) -> PreTrainedTokenizerBase:
    """Return the tokenizer that lies with the model at `origin`."""
    from transformers import AutoTokenizer

    if not origin:
        raise ArgumentError(
            f"Reward model '{name}' was passed in without a tokenizer, and it has no name to load one from: "
            "pass it in reward_processing_classes."
        )
    shared = {key: options[key] for key in ("revision", "trust_remote_code", "cache_dir", "token") if key in options}
    with _reading(
        origin, f"The tokenizer of reward model '{origin}' cannot be loaded, pass one in reward_processing_classes"
    ):
        tokenizer = AutoTokenizer.from_pretrained(origin, **shared)
    # Where a folder has none, transformers makes up one of the model's type that knows no words.
    if set(tokenizer.get_vocab()) <= set(tokenizer.all_special_tokens):
        raise ModelError(f"Reward model '{origin}' has no tokenizer: pass one in reward_processing_classes.")
    return tokenizer


@contextmanager
def _reading(origin: str, failure: str) -> Iterator[None]:
    """Raise ModelError for whatever a file leads transformers and tokenizers to; memory that runs out stays what it is."""
    try:
        with name_damaged_file(origin, ModelError, "copy or download the reward model again"):
            yield
    except LowpeakError:
        raise
    except Exception as error:
        if is_exhaustion(error):
            raise
        raise ModelError(f"{failure}: {first_line(error)}") from error


def _config(model: nn.Module) -> Any:
    config = getattr(model, "config", None)
    if config is None:
        raise ArgumentError(f"A reward model must be a transformers model, not {type(model).__name__}.")
    return config


def _pad_id(tokenizer: PreTrainedTokenizerBase, name: str, num_tokens: int | None) -> int:
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    if pad is None:
        raise ModelError(f"The tokenizer of reward model '{name}' has neither a padding nor an end-of-sequence token.")
    if num_tokens is not None and pad >= num_tokens:
        raise ModelError(
            f"The tokenizer of reward model '{name}' pads with token {pad}, and the model embeds {num_tokens} tokens: use the "
            "model's own tokenizer with its tokenizer_config.json."
        )
    return int(pad)


@contextmanager
def _judging(model: nn.Module, pad: int) -> Iterator[None]:
    """Eval mode without gradients; the classifier finds each row's last token by its config's padding token."""
    text_config = _config(model).get_text_config()
    own_pad = text_config.pad_token_id
    text_config.pad_token_id = pad
    try:
        with evaluated(model):
            yield
    finally:
        text_config.pad_token_id = own_pad

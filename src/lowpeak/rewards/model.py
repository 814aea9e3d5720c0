"""Reward models: the logit of a sequence classifier with one label, for prompt and completion.

It differs from TRL in two ways. Sequences are batched by length under a token budget, not all at once. A checkpoint without
a trained classification head is an error, not a warning.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lowpeak.errors import ArgumentError, LowpeakError, ModelError, first_line
from lowpeak.heads import eval_mode, num_embeddings
from lowpeak.memory import is_out_of_memory
from lowpeak.models import check_load_options, check_shapes, init_without_weights, name_damaged_file, reads_weights
from lowpeak.ranks import Ranks

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


REWARD_BATCH_TOKENS = 16_384  # of a forward pass, padding included


class ModelReward:
    """The logit of a one-label sequence classifier: `model(tokenizer(prompt + completion)).logits[:, 0]`.

    `model` is an instance, a name or a path; the default tokenizer is loaded from the model's name or path. A batch has at
    most `max_tokens` tokens, padding included, unless a single sequence has more. Each call restores the model's mode and its
    config's padding token. `use` replaces the model by its prepared (placed, sharded) form; if the `device` for that is given,
    rank 0 alone may read the weights (`reads_weights`).

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
        max_tokens: int = REWARD_BATCH_TOKENS,
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
                f"Reward model '{self.name}' has {_config(self.model).num_labels} labels, but a reward is one number: "
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

    def replace_model(self, frozen: Any, ranks: Ranks | None = None, device: torch.device | None = None) -> None:
        """Compute rewards with the model's prepared form: `frozen.model`, inside its context `frozen.ready()`.

        The model computes on its parameters' device, or on `device` if they are offloaded to another kind of device. If its
        weights are sharded over `ranks`, each of these must make every call, even without completions.
        """
        self.model, self._ready, self.ranks, self._device = frozen.model, frozen.ready, ranks, device

    def __call__(
        self, prompts: Sequence[Any], completions: Sequence[Any], completion_ids: Sequence[list[int]], **columns: Any
    ) -> list[float | None]:
        """Return one logit per completion; messages are formatted by the tokenizer's chat template."""
        with self.ranks.propagate_errors() if self.ranks else nullcontext():
            ids = self._ids(prompts, completions, columns.get("chat_template_kwargs"))
        rewards: list[float | None] = [None] * len(ids)
        with self._ready(), _inference_mode(self.model, self._pad):
            for batch in batches_by_length([len(tokens) for tokens in ids], self.max_tokens):
                logits = self._logits([ids[i] for i in batch]).tolist()
                for i, logit in zip(batch, logits, strict=True):
                    rewards[i] = logit
        return rewards

    def _ids(
        self, prompts: Sequence[Any], completions: Sequence[Any], options: Sequence[Any] | None = None
    ) -> list[list[int]]:
        sequences = zip(prompts, completions, options or [None] * len(prompts), strict=True)
        texts = [self._text(*sequence) for sequence in sequences]
        return self.tokenizer(texts, add_special_tokens=False)["input_ids"] if texts else []

    def _text(self, prompt: Any, completion: Any, options: Mapping[str, Any] | None) -> str:
        if isinstance(prompt, str):
            return prompt + completion
        if not getattr(self.tokenizer, "chat_template", None):
            raise ModelError(
                f"The tokenizer of reward model '{self.name}' has no chat template, but the prompts are messages: set "
                "tokenizer.chat_template, or use string prompts."
            )
        continues = (options or {}).get("continue_final_message")
        continues = self._continues if continues is None else continues
        # The completion contains the text of the message that it continues, so the prompt's copy is dropped.
        is_continued = continues and bool(prompt) and prompt[-1]["role"] == "assistant"
        messages = [*(prompt[:-1] if is_continued else prompt), *completion]
        return str(self.tokenizer.apply_chat_template(messages, tokenize=False, **self._template_kwargs))

    def _logits(self, ids: Sequence[Sequence[int]]) -> Tensor:
        device = next(self.model.parameters()).device
        if self._device is not None and device.type != self._device.type:
            device = self._device
        lengths_B = torch.tensor([len(tokens) for tokens in ids])
        mask_BL = torch.arange(int(lengths_B.max())) < lengths_B[:, None]
        input_ids_BL = torch.full(mask_BL.shape, self._pad)
        input_ids_BL[mask_BL] = torch.tensor([token for tokens in ids for token in tokens])
        output = self.model(input_ids=input_ids_BL.to(device), attention_mask=mask_BL.long().to(device))
        return output.logits[:, 0].float()


def batches_by_length(lengths: Sequence[int], max_tokens: int) -> Iterator[list[int]]:
    """Yield the indices of batches of similar lengths, longest first, within `max_tokens` padded tokens."""
    batch: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        if batch and (len(batch) + 1) * lengths[batch[0]] > max_tokens:
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch


def load_classifier(name: str, options: Mapping[str, Any], device: torch.device | None = None) -> nn.Module:
    """Return the one-label sequence classifier of a name or path, in its dtype.

    If this rank does not read weights for `device`, the model has none: rank 0 sends them.
    """
    from transformers import AutoModelForSequenceClassification

    check_load_options(options)
    with _loading_errors(name, f"Reward model '{name}' cannot be loaded"):
        if device is not None and not reads_weights(device):
            return init_without_weights(AutoModelForSequenceClassification, name, {"num_labels": 1, **options})
        report_options = {"ignore_mismatched_sizes": True, "output_loading_info": True}
        model, report = AutoModelForSequenceClassification.from_pretrained(
            name, num_labels=1, **report_options, **{"dtype": "auto", **options}
        )
    check_shapes(name, report)
    if report["missing_keys"]:
        raise ModelError(
            f"'{name}' is not a reward model: its checkpoint lacks {', '.join(sorted(report['missing_keys']))}, "
            "which would be random; use a trained sequence classifier."
        )
    return model.eval()


def load_tokenizer(origin: str, name: str, options: Mapping[str, Any]) -> PreTrainedTokenizerBase:
    """Return the tokenizer stored with the model at `origin`."""
    from transformers import AutoTokenizer

    if not origin:
        raise ArgumentError(
            f"Reward model '{name}' was passed without a tokenizer, and has no name to load one from: "
            "pass one in reward_processing_classes."
        )
    shared = {key: options[key] for key in ("revision", "trust_remote_code", "cache_dir", "token") if key in options}
    with _loading_errors(
        origin, f"The tokenizer of reward model '{origin}' cannot be loaded, pass one in reward_processing_classes"
    ):
        tokenizer = AutoTokenizer.from_pretrained(origin, **shared)
    # For a folder without a tokenizer, transformers returns one of the model's type with an empty vocabulary.
    if set(tokenizer.get_vocab()) <= set(tokenizer.all_special_tokens):
        raise ModelError(f"Reward model '{origin}' has no tokenizer: pass one in reward_processing_classes.")
    return tokenizer


@contextmanager
def _loading_errors(origin: str, failure: str) -> Iterator[None]:
    """Convert errors of loading to ModelError, except for out-of-memory errors."""
    try:
        with name_damaged_file(origin, ModelError, "copy or download the reward model again"):
            yield
    except LowpeakError:
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raise ModelError(f"{failure}: {first_line(error)}") from error


def _config(model: nn.Module) -> Any:
    config = getattr(model, "config", None)
    if config is None:
        raise ArgumentError(f"A reward model must be a transformers model, got {type(model).__name__}.")
    return config


def _pad_id(tokenizer: PreTrainedTokenizerBase, name: str, num_tokens: int | None) -> int:
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    if pad is None:
        raise ModelError(
            f"The tokenizer of reward model '{name}' has neither a padding nor an end-of-sequence token: set "
            "tokenizer.pad_token."
        )
    if num_tokens is not None and pad >= num_tokens:
        raise ModelError(
            f"The tokenizer of reward model '{name}' pads with token {pad}, but the model embeds only {num_tokens} tokens: use "
            "the model's tokenizer with its tokenizer_config.json."
        )
    return int(pad)


@contextmanager
def _inference_mode(model: nn.Module, pad: int) -> Iterator[None]:
    """Set eval mode, disable gradients, and set the config's padding token to `pad` inside the block."""
    text_config = _config(model).get_text_config()
    config_pad, config_cache = text_config.pad_token_id, getattr(text_config, "use_cache", None)
    # The classifier finds each sequence's last token by it.
    text_config.pad_token_id = pad
    # No token follows, so keys and values would only take memory.
    text_config.use_cache = False
    try:
        with eval_mode(model):
            yield
    finally:
        text_config.pad_token_id, text_config.use_cache = config_pad, config_cache

"""The first half of building an offline run: settings, model and tokenizer, before a device is needed."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from torch import nn
from transformers import AutoTokenizer, set_seed

from lowpeak.algorithms import Algorithm
from lowpeak.arguments import OfflineSettings, TokenizerSettings, check_and_reset_arguments
from lowpeak.data import check_special_tokens
from lowpeak.errors import ArgumentError, LowpeakError, first_line
from lowpeak.heads import num_embeddings, transformers_model
from lowpeak.models import context_length, convert_trainable, disable_dropout, from_pretrained, load_tokenizer
from lowpeak.parallel import check_devices
from lowpeak.setup.preflight import check_outputs
from lowpeak.setup.prepare_run import RunParts, check_teacher_arguments, load_run_reference


@dataclass(frozen=True)
class OfflineInputs:
    """Models and tokenizer as the user passed them to an offline trainer, and whether an optimizer's class was passed."""

    model: Any
    processing_class: Any
    peft_config: Any
    has_optimizer_class: bool
    ref_model: Any = None


class OfflineHooks(Protocol):
    """The part of an offline trainer that differs between algorithms before the run is built."""

    def resolve(self, args: Any) -> OfflineSettings: ...

    def load_model(self, model: Any, peft_config: Any, args: Any, settings: Any) -> nn.Module: ...

    def make_algorithm(self, settings: Any) -> Algorithm: ...

    def set_pad_token(self, tokenizer: Any, policy: nn.Module) -> Any: ...


def prepare_offline(
    inputs: OfflineInputs, user_args: Any, hooks: OfflineHooks, check_inputs: Callable[[Any, Any], None]
) -> RunParts:
    """Resolve the arguments, then load and check the model and its tokenizer.

    `check_inputs(args, settings)` rejects data, optimizer or adapter before anything loads.
    """
    check_devices(bool(user_args.fsdp), user_args.model_parallel.tensor > 1)
    args = check_and_reset_arguments(user_args)
    settings = hooks.resolve(args)
    if inputs.has_optimizer_class:  # it has a storage format of its own
        settings = replace(settings, model=settings.model.with_users_optimizer())
    set_seed(args.seed)  # before anything is made: the first weights of an adapter, or a new head, are random
    check_inputs(args, settings)
    check_outputs(args)
    algorithm = hooks.make_algorithm(settings)
    check_teacher_arguments(algorithm, args)
    policy = hooks.load_model(inputs.model, inputs.peft_config, args, settings)
    tokenizer = load_tokenizer(inputs.processing_class, inputs.model, settings.model.trust_remote_code)
    tokenizer = change_tokenizer(tokenizer, transformers_model(policy), settings.tokenizer)
    check_special_tokens(tokenizer, num_embeddings(policy))
    tokenizer = hooks.set_pad_token(tokenizer, policy)
    reference = load_run_reference(policy, inputs, settings, args, tokenizer, algorithm)
    convert_trainable(policy, settings.model)
    if settings.model.disable_dropout:
        for model in filter(None, (policy, reference)):
            disable_dropout(model)
    return RunParts(user_args, args, settings, algorithm, policy, tokenizer, reference)


def change_tokenizer(tokenizer: Any, model: Any, settings: TokenizerSettings) -> Any:
    """Return the tokenizer, or a copy with the changes that the settings ask for, which the model's configs get too.

    The new end-of-sequence token ends a completion, and so do those that ended it before.
    """
    chosen = {"eos_token": settings.eos_token, "pad_token": settings.pad_token}
    tokens = {name: token for name, token in chosen.items() if token is not None}
    if not tokens and settings.chat_template_path is None:
        return tokenizer
    changed = copy.deepcopy(tokenizer)
    if settings.chat_template_path is not None:
        end = _take_template(changed, model, settings.chat_template_path)
        tokens = {"eos_token": end, **tokens} if end is not None else tokens
    for name, token in tokens.items():
        if token not in changed.get_vocab():
            raise ArgumentError(f"{name}={token!r} is not in the tokenizer's vocabulary: name a token that it has.")
        setattr(changed, name, token)
        setattr(model.config.get_text_config(), f"{name}_id", changed.convert_tokens_to_ids(token))
    if "eos_token" in tokens:
        _add_end_token(model, changed.eos_token_id)
    return changed


def _add_end_token(model: Any, end_id: int) -> None:
    generation = getattr(model, "generation_config", None)
    if generation is not None:
        before = generation.eos_token_id if isinstance(generation.eos_token_id, list) else [generation.eos_token_id]
        generation.eos_token_id = [end_id, *(number for number in before if number not in (None, end_id))]


def _take_template(tokenizer: Any, model: Any, name: str) -> str | None:
    """Set the chat template of a file, or that of a model and its added tokens; return the model's end-of-sequence token."""
    try:
        if name.endswith((".jinja", ".j2")):
            tokenizer.chat_template = Path(name).read_text(encoding="utf-8")
            return None
        source = from_pretrained(AutoTokenizer, name)
        tokenizer.chat_template = source.get_chat_template()
    except (LowpeakError, OSError, ValueError) as error:
        raise ArgumentError(
            f"chat_template_path={name!r} must be a .jinja or .j2 file, or the name or folder of a model with a chat template: "
            f"{first_line(error)}"
        ) from error
    known = tokenizer.get_vocab()
    tokenizer.add_tokens([each for each in source.added_tokens_decoder.values() if each.content not in known])
    embeddings = model.get_input_embeddings()
    if len(tokenizer) > embeddings.num_embeddings:
        if not embeddings.weight.requires_grad:
            raise ArgumentError(
                f"chat_template_path={name!r} adds tokens whose new embeddings the adapter would leave untrained: train without an "
                "adapter, or resize the model's embeddings and name the tokens in trainable_token_indices."
            )
        model.resize_token_embeddings(len(tokenizer))
    return source.eos_token


def longest_row(max_length: int | None, policy: nn.Module, reserved: int = 0) -> int | None:
    """Return the most tokens of a sequence: `max_length`, or the model's context minus `reserved`; None for no limit."""
    context = context_length(policy)
    limits = [max_length, None if context is None else context - reserved]
    return min((limit for limit in limits if limit is not None), default=None)

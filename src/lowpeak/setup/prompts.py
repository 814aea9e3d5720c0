"""Prompts of a run: their longest length, the end tokens of their completions, and the cursor over the dataset."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from lowpeak.arguments import OnlineSettings, PromptSettings, TeacherSettings
from lowpeak.data import DatasetCompletions, DatasetCursor, LabelReader, PromptReader, TeacherPrompts, make_cursor
from lowpeak.errors import ArgumentError, DataError
from lowpeak.heads import media_token_ids, num_embeddings
from lowpeak.models import context_length
from lowpeak.records import Prompt
from lowpeak.setup.prepare_run import OnlineParts


def context_name(prompts: PromptSettings, critic: nn.Module | None) -> str:
    """Return the limit of a sequence's length, in words: the shortest context of policy, critic and vLLM."""
    length = prompts.vllm_max_model_length
    context = "the model's context" if critic is None else "the model's context or its critic's"
    return context if length is None else f"{context} or vllm_max_model_length {length}"


def max_prompt_tokens(
    policy: nn.Module, critic: nn.Module | None, max_completion_length: int, max_model_length: int | None
) -> int | None:
    """Return the most tokens of a prompt; None for no limit. ArgumentError if completions leave no room."""
    contexts = [context_length(model) for model in (policy, critic) if model is not None]
    lengths = [length for length in (*contexts, max_model_length) if length is not None]
    context = min(lengths, default=None)
    if context is None:
        return None
    if context <= max_completion_length:
        raise ArgumentError(
            f"max_completion_length={max_completion_length} leaves no room for a prompt in the model's context of {context} "
            "tokens; lower it."
        )
    return context - max_completion_length


def check_end_tokens(stop_token_ids: Sequence[int], num_embeddings: int | None) -> None:
    """Raise ArgumentError for an end token that the model cannot generate."""
    beyond = [token for token in stop_token_ids if num_embeddings is not None and token >= num_embeddings]
    if beyond:
        raise ArgumentError(
            f"generation_kwargs has the end token {beyond[0]}, but the model embeds only {num_embeddings} tokens: remove it."
        )


def prompt_cursor(dataset: Any, reader: PromptReader, settings: OnlineSettings, args: Any) -> DatasetCursor[Prompt]:
    """Check all rows of the dataset, and that they are enough for a rollout; a stream starts again when it ends."""
    cursor = make_cursor(dataset, reader, args, settings.prompts.shuffle_dataset)
    prompts = cursor.rows_per_epoch
    if prompts is not None and prompts < settings.rollout.num_prompts:
        raise DataError(
            f"the dataset has {prompts} usable prompts and a rollout needs {settings.rollout.num_prompts} "
            f"({settings.rollout.num_sequences} completions, num_generations={settings.rollout.num_generations}): add rows, or "
            "lower per_device_train_batch_size, gradient_accumulation_steps or steps_per_generation."
        )
    return cursor


def report_idle_template(parts: OnlineParts, reader: PromptReader, rows: int | None) -> None:
    """Report a given teacher_prompt_template if the dataset's `rows` were read (None: a stream), and nothing is put into it."""
    if parts.teacher is None or parts.teacher.reads_successes or rows is None or reader.longest_of_teacher:
        return
    if "teacher_prompt_template" in parts.user_args.given:
        remedy = "no row has a 'privileged_context'; add the column, or remove it"
        parts.effects.add(f"teacher_prompt_template={parts.teacher.prompt_template!r}", remedy)


def teacher_prompts(teacher: TeacherSettings | None) -> TeacherPrompts | None:
    """Return how a teacher's prompts are made; None for a run without a teacher."""
    return None if teacher is None else TeacherPrompts(teacher.prompt_template, required=teacher.needs_context)


def dataset_completions(parts: OnlineParts) -> DatasetCompletions | None:
    """Return the dataset's completions that distillation trains on, if any."""
    if parts.teacher is None or not parts.teacher.dataset_share:
        return None
    reader = LabelReader(
        parts.tokenizer,
        chat_template_kwargs=chat_options(parts),
        num_embeddings=num_embeddings(parts.policy),
        media_token_ids=media_token_ids(parts.policy),
    )
    return DatasetCompletions(
        reader, parts.teacher.dataset_share, parts.args.seed, parts.settings.sampling.max_new_tokens
    )


def chat_options(parts: OnlineParts) -> dict[str, Any]:
    """Return the run's arguments of the chat template, the tools' schemas among them."""
    options = dict(parts.settings.prompts.chat_template_kwargs)
    return options if parts.toolset is None else {**options, "tools": parts.toolset.schemas}

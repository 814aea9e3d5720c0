"""Messages and chat templates: checks, template options and tokenization.

A prompt ends with the opening of a new assistant message, as in TRL, even after an assistant message. With
`continue_final_message` among the template's options, the last assistant message is continued instead. A row's
`chat_template_kwargs` and `tools` have priority over the run's settings.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from jinja2 import TemplateError

from lowpeak.errors import DataError

Messages = list[dict[str, Any]]

# Errors that templates raise themselves, and Python's errors on messages that a template does not expect.
TEMPLATE_ERRORS = (TemplateError, LookupError, TypeError, ValueError)


def check_messages(messages: Sequence[Any], where: str) -> Messages:
    """Return the messages, checked for a role and text or tool calls, without keys whose value is None.

    Arrow gives every message of a dataset the same keys and fills in None, which templates would print. Raises DataError,
    starting with `where`, for anything but text messages.
    """
    if not messages:
        raise DataError(f"{where} is an empty list of messages; remove the row or add a message.")
    return [_check_message(message, f"{where}, message {i},") for i, message in enumerate(messages)]


def _check_message(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise DataError(f"{where} must be a mapping with 'role' and 'content', got {message!r:.80}.")
    if message.get("content") is not None:
        _check_content(message["content"], where)
    elif not message.get("tool_calls"):
        raise DataError(f"{where} has no 'content'; it must be a mapping with 'role' and 'content'.")
    return {key: value for key, value in message.items() if value is not None}


def _check_content(content: Any, where: str) -> None:
    if not isinstance(content, str | list):
        raise DataError(f"{where} must have a string as content, got type {type(content).__name__}.")
    for part in content if isinstance(content, list) else ():
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind != "text":
            raise DataError(f"{where} has a content part of type {kind!r}; lowpeak trains on text only.")


def template_options(row: Mapping[str, Any], defaults: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return one row's template arguments: the run's `defaults`, updated by the row's `tools` and `chat_template_kwargs`.

    `tools` may be a list, in which Arrow fills keys that other rows' schemas have with None, or its JSON text.
    """
    options = dict(defaults)
    tools = row.get("tools")
    if isinstance(tools, str):
        try:
            tools = json.loads(tools)
        except json.JSONDecodeError as error:
            raise DataError(
                f"{where} has a 'tools' column that is not JSON: {error}; pass a list of schemas."
            ) from error
    # An empty list counts as none, because templates print a preamble for it.
    if tools:
        options["tools"] = _without_none(tools)
    row_options = row.get("chat_template_kwargs") or {}
    if not isinstance(row_options, Mapping):
        raise DataError(f"{where}: 'chat_template_kwargs' must be a mapping, got type {type(row_options).__name__}.")
    # Arrow fills keys that other rows have with None.
    return {**options, **{key: value for key, value in row_options.items() if value is not None}}


def _without_none(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_none(each) for key, each in value.items() if each is not None}
    return [_without_none(each) for each in value] if isinstance(value, list) else value


def prompt_options(messages: Messages, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the template's options to open a new assistant message, or to continue the last one."""
    rest = answer_options(options)
    if continued_text(messages, options):
        return {**rest, "add_generation_prompt": False, "continue_final_message": True}
    return {"add_generation_prompt": True, **rest}


def answer_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the template's options for a conversation that ends with its answer."""
    return {name: value for name, value in options.items() if name != "continue_final_message"}


def continued_text(messages: Messages, options: Mapping[str, Any]) -> str:
    """Return the text of the last message if completions continue it, else an empty string."""
    if not options.get("continue_final_message") or messages[-1].get("role") != "assistant":
        return ""
    return _text_of(messages[-1])


def with_answer(messages: Messages, answer: Messages, options: Mapping[str, Any]) -> Messages:
    """Return the conversation of a prompt and an answer, whose first message continues the prompt's last if `options` say so."""
    if not continued_text(messages, options) or answer[0].get("role") != "assistant":
        return [*messages, *answer]
    continued = {**answer[0], "content": _text_of(messages[-1]) + _text_of(answer[0])}
    return [*messages[:-1], continued, *answer[1:]]


def _text_of(message: Mapping[str, Any]) -> str:
    content = message.get("content") or ""
    return content if isinstance(content, str) else "".join(part.get("text") or "" for part in content)


@contextmanager
def template_errors(where: str) -> Iterator[None]:
    """Convert the template's errors in the block to DataError, starting with `where`."""
    try:
        yield
    except TEMPLATE_ERRORS as error:
        raise DataError(
            f"{where}: the chat template raised {type(error).__name__}: {error}; change the messages or the template."
        ) from error


def encode_chats(tokenizer: Any, conversations: list[Messages], options: Mapping[str, Any]) -> list[list[int]]:
    """Return the token ids of each conversation, by one call of the tokenizer for all."""
    encoded = tokenizer.apply_chat_template(conversations, **{**options, "tokenize": True, "return_dict": True})
    # Tokenizers outside transformers may return plain lists.
    return encoded["input_ids"] if isinstance(encoded, Mapping) else encoded


def encode_chat(tokenizer: Any, messages: Messages, options: Mapping[str, Any], where: str) -> list[int]:
    """Return the token ids of one conversation; DataError, starting with `where`, if the template fails."""
    with template_errors(where):
        return encode_chats(tokenizer, [messages], options)[0]

"""Messages and the chat template: what a conversation must look like, and how it becomes tokens.

A prompt ends with the opening of the assistant's message, as in TRL, also after a message of the assistant's. With
`continue_final_message` among the template's options such a message is continued instead. A row's own
`chat_template_kwargs` and `tools` go before the run's settings.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from jinja2 import TemplateError

from lowpeak.errors import DataError

Messages = list[dict[str, Any]]

# What a template written by anybody may raise: its own errors, and Python's on unexpected messages.
TEMPLATE_ERRORS = (TemplateError, LookupError, TypeError, ValueError)


def check_messages(messages: Sequence[Any], where: str) -> Messages:
    """Return the messages without keys whose value is None, each with a role and with text or tool calls.

    Arrow gives every message of a data set the same keys and fills in None, which templates would print. Raises
    DataError, opening with `where`, on anything else than text messages.
    """
    if not messages:
        raise DataError(f"{where} is an empty list of messages; remove the row or give it a message.")
    return [_check_message(message, f"{where}, message {i},") for i, message in enumerate(messages)]


def _check_message(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise DataError(f"{where} is {message!r:.80}; a message is a mapping with 'role' and 'content'.")
    content = message.get("content")
    if isinstance(content, list):
        for kind in (part.get("type") if isinstance(part, Mapping) else None for part in content):
            if kind != "text":
                raise DataError(f"{where} has a content part of type {kind!r}; lowpeak trains on text only.")
    elif content is None and not message.get("tool_calls"):
        raise DataError(f"{where} has no 'content'; a message is a mapping with 'role' and 'content'.")
    elif content is not None and not isinstance(content, str):
        raise DataError(f"{where} has content of type {type(content).__name__}; it must be a string.")
    return {key: value for key, value in message.items() if value is not None}


def template_options(row: Mapping[str, Any], defaults: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the template's keyword arguments for one row: the run's `defaults`, then the row's `tools`, then its own kwargs.

    `tools` may be a list or its JSON text (Arrow cannot hold schemas of different shapes otherwise); an empty list
    counts as none, because templates print a preamble for it. A None in the row's kwargs is Arrow's filling.
    """
    options = dict(defaults)
    tools = row.get("tools")
    if isinstance(tools, str):
        try:
            tools = json.loads(tools)
        except json.JSONDecodeError as error:
            raise DataError(
                f"{where} has a 'tools' column that is no JSON: {error}; give a list of schemas."
            ) from error
    if tools:
        options["tools"] = tools
    own = row.get("chat_template_kwargs") or {}
    if not isinstance(own, Mapping):
        raise DataError(f"{where} has 'chat_template_kwargs' of type {type(own).__name__}; it must be a mapping.")
    return {**options, **{key: value for key, value in own.items() if value is not None}}


def prompt_options(messages: Messages, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the template's options for a prompt: it opens the assistant's message, or leaves open the one to continue."""
    rest = {name: value for name, value in options.items() if name != "continue_final_message"}
    if begun_text(messages, options):
        return {**rest, "add_generation_prompt": False, "continue_final_message": True}
    return {"add_generation_prompt": True, **rest}


def begun_text(messages: Messages, options: Mapping[str, Any]) -> str:
    """Return the text of the last message if it is the assistant's and to be continued, else an empty string."""
    if not options.get("continue_final_message") or messages[-1].get("role") != "assistant":
        return ""
    content = messages[-1].get("content") or ""
    return content if isinstance(content, str) else "".join(part.get("text") or "" for part in content)


@contextmanager
def passing_template(where: str) -> Iterator[None]:
    """Raise DataError, opening with `where`, where the template fails in the block."""
    try:
        yield
    except TEMPLATE_ERRORS as error:
        raise DataError(
            f"{where} does not pass the chat template: {error}; change the messages or the template."
        ) from error


def encode_chats(tokenizer: Any, conversations: list[Messages], options: Mapping[str, Any]) -> list[list[int]]:
    """Return the token ids of each conversation: one call of the template, then of the tokenizer, for all of them."""
    encoded = tokenizer.apply_chat_template(conversations, **{**options, "tokenize": True, "return_dict": True})
    # Tokenizers that are not transformers' own may answer with the bare lists.
    return encoded["input_ids"] if isinstance(encoded, Mapping) else encoded


def encode_chat(tokenizer: Any, messages: Messages, options: Mapping[str, Any], where: str) -> list[int]:
    """Return the token ids of one conversation; a template that fails is a DataError that opens with `where`."""
    with passing_template(where):
        return encode_chats(tokenizer, [messages], options)[0]

"""Messages appended to a conversation as token ids; the ids that the policy sampled are never tokenized again.

Only the chat template knows how an assistant's turn ends and how the next message begins. Two dummy conversations show it:
one that ends in an assistant's turn with a marker text, and the same with the new messages. What follows the marker in both
is the end of the assistant's turn; what follows in the second alone are the new messages.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from typing import Any

from lowpeak.data import TEMPLATE_ERRORS, common_prefix_length
from lowpeak.errors import DataError

Message = dict[str, Any]

_CALL_ID = "call00000"  # Mistral's templates accept ids of nine letters and digits only
USER: Message = {"role": "user", "content": "x"}
_SHORT_CONTENT = 256  # characters
_SHORT_SPLITS = 1024
_PRIVATE_USE = range(0xE000, 0xF900)  # code points that no text has by convention


class TurnAppender:
    """The token ids that append messages to a conversation, for one tokenizer and one set of template options.

    `end_ids` end a completion, `options` are the chat template's arguments (`tools`, `enable_thinking`, ...).

        appender = TurnAppender(tokenizer, end_ids, {"tools": schemas})
        ids = prompt_ids + sampled_ids
        ids += appender.append(sampled_ids[-1], [{"role": "tool", "name": "add", "content": "43"}])
    """

    def __init__(self, tokenizer: Any, end_ids: Collection[int], options: Mapping[str, Any] | None = None) -> None:
        self._tokenizer, self._end_ids = tokenizer, frozenset(end_ids)
        self._options = dict(options or {})
        self._arguments_as_text = False
        tokens = {str(token) for token in tokenizer.get_added_vocab() if len(token) > 1}
        by_length = sorted(tokens, key=len, reverse=True)
        self._control_token = re.compile("|".join(map(re.escape, by_length)) or r"(?!)")
        self._longest_token = max(map(len, tokenizer.get_vocab()))
        # Short results are often equal, and an empty one measures the room of every turn with calls.
        self._split_short = lru_cache(_SHORT_SPLITS)(lambda text: self._split(json.loads(text)))

    def may_fit(self, messages: Sequence[Message], num_tokens: int) -> bool:
        """Return whether so many tokens of the longest kind have as many characters as the messages."""
        return sum(len(str(message["content"])) for message in messages) <= num_tokens * self._longest_token

    def append(self, last_id: int, messages: Sequence[Message]) -> list[int]:
        """Return the ids of `messages` and of the opening of the next turn, after a turn that ended with `last_id`.

        Results of tools come first, then messages of the user or the system. A text like a control token stays text.
        Raises DataError if the template does not render them.
        """
        is_short = sum(len(str(message["content"])) for message in messages) < _SHORT_CONTENT
        turn_end, new = self._split_short(json.dumps(messages)) if is_short else self._split(messages)
        is_ended = last_id in self._end_ids
        if is_ended and last_id in turn_end:
            return turn_end[turn_end.index(last_id) + 1 :] + new
        if is_ended and new[:1] == [last_id]:
            # The end token of the turn also opens the next message (GLM).
            return new[1:]
        ends = [index for index, token in enumerate(turn_end) if token in self._end_ids]
        rest = turn_end[ends[0] :] if ends else []
        # The turn was cut off, or ended by another token than the template's.
        return (rest[1:] if is_ended else rest) + new

    def _split(self, messages: Sequence[Message]) -> tuple[list[int], list[int]]:
        """Return the ids that end the assistant's turn, and those of the new messages."""
        texts = [str(message["content"]) for message in messages]
        mark = next(chr(code) for code in _PRIVATE_USE if not any(chr(code) in text for text in texts))
        marker = _absent_text(texts)
        marked = [
            {**message, "content": self._control_token.sub(lambda match: match[0][0] + mark + match[0][1:], text)}
            for message, text in zip(messages, texts, strict=True)
        ]
        before, after = (self._encode(text, mark) for text in self._texts_after(marker, marked))
        # Compared as ids: texts can share the first characters of two different control tokens (gpt-oss).
        shared = common_prefix_length(before, after)
        return before[:shared], after[shared:]

    def _encode(self, text: str, mark: str) -> list[int]:
        pieces = self._tokenizer(text.split(mark), add_special_tokens=False)["input_ids"]
        return [token for piece in pieces for token in piece]

    def _texts_after(self, marker: str, messages: Sequence[Message]) -> tuple[str, str]:
        """Return the template's text after the marker, without and with the messages."""
        try:
            return self._render(marker, messages)
        except TEMPLATE_ERRORS:
            self._arguments_as_text = not self._arguments_as_text  # templates want a mapping, or its JSON text
        try:
            return self._render(marker, messages)
        except TEMPLATE_ERRORS as error:
            raise DataError(
                f"the chat template does not render a {messages[0]['role']} message after an assistant's turn "
                f"({type(error).__name__}: {error}): use a model whose template does, or set chat_template_path."
            ) from error

    def _render(self, marker: str, messages: Sequence[Message]) -> tuple[str, str]:
        is_tool = messages[0]["role"] == "tool"
        turn: dict[str, Any] = {"role": "assistant", "content": "" if is_tool else marker}
        if is_tool:
            arguments = {marker: marker}
            name = messages[0].get("name", "tool")
            turn["tool_calls"] = [tool_call(name, json.dumps(arguments) if self._arguments_as_text else arguments)]
            messages = [
                {**message, "tool_call_id": _CALL_ID} if message["role"] == "tool" else message for message in messages
            ]
        texts = []
        for conversation, opens in (([USER, turn], False), ([USER, turn, *messages], True)):
            text = render(self._tokenizer, conversation, {**self._options, "add_generation_prompt": opens})
            if marker not in text:
                raise ValueError(f"the template omits the assistant's {'tool calls' if is_tool else 'text'}")
            texts.append(text[text.rindex(marker) + len(marker) :])
        return texts[0], texts[1]


def render(tokenizer: Any, messages: Sequence[Message], options: Mapping[str, Any]) -> str:
    """Return a conversation as the chat template writes it."""
    return str(tokenizer.apply_chat_template(list(messages), **{**options, "tokenize": False}))


def render_call(
    tokenizer: Any,
    messages: Sequence[Message],
    call: dict[str, Any],
    results: Sequence[Message],
    options: Mapping[str, Any],
) -> str:
    """Return a conversation with a call and its results; the arguments are a mapping, or JSON text if the template wants it."""
    function = call["function"]
    as_text = {**call, "function": {**function, "arguments": json.dumps(function["arguments"])}}
    results = [{**result, "tool_call_id": call["id"]} for result in results]
    options = {**options, "add_generation_prompt": bool(results)}
    try:
        turn: Message = {"role": "assistant", "content": "", "tool_calls": [call]}
        return render(tokenizer, [*messages, turn, *results], options)
    except TEMPLATE_ERRORS:
        return render(tokenizer, [*messages, {**turn, "tool_calls": [as_text]}, *results], options)


def can_append(messages: Sequence[Message]) -> bool:
    """Return whether these are messages that `TurnAppender` appends: results of tools, then those of the user or the system."""
    roles = [message["role"] for message in messages]
    return bool(roles) and set(itertools.dropwhile(lambda role: role == "tool", roles)) <= {"user", "system"}


def after_prompt(row: Mapping[str, Any], observation: str) -> str:
    """Return the first observation, on a line of its own if the row's prompt has text."""
    prompt = row.get("prompt") or ""
    content = prompt if isinstance(prompt, str) else prompt[-1].get("content")
    is_separate = not observation or not content or (isinstance(content, str) and content[-1].isspace())
    return observation if is_separate else f"\n{observation}"


def tool_call(name: str, arguments: Any) -> dict[str, Any]:
    """Return an entry of a message's `tool_calls`."""
    return {"id": _CALL_ID, "type": "function", "function": {"name": name, "arguments": arguments}}


def _absent_text(texts: Sequence[str]) -> str:
    """Return a short text that is in none of `texts`."""
    marker = "zq7xk"
    while any(marker in text for text in texts):
        marker += "q"
    return marker

"""The assistant's tokens in a conversation whose chat template does not mark them with `{% generation %}`.

Three texts that the template writes tell them apart:

    asked     the messages before a turn, with the generation prompt: what the model sees when it is asked
    answered  the messages up to and with the turn: what stands there after the model's answer
    whole     all messages: the row

A turn is what `answered` has after `asked`, its end-of-turn token included, and it counts if `whole` has the same. A
template may rewrite a turn once other messages follow (Qwen3 drops its thinking). The model would not write what stands
there then, so such a turn does not count. If only the end token differs (Phi-3, GPT-OSS), the rest of the turn counts.

Token ids are those of `whole`. A token that has a character of a turn counts, as with `{% generation %}`.
"""

from __future__ import annotations

import logging
from bisect import bisect_left, bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lowpeak.data.chat import TEMPLATE_ERRORS, Messages, passing_template
from lowpeak.data.prompts import num_shared
from lowpeak.errors import DataError

logger = logging.getLogger(__name__)

_REMEDY = (
    "mark the assistant's tokens in the template with {% generation %}...{% endgeneration %}, or give a row with prompt "
    "and completion for each of its turns"
)


class AssistantTurns:
    """Tokenizes conversations and tells which tokens are the assistant's."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._warned: set[str] = set()

    def encode(
        self, messages: Messages, options: Mapping[str, Any], where: str, first: int = 0
    ) -> tuple[list[int], list[bool]]:
        """Return the token ids, and which of them are of the assistant's messages from index `first` on.

        `options` go to the template. Raises DataError, opening with `where`, if the template fails or none of these
        messages is found.
        """
        if not getattr(self._tokenizer, "is_fast", False):
            raise DataError(
                f"{where}: the tokenizer does not map tokens to characters (it is not a fast one); {_REMEDY}."
            )
        chat = _Chat(self._tokenizer, messages, options)
        with passing_template(where):
            row = chat.tokenize(chat.write(len(messages)))
        turns = [i for i in range(first, len(messages)) if messages[i]["role"] == "assistant"]
        found = [tokens for i in turns if (tokens := self._find(chat, row, i, where))]
        if turns and not found:
            raise DataError(
                f"{where}: the chat template writes the assistant's messages, or what stands before them, in another "
                f"way when the conversation is longer, so their tokens cannot be told apart; {_REMEDY}."
            )
        if len(found) < len(turns):
            self._warn_once(
                "the chat template writes %d of %d assistant messages in another way than the model would when it is "
                "asked (it may drop their thinking), so they are not in the loss; to train on them %s",
                *(where, len(turns) - len(found), len(turns), _REMEDY),
            )
        counted = [False] * len(row.ids)
        for tokens in found:
            counted[tokens.start : tokens.stop] = [True] * len(tokens)
        return row.ids, counted

    def _find(self, chat: _Chat, row: _Text, turn: int, where: str) -> range:
        """Return the tokens of message `turn`: none if the row does not have them as the model would write them."""
        try:
            asked = chat.write(turn, add_generation_prompt=True)
            if row.text.startswith(asked):
                start = row.after(asked)
            elif row.text.startswith(chat.write(turn)):
                start = num_shared(chat.tokenize(asked).ids, row.ids)
                self._warn_once(
                    "the chat template does not write its generation prompt before the assistant's message, so the model "
                    "trains on another context than it will be asked with",
                    where,
                )
            else:
                return range(0)
            answered = chat.write(turn + 1)
        except TEMPLATE_ERRORS:  # a template that does not take a part of the conversation
            return range(0)
        if row.text.startswith(answered):
            return range(start, row.up_to(answered))
        answered_ids = chat.tokenize(answered).ids
        stop = num_shared(answered_ids, row.ids)
        only_an_end = not self._tokenizer.decode(answered_ids[stop:], skip_special_tokens=True).strip()
        return range(start, stop if only_an_end else start)

    def _warn_once(self, message: str, where: str, *inputs: Any) -> None:
        if message not in self._warned:
            self._warned.add(message)
            logger.warning(f"%s: {message}. Said once.", where, *inputs)


@dataclass(frozen=True)
class _Chat:
    """A conversation, and what writes and tokenizes it."""

    tokenizer: Any
    messages: Messages
    options: Mapping[str, Any]

    def write(self, num_messages: int, **more: bool) -> str:
        """Return the text of the first messages."""
        options = {**self.options, **more, "tokenize": False}
        return str(self.tokenizer.apply_chat_template(self.messages[:num_messages], **options))

    def tokenize(self, text: str) -> _Text:
        """Return the text with its token ids: those that `apply_chat_template` gives."""
        encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        starts, ends = ([span[side] for span in encoded["offset_mapping"]] for side in (0, 1))
        return _Text(text, encoded["input_ids"], starts, ends)


@dataclass(frozen=True)
class _Text:
    """A text, the ids of its tokens, and the characters [start, end) of each."""

    text: str
    ids: list[int]
    starts: list[int]
    ends: list[int]

    def after(self, beginning: str) -> int:
        """Return the first token that has a character after a text with which this one begins."""
        return bisect_right(self.ends, len(beginning))

    def up_to(self, beginning: str) -> int:
        """Return the first token that has no character of a text with which this one begins."""
        return bisect_left(self.starts, len(beginning))

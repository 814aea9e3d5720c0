"""The assistant's tokens in conversations whose chat template has no `{% generation %}` blocks.

They are found by comparing three texts that the template writes:

    before      the messages before a turn and the generation prompt: the model's input when it generates the turn
    after       the messages up to and including the turn: the text once the model has generated it
    full text   all messages

A turn is the part of `after` that follows `before`, its end-of-turn token included. It counts for the loss if the full text
contains it at the same place. A template may rewrite a turn once other messages follow (Qwen3 drops its thinking). The model
would not generate the rewritten text, so such a turn does not count. If only the end-of-turn token differs (Phi-3, GPT-OSS),
the rest of the turn counts.

Token ids are those of the full text. A token counts if any of its characters is a turn's, as with `{% generation %}`.
"""

from __future__ import annotations

import logging
from bisect import bisect_left, bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lowpeak.data.chat import TEMPLATE_ERRORS, Messages, template_errors
from lowpeak.data.row_reader import common_prefix_length
from lowpeak.errors import DataError

logger = logging.getLogger(__name__)

_REMEDY = (
    "mark the assistant's tokens in the template with {% generation %}...{% endgeneration %}, or make a row with prompt "
    "and completion of each turn"
)


class AssistantTurns:
    """A tokenizer of conversations that also returns which tokens are the assistant's."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._warned: set[str] = set()

    def encode(
        self, messages: Messages, options: Mapping[str, Any], where: str, first: int = 0
    ) -> tuple[list[int], list[bool]]:
        """Return the token ids, and the loss mask of the assistant's messages from index `first` on.

        `options` are the template's arguments. Raises DataError, starting with `where`, if the template fails or none of
        these messages is found.
        """
        if not getattr(self._tokenizer, "is_fast", False):
            raise DataError(
                f"{where}: the tokenizer does not map tokens to characters, because it is not a fast tokenizer; {_REMEDY}."
            )
        chat = _Chat(self._tokenizer, messages, options)
        with template_errors(where):
            full = chat.tokenize(chat.write(len(messages)))
        turns = [i for i in range(first, len(messages)) if messages[i]["role"] == "assistant"]
        spans = [span for i in turns if (span := self._find_turn(chat, full, i, where))]
        if turns and not spans:
            raise DataError(
                f"{where}: the chat template rewrites the assistant's messages, or the text before them, when other messages "
                f"follow, so their tokens cannot be found; {_REMEDY}."
            )
        if len(spans) < len(turns):
            self._warn_once(
                "the chat template rewrites %d of %d assistant messages when other messages follow (it may drop their "
                "thinking), so they are not in the loss; to train on them %s",
                *(where, len(turns) - len(spans), len(turns), _REMEDY),
            )
        loss_mask = [False] * len(full.ids)
        for span in spans:
            loss_mask[span.start : span.stop] = [True] * len(span)
        return full.ids, loss_mask

    def _find_turn(self, chat: _Chat, full: _Text, turn: int, where: str) -> range:
        """Return the range of the tokens of message `turn`.

        It is empty if the full text does not contain the message as the model would generate it.
        """
        try:
            before = chat.write(turn, add_generation_prompt=True)
            if full.text.startswith(before):
                start = full.first_token_after(before)
            elif full.text.startswith(chat.write(turn)):
                start = common_prefix_length(chat.tokenize(before).ids, full.ids)
                self._warn_once(
                    "the chat template does not write its generation prompt before the assistant's message, so the model "
                    "trains on another context than it will generate from",
                    where,
                )
            else:
                return range(0)
            after = chat.write(turn + 1)
        except TEMPLATE_ERRORS:
            # Some templates refuse a part of the conversation.
            return range(0)
        if full.text.startswith(after):
            return range(start, full.num_tokens_of(after))
        after_ids = chat.tokenize(after).ids
        stop = common_prefix_length(after_ids, full.ids)
        only_end_differs = not self._tokenizer.decode(after_ids[stop:], skip_special_tokens=True).strip()
        return range(start, stop if only_end_differs else start)

    def _warn_once(self, message: str, where: str, *inputs: Any) -> None:
        if message not in self._warned:
            self._warned.add(message)
            logger.warning(f"%s: {message}. Logged once.", where, *inputs)


@dataclass(frozen=True)
class _Chat:
    """A conversation with its tokenizer and the chat template's options."""

    tokenizer: Any
    messages: Messages
    options: Mapping[str, Any]

    def write(self, num_messages: int, **more: bool) -> str:
        """Return the template's text of the first messages."""
        options = {**self.options, **more, "tokenize": False}
        return str(self.tokenizer.apply_chat_template(self.messages[:num_messages], **options))

    def tokenize(self, text: str) -> _Text:
        """Return the text with its token ids, which are those of `apply_chat_template`."""
        encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        starts, ends = ([span[side] for span in encoded["offset_mapping"]] for side in (0, 1))
        return _Text(text, encoded["input_ids"], starts, ends)


@dataclass(frozen=True)
class _Text:
    """A text, its token ids, and the characters [start, end) of each token."""

    text: str
    ids: list[int]
    starts: list[int]
    ends: list[int]

    def first_token_after(self, prefix: str) -> int:
        """Return the index of the first token with a character after the prefix."""
        return bisect_right(self.ends, len(prefix))

    def num_tokens_of(self, prefix: str) -> int:
        """Return the number of tokens with a character of the prefix."""
        return bisect_left(self.starts, len(prefix))

"""Rows for supervised training, as the records that the rest of the straight line works with.

A row is tokenized whole, each token counts or not, and the record's prompt is what stands before the first that counts.
The formats and their defaults are those of TRL's SFT:

    columns               values                 what counts                  with completion_only
    prompt + completion   strings or messages    the completion (True)        False: all but the first token
    messages              a conversation         all but the first token      True: the assistant's tokens
    text                  a string               all but the first token      True: an error

The first token is never counted, because nothing predicts it. Plain text ends with the end-of-sequence token.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from datasets import Dataset, IterableDataset

from lowpeak.data.chat import (
    TEMPLATE_ERRORS,
    check_messages,
    check_template,
    encode_chat,
    template_options,
)
from lowpeak.data.prompts import check_ids, log_left_out, read_rows
from lowpeak.errors import DataError
from lowpeak.records import Completion, Record

logger = logging.getLogger(__name__)

# What transformers looks for when it is asked for the assistant's tokens.
_GENERATION_BLOCK = re.compile(r"\{%-?\s*generation\s*-?%\}")


class SupervisedReader:
    """Reads rows as records without rewards, advantages and sampling log-probs (those are zeros).

    `max_length` cuts the end of longer rows, whose finish reason is then "length". `completion_only` None is each
    format's default. `assistant_only` counts the tokens inside the template's generation blocks only. `formatting_func(row)`
    returns the text that is read in the row's place. Raises DataError, naming the row, on a row that cannot be used; a row
    without a counted token is left out.
    """

    left_out = "no token in them counts for the loss"

    def __init__(
        self,
        tokenizer: Any,
        *,
        max_length: int | None = None,
        completion_only: bool | None = None,
        assistant_only: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        text_field: str = "text",
        num_embeddings: int | None = None,
        formatting_func: Callable[[Mapping[str, Any]], str] | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self.max_length = max_length
        self._completion_only = completion_only
        self._assistant_only = assistant_only
        self._template_defaults = dict(chat_template_kwargs or {})
        self._text_field = text_field
        self._num_embeddings = num_embeddings
        self._formatting_func = formatting_func
        self._warned = False

    def read(self, row: Mapping[str, Any], serial: int, index: int | None = None) -> Record | None:
        """The row as a record of group `serial`; None where no token of it counts."""
        where = f"row {serial if index is None else index}"
        ids, counted = self._tokenize(row, where)
        check_ids(ids, self._num_embeddings, where)
        return make_record(serial, ids, counted, self.max_length)

    def read_batch(self, rows: Sequence[Mapping[str, Any]], first: int) -> list[Record | None]:
        """`[read(row, first + i) for i, row in enumerate(rows)]`."""
        return [self.read(row, i) for i, row in enumerate(rows, first)]

    def _tokenize(self, row: Mapping[str, Any], where: str) -> tuple[list[int], list[bool]]:
        """Token ids of the whole row, and which of them count."""
        if self._formatting_func is not None:
            return self._text(self._formatting_func(row), where)
        if "prompt" in row and "completion" in row:
            return self._pair(row, where)
        if "messages" in row:
            return self._conversation(row, where)
        if self._text_field in row:
            return self._text(row[self._text_field], where)
        raise DataError(
            f"{where} has the columns {', '.join(map(repr, row))}; supervised training reads 'prompt' with "
            f"'completion', 'messages', or {self._text_field!r}: rename them."
        )

    def _pair(self, row: Mapping[str, Any], where: str) -> tuple[list[int], list[bool]]:
        prompt, completion = row["prompt"], row["completion"]
        if isinstance(prompt, str) and isinstance(completion, str):
            self._reject_assistant_only(where)
            prompt_ids, ids = self._encode_text(prompt), self._end(self._encode_text(prompt + completion))
            counted = [True] * len(ids)
        elif isinstance(prompt, list) and isinstance(completion, list):
            prompt_ids, ids, counted = self._encode_turns(row, where)
        else:
            kinds = f"{type(prompt).__name__} and {type(completion).__name__}"
            raise DataError(f"{where} has prompt and completion of types {kinds}; give two strings or two lists.")
        if self._completion_only is False:
            return ids, counted
        start = self._completion_start(prompt_ids, ids, where)
        return ids, [False] * start + counted[start:]

    def _encode_turns(self, row: Mapping[str, Any], where: str) -> tuple[list[int], list[int], list[bool]]:
        prompt = check_messages(row["prompt"], f"{where}: the prompt")
        completion = check_messages(row["completion"], f"{where}: the completion")
        options = self._options(row, where)
        prompt_ids = encode_chat(self._tokenizer, prompt, {"add_generation_prompt": True, **options}, where)
        if self._assistant_only:
            return prompt_ids, *self._encode_assistant([*prompt, *completion], options, where)
        ids = encode_chat(self._tokenizer, [*prompt, *completion], options, where)
        return prompt_ids, ids, [True] * len(ids)

    def _conversation(self, row: Mapping[str, Any], where: str) -> tuple[list[int], list[bool]]:
        if not isinstance(row["messages"], list):
            raise DataError(f"{where} has 'messages' of type {type(row['messages']).__name__}; it must be a list.")
        messages = check_messages(row["messages"], f"{where}: 'messages'")
        options = self._options(row, where)
        if self._assistant_only or self._completion_only:
            return self._encode_assistant(messages, options, where)
        ids = encode_chat(self._tokenizer, messages, options, where)
        return ids, [True] * len(ids)

    def _text(self, text: Any, where: str) -> tuple[list[int], list[bool]]:
        if not isinstance(text, str):
            raise DataError(f"{where} has {self._text_field!r} of type {type(text).__name__}; it must be a string.")
        self._reject_assistant_only(where)
        if self._completion_only:
            raise DataError(
                f"{where} is plain text, which has no completion; give 'prompt' and 'completion' columns or leave "
                "completion_only_loss out."
            )
        ids = self._end(self._encode_text(text))
        return ids, [True] * len(ids)

    def _options(self, row: Mapping[str, Any], where: str) -> dict[str, Any]:
        options = template_options(row, self._template_defaults, where)
        check_template(self._tokenizer, options, where)
        return options

    def _encode_text(self, text: str) -> list[int]:
        return self._tokenizer(text)["input_ids"]

    def _end(self, ids: list[int]) -> list[int]:
        """Plain text with the end-of-sequence token, unless the text or the tokenizer has put it there."""
        end = self._tokenizer.eos_token_id
        return ids if end is None or ids[-1:] == [end] else [*ids, end]

    def _encode_assistant(
        self, messages: list[dict[str, Any]], options: Mapping[str, Any], where: str
    ) -> tuple[list[int], list[bool]]:
        """Token ids of a conversation, and which of them stand in the template's generation blocks."""
        template = self._tokenizer.get_chat_template(options.get("chat_template"), options.get("tools"))
        if not _GENERATION_BLOCK.search(template):
            raise DataError(
                f"{where}: the chat template does not say which tokens are the assistant's; mark them in it with "
                "{% generation %}...{% endgeneration %}, or train on prompt and completion columns."
            )
        options = {**options, "tokenize": True, "return_dict": True, "return_assistant_tokens_mask": True}
        try:
            encoded = self._tokenizer.apply_chat_template(messages, **options)
        except TEMPLATE_ERRORS as error:
            raise DataError(f"{where} does not pass the chat template: {error}; change the messages.") from error
        return encoded["input_ids"], [bool(flag) for flag in encoded["assistant_masks"]]

    def _completion_start(self, prompt_ids: list[int], ids: list[int], where: str) -> int:
        """Where the completion starts: after the prompt's tokens, or where they and the row's part (as TRL does)."""
        start = 0
        for own, whole in zip(prompt_ids, ids, strict=False):
            if own != whole:
                break
            start += 1
        if start < len(prompt_ids) and not self._warned:
            self._warned = True
            logger.warning(
                "%s: prompt and completion together do not begin with the prompt's own tokens (they part after %d of "
                "%d), so the model trains on another context than it will be asked with; end prompts on a token "
                "boundary, or use a chat template that writes them the same both times. Said once.",
                *(where, start, len(prompt_ids)),
            )
        return start

    def _reject_assistant_only(self, where: str) -> None:
        if self._assistant_only:
            raise DataError(f"{where} is plain text, and assistant_only_loss needs messages; leave it out.")


def make_record(group: int, ids: list[int], counted: list[bool], max_length: int | None = None) -> Record | None:
    """A tokenized row as a record, cut to `max_length`; None where nothing after the first token counts.

    The prompt is all that stands before the first counted token; what stands after the last one is left away, since
    under causal attention it changes nothing. The loss mask says which tokens between them count.
    """
    kept = ids[:max_length]
    where = [i for i in range(1, len(kept)) if counted[i]]
    if not where:
        return None
    start, stop = where[0], where[-1] + 1
    cut = any(counted[len(kept) :])
    completion = Completion(
        ids=torch.tensor(ids[start:stop], dtype=torch.int32),
        logprobs=torch.zeros(stop - start),
        loss_mask=torch.tensor(counted[start:stop], dtype=torch.bool),
        finish_reason="length" if cut else "stop",
    )
    return Record(group, tuple(ids[:start]), completion, rewards=(), reward=0.0)


def read_records(dataset: Dataset | IterableDataset, reader: SupervisedReader) -> list[Record]:
    """All records of a data set, their groups counted from 0; logs how many rows are cut and how many left out."""
    items = [record for _, record in read_rows(dataset, reader)]
    records = [record for record in items if record is not None]
    log_left_out(len(items) - len(records), len(items), reader)
    num_cut = sum(record.completion.finish_reason == "length" for record in records)
    if num_cut:
        logger.warning("%d of %d rows are longer than max_length and lose their end.", num_cut, len(items))
    return records

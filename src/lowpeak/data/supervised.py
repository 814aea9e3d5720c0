"""Rows for supervised training, as the records that the rest of the straight line works with.

A row is tokenized whole, each token counts or not, and the record's prompt is what stands before the first that counts.
The formats and their defaults are those of TRL's SFT:

    columns               values                 what counts                  with completion_only
    prompt + completion   strings or messages    the completion (True)        False: all but the first token
    messages              a conversation         all but the first token      True: the assistant's tokens
    conversations         also from and value    all but the first token      True: the assistant's tokens
    text                  a string               all but the first token      True: an error
    input_ids             token ids              all but the first token      True: needs completion_mask

`input_ids` may have `labels` (-100 does not count), or masks whose zeros do not count: `assistant_masks`, which always acts,
and `completion_mask`, which `completion_only` decides on.

The first token is never counted, because nothing predicts it. Plain text ends with the end-of-sequence token.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from datasets import Dataset, IterableDataset

from lowpeak.data.assistant_turns import AssistantTurns
from lowpeak.data.chat import check_messages, encode_chat, passing_template
from lowpeak.data.prompts import RowReader, num_shared, read_all
from lowpeak.errors import DataError, fail_on_exit
from lowpeak.records import Completion, Record

logger = logging.getLogger(__name__)

# What transformers looks for when it is asked for the assistant's tokens.
_GENERATION_BLOCK = re.compile(r"\{%-?\s*generation\s*-?%\}")
# Who speaks in the from/value form, where that is not the role's name.
_ROLES = {"human": "user", "gpt": "assistant"}
_NO_LABEL = -100


def check_supervised_columns(row: Mapping[str, Any], text_field: str, where: str) -> None:
    """Raise DataError for a row without any of the columns that are trained on."""
    if (
        not {"input_ids", "messages", "conversations", text_field} & row.keys()
        and not {"prompt", "completion"} <= row.keys()
    ):
        raise DataError(
            f"{where} has the columns {', '.join(map(repr, row))}; supervised training reads 'prompt' with 'completion', "
            f"'messages', 'conversations', {text_field!r}, or 'input_ids': rename them."
        )


class SupervisedReader(RowReader[Record]):
    """Reads rows as records without rewards, advantages and sampling log-probs (those are zeros).

    `max_length` cuts the end of longer rows, whose finish reason is then "length". `completion_only` None is each
    format's default. `assistant_only` counts the assistant's tokens alone, as the template's generation blocks or
    `AssistantTurns` tell them. `formatting_func(row)` returns the text that is read in the row's place. A row without a counted
    token is left out.
    """

    left_out = "no token in them counts for the loss"

    def __init__(
        self,
        tokenizer: Any,
        *,
        max_length: int | None = None,
        completion_only: bool | None = None,
        assistant_only: bool = False,
        text_field: str = "text",
        formatting_func: Callable[[Mapping[str, Any]], str] | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(tokenizer, **settings)
        self.max_length = max_length
        self._completion_only = completion_only
        self._assistant_only = assistant_only
        self._text_field = text_field
        self._formatting_func = formatting_func
        self._turns = AssistantTurns(tokenizer)
        self._warned = False

    def read(self, row: Mapping[str, Any], serial: int, index: int | None = None) -> Record | None:
        where = f"row {serial if index is None else index}"
        ids, counted = self._tokenize(row, where)
        self._check_ids(ids, where)
        return make_record(serial, ids, counted, self.max_length)

    def _tokenize(self, row: Mapping[str, Any], where: str) -> tuple[list[int], list[bool]]:
        """Return the token ids of the whole row, and which of them count."""
        if self._formatting_func is not None:
            with fail_on_exit(DataError, "formatting_func"):
                text = self._formatting_func(row)
            if not isinstance(text, str):
                raise DataError(f"{where}: formatting_func returned a {type(text).__name__}; it must return a string.")
            return self._text(text, where)
        check_supervised_columns(row, self._text_field, where)
        if "input_ids" in row:
            return self._tokenized(row, where)
        if "prompt" in row and "completion" in row:
            return self._pair(row, where)
        for name in ("messages", "conversations"):
            if name in row:
                return self._conversation(row, name, where)
        return self._text(row[self._text_field], where)

    def _tokenized(self, row: Mapping[str, Any], where: str) -> tuple[list[int], list[bool]]:
        ids = _numbers(row, "input_ids", where)
        if row.get("seq_lengths") is not None:
            raise DataError(
                f"{where} is several rows in one ('seq_lengths'); pass the rows as they were before packing."
            )
        if row.get("labels") is not None:
            if self._completion_only is not None or self._assistant_only:
                raise DataError(
                    f"{where} has 'labels', which say what counts; remove completion_only_loss and assistant_only_loss."
                )
            labels = _numbers(row, "labels", where, len(ids))
            if any(label not in (_NO_LABEL, token) for token, label in zip(ids, labels, strict=True)):
                raise DataError(f"{where} has a label that is neither its token nor {_NO_LABEL}; mend the labels.")
            return ids, [label != _NO_LABEL for label in labels]
        counted = [True] * len(ids)
        for name in self._masks(row, where):
            mask = _numbers(row, name, where, len(ids))
            counted = [before and bool(flag) for before, flag in zip(counted, mask, strict=True)]
        return ids, counted

    def _masks(self, row: Mapping[str, Any], where: str) -> list[str]:
        """Return the columns that say which tokens of `input_ids` count, each where it has to be or is allowed to be."""
        masks = [name for name in ("assistant_masks", "completion_mask") if row.get(name) is not None]
        if self._assistant_only and "assistant_masks" not in masks:
            raise DataError(f"{where} has no 'assistant_masks', which assistant_only_loss needs beside 'input_ids'.")
        if self._completion_only and "completion_mask" not in masks:
            raise DataError(f"{where} has no 'completion_mask', which completion_only_loss needs beside 'input_ids'.")
        if self._completion_only is None and "completion_mask" in masks:
            raise DataError(
                f"{where} has a 'completion_mask', which acts with completion_only_loss=True alone, as in TRL; set it, or "
                "set it to False to count the prompt as well."
            )
        return masks if self._completion_only else [name for name in masks if name != "completion_mask"]

    def _pair(self, row: Mapping[str, Any], where: str) -> tuple[list[int], list[bool]]:
        prompt, completion = row["prompt"], row["completion"]
        if isinstance(prompt, str) and isinstance(completion, str):
            self._reject_assistant_only(where)
            prompt_ids, ids = self._tokenizer(prompt)["input_ids"], self._encode_text(prompt + completion)
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
        prompt, options = self._chat(row, row["prompt"], where, "the prompt")
        completion = check_messages(row["completion"], f"{where}: the completion")
        prompt_ids = encode_chat(self._tokenizer, prompt, {"add_generation_prompt": True, **options}, where)
        if self._assistant_only:
            first = 0 if self._completion_only is False else len(prompt)
            return prompt_ids, *self._encode_assistant([*prompt, *completion], options, where, first)
        ids = encode_chat(self._tokenizer, [*prompt, *completion], options, where)
        return prompt_ids, ids, [True] * len(ids)

    def _conversation(self, row: Mapping[str, Any], name: str, where: str) -> tuple[list[int], list[bool]]:
        turns = row[name]
        if not isinstance(turns, list):
            raise DataError(f"{where} has {name!r} of type {type(turns).__name__}; it must be a list.")
        if name == "conversations":
            turns = [_with_role_and_content(turn) for turn in turns]
        messages, options = self._chat(row, turns, where, repr(name))
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
        ids = self._encode_text(text)
        return ids, [True] * len(ids)

    def _encode_text(self, text: str) -> list[int]:
        """Return plain text's ids with the end-of-sequence token, unless the text or the tokenizer has put it there."""
        ids, end = self._tokenizer(text)["input_ids"], self._tokenizer.eos_token_id
        return ids if end is None or ids[-1:] == [end] else [*ids, end]

    def _encode_assistant(
        self, messages: list[dict[str, Any]], options: Mapping[str, Any], where: str, first: int = 0
    ) -> tuple[list[int], list[bool]]:
        """Return token ids of a conversation, and which are the assistant's; those of messages before `first` do not matter."""
        template = self._tokenizer.get_chat_template(options.get("chat_template"), options.get("tools"))
        if not _GENERATION_BLOCK.search(template):
            return self._turns.encode(messages, options, where, first)
        options = {**options, "tokenize": True, "return_dict": True, "return_assistant_tokens_mask": True}
        with passing_template(where):
            encoded = self._tokenizer.apply_chat_template(messages, **options)
        return encoded["input_ids"], [bool(flag) for flag in encoded["assistant_masks"]]

    def _completion_start(self, prompt_ids: list[int], ids: list[int], where: str) -> int:
        """Return where the completion starts: after the prompt's tokens, or where they and the row's part (as TRL does)."""
        start = num_shared(prompt_ids, ids)
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


def _numbers(row: Mapping[str, Any], name: str, where: str, length: int | None = None) -> list[int]:
    """Return a column of whole numbers, one for each token: a list, or a tensor or an array of the data set's format."""
    try:
        numbers = [_whole(number) for number in row[name]]
    except (OverflowError, TypeError, ValueError) as error:
        raise DataError(f"{where} has {name!r} {row[name]!r:.40}; it must be a list of whole numbers.") from error
    if length is not None and len(numbers) != length:
        raise DataError(f"{where} has {len(numbers)} {name!r} for {length} 'input_ids'; give one for each.")
    return numbers


def _whole(number: Any) -> int:
    if isinstance(number, str) or int(number) != number:
        raise ValueError("not a whole number")
    return int(number)


def _with_role_and_content(turn: Any) -> Any:
    """Return a message of the from/value form (ShareGPT's) as one with role and content; another one as it is."""
    if not isinstance(turn, Mapping) or turn.get("from") is None:
        return turn
    rest = {key: value for key, value in turn.items() if key not in ("from", "value")}
    return {"role": _ROLES.get(turn["from"], turn["from"]), "content": turn.get("value"), **rest}


def make_record(group: int, ids: list[int], counted: list[bool], max_length: int | None = None) -> Record | None:
    """Return a tokenized row as a record, cut to `max_length`; None where nothing after the first token counts.

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
    """Return all records of a data set, their groups counted from 0; logs how many rows are cut and how many left out."""
    records, num_rows = read_all(dataset, reader)
    num_cut = sum(record.completion.finish_reason == "length" for record in records)
    if num_cut:
        logger.warning("%d of %d rows are longer than max_length and lose their end.", num_cut, num_rows)
    return records

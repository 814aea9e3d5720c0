"""Supervised data: rows as records, whose loss mask says which tokens count for the loss.

A row is tokenized completely; the record's prompt is the text before the first token that counts. The formats and their
defaults are those of TRL's SFT:

    columns               values                 tokens that count            with completion_only
    prompt + completion   strings or messages    the completion (True)        False: all but the first token
    messages              a conversation         all but the first token      True: the assistant's tokens
    conversations         also ShareGPT's        all but the first token      True: the assistant's tokens
    text                  a string               all but the first token      True: an error
    input_ids             token ids              all but the first token      True: needs completion_mask

`input_ids` may come with `labels` (-100 does not count), or with masks whose zeros do not count: `assistant_masks` always
applies, `completion_mask` only with `completion_only`.

The first token never counts, because no token predicts it. Plain text ends with the end-of-sequence token.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import torch

from lowpeak.data.assistant_turns import AssistantTurns
from lowpeak.data.chat import check_messages, encode_chat, template_errors
from lowpeak.data.row_reader import RowReader, read_integers
from lowpeak.errors import DataError, fail_on_exit
from lowpeak.records import Completion, Record

# The mark that transformers searches for when it returns the assistant's tokens.
_GENERATION_BLOCK = re.compile(r"\{%-?\s*generation\s*-?%\}")
# Speakers of the from/value format whose name is not the role's.
_ROLES = {"human": "user", "gpt": "assistant"}
_NO_LABEL = -100
_DEFAULT_TEXT_FIELD = "text"
# Columns of each format beside text, in the order in which they are looked for.
_FORMATS = (("input_ids",), ("prompt", "completion"), ("messages",), ("conversations",))


def check_supervised_columns(row: Mapping[str, Any], text_field: str, where: str) -> tuple[str, ...]:
    """Return the columns that the row is read from; DataError for a row without the columns of any format."""
    columns = next((names for names in (*_FORMATS, (text_field,)) if row.keys() >= set(names)), None)
    if columns is None:
        raise DataError(
            f"{where} has the columns {', '.join(map(repr, row))}, but supervised training needs 'prompt' with 'completion', "
            f"'messages', 'conversations', {text_field!r}, or 'input_ids': rename the columns."
        )
    return columns


class SupervisedReader(RowReader[Record]):
    """A reader of rows as records without rewards and advantages; sampling log-probs are zeros.

    Longer rows are truncated to `max_length`; their finish reason is then "length". `completion_only` None is the format's
    default. With `assistant_only`, only the assistant's tokens count: those in the template's generation blocks, or those that
    `AssistantTurns` finds. `formatting_func(row)` returns a text that replaces the row. A row without a token that counts is
    dropped.
    """

    drop_reason = "no token in them counts for the loss"
    prepared_columns = ("input_ids", "labels")

    def __init__(
        self,
        tokenizer: Any,
        *,
        max_length: int | None = None,
        completion_only: bool | None = None,
        assistant_only: bool = False,
        text_field: str = _DEFAULT_TEXT_FIELD,
        formatting_func: Callable[[Mapping[str, Any]], str] | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(tokenizer, **settings)
        self.max_length = max_length
        if max_length is not None:
            self.drop_reason = f"none of their first {max_length} tokens counts for the loss"
        self._completion_only = completion_only
        self._assistant_only = assistant_only
        self._text_field = text_field
        self._formatting_func = formatting_func
        self._turns = AssistantTurns(tokenizer)

    def read(self, row: Mapping[str, Any], serial: int, index: int | None = None) -> Record | None:
        where = f"row {serial if index is None else index}"
        ids, loss_mask = self._tokenize(row, where)
        self._check_ids(ids, where)
        return make_record(serial, ids, loss_mask, self.max_length)

    def prepare(self, row: Mapping[str, Any]) -> dict[str, list[int]]:
        """Return the row's token ids and labels, which are -100 for tokens without loss."""
        ids, loss_mask = self._tokenize(row, "a row")
        labels = [token if counts else _NO_LABEL for token, counts in zip(ids, loss_mask, strict=True)]
        return {"input_ids": ids[: self.max_length], "labels": labels[: self.max_length]}

    def is_truncated(self, item: Record) -> bool:
        return item.completion.finish_reason == "length"

    def _tokenize(self, row: Mapping[str, Any], where: str) -> tuple[list[int], list[bool]]:
        """Return the token ids of the row, and its loss mask."""
        if self._formatting_func is not None:
            self._report_text_field(f"formatting_func turns {where} into text: remove one of the two arguments")
            with fail_on_exit(DataError, "formatting_func"):
                try:
                    text = self._formatting_func(row)
                except Exception as error:  # the user's function may raise any class
                    raise DataError(f"{where}: formatting_func raised {type(error).__name__}: {error}") from error
            if not isinstance(text, str):
                raise DataError(f"{where}: formatting_func must return a string, got type {type(text).__name__}.")
            return self._read_text(text, where)
        columns = check_supervised_columns(row, self._text_field, where)
        if columns == (self._text_field,):
            return self._read_text(row[self._text_field], where)
        self._report_text_field(f"{where} has {' and '.join(columns)}: remove the argument, or these columns")
        if columns[0] == "input_ids":
            return self._read_tokens(row, where)
        if columns[0] == "prompt":
            return self._read_prompt_and_completion(row, where)
        return self._read_conversation(row, columns[0], where)

    def _report_text_field(self, reason: str) -> None:
        if self._text_field != _DEFAULT_TEXT_FIELD:
            self._report_idle(f"dataset_text_field={self._text_field!r}", reason)

    def _read_tokens(self, row: Mapping[str, Any], where: str) -> tuple[list[int], list[bool]]:
        ids = read_integers(row, "input_ids", where)
        if row.get("seq_lengths") is not None:
            raise DataError(
                f"{where} is a packed row ('seq_lengths'); pass the rows before packing, because lowpeak packs them itself."
            )
        if row.get("labels") is not None:
            return ids, self._mask_of_labels(ids, row, where)
        loss_mask = [True] * len(ids)
        for name in self._mask_columns(row, where):
            mask = read_integers(row, name, where, len(ids))
            loss_mask = [counts and bool(flag) for counts, flag in zip(loss_mask, mask, strict=True)]
        return ids, loss_mask

    def _mask_of_labels(self, ids: list[int], row: Mapping[str, Any], where: str) -> list[bool]:
        if self._completion_only is not None or self._assistant_only:
            raise DataError(
                f"{where} has 'labels', which already mark the tokens that count; remove completion_only_loss and "
                "assistant_only_loss."
            )
        labels = read_integers(row, "labels", where, len(ids))
        if any(label not in (_NO_LABEL, token) for token, label in zip(ids, labels, strict=True)):
            raise DataError(f"{where} has a label that is neither its token nor {_NO_LABEL}; correct the labels.")
        return [label != _NO_LABEL for label in labels]

    def _mask_columns(self, row: Mapping[str, Any], where: str) -> list[str]:
        """Return the mask columns that apply to `input_ids`.

        Raises DataError if one is missing, or if it is not clear whether `completion_mask` applies.
        """
        masks = [name for name in ("assistant_masks", "completion_mask") if row.get(name) is not None]
        if self._assistant_only and "assistant_masks" not in masks:
            raise DataError(
                f"{where} has no 'assistant_masks', which assistant_only_loss needs with 'input_ids'; add it."
            )
        if self._completion_only and "completion_mask" not in masks:
            raise DataError(
                f"{where} has no 'completion_mask', which completion_only_loss needs with 'input_ids'; add it."
            )
        if self._completion_only is None and "completion_mask" in masks:
            raise DataError(
                f"{where} has a 'completion_mask', which applies only with completion_only_loss=True, as in TRL; set this, or "
                "False to train on the prompt as well."
            )
        return masks if self._completion_only else [name for name in masks if name != "completion_mask"]

    def _read_prompt_and_completion(self, row: Mapping[str, Any], where: str) -> tuple[list[int], list[bool]]:
        prompt, completion = row["prompt"], row["completion"]
        if isinstance(prompt, str) and isinstance(completion, str):
            self._reject_assistant_only(where)
            self._report_text(where)
            prompt_ids, ids = self._tokenizer(prompt)["input_ids"], self._encode_text(prompt + completion)
            loss_mask = [True] * len(ids)
        elif isinstance(prompt, list) and isinstance(completion, list):
            prompt_ids, ids, loss_mask = self._encode_turns(row, where)
        else:
            types = f"{type(prompt).__name__} and {type(completion).__name__}"
            raise DataError(f"{where} has prompt and completion of types {types}; pass two strings or two lists.")
        if self._completion_only is False:
            return ids, loss_mask
        start = self._completion_start(prompt_ids, ids, where)
        return ids, [False] * start + loss_mask[start:]

    def _encode_turns(self, row: Mapping[str, Any], where: str) -> tuple[list[int], list[int], list[bool]]:
        """Return the token ids of the prompt, those of prompt and completion, and their loss mask."""
        prompt, options = self._read_chat(row, row["prompt"], where, "the prompt")
        completion = check_messages(row["completion"], f"{where}: the completion")
        prompt_ids = encode_chat(self._tokenizer, prompt, {"add_generation_prompt": True, **options}, where)
        if self._assistant_only:
            first = 0 if self._completion_only is False else len(prompt)
            return prompt_ids, *self._encode_assistant([*prompt, *completion], options, where, first)
        ids = encode_chat(self._tokenizer, [*prompt, *completion], options, where)
        return prompt_ids, ids, [True] * len(ids)

    def _read_conversation(self, row: Mapping[str, Any], name: str, where: str) -> tuple[list[int], list[bool]]:
        turns = row[name]
        if not isinstance(turns, list):
            raise DataError(f"{where}: {name!r} must be a list of messages, got type {type(turns).__name__}.")
        if name == "conversations":
            turns = [_with_role_and_content(turn) for turn in turns]
        messages, options = self._read_chat(row, turns, where, repr(name))
        if self._assistant_only or self._completion_only:
            return self._encode_assistant(messages, options, where)
        ids = encode_chat(self._tokenizer, messages, options, where)
        return ids, [True] * len(ids)

    def _read_text(self, text: Any, where: str) -> tuple[list[int], list[bool]]:
        if not isinstance(text, str):
            raise DataError(f"{where}: {self._text_field!r} must be a string, got type {type(text).__name__}.")
        self._reject_assistant_only(where)
        self._report_text(where)
        if self._completion_only:
            raise DataError(
                f"{where} is plain text without a completion; use 'prompt' and 'completion' columns, or remove "
                "completion_only_loss."
            )
        ids = self._encode_text(text)
        return ids, [True] * len(ids)

    def _encode_assistant(
        self, messages: list[dict[str, Any]], options: Mapping[str, Any], where: str, first: int = 0
    ) -> tuple[list[int], list[bool]]:
        """Return the token ids of a conversation and a mask of the assistant's.

        The mask is correct for the messages from index `first` on; the caller ignores it before.
        """
        template = self._tokenizer.get_chat_template(options.get("chat_template"), options.get("tools"))
        if not _GENERATION_BLOCK.search(template):
            return self._turns.encode(messages, options, where, first)
        options = {**options, "tokenize": True, "return_dict": True, "return_assistant_tokens_mask": True}
        with template_errors(where):
            encoded = self._tokenizer.apply_chat_template(messages, **options)
        return encoded["input_ids"], [bool(flag) for flag in encoded["assistant_masks"]]

    def _reject_assistant_only(self, where: str) -> None:
        if self._assistant_only:
            raise DataError(f"{where} is plain text, but assistant_only_loss needs messages; remove this argument.")


def _with_role_and_content(turn: Any) -> Any:
    """Return a message of the from/value format (ShareGPT's) with role and content; others unchanged."""
    if not isinstance(turn, Mapping) or turn.get("from") is None:
        return turn
    rest = {key: value for key, value in turn.items() if key not in ("from", "value")}
    return {"role": _ROLES.get(turn["from"], turn["from"]), "content": turn.get("value"), **rest}


def make_record(group: int, ids: list[int], loss_mask: list[bool], max_length: int | None = None) -> Record | None:
    """Return a tokenized row as a record, truncated to `max_length`.

    It is None if no token after the first one counts. The record's prompt ends before the first token that counts. Tokens
    after the last one that counts are removed, since under causal attention they change nothing.
    """
    length = len(ids[:max_length])
    counted = [i for i in range(1, length) if loss_mask[i]]
    if not counted:
        return None
    start, stop = counted[0], counted[-1] + 1
    is_truncated = any(loss_mask[length:])
    completion = Completion(
        ids=torch.tensor(ids[start:stop], dtype=torch.int32),
        logprobs=torch.zeros(stop - start),
        loss_mask=torch.tensor(loss_mask[start:stop], dtype=torch.bool),
        finish_reason="length" if is_truncated else "stop",
    )
    return Record(group, tuple(ids[:start]), completion, rewards=(), reward=0.0)

"""Prompts of a dataset: the columns of a row, and the reader that tokenizes its prompt.

A row has a `prompt`, a string or a list of messages, or its token ids, `input_ids`; rewards get all its other columns.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import count, groupby
from typing import Any, Literal

from datasets import Dataset

from lowpeak.data.chat import (
    TEMPLATE_ERRORS,
    Messages,
    continued_text,
    encode_chat,
    encode_chats,
    prompt_options,
)
from lowpeak.data.completions import DatasetCompletions
from lowpeak.data.row_reader import RowReader, read_integers
from lowpeak.errors import DataError
from lowpeak.records import Prompt

Overlong = Literal["error", "drop"]

# Keywords of every reward besides the columns; a column of the same name would replace one of them.
REWARD_KEYWORDS = frozenset(
    {
        *("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric"),
        *("environments", "conversations"),
    }
)
_NUM_ENVIRONMENT_ROWS = 4096  # of a dataset that environments take the place of
_EMPTY_PROMPT = [{"role": "user", "content": ""}]
PRIVILEGED_CONTEXT = "privileged_context"  # the column with what a teacher reads besides the prompt
VISION_COLUMNS = frozenset({"image", "images"})


def check_prompt_columns(row: Any, where: str) -> None:
    """Raise DataError for a row without `prompt` or `input_ids`, or with a reserved column name."""
    if not isinstance(row, Mapping):
        raise DataError(
            f"{where} must be a mapping of columns, got type {type(row).__name__}: set the dataset's format to None."
        )
    if not {"prompt", "input_ids"} & row.keys():
        raise DataError(f"{where} has no 'prompt' column, only {_names(row)}; rename the column with the prompt.")
    if keywords := REWARD_KEYWORDS & row.keys():
        raise DataError(f"{where}: the columns {_names(keywords)} are keywords of every reward; rename them.")
    check_text_only(row, where)


def check_text_only(row: Mapping[str, Any], where: str) -> None:
    """Raise DataError if the row has a column of images."""
    if vision := VISION_COLUMNS & row.keys():
        raise DataError(
            f"{where}: the columns {_names(vision)} contain images; lowpeak trains on text only, remove them."
        )


def environment_datasets(train_dataset: Any, eval_dataset: Any, environment_factory: Any) -> tuple[Any, Any]:
    """Return the datasets with an empty user message for a prompt that rows lack: environments open these conversations.

    Without a `train_dataset` the rows are those of the factory's `dataset`, or 4,096 of such messages. Raises DataError if a row
    names no environment of the factories.
    """
    if environment_factory is None:
        return train_dataset, eval_dataset
    if train_dataset is None:
        if isinstance(environment_factory, Mapping):
            raise DataError(
                "environment_factory has several environments, and a dataset's column 'environment' chooses among them: pass "
                "train_dataset, or one factory."
            )
        own = getattr(environment_factory, "dataset", None)
        if own is not None and not isinstance(own, Dataset):
            raise DataError(
                f"the attribute dataset of the environment is a {type(own).__name__}: make it a datasets.Dataset "
                "(Dataset.from_list takes rows), or pass train_dataset."
            )
        is_empty = own is None
        train_dataset = Dataset.from_dict({"prompt": [_EMPTY_PROMPT] * _NUM_ENVIRONMENT_ROWS}) if is_empty else own
    train_dataset = _with_prompts(train_dataset, environment_factory, "train_dataset")
    if isinstance(eval_dataset, dict):
        names = {key: f"eval_dataset[{key!r}]" for key in eval_dataset}
        return train_dataset, {key: _with_prompts(eval_dataset[key], environment_factory, names[key]) for key in names}
    return train_dataset, _with_prompts(eval_dataset, environment_factory, "eval_dataset")


def _with_prompts(dataset: Any, environment_factory: Any, name: str) -> Any:
    columns = getattr(dataset, "column_names", None)
    if isinstance(environment_factory, Mapping) and isinstance(dataset, Dataset):
        for value in dataset.unique("environment") if "environment" in dataset.column_names else [None]:
            check_environment_name(value, environment_factory, name)
    return (
        dataset if not columns or "prompt" in columns else dataset.add_column("prompt", [_EMPTY_PROMPT] * len(dataset))
    )


def _names(names: Any) -> str:
    return ", ".join(repr(str(name)) for name in sorted(names, key=str)) or "none"


def check_environment_name(value: Any, factories: Collection[Any], where: str) -> None:
    """Raise DataError if a row's `environment` is not among the names of the factories."""
    if value not in factories:
        names = ", ".join(map(repr, factories)) or "none"
        raise DataError(
            f"{where} has environment={value!r}, which is not among those of environment_factory: {names}; set this column of the "
            "dataset in each row."
        )


@dataclass(frozen=True)
class TeacherPrompts:
    """How a teacher's prompts are made: `template` combines `{prompt}` with the row's `{privileged_context}`.

    In a conversation the last message, the user's, is the prompt. `required`: every row must have a privileged context.
    """

    template: str
    required: bool = False

    def add_context(self, row: Mapping[str, Any], where: str) -> dict[str, Any] | None:
        """Return the row with its privileged context in the prompt; None for a row without one."""
        context, prompt = row.get(PRIVILEGED_CONTEXT), row["prompt"]
        if context is None:
            if self.required:
                raise DataError(
                    f"{where} has no {PRIVILEGED_CONTEXT!r}, without which a policy that is its own teacher learns nothing: add "
                    "the column, or pass a teacher_model."
                )
            return None
        last = last_text(prompt)
        if last is None or not isinstance(context, str):
            raise DataError(
                f"{where}: a {PRIVILEGED_CONTEXT!r} is text that is added to a prompt of text, or to the text of a last message "
                f"that is not the assistant's; got {context!r:.40} for {prompt!r:.60}: write both as text."
            )
        combined = self.template.format(prompt=last, privileged_context=context)
        changed = combined if isinstance(prompt, str) else [*prompt[:-1], {**prompt[-1], "content": combined}]
        return {**row, "prompt": changed}


def last_text(prompt: str | list[dict[str, Any]]) -> str | None:
    """Return the prompt, or the text of its last message; None for the assistant's message, and for other content."""
    if isinstance(prompt, str):
        return prompt
    content = None if prompt[-1].get("role") == "assistant" else prompt[-1].get("content")
    return content if isinstance(content, str) else None


class PromptReader(RowReader[Prompt]):
    """A reader of rows as prompts; one per dataset, because it remembers the first row's format.

    As in TRL, strings are tokenized with the tokenizer's special tokens (a BOS if it adds one), and messages as the chat
    template writes them. `max_prompt_tokens` None means no limit; `limit_reason` names the source of the limit in errors.
    With `overlong` "drop", a prompt that is too long is dropped. `longest` and `longest_of_teacher` are the
    lengths of the longest prompts read so far. `teacher` makes the prompts that a teacher reads, which are within the same limit;
    `completions` of the dataset take the place of generated ones.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        max_prompt_tokens: int | None = None,
        overlong: Overlong = "error",
        limit_reason: str = "the limit",
        teacher: TeacherPrompts | None = None,
        completions: DatasetCompletions | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(tokenizer, **settings)
        self._teacher, self._completions = teacher, completions
        subject = "the prompt" if teacher is None else "the prompt, or the one with its privileged context,"
        self.drop_reason = f"{subject} has more than {max_prompt_tokens} tokens"
        self._max_tokens = max_prompt_tokens
        self._overlong = overlong
        self._limit_reason = limit_reason
        self._conversational: bool | None = None
        self.longest = self.longest_of_teacher = 0

    def read(self, row: Mapping[str, Any], serial: int, index: int | None = None) -> Prompt | None:
        return self._read([row], serial, serial if index is None else index)[0]

    def read_batch(self, rows: Sequence[Mapping[str, Any]], first: int) -> list[Prompt | None]:
        return self._read(rows, first, first)

    def _read(self, rows: Sequence[Mapping[str, Any]], serial: int, index: int) -> list[Prompt | None]:
        """Return consecutive rows as prompts; all rows are checked before any is tokenized."""
        places = [f"row {i}" for i in range(index, index + len(rows))]
        for row, where in zip(rows, places, strict=True):
            check_prompt_columns(row, where)
        if "prompt" not in rows[0]:
            return self._read_ids(rows, serial, places)
        for row, where in zip(rows, places, strict=True):
            self._check_format(row.get("prompt"), where)
        encoded, options = self._encode(rows, places)
        of_teacher = self._encode_for_teacher(rows, places)
        columns = zip(rows, encoded, options, range(serial, serial + len(rows)), places, of_teacher, strict=True)
        return [self._make_prompt(*each) for each in columns]

    def _encode(
        self, rows: Sequence[Mapping[str, Any]], places: Sequence[str]
    ) -> tuple[list[list[int]], list[dict[str, Any]]]:
        """Return the token ids of each row's prompt, and its options of the chat template."""
        if not self._conversational:
            self._report_text(places[0])
            return self._tokenizer([row["prompt"] for row in rows])["input_ids"], [{}] * len(rows)
        chats = [
            self._read_chat(row, row["prompt"], where, "the prompt") for row, where in zip(rows, places, strict=True)
        ]
        return self._encode_chats(chats, places), [chat_options for _, chat_options in chats]

    def _encode_for_teacher(
        self, rows: Sequence[Mapping[str, Any]], places: Sequence[str]
    ) -> list[tuple[int, ...] | None]:
        """Return the token ids of each row's prompt with its privileged context; None for rows without one."""
        encoded: list[tuple[int, ...] | None] = [None] * len(rows)
        if self._teacher is None:
            return encoded
        combined = {i: row for i, row in enumerate(map(self._teacher.add_context, rows, places)) if row is not None}
        if combined:
            found, _ = self._encode(list(combined.values()), [places[i] for i in combined])
            for i, ids in zip(combined, found, strict=True):
                encoded[i] = tuple(ids)
        return encoded

    def teacher_ids(self, prompt: Prompt, context: str) -> tuple[int, ...] | None:
        """Return the ids that a teacher reads of a prompt with this context; None for too many, and if none can be added."""
        row, is_ids = (
            {**prompt.columns, "prompt": prompt.source, PRIVILEGED_CONTEXT: context},
            "input_ids" in prompt.columns,
        )
        if is_ids or last_text(prompt.source) is None:
            return None
        self._check_format(prompt.source, "")
        (ids,) = self._encode_for_teacher([row], [f"row {prompt.serial}"])
        return None if ids is None or (self._max_tokens is not None and len(ids) > self._max_tokens) else ids

    def _read_ids(self, rows: Sequence[Mapping[str, Any]], serial: int, places: Sequence[str]) -> list[Prompt | None]:
        """Return rows of token ids as prompts, with their text for rewards."""
        prompts = []
        for row, number, where in zip(rows, count(serial), places, strict=False):
            if self._teacher is not None and self._teacher.add_context({"prompt": "", **row}, where) is not None:
                raise DataError(
                    f"{where} has a {PRIVILEGED_CONTEXT!r} for a prompt of token ids, to which no text can be added: pass the "
                    "prompt as text or messages, or remove the column."
                )
            ids = read_integers(row, "input_ids", where)
            self._check_ids(ids, where)
            text = self._tokenizer.decode(ids)
            self._check_format(text, where)
            prompts.append(self._make_prompt({**row, "prompt": text}, ids, {}, number, where))
        return prompts

    def _check_format(self, prompt: Any, where: str) -> None:
        if prompt is None or prompt == "":
            raise DataError(f"{where} has an empty prompt; remove the row or fill it in.")
        if not isinstance(prompt, str | list):
            raise DataError(
                f"{where}: the prompt must be a string or a list of messages, got type {type(prompt).__name__}."
            )
        conversational = isinstance(prompt, list)
        if self._conversational is None:
            self._conversational = conversational
        if conversational != self._conversational:
            kinds = ("a list of messages", "a string") if conversational else ("a string", "a list of messages")
            raise DataError(f"{where} has {kinds[0]} as its prompt, but earlier rows have {kinds[1]}; use one format.")

    def _encode_chats(self, chats: Sequence[tuple[Messages, dict[str, Any]]], places: Sequence[str]) -> list[list[int]]:
        """Return token ids; consecutive rows with the same template options share one call."""
        prompts = [(messages, prompt_options(messages, options)) for messages, options in chats]
        encoded: list[list[int]] = []
        for options, run in groupby(prompts, key=lambda prompt: prompt[1]):
            conversations = [messages for messages, _ in run]
            try:
                encoded += encode_chats(self._tokenizer, conversations, options)
            except TEMPLATE_ERRORS:
                # Repeat the rows one by one, so that the error names its row.
                for messages in conversations:
                    encoded.append(
                        encode_chat(self._tokenizer, messages, options, f"{places[len(encoded)]}: the prompt")
                    )
        return encoded

    def _make_prompt(
        self,
        row: Mapping[str, Any],
        ids: list[int],
        options: Mapping[str, Any],
        serial: int,
        where: str,
        teacher_ids: tuple[int, ...] | None = None,
    ) -> Prompt | None:
        if not ids:
            raise DataError(f"{where}: the tokenizer returns no token for the prompt {row['prompt']!r:.80}; change it.")
        self._check_ids(ids, where)
        longest = max(len(ids), len(teacher_ids or ()))
        if self._max_tokens is not None and longest > self._max_tokens:
            if self._overlong == "drop":
                return None
            named = "the prompt" if len(ids) > self._max_tokens else "the prompt with its privileged context"
            raise DataError(
                f"{where}: {named} has {longest} tokens; {self._limit_reason} leaves {self._max_tokens}; "
                "shorten it or set overlong_prompts='drop'."
            )
        self.longest = max(self.longest, len(ids))
        self.longest_of_teacher = max(self.longest_of_teacher, len(teacher_ids or ()))
        columns = {name: value for name, value in row.items() if name != "prompt"}
        prefix = continued_text(row["prompt"], options)
        completion = None if self._completions is None else self._completions.draw(row, ids, serial, where)
        return Prompt(serial, tuple(ids), row["prompt"], columns, prefix, teacher_ids, completion)

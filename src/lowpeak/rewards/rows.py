"""What rewards are called with: groups laid out as rows, in order, in the shapes of TRL's reward contract."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from lowpeak.records import Completion, Group, Prompt

# The contract's own words: a column of this name is never passed on.
_NOT_COLUMNS = frozenset({"prompt", "completion", "completion_ids"})


@dataclass(frozen=True)
class Rows:
    """N rows: row n is completion `places[n][1]` of group `places[n][0]`."""

    prompts: list[Any]
    completions: list[Any]
    completion_ids: list[list[int]]
    columns: dict[str, list[Any]]
    texts: tuple[str, ...]
    places: tuple[tuple[int, int], ...]

    def __len__(self) -> int:
        return len(self.texts)

    def keywords(self) -> dict[str, Any]:
        """The keywords of one call: new lists each time, so that a function that sorts or pops harms no other."""
        return {
            **{name: list(values) for name, values in self.columns.items()},
            "prompts": list(self.prompts),
            "completions": list(self.completions),
            "completion_ids": [list(ids) for ids in self.completion_ids],
        }

    def describe(self, row: int) -> str:
        """Which row an error is about."""
        group, completion = self.places[row]
        text = self.texts[row]
        shown = text if len(text) <= 60 else text[:57] + "..."
        return f"row {row} (completion {completion} of group {group}: {shown!r})"


def read_rows(groups: Sequence[Group], decode: Callable[[list[int]], str]) -> Rows:
    """The rows of whole groups.

    A column has one value per row, the prompt's or, where a `rollout_func` gave one, the completion's; None where a
    row has neither. Prompts are as the data set gave them, completions strings or lists of one message.
    """
    pairs = [(group.prompt, completion) for group in groups for completion in group.completions]
    ids = [completion.ids.tolist() for _, completion in pairs]
    texts = tuple(decode(row) for row in ids)
    return Rows(
        prompts=[prompt.source for prompt, _ in pairs],
        completions=[_as_given(prompt, text) for (prompt, _), text in zip(pairs, texts, strict=True)],
        completion_ids=ids,
        columns=_columns(pairs),
        texts=texts,
        places=tuple((g, k) for g, group in enumerate(groups) for k in range(len(group.completions))),
    )


def _columns(pairs: Sequence[tuple[Prompt, Completion]]) -> dict[str, list[Any]]:
    fields = [{**prompt.columns, **completion.extra} for prompt, completion in pairs]
    names = dict.fromkeys(name for row in fields for name in row if name not in _NOT_COLUMNS)
    return {name: [row.get(name) for row in fields] for name in names}


def _as_given(prompt: Prompt, text: str) -> str | list[dict[str, Any]]:
    """The completion in its prompt's format; what it continues of the prompt is part of it."""
    if isinstance(prompt.source, str):
        return text
    return [{"role": "assistant", "content": prompt.begun + text}]

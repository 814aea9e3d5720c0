"""The part of a run's journal that its report shows: steps, events, and an even sample of completions."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

from lowpeak.errors import ArgumentError
from lowpeak.journal import (
    EVALUATIONS,
    EVENTS,
    FORMAT,
    ROLLOUTS,
    RUN,
    STEPS,
    TOKENS,
    conversation_text,
    journal_files,
    read_rows,
)

MAX_STEPS = 5_000  # of a run, in its curves
MAX_COMPLETIONS = 20_000  # with their text
MAX_TOKEN_ROWS = 2_000  # with token values
MAX_TOKENS = 1_000_000  # of these completions together
MAX_TEXT_LENGTH = 64 << 20  # characters of all completions and their prompts

Value = TypeVar("Value")
Position = tuple[int, int]  # of a completion: the rollout's first step, and the index of its line

_STEP = re.compile(rb'\{"step": ?(\d+)[,}]')  # with which the journal begins each line
_GROUP = re.compile(rb'"group": ?(\d+)')
# In format 1, rewards and the values of `log_extra` stand next to these.
_NAMES_OF_FORMAT_1 = ("step", "group", "prompt", "completion", "reward", "advantage", "num_tokens", "finish_reason")


@dataclass(frozen=True)
class Completions:
    """A sample of a run's completions, as JSON, with its prompts.

    The journal has `num_total` completions, and `num_available` of them with token values.
    """

    rows: list[dict[str, Any]]
    prompts: list[str]
    num_total: int
    num_available: int


@dataclass(frozen=True)
class RunData:
    """A run's numbers by step, its events, and a sample of its completions.

    `num_steps` are those of the journal, `seconds` what they took, `quote` what `lowpeak plan --prices` wrote (None: nothing).
    `facts` are those of the run's last start. Each step has the `hours` until its end.
    """

    name: str
    steps: list[dict[str, Any]]
    evaluations: list[dict[str, Any]]
    events: list[dict[str, Any]]
    completions: Completions
    num_steps: int
    facts: dict[str, Any]
    seconds: float = 0.0
    quote: dict[str, Any] | None = None


def has_journal(folder: Path) -> bool:
    """Return whether a run has written a step or a completion."""
    return any(journal_files(folder / "journal", name) for name in (STEPS, ROLLOUTS))


def _check_folder(folder: Path) -> None:
    if not folder.is_dir():
        raise ArgumentError(f"{folder} is not a folder: pass the output_dir of a run.")
    if not has_journal(folder):
        raise ArgumentError(
            f"{folder} has no journal/{STEPS}.jsonl: pass the output_dir of a run that has finished a step."
        )


def read_runs(folders: Sequence[Path]) -> list[RunData]:
    """Return the data of each run; together they have at most the completions that one page may have.

    Raises:
        ArgumentError: a folder is not there, or has no journal.
    """
    for folder in folders:
        _check_folder(folder)
    names = _run_names(folders)
    journals = [folder / "journal" for folder in folders]
    num_online = sum(bool(journal_files(journal, ROLLOUTS)) for journal in journals)
    return [_read_run(name, journal, max(1, num_online)) for name, journal in zip(names, journals, strict=True)]


def _run_names(folders: Sequence[Path]) -> list[str]:
    """Return the shortest ends of the folders' paths that tell them apart."""
    paths = [folder.resolve().parts for folder in folders]
    names = [path[-1] for path in paths]
    for length in range(2, max(map(len, paths)) + 1):
        if len(set(names)) == len(names):
            break
        names = ["/".join(path[-length:]) for path in paths]
    return names


def _read_run(name: str, journal: Path, num_online: int) -> RunData:
    """Return a run's data, with its share of the completions if `num_online` runs have some."""
    steps = list(read_rows(journal, STEPS))
    seconds = [*itertools.accumulate(_number(row.get("step_time")) or 0.0 for row in steps)]
    timed = [row | {"hours": until / 3600} for row, until in zip(steps, seconds, strict=True)]
    return RunData(
        name,
        [_numbers(row) for row in sample_evenly(timed, MAX_STEPS)],
        [_numbers(row) for row in read_rows(journal, EVALUATIONS)],
        [_event(row) for row in read_rows(journal, EVENTS)],
        read_completions(journal, *(most // num_online for most in (MAX_COMPLETIONS, MAX_TOKEN_ROWS, MAX_TEXT_LENGTH))),
        len(steps),
        ([*read_rows(journal, RUN)] or [{}])[-1],
        seconds[-1] if seconds else 0.0,
        _read_quote(journal.parent / "quote.json"),
    )


def _read_quote(path: Path) -> dict[str, Any] | None:
    """Return the quote of a run; None without one, or for a file that is no quote."""
    try:
        quote = json.loads(path.read_text(encoding="utf-8"))
        return {name: quote[name] for name in ("gpu", "steps", "price_per_hour", "hours", "dollars")}
    except (OSError, ValueError, TypeError, LookupError):
        return None


def _numbers(row: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if type(value) in (int, float) and math.isfinite(value)}


def _event(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return an event as texts: its time, kind and details."""
    details = {name: value for name, value in row.items() if name not in ("step", "time", "event")}
    return {
        "step": row["step"],
        "time": time_text(row.get("time")),
        "event": str(row.get("event", "")),
        "details": ", ".join(f"{name} {value}" for name, value in details.items() if value != 0),
    }


def time_text(value: Any) -> str:
    """Return a time in seconds since 1970 as text; none for another value."""
    seconds = _number(value)
    if seconds is None or not 0 <= seconds < 1e11:
        return ""
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M:%S} UTC"


def sample_evenly(items: Sequence[Value], most: int) -> Sequence[Value]:
    """Return at most `most` of the items at even distances, with the first and the last."""
    if len(items) <= most:
        return items
    return [items[round(i * (len(items) - 1) / max(1, most - 1))] for i in range(most)]


def read_completions(journal: Path, most: int, most_with_tokens: int, most_characters: int) -> Completions:
    """Return an even sample of a run's groups, first of those with token values, then of all others.

    If their text is longer than `most_characters`, the sample is smaller.
    """
    groups = _groups(journal)
    positions = {*itertools.chain(*groups)}
    lengths = {position: len(row["pieces"]) for position, row in _token_rows(journal, positions)}
    chosen = _sample_groups(groups, lengths, most)
    wanted = {*itertools.chain(*chosen)}
    parsed = [(position, _parse(line)) for position, line in _lines(journal) if position in wanted]
    rows = {position: row for position, row in parsed if row is not None}  # without damaged lines
    sizes = [(group, sum(_length(rows.get(each, {})) for each in group)) for group in chosen]
    shown = [each for each in itertools.chain(*_fitting(sizes, most, most_characters)) if each in rows]
    values = [(position, lengths[position]) for position in shown if position in lengths]
    tokens = dict(_token_rows(journal, {*_fitting(values, most_with_tokens, MAX_TOKENS * most // MAX_COMPLETIONS)}))
    prompts: dict[str, int] = {}
    completions = [_completion(rows[position], prompts, tokens.get(position)) for position in shown]
    return Completions(completions, [*prompts], len(positions), len(lengths))


def _groups(journal: Path) -> list[list[Position]]:
    """Return the positions of the completions of each prompt."""
    groups: dict[tuple[int, bytes], list[Position]] = {}
    for position, line in _lines(journal):
        found = _GROUP.search(line)
        groups.setdefault((position[0], found[1] if found else b""), []).append(position)
    return [*groups.values()]


def _sample_groups(groups: Sequence[list[Position]], valued: Collection[Position], most: int) -> list[list[Position]]:
    """Return an even sample of groups in order, those with `valued` completions first, of at most `most` completions."""
    most_groups = max(1, most // max(map(len, groups), default=1))
    first = [group for group in groups if any(each in valued for each in group)]
    others = [group for group in groups if not any(each in valued for each in group)]
    chosen = [*sample_evenly(first, most_groups)]
    return sorted([*chosen, *sample_evenly(others, most_groups - len(chosen))])


def _length(row: Mapping[str, Any]) -> int:
    return len(str(row.get("completion"))) + len(str(row.get("prompt")))


def _fitting(sizes: Sequence[tuple[Value, int]], most: int, most_in_all: int) -> list[Value]:
    """Return an even sample of at most `most` values, and fewer if their sizes sum to more than `most_in_all`."""
    chosen = sample_evenly(sizes, most)
    total = sum(size for _, size in chosen)
    if total > most_in_all:
        chosen = sample_evenly(chosen, max(1, len(chosen) * most_in_all // total))
    return [value for value, _ in chosen]


def _token_rows(journal: Path, positions: Collection[Position]) -> Iterator[tuple[Position, dict[str, Any]]]:
    """Yield the token values of completions at `positions`, without rows that are damaged."""
    for row in read_rows(journal, TOKENS):
        if type(row.get("row")) is int and (row["step"], row["row"]) in positions and _is_complete(row):
            yield (row["step"], row["row"]), row


def _lines(journal: Path) -> Iterator[tuple[Position, bytes]]:
    """Yield each complete line of the files of completions with its position, without parsing it."""
    counts = Counter[int]()
    for path in journal_files(journal, ROLLOUTS):
        with path.open("rb") as file:
            for line in file:
                found = _STEP.match(line)
                if found and line.endswith(b"\n"):
                    step = int(found[1])
                    yield (step, counts[step]), line
                    counts[step] += 1


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None


def _is_complete(row: Mapping[str, Any]) -> bool:
    """Return whether a row of token values has one value per token in each column."""
    columns = [row.get(name) for name in ("pieces", "logprobs", "entropy", "mismatch", "loss_mask")]
    return all(isinstance(column, list) and len(column) == len(columns[0] or ()) for column in columns)


def _completion(row: Mapping[str, Any], prompts: dict[str, int], tokens: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return a completion for the page; its prompt is a number of `prompts`, which is filled."""
    turns = _turns(row)
    shown: dict[str, Any] = {
        "step": row["step"],
        "group": "/".join(_text(row[name]) for name in ("rollout", "group") if name in row),
        "prompt": prompts.setdefault(_text(row.get("prompt")), len(prompts)),
        "completion": turns or _text(row.get("completion")),
        "reward": _number(row.get("reward")),
        "advantage": _number(row.get("advantage")),
        "length": _number(row.get("num_tokens")),
        "finish": _text(row.get("finish_reason")),
        "rewards": {name: _number(value) for name, value in _mapping(row, "rewards").items()},
        "facts": [[name, _text(value)] for name, value in _facts(row) if name != "turns" or not turns],
    }
    if tokens is not None:
        values = {name: [*map(_rounded, tokens[name])] for name in ("logprobs", "entropy", "mismatch", "loss_mask")}
        shown["tokens"] = {"pieces": [*map(_text, tokens["pieces"])], **values}
    return shown


def _turns(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return a conversation's turns: text with calls, facts, range of tokens; none for other completions.

    The messages after a turn are replies to it, or the `context` of the next turn if that one begins a branch.
    """
    messages, turns = row.get("completion", ""), row["turns"] if isinstance(row.get("turns"), list) else []
    firsts = _indices_of_turns(messages, turns) if _are_messages(messages) else []
    between = [messages[first + 1 : last] for first, last in itertools.pairwise([*firsts, len(messages)])]
    begins_branch = [i > 0 and "follows" in turns[i] for i in range(len(firsts))] + [False]
    return [
        _turn(
            _branch(i + 1, turns[i]),
            turns[i],
            messages[first],
            between[i - 1] if begins_branch[i] else None,
            () if begins_branch[i + 1] else between[i],
        )
        for i, first in enumerate(firsts)
    ]


def _turn(
    facts: list[list[str]],
    turn: Mapping[str, Any],
    message: Mapping[str, Any],
    context: Sequence[Mapping[str, Any]] | None,
    replies: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    names = (("tokens", "num_tokens"), ("reward", "reward"), ("seconds of the reply", "seconds"))
    shown: dict[str, Any] = {
        "text": conversation_text([message]),
        "replies": [conversation_text([each]).strip() for each in replies],
        "facts": [*facts, *([name, _text(turn[key])] for name, key in names[: 2 + bool(replies)] if key in turn)],
        "start": turn.get("first_token"),
        "length": turn["num_tokens"],
    }
    if context is not None:
        shown["context"] = [conversation_text([each]).strip() for each in context]
    return shown


def _indices_of_turns(messages: Sequence[Mapping[str, Any]], turns: Sequence[Any]) -> list[int]:
    """Return the index of each turn's message: the turn's own, or else of the assistant's; none if they are not the turns'."""
    own = [turn["message"] for turn in turns if isinstance(turn, dict) and type(turn.get("message")) is int]
    firsts = own or [i for i, each in enumerate(messages) if each["role"] == "assistant"]
    is_ordered = all(a < b for a, b in itertools.pairwise([-1, *firsts, len(messages)]))
    return firsts if is_ordered and len(firsts) == len(turns) else []


def _branch(number: int, turn: Mapping[str, Any]) -> list[list[str]]:
    """Return the number of a turn that begins a branch, and what the branch forks from."""
    if "follows" not in turn:
        return []
    return [
        ["turn", str(number)],
        ["branch from", f"turn {turn['follows'] + 1}" if turn["follows"] >= 0 else "the prompt"],
    ]


def _facts(row: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the other values of a completion by name: policy versions, extras, dataset columns."""
    # In format 1, a reward of this name is a float.
    row_format = row["format"] if type(row.get("format")) is int else 1
    if row_format > FORMAT:
        raise ArgumentError(
            f"The journal has completions of format {row_format}, and this version of lowpeak reads up to {FORMAT}: upgrade "
            "lowpeak to the version that wrote it."
        )
    if row_format == 1:
        yield from ((name, value) for name, value in row.items() if name not in _NAMES_OF_FORMAT_1)
        return
    yield "policy version", row.get("policy_version")
    if "turns" in row:
        yield "turns", row["turns"]
    for kind in ("extra", "columns"):
        yield from _mapping(row, kind).items()


def _mapping(row: Mapping[str, Any], name: str) -> dict[str, Any]:
    value = row.get(name)
    return value if isinstance(value, dict) else {}


def _number(value: Any) -> float | None:
    return value if type(value) in (int, float) and math.isfinite(value) else None


def _rounded(value: Any) -> float | None:
    """Return a number with four significant digits."""
    number = _number(value)
    return number if number is None or type(number) is int else float(f"{number:.4g}")


def _text(value: Any) -> str:
    """Return a column of a completion as text; messages as their roles and contents, with their tool calls."""
    if type(value) is float and math.isfinite(value):
        return f"{value:.4g}" if abs(value) < 1e4 else f"{value:.0f}"
    if _are_messages(value):
        return conversation_text(value)
    if isinstance(value, list | dict):
        return json.dumps(value, ensure_ascii=False)
    return "" if value is None else str(value)


def _are_messages(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, dict) and "role" in each for each in value)

"""What all ranks of a run must have alike: their arguments, the folder that they write into, and their data."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from lowpeak.data.digest import digest_row
from lowpeak.errors import ArgumentError, DataError
from lowpeak.ranks import Ranks

# What a rank may have to itself: where it is, what it shows and reports, what only rank 0's answer counts for.
_OF_A_RANK = frozenset(
    (
        "local_rank",
        "disable_tqdm",
        "report_to",
        "project",
        "resume_from_checkpoint",
        "num_completions_to_print",
    )
)


def require_same_arguments(args: Any, ranks: Ranks) -> None:
    """ArgumentError where ranks were told different things (another file on another host, a seed from the clock): they would wait
    for each other for good, or train on each other's numbers without a word.
    """
    own = {f.name: repr(getattr(args, f.name, None)) for f in fields(args) if _must_agree(f.name, args)}
    own["output_dir"] = repr(os.path.abspath(args.output_dir))  # ranks write into one folder
    told = ranks.gather(own)
    for name in own:
        for rank, other in enumerate(told):
            if other.get(name) != told[0].get(name):
                raise ArgumentError(
                    f"{name} is {told[0].get(name)} on rank 0 and {other.get(name)} on rank {rank}: start all ranks with the same "
                    "arguments."
                )


def _must_agree(name: str, args: Any) -> bool:
    plain = isinstance(getattr(args, name, None), bool | int | float | str | None)
    return plain and name not in _OF_A_RANK and not name.startswith(("log", "hub_", "push_to_hub", "trackio", "run_"))


def require_same_data(datasets: Mapping[str, Any], ranks: Ranks) -> None:
    """DataError where ranks have other data than rank 0, by length, columns, first and last row: their prompts would be taken for
    one another's. A stream is compared by its columns; several data sets in one each by itself.
    """
    own = {f"{name}, {trait}": said for name, data in datasets.items() for trait, said in _traits(data).items()}
    for rank, other in enumerate(told := ranks.gather(own)):
        for key, said in told[0].items():
            if other.get(key) != said:
                raise DataError(
                    f"{key.partition(',')[0]} has {said} on rank 0 and {other.get(key, 'none')} on rank {rank}: give all ranks "
                    "the same data."
                )


def _traits(data: Any) -> dict[str, str]:
    """What tells a data set from another without reading it."""
    if isinstance(data, Mapping):
        return {f"{name} {trait}": said for name, one in data.items() for trait, said in _traits(one).items()}
    if data is None or not hasattr(data, "__len__") or not len(data):
        return {"columns": _columns(getattr(data, "column_names", None))}
    ends = {"first": data[0], "last": data[len(data) - 1]}
    columns = getattr(data, "column_names", None) or list(ends["first"])
    rows = {name: f"a {name} row with SHA-256 {digest_row(row)}" for name, row in ends.items()}
    return {"length": f"{len(data)} rows", "columns": _columns(columns), **rows}


def _columns(names: Any) -> str:
    return f"the columns {', '.join(sorted(names))}" if names else "columns without names"

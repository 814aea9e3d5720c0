"""Consistency of a run's ranks: one rank logs, and all have the same arguments and data."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from lowpeak.data import digest_row
from lowpeak.errors import ArgumentError, DataError
from lowpeak.ranks import Ranks


def silence_nonzero_ranks(args: Any) -> None:
    """Log only errors on ranks where transformers does not log, or at the level of `log_level_replica`."""
    if args.should_log:
        return
    is_set = args.log_level_replica not in ("warning", "passive")  # warning is transformers' default
    logging.getLogger("lowpeak").setLevel(args.get_process_log_level() if is_set else logging.ERROR)


# Arguments that may differ between ranks: a rank's place, its output, and what only rank 0 uses.
_PER_RANK = frozenset(
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
    """Raise ArgumentError if an argument differs between ranks, by another file on a host or a seed from the clock.

    Such ranks would wait for each other forever, or train silently on each other's numbers.
    """
    local = {f.name: repr(getattr(args, f.name, None)) for f in fields(args) if _must_agree(f.name, args)}
    local["output_dir"] = repr(os.path.abspath(args.output_dir))  # ranks write into one folder
    gathered = ranks.gather(local)
    for name in local:
        for rank, values in enumerate(gathered):
            if values.get(name) != gathered[0].get(name):
                raise ArgumentError(
                    f"{name} is {gathered[0].get(name)} on rank 0 and {values.get(name)} on rank {rank}: start all ranks "
                    "with the same arguments."
                )


def _must_agree(name: str, args: Any) -> bool:
    plain = isinstance(getattr(args, name, None), bool | int | float | str | None)
    return plain and name not in _PER_RANK and not name.startswith(("log", "hub_", "push_to_hub", "trackio", "run_"))


def require_same_data(datasets: Mapping[str, Any], ranks: Ranks) -> None:
    """Raise DataError if a rank's data differ from rank 0's in length, columns, first or last row.

    A stream is compared by its columns, and each of several data sets separately.
    """
    local = {f"{name}, {trait}": value for name, data in datasets.items() for trait, value in _traits(data).items()}
    for rank, values in enumerate(gathered := ranks.gather(local)):
        for key, value in gathered[0].items():
            if values.get(key) != value:
                raise DataError(
                    f"{key.partition(',')[0]} has {value} on rank 0 and {values.get(key, 'none')} on rank {rank}: give all ranks "
                    "the same data."
                )


def _traits(data: Any) -> dict[str, str]:
    """Return traits that distinguish data sets without reading them completely."""
    if isinstance(data, Mapping):
        return {f"{name} {trait}": value for name, one in data.items() for trait, value in _traits(one).items()}
    if data is None or not hasattr(data, "__len__") or not len(data):
        return {"columns": _columns(getattr(data, "column_names", None))}
    ends = {"first": data[0], "last": data[len(data) - 1]}
    columns = getattr(data, "column_names", None) or list(ends["first"])
    rows = {name: f"a {name} row with SHA-256 {digest_row(row)}" for name, row in ends.items()}
    return {"length": f"{len(data)} rows", "columns": _columns(columns), **rows}


def _columns(names: Any) -> str:
    return f"the columns {', '.join(sorted(names))}" if names else "columns without names"

"""The start of a run on several ranks: what they must agree on, who logs, which checkpoint all resume from."""

from __future__ import annotations

import json
import logging
import os
import re
import socket
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]

from lowpeak.checkpoint import find_resume, last_checkpoint, set_aside, sweep
from lowpeak.data import digest_row
from lowpeak.errors import ArgumentError, CheckpointError, DataError
from lowpeak.journal import Journal
from lowpeak.ranks import Ranks

logger = logging.getLogger(__name__)

LAUNCH_FILE = ".lowpeak.launch"  # in output_dir


def quiet_replicas(args: Any) -> None:
    """Let one process log where transformers lets one: on others lowpeak says errors alone, or what `log_level_replica` sets."""
    if args.should_log:
        return
    asked = args.log_level_replica not in ("warning", "passive")  # warning is transformers' default
    logging.getLogger("lowpeak").setLevel(args.get_process_log_level() if asked else logging.ERROR)


def take_up(output_dir: Path, resume_from_checkpoint: str | bool | None) -> Path | None:
    """Clear what a killed run left half done, and return the checkpoint to go on from; one process calls it.

    After torchrun has started the ranks again (TORCHELASTIC_RESTART_COUNT), that is the last whole one that an earlier life of
    this very launch has written, whatever the arguments of the first start were; as they say where there is none yet.
    """
    sweep(output_dir)
    restarts = _restarts()
    last = last_checkpoint(output_dir)
    if restarts and last is not None and _is_of_this_launch(last):
        logger.warning("Started again (restart %d): going on from %s.", restarts, last)
        return find_resume(output_dir, True)
    return find_resume(output_dir, resume_from_checkpoint)


def check_resume(output_dir: Path, resume_from_checkpoint: str | bool | None) -> None:
    """Raise CheckpointError if there is no such checkpoint; a later life of a run chooses its own."""
    if not _restarts():
        find_resume(output_dir, resume_from_checkpoint)


def note_launch(output_dir: Path, step: int) -> None:
    """Write down that the folder's checkpoints beyond `step` are this launch's; one process calls it.

    A later life leaves what an earlier one wrote. It may be the first to come so far: a rank can die while it loads, beside
    another run's checkpoints.
    """
    launch = _launch()
    if launch is not None and not (_restarts() and (_noted(output_dir) or {}).get("launch") == launch):
        (output_dir / LAUNCH_FILE).write_text(json.dumps({"launch": launch, "from_step": step}), encoding="utf-8")


def _is_of_this_launch(checkpoint: Path) -> bool:
    noted = _noted(checkpoint.parent)
    if noted is None or noted["launch"] != _launch():
        return False
    return int(checkpoint.name.rpartition("-")[2]) > noted["from_step"]


def _restarts() -> int:
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT") or 0)


def _noted(output_dir: Path) -> dict[str, Any] | None:
    try:
        noted = json.loads((output_dir / LAUNCH_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):  # none, or torn by a kill
        return None
    return noted if isinstance(noted, dict) and noted.keys() >= {"launch", "from_step"} else None


def _launch() -> str | None:
    """A name that all lives of a run under torch's agent share, and no other run; None without such an agent.

    Without an id of the user's or torchrun's own (--standalone) it is the agent's process: it outlives the ranks it starts.
    """
    name = os.environ.get("TORCHELASTIC_RUN_ID")
    if name is None:
        return None
    agent = psutil.Process().parent()
    if name not in ("", "none") or agent is None:
        return name
    return f"{socket.gethostname()} {agent.pid} {agent.create_time()}"


def check_name(checkpoint: Path, output_dir: Path, step: int) -> None:
    """CheckpointError for a checkpoint of the run's own folder that is named after another step than the one it holds."""
    path = checkpoint.resolve()
    is_named = path.parent == output_dir.resolve() and re.fullmatch(r"checkpoint-\d+", path.name)
    if is_named and path.name != f"checkpoint-{step}":
        raise CheckpointError(
            f"{checkpoint} holds step {step}, and the run would take it for another step's: rename it to checkpoint-{step}, or "
            f"move it out of {output_dir}."
        )


def clear_folder(output_dir: Path, journal: Journal, step: int | None) -> None:
    """Put aside what of another run, or of later steps than a resumed run's `step`, is in the folder; one process calls it.

    Checkpoints go before the journal loses the steps to them.
    """
    aside = set_aside(output_dir, step or 0)
    if aside is not None:
        logger.warning("Checkpoints of another run stood in %s; they are now in %s.", output_dir, aside)
    if step is not None:
        journal.resume_at(step)
    note_launch(output_dir, step or 0)


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

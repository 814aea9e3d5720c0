"""Restarts by torchrun or the command line: the store and the record of a restarted run; the time limit of ranks on CPUs.

torchrun's static rendezvous (its default, and accelerate's) keeps one store for all restarts of a run, without a prefix
for each (torch 2.11 to 2.13, static_tcp_rendezvous.py): after a restart, ranks read old addresses in it, and fail to
connect or hang. With `--standalone` or `--rdzv-backend c10d` each restart has a separate store.
"""

from __future__ import annotations

import json
import os
import socket
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
import torch.distributed as dist
from accelerate import PartialState

LAUNCH_FILE = ".lowpeak.launch"  # in output_dir
RELAUNCHES = "LOWPEAK_RELAUNCHES"  # in the environment of ranks: how often the command line has launched them again

_TIMEOUT = timedelta(seconds=300)


def renew_master_port() -> None:
    """After a restart by torchrun, let rank 0 host a new store; the old store passes the new MASTER_PORT on.

    Call it before the process group is made. It does nothing in a first start, or without torchrun.
    """
    restart = _torchrun_restarts()  # a launch has its own store
    agent_hosts = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if not restart or not agent_hosts or not dist.is_available() or dist.is_initialized():
        return
    key = f"lowpeak/life_{restart}/port"
    old_store = dist.TCPStore(
        os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False, timeout=_TIMEOUT
    )
    if os.environ["RANK"] == "0":
        with socket.socket() as probe:
            probe.bind(("", 0))
            old_store.set(key, str(probe.getsockname()[1]))
    os.environ["MASTER_PORT"] = old_store.get(key).decode()  # waits for rank 0
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"


def limit_collectives_on_cpu(seconds: int, backend: str | None) -> None:
    """Make the process group of several ranks on CPUs with this time limit, which transformers sets only for GPUs."""
    if int(os.environ.get("WORLD_SIZE") or 1) > 1 and dist.is_available() and not dist.is_initialized():
        PartialState(cpu=True, backend=backend, timeout=timedelta(seconds=seconds))


def record_launch(output_dir: Path, step: int) -> None:
    """Write a file that marks the folder's checkpoints after `step` as this launch's; one process calls it."""
    launch = _launch_name()
    # A restarted run keeps the file of its first start. There may be none: a rank can die while it loads.
    if launch is not None and not (num_restarts() and (_read_record(output_dir) or {}).get("launch") == launch):
        (output_dir / LAUNCH_FILE).write_text(json.dumps({"launch": launch, "from_step": step}), encoding="utf-8")


def is_of_this_launch(checkpoint: Path) -> bool:
    """Return whether this launch has written the checkpoint, before a restart."""
    record = _read_record(checkpoint.parent)
    if record is None or record["launch"] != _launch_name():
        return False
    return int(checkpoint.name.rpartition("-")[2]) > record["from_step"]


def num_restarts() -> int:
    """Return how often torchrun has restarted the ranks, plus the launches that came before."""
    return _torchrun_restarts() + int(os.environ.get(RELAUNCHES) or 0)


def _torchrun_restarts() -> int:
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT") or 0)


def _read_record(output_dir: Path) -> dict[str, Any] | None:
    try:
        record = json.loads((output_dir / LAUNCH_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):  # there is none, or a kill has truncated it
        return None
    return record if isinstance(record, dict) and record.keys() >= {"launch", "from_step"} else None


def _launch_name() -> str | None:
    """Return a name that all restarts by one torchrun agent share, and no other run has; None without an agent.

    Without a run id, which the user or --standalone sets, it is the agent's process, which outlives the ranks.
    """
    name = os.environ.get("TORCHELASTIC_RUN_ID")
    if name is None:
        return None
    agent = psutil.Process().parent()
    if name not in ("", "none") or agent is None:
        return name
    return f"{socket.gethostname()} {agent.pid} {agent.create_time()}"

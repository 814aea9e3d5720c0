"""Where and how long the ranks of a run meet: the store of a restarted run, and the time limit of ranks on CPUs.

torchrun's static rendezvous (its default, and accelerate's) keeps one store for all lives of a run, without a prefix for each
(torch 2.11 to 2.13, static_tcp_rendezvous.py): ranks of the second life read the first life's addresses in it, and fail to connect
or hang. With `--standalone` or `--rdzv-backend c10d` each life has a store of its own.
"""

from __future__ import annotations

import os
import socket
from datetime import timedelta

import torch.distributed as dist
from accelerate import PartialState

_SECONDS = timedelta(seconds=300)


def meet_anew() -> None:
    """In a later life under torchrun: let rank 0 host a new store, and tell the others its port through the old one.

    Call it before the process group is made; it changes MASTER_PORT. Nothing in a run's first life, or without torchrun.
    """
    life = int(os.environ.get("TORCHELASTIC_RESTART_COUNT") or 0)
    agent_hosts = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if not life or not agent_hosts or not dist.is_available() or dist.is_initialized():
        return
    key = f"lowpeak/life_{life}/port"
    old = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False, timeout=_SECONDS)
    if os.environ["RANK"] == "0":
        with socket.socket() as probe:
            probe.bind(("", 0))
            old.set(key, str(probe.getsockname()[1]))
    os.environ["MASTER_PORT"] = old.get(key).decode()  # waits for rank 0
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"


def limit_collectives_on_cpu(seconds: int, backend: str | None) -> None:
    """Make the process group of several ranks on CPUs with this time limit, which transformers passes on for devices alone."""
    if int(os.environ.get("WORLD_SIZE") or 1) > 1 and dist.is_available() and not dist.is_initialized():
        PartialState(cpu=True, backend=backend, timeout=timedelta(seconds=seconds))

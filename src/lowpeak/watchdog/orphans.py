"""Orphan detection: a process ends its process group when its parent has died.

Without it, vLLM's engine and workers survive a killed API server, and ranks survive a killed launcher. A thread compares the
parent's process id every half second. Linux's signal at a parent's death (PR_SET_PDEATHSIG) would come when the parent's
*thread* ends, and other systems do not have it.
"""

from __future__ import annotations

import os
import signal
import threading
import time

PARENT_VARIABLE = "LOWPEAK_PARENT"  # environment variable of a group's first process: the process id of its parent
_LOOK_SECONDS = 0.5
_SAVING_SECONDS = 30.0  # as long as torchrun gives ranks


def exit_training_with_parent() -> None:
    """Watch the parent that the environment names, if any. The run has time to finish its step and save."""
    if PARENT_VARIABLE in os.environ:
        exit_with_parent(first=True, grace=_SAVING_SECONDS)
        # Processes that this one starts have another parent.
        del os.environ[PARENT_VARIABLE]


def exit_with_parent(first: bool, grace: float = 2.0) -> None:
    """Start a thread that ends the process group after the parent has died.

    It sends SIGTERM, and SIGKILL after `grace` seconds. The `first` process of a group reads its parent from the
    environment, because the parent may have died already. If it was started into another process's group, it ends
    alone. The grace also covers an orderly exit, in which a parent ends shortly before its children.
    """
    expected = int(os.environ[PARENT_VARIABLE]) if first else os.getppid()
    alone = first and os.getpgrp() != os.getpid()
    arguments = (expected, grace, alone)
    threading.Thread(target=_watch, args=arguments, name="lowpeak-orphans", daemon=True).start()


def watch_parent_in_forks() -> None:
    """Watch the parent in every process that this one forks, too: threads do not survive a fork."""
    os.register_at_fork(after_in_child=lambda: exit_with_parent(first=False))


def _watch(expected: int, grace: float, alone: bool) -> None:
    while os.getppid() == expected:
        time.sleep(_LOOK_SECONDS)
    target, kill = (os.getpid(), os.kill) if alone else (os.getpgrp(), os.killpg)
    kill(target, signal.SIGTERM)
    time.sleep(grace)
    kill(target, signal.SIGKILL)

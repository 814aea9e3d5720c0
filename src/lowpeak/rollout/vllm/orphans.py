"""Processes that end with the one that started them: vLLM's engine and workers live on when its API server is killed.

A signal at a parent's death (PR_SET_PDEATHSIG) is Linux's alone and comes when the parent's *thread* ends; a look at the parent's
number every half second works everywhere, and whoever sees it change ends the whole process group, stopped members too.
"""

from __future__ import annotations

import os
import signal
import threading
import time

PARENT = "LOWPEAK_PARENT"  # in the environment of the first process of a group: who started it
_LOOK_SECONDS = 0.5


def end_with_parent(first: bool, grace: float = 2.0) -> None:
    """Watch this process's parent from a thread, and when it has ended, end the group: SIGTERM, and SIGKILL after `grace` seconds.

    `first` is the process that leads the group; its parent is the one that the environment names, who may be gone already.
    Processes that end in order leave a dead parent for a moment: that is what the grace is for.
    """
    expected = int(os.environ[PARENT]) if first else os.getppid()
    arguments = (expected, grace)
    threading.Thread(target=_watch, args=arguments, name="lowpeak-orphans", daemon=True).start()


def watch_forks() -> None:
    """The same in every process that is forked from this one, once: a thread does not survive a fork."""
    os.register_at_fork(after_in_child=lambda: end_with_parent(first=False))


def _watch(expected: int, grace: float) -> None:
    while os.getppid() == expected:
        time.sleep(_LOOK_SECONDS)
    os.killpg(os.getpgrp(), signal.SIGTERM)
    time.sleep(grace)
    os.killpg(os.getpgrp(), signal.SIGKILL)

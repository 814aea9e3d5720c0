"""Processes that end with the one that started them: vLLM's engine and workers live on for minutes when its API server is killed.

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
_GRACE_SECONDS = 2.0  # processes that end in order leave a parent that has ended for a moment


def end_with_parent(first: bool) -> None:
    """Watch this process's parent from a thread, here and in what is forked from here.

    `first` is the process that leads the group; its parent is the one that the environment names, who may be gone already.
    """
    expected = int(os.environ[PARENT]) if first else os.getppid()
    threading.Thread(target=_watch, args=(expected,), name="lowpeak-orphans", daemon=True).start()
    if not _forks_are_watched:
        _forks_are_watched.append(True)
        os.register_at_fork(after_in_child=lambda: end_with_parent(first=False))


_forks_are_watched: list[bool] = []


def _watch(expected: int) -> None:
    while os.getppid() == expected:
        time.sleep(_LOOK_SECONDS)
    time.sleep(_GRACE_SECONDS)
    os.killpg(os.getpgrp(), signal.SIGKILL)

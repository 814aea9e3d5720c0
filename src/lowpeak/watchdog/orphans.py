"""Processes that end with the one that started them: vLLM's engine and workers live on when its API server is killed, and ranks
when their launcher is.

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
_SAVING_SECONDS = 30.0  # what torchrun gives ranks, too


def end_training_with_parent() -> None:
    """Watch the parent that the environment names, if one is; a run that is asked to end has time to finish its step and save."""
    if PARENT in os.environ:
        end_with_parent(first=True, grace=_SAVING_SECONDS)
        del os.environ[PARENT]  # what this process starts has another one


def end_with_parent(first: bool, grace: float = 2.0) -> None:
    """Watch this process's parent from a thread, and when it has ended, end the group: SIGTERM, and SIGKILL after `grace` seconds.

    `first` is the process that leads the group; its parent is the one that the environment names, who may be gone already. One
    that was started into another's group ends alone.
    Processes that end in order leave a dead parent for a moment: that is what the grace is for.
    """
    expected = int(os.environ[PARENT]) if first else os.getppid()
    alone = first and os.getpgrp() != os.getpid()
    arguments = (expected, grace, alone)
    threading.Thread(target=_watch, args=arguments, name="lowpeak-orphans", daemon=True).start()


def watch_forks() -> None:
    """The same in every process that is forked from this one, once: a thread does not survive a fork."""
    os.register_at_fork(after_in_child=lambda: end_with_parent(first=False))


def _watch(expected: int, grace: float, alone: bool) -> None:
    while os.getppid() == expected:
        time.sleep(_LOOK_SECONDS)
    number, end = (os.getpid(), os.kill) if alone else (os.getpgrp(), os.killpg)
    end(number, signal.SIGTERM)
    time.sleep(grace)
    end(number, signal.SIGKILL)

"""Signals while a run fails: they wait until the cause of the failure is out."""

from __future__ import annotations

import os
import signal
from contextlib import contextmanager

import pytest

from lowpeak.errors import RewardError
from lowpeak.training import step_trainer
from small_runs import make


def failing(completions, **columns):
    raise KeyError("answer")


def test_a_sigterm_that_comes_while_a_failure_is_explained_does_not_cut_the_explanation(tmp_path, monkeypatch):
    explained = []

    @contextmanager
    def explaining(ranks, where):
        try:
            yield
        except RewardError:
            os.kill(os.getpid(), signal.SIGTERM)
            explained.append("said")
            raise

    monkeypatch.setattr(step_trainer, "watched", explaining)
    before = signal.getsignal(signal.SIGTERM)
    run = make("GRPO", tmp_path, reward_funcs=failing)
    with pytest.raises(RewardError, match="'failing'"):
        run.train()
    assert explained == ["said"]
    assert signal.getsignal(signal.SIGTERM) is before

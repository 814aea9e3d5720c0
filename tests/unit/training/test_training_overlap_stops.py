"""Ends of a run while rollouts are in flight: Ctrl-C, SIGTERM, early stops and errors; none waits for what it leaves behind."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import threading
import time
from contextlib import nullcontext

import pytest
import torch
from datasets import IterableDataset
from test_training_overlap import REFILLS, SAVES, samplers, serials, trained

from lowpeak.checkpoint.folders import last_checkpoint
from lowpeak.checkpoint.run_state import load_run_state
from lowpeak.errors import DataError, EngineError, MemoryExhaustedError, RewardError
from lowpeak.vllm.protocol import Answer
from overlap_runs import Delayed, Sampler, run_ahead, talk, totals
from small_runs import StopAfter, digits, journal, rows, same, weights
from tiny_models import tiny_model

pytestmark = pytest.mark.timeout(60)


class Slow(Sampler):
    """A sampler that stops answering after some answers, until its requests are aborted or released."""

    def __init__(self, after):
        super().__init__()
        self.left, self._released, pause = after, threading.Event(), self.vllm.pause

        def abort():
            self.left = self.left if self.left >= 0 else 10**6
            pause()

        self.vllm.pause = abort

    def release(self):
        self._released.set()

    def __call__(self, request):
        self.left -= 1
        if self.left >= 0:
            return super().__call__(request)
        while self.left < 0 and not self._released.wait(0.01):
            pass
        return super().__call__(request) if self._released.is_set() else Answer((), (), "abort")


def stopped_run(folder, after, **changes):
    """A run whose fourth rollout stops after so many answers, and that gets a SIGTERM when the third is rewarded.

    A launcher kills it 30 seconds later.
    """
    calls = []

    def reward(completions, **columns):
        calls.append(len(completions))
        if len(calls) == 3:
            calls.append(time.monotonic())
            os.kill(os.getpid(), signal.SIGTERM)
        return digits(completions)

    run = run_ahead(folder, [Slow(after)], 1, reward_funcs=reward, vllm_batch_size=4, **changes)
    with pytest.raises(KeyboardInterrupt, match="checkpoint-3"):
        run.train()
    assert time.monotonic() - calls[3] < 28
    return load_run_state(folder / "checkpoint-3").in_flight


@pytest.mark.parametrize("seconds", [0.5, pytest.param(None, marks=pytest.mark.release)])
def test_sigterm_ends_a_run_in_time_and_what_is_missing_is_generated_on_resume(tmp_path, monkeypatch, seconds):
    if seconds is not None:
        monkeypatch.setattr("lowpeak.training.signals._WAIT_SECONDS", seconds)
    (saved,) = stopped_run(tmp_path, 8 * 3 + 5, **SAVES)
    assert (saved.number, saved.policy_version, len(saved.records)) == (3, 2, 4)
    trained(tmp_path, samplers(1), 1, resume=True)
    found = journal(tmp_path, "rollouts")
    assert len(found) == 6 * 8
    assert [row["policy_version"] for row in found if row["rollout"] == 3] == [2] * 4 + [3] * 4


def test_sigterm_in_the_middle_of_a_hand_over_saves_the_state_before_it(tmp_path, monkeypatch):
    """In a refill of the fourth rollout, while the fifth is under generation, whose prompts are drawn again on resume."""
    monkeypatch.setattr("lowpeak.training.signals._WAIT_SECONDS", 0.5)
    slow, number = Slow(10**6), []

    def reward(prompts, completions, **columns):
        if number == [0, 1, 2, 3]:
            slow.left = 0
            run.run.interrupts._on_signal(15, None)
        return equal_for_most(prompts, completions)

    def equal_for_most(prompts, completions, **columns):
        return [
            value if prompt[0] in "012" else 0.0 for prompt, value in zip(prompts, digits(completions), strict=True)
        ]

    run = run_ahead(tmp_path / "a", [slow], 1, reward_funcs=reward, **REFILLS)
    hand_over = run.collector.hand_over
    run.collector.hand_over = lambda k, *args: (number.append(k), hand_over(k, *args))[1]
    with pytest.raises(KeyboardInterrupt, match="checkpoint-3"):
        run.train()
    (saved,) = load_run_state(tmp_path / "a" / "checkpoint-3").in_flight
    assert (saved.number, len(saved.records)) == (3, 8)
    settings = {**REFILLS, "reward_funcs": equal_for_most}
    calm, resumed = (run_ahead(tmp_path / name, samplers(1), 1, **settings) for name in ("calm", "a"))
    calm.train()
    resumed.train(resume_from_checkpoint=True)
    assert same(weights(calm), weights(resumed))
    assert [row[:1] + row[2:] for row in serials(tmp_path / "a")] == [
        row[:1] + row[2:] for row in serials(tmp_path / "calm")
    ]


class AtMessage(logging.Handler):
    """Calls `act` when the library logs words."""

    def __init__(self, words, act):
        super().__init__(logging.INFO)
        self._words, self._act = words, act

    def emit(self, record):
        if self._words in record.getMessage():
            self._act()


def interrupted_run(folder, monkeypatch, at_wait):
    """A run that gets a Ctrl-C in its third reward, and `at_wait(slow)` when it begins to wait for the fourth rollout."""
    slow, calls = Slow(8 * 3), []
    logger = logging.getLogger("lowpeak.training.pipeline")
    monkeypatch.setattr(logger, "level", logging.INFO)
    handler = AtMessage("Waiting for rollouts 3, which are saved", lambda: at_wait(slow))

    def reward(completions, **columns):
        calls.append(len(completions))
        if len(calls) == 3:
            os.kill(os.getpid(), signal.SIGINT)
        return digits(completions)

    run = run_ahead(folder, [slow], 1, reward_funcs=reward, **SAVES)
    logger.addHandler(handler)
    try:
        run.train()
    finally:
        logger.removeHandler(handler)


def test_ctrl_c_waits_for_the_rollouts_in_flight_saves_them_and_says_so(tmp_path, monkeypatch):
    with pytest.raises(KeyboardInterrupt, match="checkpoint-3"):
        interrupted_run(tmp_path, monkeypatch, Slow.release)
    (saved,) = load_run_state(tmp_path / "checkpoint-3").in_flight
    assert (saved.number, len(saved.records)) == (3, 8)


def test_a_second_ctrl_c_ends_the_wait_at_once(tmp_path, monkeypatch):
    def press_again(slow):
        threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGINT)).start()

    with pytest.raises(KeyboardInterrupt) as stopped:
        interrupted_run(tmp_path, monkeypatch, press_again)
    assert not str(stopped.value)
    assert last_checkpoint(tmp_path) == tmp_path / "checkpoint-2"


def fails(completions, **columns):
    raise ValueError("unscored")


def ends_early():
    yield from rows(4)
    yield {"prompt": ""}


class NoMemory(torch.optim.SGD):
    def step(self, *args, **kwargs):
        raise torch.OutOfMemoryError("states do not fit")


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"callbacks": [StopAfter(1)]}, None),
        ({"max_steps": 1}, None),
        ({"reward_funcs": fails}, RewardError),
        ({"data": IterableDataset.from_generator(ends_early)}, DataError),
        ({"model": (model := tiny_model()), "optimizers": (NoMemory(model.parameters()), None)}, MemoryExhaustedError),
    ],
    ids=["early stop", "max_steps", "RewardError", "DataError", "out of memory"],
)
def test_a_run_that_ends_leaves_no_request_and_waits_for_none(tmp_path, changes, error):
    """The servers answer the first rollout, and nothing else before they are interrupted."""
    of = [Slow(8), Slow(0)]
    run = run_ahead(tmp_path, of, 2, **{"reward_funcs": digits, **changes})
    if error is None:
        run.train()
        assert len(journal(tmp_path)) == 1
    else:
        with pytest.raises(error):
            run.train()
    for each in of:
        assert each.left >= 0, "a request still waits"
        assert each.vllm.events[-1:] == ["close"] or not each.asked
        assert each.vllm.events.count("pause") == each.vllm.events.count("resume")


@pytest.mark.parametrize("end", ["early", "reward", "tool", "SIGTERM", "tool at SIGTERM"])
def test_every_environment_is_closed_however_a_run_ends(tmp_path, end, monkeypatch):
    """Also with a call that hangs; too many of these end the run, when the rollout is due."""
    monkeypatch.setattr("lowpeak.training.signals._WAIT_SECONDS", 0.5)
    hangs, calls = threading.Event(), []

    def add(a: int, b: int) -> int:
        """Add two numbers.

        Args:
            a: The first number.
            b: The second number.
        """
        hangs.wait(20 * ("tool" in end and Delayed.events["reset"] > 3 * 8))
        return a + b

    def reward(environments, **columns):
        calls.append(len(environments))
        if len(calls) == 3 and "SIGTERM" in end:
            run.run.interrupts._on_signal(15, None)
        if end == "reward":
            raise ValueError("unscored")
        return totals(environments, **columns)

    parts = talk(0) | {"tools": [add], "reward_funcs": [reward]}
    changes = {"callbacks": [StopAfter(2)]} if end == "early" else {}
    changes |= {"tool_timeout": 0.2 if end == "tool" else None}
    run = run_ahead(tmp_path, samplers(1, 0, model=parts["model"]), 1, **parts, **changes)
    runner = run.parts.toolset.runner
    runner._num_threads, runner._threads = 2, asyncio.Semaphore(2)
    errors = {"reward": RewardError, "tool": EngineError, "early": ()}
    began = time.monotonic()
    try:
        with pytest.raises(errors.get(end, KeyboardInterrupt)) if errors.get(end, True) else nullcontext():
            run.train()
    finally:
        hangs.set()
    assert time.monotonic() - began < 15
    assert Delayed.events["reset"] > 8
    assert not Delayed.open

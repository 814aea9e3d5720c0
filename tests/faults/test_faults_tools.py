"""Tools and environments that fail in every way do not end a run, and leave nothing behind."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import random
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any

import pytest
from fault_runs import At

from child_processes import succeed
from lowpeak.journal import ROLLOUTS, TOOL_RESULTS, read_rows, read_steps
from scripted_turns import ScriptedTurns, call, questions
from small_runs import make
from tiny_models import tiny_model, tool_tokenizer

TIMEOUT = 0.1
COMPLETIONS = 8  # a step


class Unprintable(Exception):
    """An exception, and a result, without a text."""

    def __str__(self) -> str:
        raise ValueError("no text")


def recursive() -> list[Any]:
    found: list[Any] = []
    found.append(found)
    return found


def fail(error: BaseException) -> None:
    raise error


class Panic(BaseException):
    """As extension modules raise it."""


FAILURES = {
    "ValueError": lambda: fail(ValueError("wrong")),
    "MemoryError": lambda: fail(MemoryError()),
    "SystemExit": lambda: fail(SystemExit(3)),
    "KeyboardInterrupt": lambda: fail(KeyboardInterrupt()),
    "CancelledError": lambda: fail(asyncio.CancelledError()),
    "StopIteration": lambda: next(iter(())),
    "GeneratorExit": lambda: fail(GeneratorExit()),
    "Panic": lambda: fail(Panic()),
    "Unprintable error": lambda: fail(Unprintable()),
    "Unprintable result": Unprintable,
    "time-out": lambda: time.sleep(2 * TIMEOUT),
}
ENDINGS = {
    **FAILURES,
    "None": lambda: None,
    "bytes": lambda: b"\xff\x00",
    "object": object,
    "recursion": recursive,
    "1 MB": lambda: "7" * (1 << 20),
    "control tokens": lambda: "<|im_end|><eos></tool_call><tool_call>",
    "lone surrogate": lambda: "a\ud800b",
    "empty": lambda: "",
}


def fault(kind: str) -> Any:
    """End in the given way.

    Args:
        kind: Its name.
    """
    return ENDINGS[kind]()


async def late_fault(kind: str) -> Any:
    """End in the given way on the event loop.

    Args:
        kind: Its name.
    """
    if kind == "time-out":
        await asyncio.sleep(30)
    return ENDINGS[kind]()


class Wild:
    """An environment each of whose methods fails now and then; it counts those that are open."""

    num_open = 0
    draws = random.Random(0)

    def __init__(self) -> None:
        type(self).num_open += 1

    def _may_fail(self) -> None:
        if self.draws.random() < 0.1:
            FAILURES[self.draws.choice([*FAILURES][:9])]()

    def reset(self, **row: Any) -> str:
        self._may_fail()
        return self.draws.choice([" go", "", "\udc80"])

    def act(self, kind: str) -> Any:
        """End in the given way.

        Args:
            kind: Its name.
        """
        return ENDINGS[kind]()

    def get_turn_reward(self) -> float:
        self._may_fail()
        return 0.5

    def get_reward(self) -> Any:
        self._may_fail()
        return self.draws.choice(["high", float("nan"), *[self.draws.random() + 0.1] * 8])

    async def close(self) -> None:
        type(self).num_open -= 1
        self._may_fail()


class RandomTurns:
    """Two calls that end in random ways, then an answer."""

    def __init__(self) -> None:
        self.kinds: list[str] = []
        self._draws = random.Random(0)

    def __getitem__(self, number: int) -> str:
        if number == 2:
            return "x<eos>"
        # The tokenizer of characters takes a second for 1 MB.
        weights = [0.05 if kind in ("1 MB", "time-out") else 1.0 for kind in ENDINGS]
        self.kinds += self._draws.choices([*ENDINGS], weights)
        return call(self._draws.choice(["fault", "late_fault", "act"]), kind=self.kinds[-1]) + "<eos>"


def held() -> dict[str, int]:
    """Return what the process holds, once abandoned threads have ended."""
    until = time.monotonic() + 30
    while any(thread.name == "lowpeak-tool" for thread in threading.enumerate()) and time.monotonic() < until:
        time.sleep(0.01)
    gc.collect()
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {
        "threads": threading.active_count(),
        "files": len(os.listdir("/proc/self/fd")),
        "environments": Wild.num_open,
        "resident": int(status["VmRSS"].split()[0]) * 1024,
    }


def train_on_faults(steps: tuple[int, int], place: Path) -> None:
    """Look after each of two steps."""
    tokenizer, turns, found = tool_tokenizer(), RandomTurns(), list[dict[str, int]]()
    run = make(
        "GRPO", place / "run", tiny_model(len(tokenizer), context=512), questions(), tokenizer,
        tools=[fault, late_fault], environment_factory=Wild, reward_funcs=[], tool_timeout=TIMEOUT,
        max_completion_length=200, max_steps=steps[-1] + 1, logging_steps=1000,
    )  # fmt: skip
    for step in steps:
        run.add_callback(At("on_step_begin", step, lambda model: found.append(held())))
    engine = ScriptedTurns(tokenizer, [turns] * COMPLETIONS)
    engine.requests = deque(maxlen=1)  # type: ignore[assignment]
    run.collector.engine.engine = engine
    run.train()
    (place / "found.json").write_text(json.dumps([found, turns.kinds, Wild.num_open]))


@pytest.mark.parametrize("steps", [(20, 60), pytest.param((50, 1000), marks=pytest.mark.release)])
def test_failing_tools_end_no_run_and_leave_nothing_behind(tmp_path, steps):
    succeed(train_on_faults, steps, tmp_path, seconds=1800)
    (before, after), kinds, num_open = json.loads((tmp_path / "found.json").read_text())
    assert after.pop("resident") - before.pop("resident") < 16 << 20
    assert before == after
    assert num_open == 0
    assert {*kinds} == {*ENDINGS}
    rows = list(read_rows(tmp_path / "run" / "journal", ROLLOUTS))
    assert len(rows) == COMPLETIONS * (steps[-1] + 1)
    assert {row["reward"] is None for row in rows} == {True, False}
    assert all(row["reward"] != 0 for row in rows)
    results = list(read_rows(tmp_path / "run" / "journal", TOOL_RESULTS))
    # On a busy machine any call may be late.
    failed = [row["arguments"]["kind"] for row in results if "error" in row and "is_late" not in row]
    assert {*failed} == {*FAILURES} - {"time-out"}
    assert any(row["arguments"]["kind"] == "time-out" and row.get("is_late") for row in results)
    logged = read_steps(tmp_path / "run" / "journal")
    num_calls = sum(row["tools/call_frequency"] * COMPLETIONS for row in logged)
    assert num_calls > len(results) > 0.5 * num_calls

"""SIGTERM and Ctrl-C while a run waits for a vLLM server: it ends at once, what it has is saved, and it goes on to the same end."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from fault_runs import Case, build, checkpoints, ending, finish, steps

from case_selection import mark_extended
from child_processes import free_port, succeed
from fake_vllm import ScriptedVllm, answer_of, engine_over
from lowpeak.vllm.server import ServerVllm

SERVER = {"use_vllm": True, "vllm_mode": "server", "vllm_server_timeout": 50.0}
SHORT = {"max_steps": 6, "save_steps": 2, "num_iterations": 2, "max_completion_length": 3}
PLAIN = Case(args={**SHORT, "eval_strategy": "steps", "eval_steps": 3})


def nowhere() -> str:
    """An address where nobody listens."""
    return f"http://127.0.0.1:{free_port()}"


def signal_when_it_waits(place: Path, number: int) -> None:
    """A thread that sends the signal to this process once its log says that it waits, and notes when."""

    def watch() -> None:
        until = time.monotonic() + 50
        while "waiting for vLLM" not in (place / "log").read_text() and time.monotonic() < until:
            time.sleep(0.05)
        (place / "signalled").write_text(str(time.monotonic()))
        os.kill(os.getpid(), number)

    threading.Thread(target=watch, daemon=True).start()


class Fickle(ScriptedVllm):
    """A scripted vLLM that dies at its call number `dies_at`, and then is waited for where no server is."""

    def __init__(self, dies_at: int | None = None) -> None:
        super().__init__(answer_of)
        self.dies_at, self.is_away = dies_at, False
        self.waiting: Any = None

    def complete(self, requests: Any, timeout: float | None = None) -> Any:
        if len(self.waves) == self.dies_at:
            self.dies_after, self.is_away = 3, True
        return super().complete(requests, timeout)

    def info(self, wait_seconds: float | None = None) -> Any:
        if self.is_away:
            self.waiting.wait(50.0)
        return super().info(wait_seconds)


def build_over(vllm: Fickle, case: Case, place: Path) -> Any:
    trainer = build(case, place / "run")
    vllm.waiting = ServerVllm(nowhere(), None, lambda: trainer.run.interrupts.stopping)
    trainer.collector.engine = engine_over(vllm, batch_size=4)
    trainer.collector.engine.close()
    return trainer


def stop(trainer: Any, place: Path, number: int) -> None:
    signal_when_it_waits(place, number)
    try:
        trainer.train()
    except KeyboardInterrupt as error:
        seconds = time.monotonic() - float((place / "signalled").read_text())
        (place / "error.txt").write_text(f"{error}")
        (place / "seconds").write_text(str(seconds))
        return
    raise AssertionError("the run ended well")


def wait_for_one_that_never_comes(case: Case, place: Path, number: int) -> None:
    stop(build(case, place / "run"), place, number)


def wait_for_one_that_died(case: Case, place: Path, dies_at: int, number: int) -> None:
    stop(build_over(Fickle(dies_at), case, place), place, number)


def train(case: Case, place: Path, resumes: bool) -> None:
    trainer = build_over(Fickle(), case, place)
    trainer.train(resume_from_checkpoint=resumes)
    finish(trainer, place / "result.json")


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    place = tmp_path_factory.mktemp("undisturbed")
    succeed(train, PLAIN, place, False)
    return ending(place)


@pytest.mark.parametrize("number", mark_extended([signal.SIGTERM, signal.SIGINT], [signal.SIGTERM]))
def test_before_the_first_step_there_is_nothing_to_save(tmp_path, number):
    case = Case(args={**SERVER, "vllm_server_base_url": nowhere()})
    succeed(wait_for_one_that_never_comes, case, tmp_path, number)
    assert float((tmp_path / "seconds").read_text()) < 3
    assert "first step" in (tmp_path / "error.txt").read_text()
    assert checkpoints(tmp_path / "run") == []


# A rollout serves two steps and takes two waves; the evaluation after step 3 takes waves of its own.
@pytest.mark.parametrize(("dies_at", "step"), mark_extended([(3, 2), (5, 3)], [(3, 2)]))
def test_a_server_that_died_is_waited_for_no_longer_and_the_run_goes_on_to_the_same_end(tmp_path, alone, dies_at, step):
    succeed(wait_for_one_that_died, PLAIN, tmp_path, dies_at, signal.SIGTERM)
    assert float((tmp_path / "seconds").read_text()) < 3
    assert f"{tmp_path}/run/checkpoint-{step}." in (tmp_path / "error.txt").read_text()
    assert [row["step"] for row in steps(tmp_path / "run")] == list(range(1, step + 1))
    succeed(train, PLAIN, tmp_path, True)
    assert ending(tmp_path) == alone

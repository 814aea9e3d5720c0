"""The console: a log is one aligned line of at most eight numbers, a bar is for terminals, and callbacks get every number."""

from __future__ import annotations

import re
import sys

import pytest
from transformers import PrinterCallback, ProgressCallback, TrainerCallback

from overlap_runs import Sampler, run_ahead
from small_runs import DATA, digits, make, rows

NUMBER = re.compile(r"(?<= )(-?\d+(?:\.\d+)?(?:e-?\d+)?|\d+:\d\d:\d\d)(?= |$)")


class Tracker(TrainerCallback):
    """Keeps the logs that a tracker of `report_to` gets."""

    def __init__(self):
        self.logs = []

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.logs.append(dict(logs))


def run(kind, folder, **changes):
    tracker = Tracker()
    data = DATA.get(kind, rows)(4)
    evaluated = {"eval_dataset": data, "eval_strategy": "steps", "eval_steps": 2}
    trainer = make(kind, folder, **evaluated, callbacks=[tracker], disable_tqdm=False, max_steps=4, **changes)
    trainer.train()
    return trainer, tracker


@pytest.mark.parametrize(("kind", "first"), [("GRPO", "reward"), ("SFT", "loss")])
def test_a_log_is_an_aligned_line_of_at_most_eight_numbers(tmp_path, capsys, kind, first):
    _, tracker = run(kind, tmp_path)
    out, err = capsys.readouterr()
    lines = [line for line in out.splitlines() if line.startswith("step ")]
    steps = [line for line in lines if "eval" not in line and "done" not in line]
    assert [line.split()[1] for line in steps] == ["1/4", "2/4", "3/4", "4/4"]
    assert all(line.split()[2] == first and 5 <= len(NUMBER.findall(line)) <= 8 for line in steps)
    assert len({line.index("grad norm") for line in steps[1:]}) == 1
    assert 0.1 < float(steps[0].split("GiB")[1].split()[0]) < 50
    assert re.fullmatch(r".* left +\d+:\d\d:\d\d", steps[0])
    evaluations = [line for line in lines if "  eval  " in line]
    assert len(evaluations) == 2
    assert f"  {first} " in evaluations[0]
    assert "\r" not in err + out  # no bar in a file
    assert all({"grad_norm", "peak_memory/train", "time/train"} <= logs.keys() for logs in tracker.logs[:2])


def test_a_run_with_rollouts_ahead_shows_staleness_the_sample_size_and_idle_shares(tmp_path, capsys):
    run_ahead(tmp_path, [Sampler()], 1, reward_funcs=digits).train()
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("step 4/6"))
    number = r" +\d+(\.\d+)?"
    words = ("reward", "staleness", "sample size", "idle servers", "idle trainer", "s/step", "GiB")
    assert re.fullmatch("step 4/6" + "".join(f"  {word}{number}" for word in words) + r"  left +\d+:\d\d:\d\d", line)
    assert re.search(r"staleness +1", line)
    assert len(NUMBER.findall(line)) <= 8


def test_log_all_prints_every_number_with_memory_in_gib(tmp_path, capsys):
    _, tracker = run("SFT", tmp_path, log_all=True)
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("step 1/4"))
    assert all(f"  {name} " in line for name in tracker.logs[0])
    assert re.search(r"  peak_memory/train [\d.]+GiB", line)


def test_a_terminal_has_a_bar_with_the_phase_under_the_lines(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    run("SFT", tmp_path)
    out, err = capsys.readouterr()
    assert re.search(r"4/4 \[.*training\]", err)
    assert sum(line.startswith("step ") for line in out.splitlines()) == 7


class OwnBar(ProgressCallback):
    """A user's own console."""


def test_a_users_own_callback_stays_and_the_console_is_removed_by_its_usual_name(tmp_path, capsys):
    trainer = make("SFT", tmp_path, callbacks=[OwnBar()])
    assert trainer.pop_callback(OwnBar) is not None
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    assert capsys.readouterr().out == ""

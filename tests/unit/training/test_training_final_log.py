"""The last entry of the log has the metrics of the steps that no other entry told of, as in TRL."""

from __future__ import annotations

from functools import partial

import pytest

from small_runs import StopAfter, journal, trained

UNLOGGED = {"logging_steps": 500}
trained_grpo = partial(trained, "GRPO", **UNLOGGED)


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("GRPO", ("reward", "entropy", "num_tokens")),
        ("SFT", ("entropy", "num_tokens")),
        ("Reward", ("accuracy", "num_tokens")),
    ],
)
def test_a_run_shorter_than_logging_steps_logs_its_metrics_at_the_end(tmp_path, kind, names):
    (entry,) = trained(kind, tmp_path, **UNLOGGED).state.log_history
    assert {"train_loss", "train_runtime", *names} <= entry.keys()
    assert entry["num_tokens"] == journal(tmp_path)[-1]["num_tokens"]


def test_the_last_entry_is_of_the_steps_since_the_one_before(tmp_path):
    first, entry = trained_grpo(tmp_path, max_steps=3, logging_steps=2).state.log_history
    assert first["step"] == 2
    assert entry["reward"] == pytest.approx(journal(tmp_path)[-1]["reward"])
    assert entry["entropy"] == pytest.approx(journal(tmp_path)[-1]["entropy"])


@pytest.mark.extended
def test_a_run_that_stops_early_and_one_that_goes_on_log_their_own_journal(tmp_path):
    changes = {"max_steps": 5, "save_strategy": "steps", "save_steps": 2}
    stopped = trained_grpo(tmp_path, **changes, callbacks=[StopAfter(3)])
    mean = sum(row["reward"] for row in journal(tmp_path)) / 3
    assert stopped.state.log_history[-1]["reward"] == pytest.approx(mean)
    resumed = trained_grpo(tmp_path, **changes, resume=True)
    mean = sum(row["reward"] for row in journal(tmp_path)[2:]) / 3
    assert resumed.state.log_history[-1]["reward"] == pytest.approx(mean)
    finished = trained_grpo(tmp_path, **changes, resume=True)
    assert finished.was_finished
    assert finished.state.log_history == []  # it takes no step, so there is nothing to log


def test_completions_that_no_entry_showed_are_printed_at_the_end(tmp_path, capsys):
    trained_grpo(tmp_path, max_steps=1, log_completions=True, num_completions_to_print=1)
    assert "step 1" in capsys.readouterr().out

"""Several ranks decide alike, fail together with one sentence, and stop at the same step."""

from __future__ import annotations

import json
import re

import fault_ranks
import pytest
from setups import named_models, seen

from case_selection import mark_extended
from child_processes import run_ranks, succeed_on_ranks
from lowpeak.journal import read_steps


@pytest.fixture(scope="module")
def failures(tmp_path_factory):
    """What each rank raised in each case of `FAILURES`, all in the same two processes."""
    place = tmp_path_factory.mktemp("failures")
    succeed_on_ranks(fault_ranks.fail_in_turn, place)
    return seen(place)


@pytest.mark.parametrize(
    ("case", "rank", "kind", "words"),
    [
        ("reward", 1, "RewardError", "KeyError: 'no such answer'"),
        ("exit", 1, "RewardError", "SystemExit: 0"),
        ("rollout_func", 1, "ConnectionError", "the sandbox does not answer"),
        ("data", 1, "DataError", "row 3"),
        ("folder", 0, "ArgumentError", "blocked/run'"),
        ("load", 1, "ModelError", "no-such-model"),
        ("resume", 1, "CheckpointError", "'last_epoch'"),
        ("held", 0, "CheckpointError", "held"),
    ],
)
def test_what_one_rank_fails_at_is_an_error_on_all(failures, case, rank, kind, words):
    own, other = failures[rank][case], failures[1 - rank][case]
    assert own.startswith(f"{kind}: ")
    assert words in own
    foreign = kind == "ConnectionError"  # a user's own class is named in the words
    assert other.startswith(f"{'RankError' if foreign else kind}: on rank {rank}")
    assert other.endswith(own if foreign else own.removeprefix(f"{kind}: "))


def test_memory_that_no_size_suffices_for_on_one_rank_ends_the_run_on_all(failures):
    own, other = failures[1]["memory"], failures[0]["memory"]
    for error, cause in ((own, "tried to allocate 20.00 GiB"), (other, "rank 1: tried to allocate 20.00 GiB")):
        assert error.startswith("MemoryExhaustedError: out of memory in phase score, also with the smallest sizes")
        assert cause in error


def test_weights_that_one_rank_finds_broken_are_named_by_all(failures):
    assert failures[0]["weights"] == failures[1]["weights"]
    assert failures[0]["weights"].startswith("NonFiniteError: ")
    assert "step 1" in failures[0]["weights"]
    assert "model.layers.1.mlp.up_proj.weight" in failures[0]["weights"]


def test_layout_and_sizes_are_those_that_every_rank_can_have(tmp_path):
    succeed_on_ranks(fault_ranks.choose, tmp_path)
    roomy, full = seen(tmp_path)
    assert roomy == full
    assert (roomy["layout"], roomy["first"]) == ("padded", "rank 0's")
    assert "attn_implementation='eager'" in roomy["why"]
    assert roomy["sizes"] == {
        "micro_batch_tokens": 512,
        "logprob_chunk_size": 16,
        "kv_cache_bytes": 1 << 24,
        "layout": "padded",
    }


def test_what_the_callback_of_one_rank_asks_for_is_done_on_all(tmp_path):
    succeed_on_ranks(fault_ranks.ask_alone, tmp_path)
    assert seen(tmp_path) == [{"step": 1, "evaluated": 1, "saved": ["checkpoint-1"]}] * 2


@pytest.mark.parametrize("strategy", mark_extended(["fsdp2", "zero3"], ["fsdp2"]))
def test_a_supervised_run_that_evaluates_and_saves_trains_on_as_one_that_does_not(tmp_path, strategy):
    succeed_on_ranks(fault_ranks.evaluate_and_save, tmp_path, strategy)
    for found in seen(tmp_path):
        assert found["often"] == found["never"]
        assert all(error.startswith("ArgumentError: ") and "evaluate()" in error for error in found["early"])


@pytest.mark.parametrize("strategy", mark_extended(["fsdp2", "zero3"], ["zero3"]))
def test_a_rank_without_prompts_waits_for_nobody_in_vain(tmp_path, strategy):
    named_models(tmp_path / "named")
    succeed_on_ranks(fault_ranks.have_nothing, tmp_path, strategy)
    first, second = seen(tmp_path)
    errors = sorted([first.pop("error"), second.pop("error")], key=len)
    assert all(error.startswith("RewardError: ") and "KeyError: 'no such answer'" in error for error in errors)
    assert errors[1].startswith("RewardError: on rank 0")
    assert first == second
    assert first["steps"] == [2, 2]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """A run that nobody stops: its folder, and what each rank saw."""
    place = tmp_path_factory.mktemp("alone")
    succeed_on_ranks(fault_ranks.leave_alone, place)
    return place / "run", seen(place)


def test_all_ranks_log_the_same_numbers_and_the_first_writes_them_once(alone):
    folder, (first, second) = alone
    assert first == second
    assert {"peak_memory/train", "time/reward", "useful_tokens/train", "useful_tokens/rollout"} <= first["logs"][
        0
    ].keys()
    steps = read_steps(folder / "journal")
    assert [row["step"] for row in steps] == [1, 2, 3, 4, 5, 6]
    assert len((folder / "journal/rollouts.jsonl").read_text().splitlines()) == 6 * 8
    per_second = [
        row["num_tokens"] - before for row, before in zip(steps, [0, *(r["num_tokens"] for r in steps)], strict=False)
    ]
    assert [row["tokens_per_second"] * row["step_time"] for row in steps] == pytest.approx(per_second)


@pytest.mark.parametrize(
    ("strategy", "signals", "step"),
    mark_extended(
        [
            ("ddp", {1: ("SIGINT", 2)}, 3),
            ("ddp", {0: ("SIGTERM", 1), 1: ("SIGTERM", 2)}, 2),  # the launcher's, twice
            ("ddp", {0: ("SIGINT", 3), 1: ("SIGINT", 3)}, 4),  # in the same step
            ("zero3", {1: ("SIGTERM", 2)}, 3),
        ],
        [("ddp", {1: ("SIGINT", 2)}, 3)],
    ),
)
def test_the_first_request_to_stop_on_any_rank_saves_the_same_step_on_all(tmp_path, alone, strategy, signals, step):
    succeed_on_ranks(fault_ranks.stop, tmp_path, signals, strategy)
    first, second = seen(tmp_path)
    assert first == second
    assert first["error"].startswith("KeyboardInterrupt: ")
    assert f"checkpoint-{step}" in first["error"]
    assert (first["step"], first["checkpoints"]) == (step, [f"checkpoint-{step}"])
    assert first["weights"] == pytest.approx(alone[1][0]["weights"], rel=0, abs=0 if strategy == "ddp" else 1e-3)


@pytest.mark.extended
def test_the_second_ctrl_c_on_any_rank_ends_all_of_them_now(tmp_path):
    ended = run_ranks(fault_ranks.stop_at_once, tmp_path)
    assert [rank.code for rank in ended] == [0, 1]
    assert json.loads((tmp_path / "seen0.json").read_text())["error"] == "KeyboardInterrupt: "
    assert re.search("rank 0 .*phase reward.* KeyboardInterrupt.* Rank 1 .*phase reward", ended[1].log)
    assert abs(ended[1].at - ended[0].at) < 20

"""A rank that goes away, fails alone or does not come ends the others soon, with a sentence that names it and their phase."""

from __future__ import annotations

import re
from pathlib import Path

import fault_ranks
import pytest
from setups import noted, seen

from case_selection import mark_extended
from child_processes import Ended, run_ranks, succeed_on_ranks

SOON = 20.0  # seconds on a busy machine; a rank that hangs is given 5 to end by itself


def after_death(place: Path, survivor: Ended) -> float:
    """Seconds by which the rank outlived the one that died."""
    return survivor.at - float((place / "died").read_text())


@pytest.mark.parametrize(
    ("strategy", "victim", "how", "world_size"),
    mark_extended([("ddp", 0, "exit", 2), ("ddp", 1, "kill", 3), ("zero3", 1, "kill", 2)], [("ddp", 1, "kill", 3)]),
)
def test_all_others_raise_an_error_that_names_the_rank_that_went_and_where_they_were(
    tmp_path, strategy, victim, how, world_size
):
    ended = run_ranks(fault_ranks.die, tmp_path, strategy, victim, how, 0.0, world_size=world_size)
    for rank in {*range(world_size)} - {victim}:
        error = noted(tmp_path, rank)["error"]
        assert re.match(f"RankError: rank {victim} is gone .*Rank {rank} was in .*phase reward", error)
        assert after_death(tmp_path, ended[rank]) < SOON


def test_a_rank_that_goes_while_the_trained_model_is_written_is_named(tmp_path):
    ended = run_ranks(fault_ranks.die_saving, tmp_path)
    error = noted(tmp_path, 0)["error"]
    assert re.match("RankError: rank 1 is gone .*Rank 0 was in phase save", error)
    assert after_death(tmp_path, ended[0]) < SOON


@pytest.mark.extended
@pytest.mark.parametrize(
    ("how", "busy", "where"),
    [("kill", 50.0, "phase reward"), ("kill, and leave a child", 0.0, "the step, after phase reward")],
)
def test_a_rank_that_is_busy_or_hangs_when_another_goes_is_ended(tmp_path, how, busy, where):
    ended = run_ranks(fault_ranks.die, tmp_path, "ddp", 1, how, busy)
    assert ended[0].code == 1
    assert re.search(f"lowpeak: error: rank 1 is gone .*Rank 0 was in {where}", ended[0].log)
    assert after_death(tmp_path, ended[0]) < SOON


def test_an_error_that_nobody_agreed_on_is_told_to_the_others(tmp_path):
    succeed_on_ranks(fault_ranks.fail_alone, tmp_path)
    first, second = seen(tmp_path)
    assert second["error"] == "LookupError: a bug of the user's"
    assert re.match("RankError: rank 1 failed .*phase optimizer: LookupError: a bug of", first["error"])


@pytest.mark.extended
def test_nccls_lack_of_memory_ends_all_ranks_with_advice_and_is_not_retried(tmp_path):
    succeed_on_ranks(fault_ranks.lose_communicator, tmp_path)
    first, second = seen(tmp_path)
    assert re.match("RankError: NCCL .*memory_budget.*failure 2", second["error"])
    assert re.match("RankError: rank 1 failed in phase train: NCCL .*memory_budget.*failure 2", first["error"])
    assert first["lowered"] == second["lowered"] == []


@pytest.mark.extended
def test_a_rank_that_is_slow_is_not_taken_for_a_dead_one(tmp_path):
    succeed_on_ranks(fault_ranks.be_slow, tmp_path)
    assert [rank["step"] for rank in seen(tmp_path)] == [3, 3]


@pytest.mark.extended
def test_a_rank_that_is_stopped_is_waited_for_as_long_as_ddp_timeout_says(tmp_path):
    ended = run_ranks(fault_ranks.be_stopped, tmp_path, seconds=90)
    found = noted(tmp_path, 0)
    assert re.fullmatch("RankError: no answer .*phase reward.*rank 1 is in .*", found["error"])  # one line
    assert found["seconds"] < 60
    assert (ended[0].code, ended[1].code) == (0, -9)


@pytest.mark.extended
def test_a_rank_that_does_not_come_within_the_limit_of_collectives_is_named_with_its_phase(tmp_path):
    ended = run_ranks(fault_ranks.wait_too_long, tmp_path)
    error = noted(tmp_path, 0)["error"]
    assert re.match("RankError: no answer .*phase reward.*rank 1 is in phase reward.*ddp_timeout", error)
    assert ended[1].code == 1
    assert re.search("rank 0 failed .*phase reward: no answer", ended[1].log)

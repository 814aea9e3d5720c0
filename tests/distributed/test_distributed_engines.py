"""Engines that are lost, and engines over several ranks, among ranks: nobody hangs, nothing is generated twice."""

from __future__ import annotations

from pathlib import Path

import lost_ranks
import pytest
from fault_ranks import seen
from forked import succeed
from setups import named_models

from lowpeak.rollout.vllm.requests import rows_of
from vllms import SAMPLING, prompts, said


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_an_engine_that_one_rank_loses_is_loaded_again_by_all_and_nothing_is_judged_twice(
    tmp_path: Path, strategy: str
) -> None:
    """Also where the others would ask a sharded reward model meanwhile, which takes all ranks."""
    named_models(tmp_path / "named")
    succeed(lost_ranks.lose_one, tmp_path, strategy)
    ranks = seen(tmp_path)
    for found in ranks:
        assert found["shaken"]["judged"] == found["calm"]["judged"]
        assert found["shaken"]["weights"] == found["calm"]["weights"]
        assert found["shaken"]["loads"] == found["calm"]["loads"] + 1
    assert ranks[0]["shaken"]["asked"] == [4, 4, 4]  # what it had answered, it kept
    assert ranks[1]["shaken"]["asked"] == [4, 4, 2, 4]


def test_an_engine_that_never_comes_back_ends_all_ranks_with_one_sentence(tmp_path: Path) -> None:
    succeed(lost_ranks.lose_for_good, tmp_path)
    other, own = (found["error"] for found in seen(tmp_path))
    assert own == "LostEngineError: The scripted vLLM died."
    assert other == "LostEngineError: on rank 1, and so all ranks stop: The scripted vLLM died."


def test_ranks_of_which_one_waits_for_a_server_and_is_asked_to_stop_save_the_same_step(tmp_path: Path) -> None:
    succeed(lost_ranks.stop_while_one_waits, tmp_path)
    calm, waiting = seen(tmp_path)
    assert waiting["seconds"] < 10  # the wait was of 40
    saved = tmp_path / "run/checkpoint-1"
    for found in (calm, waiting):
        assert found["error"].startswith(f"KeyboardInterrupt: stopped on request; everything is saved in {saved}.")
    assert (saved / "trainer_state.json").exists()


def test_a_team_asks_the_same_in_the_same_order_and_each_keeps_its_own(tmp_path: Path) -> None:
    succeed(lost_ranks.share_prompts, tmp_path)
    first, second = seen(tmp_path)
    assert first["asked"] == second["asked"]
    assert [len(wave) for wave in first["asked"]] == [2, 4, 4, 4]
    assert (first["serials"], second["serials"]) == ([0, 1], [10])
    for found, own in ((first, prompts(2)), (second, prompts(1, first=10))):
        rows = rows_of(own, SAMPLING, (1,))
        expected = [list(said(row.request)) for row in rows if row.number < 2]
        assert [ids for group in found["answers"] for ids in group] == expected
    assert (first["none"], second["none"]) == (2, 0)
    assert first["team"] == [0, 2, [0, 1]]
    assert second["team"] == [1, 2, [0, 1]]
    assert (first["alone"], second["alone"]) == ([0, 1, [0], [1.0]], [0, 1, [1], [1.0]])

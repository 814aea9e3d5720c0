"""The second device's own manners, what is refused on it, what an exception leaves, and the bytes that offloads free."""

from __future__ import annotations

import json

import pytest
from device_checks import leave_by_exception, leave_on_host, measure_peaks, refuse_and_count

from children import succeed

SECONDS = 140.0


def test_the_device_refuses_what_accelerators_refuse_and_counts_what_makes_a_host_wait(tmp_path):
    succeed(refuse_and_count, "", tmp_path, seconds=SECONDS)


@pytest.mark.parametrize("what", ["reference", "reward"])
def test_a_frozen_model_that_was_left_on_the_host_is_a_mismatch(tmp_path, what):
    succeed(leave_on_host, what, tmp_path, seconds=SECONDS)


@pytest.mark.parametrize("what", ["a layer", "a reward", "scoring", "generate()"])
def test_a_rollout_that_raises_leaves_everything_as_it_was(tmp_path, what):
    succeed(leave_by_exception, what, tmp_path, seconds=SECONDS)


def without_and_with(name, place):
    """What a run takes without and with its offloads, step by step, and the bytes that more went down and up with them."""
    succeed(measure_peaks, f"offloads: {name}", place, seconds=SECONDS)
    plain, away = json.loads((place / "peaks.json").read_text())
    steps = list(zip(plain["peaks"], away["peaks"], strict=True))
    return plain["reference"], steps, away["down"] - plain["down"], away["up"] - plain["up"]


def freed(step, phase):
    return step[0][f"peak_memory/{phase}"] - step[1][f"peak_memory/{phase}"]


@pytest.mark.parametrize("name", ["during the rollout, a reference", "during the rollout, ppo"])
def test_a_rollout_has_all_bytes_that_went_to_the_host_and_they_come_back(tmp_path, name):
    reference, steps, down, up = without_and_with(name, tmp_path)
    moved = [after["offload/bytes"] for _, after in steps]
    assert 0 < moved[0] <= reference < moved[1]  # large storages of the reference's, and then optimizer states
    assert down == up == sum(moved)
    assert [freed(step, "rollout") for step in steps] == moved
    assert [freed(step, "train") for step in steps] == [0, 0]


def test_a_frozen_model_on_the_host_takes_nothing_but_a_layer_in_its_pass(tmp_path):
    reference, steps, down, up = without_and_with("frozen models, a reference", tmp_path)
    assert down == 0
    assert up >= reference  # one pass
    first, second = steps
    assert [freed(first, phase) for phase in ("rollout", "train", "optimizer")] == [reference] * 3
    assert freed(second, "train") == reference
    assert 0.9 * reference < freed(first, "score") < reference


@pytest.mark.parametrize("name", ["grpo", "sft"])
def test_checkpointed_activations_go_to_the_host_and_come_back_once(tmp_path, name):
    _, steps, down, up = without_and_with(f"activations, {name}", tmp_path)
    assert down == up > 0
    assert all(freed(step, "train") >= 0 for step in steps)


def test_all_activations_on_the_host_lower_the_peak_of_training(tmp_path):
    _, steps, down, up = without_and_with("activations, all of them", tmp_path)
    assert 0 < down <= up
    assert all(freed(step, "train") > 0.1 * step[0]["peak_memory/train"] for step in steps)

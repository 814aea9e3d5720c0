"""The second device's own manners, what is refused on it, what an exception leaves, and the bytes that offloads free."""

from __future__ import annotations

import json

import pytest
from device_checks import (
    leave_by_exception,
    leave_on_host,
    measure_all,
    offload_when_nothing_is_smaller,
    refuse_and_count,
    train_without_float64,
)

from child_processes import succeed

SECONDS = 240.0
MEASURED = {
    f"offloads: {name}"
    for name in (
        "during the rollout, a reference",
        "during the rollout, ppo",
        "frozen models, a reference",
        "activations, grpo",
        "activations, sft",
        "activations, all of them",
    )
}


@pytest.mark.extended
@pytest.mark.parametrize(
    "check",
    [refuse_and_count, leave_on_host, leave_by_exception],
    ids=lambda check: check.__name__,
)
def test_the_device_refuses_what_accelerators_refuse_and_a_rollout_that_raises_leaves_all_as_it_was(tmp_path, check):
    succeed(check, "", tmp_path, seconds=SECONDS)


def test_a_device_without_float64_samples_and_trains(tmp_path):
    succeed(train_without_float64, "", tmp_path, seconds=SECONDS)


@pytest.mark.release
def test_activations_go_to_the_host_when_memory_runs_out_and_nothing_can_be_smaller(tmp_path):
    succeed(offload_when_nothing_is_smaller, "", tmp_path, seconds=SECONDS)


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    place = tmp_path_factory.mktemp("measured")
    succeed(measure_all, sorted(MEASURED), place, seconds=SECONDS)
    return json.loads((place / "peaks.json").read_text())


def without_and_with(measured, name):
    """What a run takes without and with its offloads, step by step, and the bytes that more went down and up with them."""
    plain, away = measured[f"offloads: {name}"]
    steps = list(zip(plain["peaks"], away["peaks"], strict=True))
    return plain["reference"], steps, away["down"] - plain["down"], away["up"] - plain["up"]


def freed(step, phase):
    return step[0][f"peak_memory/{phase}"] - step[1][f"peak_memory/{phase}"]


@pytest.mark.release
@pytest.mark.parametrize("name", ["during the rollout, a reference", "during the rollout, ppo"])
def test_a_rollout_has_all_bytes_that_went_to_the_host_and_they_come_back(measured, name):
    reference, steps, down, up = without_and_with(measured, name)
    moved = [after["offload/bytes"] for _, after in steps]
    assert 0 < moved[0] <= reference < moved[1]  # large storages of the reference's, and then optimizer states
    assert down == up == sum(moved)
    assert [freed(step, "rollout") for step in steps] == moved
    assert [freed(step, "train") for step in steps] == [0, 0]


@pytest.mark.release
def test_a_frozen_model_on_the_host_takes_nothing_but_two_layers_in_its_pass(measured):
    reference, steps, down, up = without_and_with(measured, "frozen models, a reference")
    assert down == 0
    layers, rest = divmod(up, -(-up // reference))  # of one pass
    assert rest == 0
    assert 0 < reference - layers < 1 << 16  # the small embeddings and norms stay on the device
    first, second = steps
    saved = [*(freed(first, phase) for phase in ("rollout", "train", "optimizer")), freed(second, "train")]
    assert saved == pytest.approx([layers] * 4, rel=0.01)
    # Two of its four layers are on the device at a time.
    assert freed(first, "score") == pytest.approx(layers / 2, rel=0.05)


@pytest.mark.release
@pytest.mark.parametrize("name", ["grpo", "sft"])
def test_checkpointed_activations_go_to_the_host_and_come_back_once(measured, name):
    _, steps, down, up = without_and_with(measured, f"activations, {name}")
    assert down == up > 0
    assert all(freed(step, "train") >= 0 for step in steps)


@pytest.mark.release
def test_all_activations_on_the_host_lower_the_peak_of_training(measured):
    _, steps, down, up = without_and_with(measured, "activations, all of them")
    assert 0 < down <= up
    assert all(freed(step, "train") > 0.1 * step[0]["peak_memory/train"] for step in steps)

"""The benchmark commands: what they run, how they judge, and what they draw."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from benchmarks import learning_curve, plot_curve, same_steps, step_cost
from safetensors.torch import save_file


def runs_of(*sampled: float) -> list[dict[str, Any]]:
    """One run a seed, with this sampled accuracy at step 60."""
    return [{"seed": seed, "accuracy": {"60": {"sampled": s, "greedy": 1.0}}} for seed, s in enumerate(sampled)]


def test_a_full_plan_measures_the_judged_steps():
    plan, _ = learning_curve.parse(["--algorithm", "rloo"])
    assert (plan.algorithm, plan.seeds, plan.judged) == ("rloo", (0, 1, 2), (60, 100, 160))
    assert set(plan.judged) <= set(plan.snapshots)


def test_a_quick_plan_is_one_seed_and_is_judged_at_its_end():
    plan, _ = learning_curve.parse(["--quick"])
    assert (plan.seeds, plan.snapshots, plan.judged) == ((0,), (12,), (12,))


def test_our_mean_agrees_up_to_two_deviations_of_the_peer_s_seeds():
    peer = runs_of(0.4, 0.5, 0.6)  # mean 0.5, deviation 0.1
    assert learning_curve.compare({"lowpeak": runs_of(0.65, 0.69, 0.7), "trl": peer}, 60)["within"] is True
    far = learning_curve.compare({"lowpeak": runs_of(0.71, 0.75, 0.7), "trl": peer}, 60)
    assert (far["within"], far["distance_in_deviations"]) == (False, 2.2)


def test_one_seed_is_not_judged():
    found = learning_curve.compare({"lowpeak": runs_of(0.5), "trl": runs_of(0.4)}, 60)
    assert (found["within"], found["distance_in_deviations"]) == (None, None)


def test_what_no_phase_took_is_the_rest():
    runs = [
        {"cpu_seconds": 10.0, "cpu_seconds_by_phase": {"rollout": 2.0, "train": 5.0}},
        {"cpu_seconds": 12.0, "cpu_seconds_by_phase": {"rollout": 4.0, "train": 5.0}},
    ]
    found = step_cost.per_step(runs, steps=10)
    assert found == {"rollout": 0.3, "reward": 0.0, "train": 0.5, "rest": pytest.approx(0.3), "total": 1.1}


def test_the_band_is_the_mean_of_the_seeds_with_two_deviations():
    runs = [
        {"accuracy": {"10": {"sampled": 0.2}, "0": {"sampled": 0.1}}},
        {"accuracy": {"0": {"sampled": 0.1}, "10": {"sampled": 0.4}}},
    ]
    assert plot_curve.band(runs) == [(0, 0.1, 0.0), (10, pytest.approx(0.3), pytest.approx(2 * 0.02**0.5))]


def test_the_drawing_command_needs_no_training_to_be_parsed(tmp_path):
    data, picture, quick = plot_curve.parse(["--data", str(tmp_path / "a.json"), "--quick"])
    assert (data.name, picture.name, quick) == ("a.json", "curve.png", True)


def test_the_furthest_difference_is_over_all_weights(tmp_path):
    for name, last in (("a", 1.0), ("b", -0.5)):
        (tmp_path / name).mkdir()
        weights = {"first": torch.zeros(2, 2), "second": torch.tensor([0.25, last])}
        save_file(weights, tmp_path / name / "model.safetensors")
    assert same_steps.furthest(tmp_path / "a", tmp_path / "b") == 1.5
    assert same_steps.furthest(tmp_path / "b", tmp_path / "a") == 1.5

"""Where a run goes on, and with which random numbers."""

import logging
import random

import numpy as np
import pytest
import torch

from lowpeak.checkpoint.atomic import staged
from lowpeak.checkpoint.resume import capture_random, find_resume, keep_random, restore_random
from lowpeak.checkpoint.state import RunState, save_run_state
from lowpeak.errors import CheckpointError


def save(run_dir, step):
    with staged(run_dir / f"checkpoint-{step}") as stage:
        save_run_state(stage, RunState(step, {}, capture_random()))
    return run_dir / f"checkpoint-{step}"


def draw():
    """Numbers of all three generators, normal ones too: those come in pairs, of which one is kept."""
    return [random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(), *torch.randn(3).tolist()]


@pytest.mark.parametrize("before", [0, 1])
def test_restored_generators_draw_the_same_numbers_again(before):
    for _ in range(before):
        random.gauss(0, 1)
        np.random.randn()
    state = capture_random()
    first = draw()
    assert draw() != first
    restore_random(state)
    assert draw() == first


def test_a_captured_state_does_not_change_while_numbers_are_drawn():
    state = capture_random()
    first = draw()
    for _ in range(2):
        restore_random(state)
        assert draw() == first


def test_what_evaluation_draws_and_seeds_changes_no_training_draw():
    def evaluate():
        with keep_random():
            draw()
            torch.manual_seed(0)
            random.seed(0)
            np.random.seed(0)
            raise ValueError("in the evaluation")

    state = capture_random()
    expected = draw()
    restore_random(state)
    with pytest.raises(ValueError, match="in the evaluation"):
        evaluate()
    assert draw() == expected


def test_a_change_of_the_number_of_cuda_devices_is_said(caplog):
    state = capture_random() | {"cuda": [torch.zeros(16, dtype=torch.uint8)] * (torch.cuda.device_count() + 1)}
    if torch.cuda.device_count():
        state["cuda"][: torch.cuda.device_count()] = torch.cuda.get_rng_state_all()
    with caplog.at_level(logging.WARNING):
        restore_random(state)
    assert "draws on a device (dropout) will differ" in caplog.text


@pytest.mark.parametrize("nothing", [None, False])
def test_without_a_request_nothing_is_resumed(tmp_path, nothing):
    save(tmp_path, 5)
    assert find_resume(tmp_path, nothing) is None


def test_true_means_the_last_whole_checkpoint(tmp_path):
    for step in (9, 10):
        save(tmp_path, step)
    (tmp_path / "checkpoint-11.staged").mkdir()
    assert find_resume(tmp_path, True) == tmp_path / "checkpoint-10"


def test_a_path_means_itself(tmp_path):
    for step in (9, 10):
        save(tmp_path, step)
    assert find_resume(tmp_path / "elsewhere", str(tmp_path / "checkpoint-9")) == tmp_path / "checkpoint-9"


@pytest.mark.parametrize("folder", ["run", "nowhere"])
def test_true_without_a_checkpoint_names_the_folder(tmp_path, folder):
    (tmp_path / "run").mkdir()
    with pytest.raises(CheckpointError, match=f"{tmp_path / folder} holds no whole checkpoint-N; start without it"):
        find_resume(tmp_path / folder, True)


def test_a_path_that_does_not_exist_is_named_with_the_last_one_of_the_run(tmp_path):
    last = save(tmp_path, 4)
    with pytest.raises(CheckpointError, match=f"{tmp_path / 'checkpoint-5'} is not a folder that exists.* is {last}"):
        find_resume(tmp_path, tmp_path / "checkpoint-5")


def test_a_checkpoint_of_another_library_is_refused(tmp_path):
    (tmp_path / "checkpoint-3").mkdir()
    (tmp_path / "checkpoint-3" / "trainer_state.json").write_text("{}")
    for request in (True, tmp_path / "checkpoint-3"):
        with pytest.raises(CheckpointError, match=r"checkpoint-3 holds no state of a lowpeak run"):
            find_resume(tmp_path, request)


def test_a_run_folder_in_place_of_a_checkpoint_is_told_which_checkpoint_was_meant(tmp_path):
    last = save(tmp_path / "run", 8)
    with pytest.raises(CheckpointError, match=f"did you mean {last}"):
        find_resume(tmp_path, tmp_path / "run")


@pytest.mark.parametrize("suffix", ["staged", "removing"])
def test_what_a_killed_run_left_is_refused_although_it_holds_a_state(tmp_path, suffix):
    leftover = save(tmp_path, 6).rename(tmp_path / f"checkpoint-6.{suffix}")
    with pytest.raises(CheckpointError, match="left half written"):
        find_resume(tmp_path, leftover)

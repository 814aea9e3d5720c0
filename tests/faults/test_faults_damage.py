"""A damaged checkpoint never trains on: whatever happens to whichever of its files is named before training."""

from __future__ import annotations

import os
import pickle
import re
import shutil
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from fault_kills import kill, kill_at_event, renaming
from fault_runs import Case, build, run_alone
from safetensors.torch import load_file

from case_selection import mark_extended
from child_processes import KILLED, call, succeed
from file_damage import DAMAGES, harm, sign_again
from lowpeak.errors import CheckpointError
from tiny_models import digest

# A rollout is in the middle of its use, and the reference's average is in a folder of ranges.
CASE = Case(
    args={"num_iterations": 4, "beta": 0.04, "sync_ref_model": True, "ref_model_sync_steps": 2, "max_steps": 6},
    dropout=0.1,
)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run with a checkpoint in the middle of a rollout."""
    place = tmp_path_factory.mktemp("whole")
    succeed(run_alone, CASE, place)
    return place / "run"


@pytest.fixture
def copied(whole, tmp_path):
    """A copy of that checkpoint."""
    return Path(shutil.copytree(whole / "checkpoint-3", tmp_path / "checkpoint-3"))


@pytest.mark.parametrize("damage", mark_extended(DAMAGES, DAMAGES[:2]))
def test_no_damage_to_any_file_of_a_checkpoint_is_trained_on(tmp_path, copied, damage):
    trainer = build(CASE, tmp_path / "run")
    before = digest(trainer.model)
    # A model card is a text for people, who may change it.
    for file in sorted(path for path in copied.rglob("*") if path.is_file() and path.name != "README.md"):
        content = file.read_bytes()
        if harm(file, damage):
            with pytest.raises(CheckpointError) as caught:
                trainer.train(resume_from_checkpoint=str(copied))
            assert file.name in str(caught.value) or "no state" in str(caught.value)
            assert "\n" not in str(caught.value)
        file.write_bytes(content)
    assert digest(trainer.model) == before
    assert trainer.state.global_step == 0


def test_what_is_not_damaged_is_trained_on(tmp_path, whole, copied):
    build(CASE, tmp_path / "run").train(resume_from_checkpoint=str(copied))
    end = load_file(whole / "checkpoint-6" / "model.safetensors")
    for name, value in load_file(tmp_path / "run" / "checkpoint-6" / "model.safetensors").items():
        assert torch.equal(value, end[name])


class Payload:
    """Runs code when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (os.fspath(self.mark),)


@pytest.mark.parametrize(
    "name", ["shards/.metadata", "reference/.metadata", "reference/numbers.pt", "shards/numbers.pt"]
)
def test_a_checkpoint_runs_no_code(tmp_path, copied, name):
    (copied / name).parent.mkdir(exist_ok=True)
    if name.endswith(".pt"):
        torch.save(Payload(tmp_path / "ran"), copied / name)
    else:
        (copied / name).write_bytes(pickle.dumps(Payload(tmp_path / "ran")))
    sign_again(copied)
    trainer = build(CASE, tmp_path / "run")
    with suppress(CheckpointError, pickle.UnpicklingError):  # files that nothing reads are as good
        trainer.train(resume_from_checkpoint=str(copied))
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("name", ["optimizer.pt", "scheduler.pt"])
def test_a_checkpoint_without_optimizer_states_is_not_resumed(tmp_path, copied, name):
    (copied / name).unlink()
    sign_again(copied)
    with pytest.raises(CheckpointError, match=re.escape(name)):
        build(CASE, tmp_path / "run").train(resume_from_checkpoint=str(copied))


def save_twice_killed_the_second_time(case: Case, place: Path, moment: str) -> None:
    trainer = build(case, place / "run")
    trainer.save_model(str(place / "export"))
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            parameter.add_(1.0)
    if moment == "writing":
        kill_in_write()
    else:
        kill_at_event(renaming("", moment))
    trainer.save_model(str(place / "export"))


def kill_in_write(nth: int = 20) -> None:
    """Kill inside of the file of weights: Python has no event for a write."""
    plain, calls = os.pwrite, count(1)
    os.pwrite = lambda *args: kill() if next(calls) == nth else plain(*args)


@pytest.mark.parametrize(
    "moment", mark_extended(["writing", "export/config.json", "export/model.safetensors"], ["writing"])
)
def test_a_kill_while_a_model_is_exported_leaves_the_earlier_export_or_the_new_one(tmp_path, moment):
    assert call(save_twice_killed_the_second_time, CASE, tmp_path, moment) == KILLED
    start = dict(build(CASE, tmp_path / "other").model.state_dict())
    found = load_file(tmp_path / "export" / "model.safetensors")
    assert all(torch.equal(value, start[name]) for name, value in found.items())

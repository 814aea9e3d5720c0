"""What one rank meets is every rank's error, and none waits for another that has left."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from lowpeak.checkpoint.atomic import staged
from lowpeak.checkpoint.manifest import MANIFEST_FILE
from lowpeak.errors import CheckpointError, RankError
from lowpeak.ranks import Ranks


class ThreadRanks(Ranks):
    """Ranks that are threads: what each gives lies in a list that all of them see."""

    def __init__(self, rank, shared):
        super().__init__()
        self.rank, self.world_size, self._shared = rank, len(shared["items"]), shared

    def _everybodys(self, item):
        self._shared["items"][self.rank] = item
        self._shared["barrier"].wait(10)
        items = list(self._shared["items"])
        self._shared["barrier"].wait(10)
        return items

    def _reduce(self, numbers, op):
        return [max(column) for column in zip(*self._everybodys(numbers), strict=True)]


def on_ranks(work, world_size=3):
    """What `work(ranks)` gives or raises on each rank; no rank may wait for ever."""
    shared = {"items": [None] * world_size, "barrier": threading.Barrier(world_size)}

    def run(rank):
        try:
            return work(ThreadRanks(rank, shared))
        except Exception as error:
            return error

    with ThreadPoolExecutor(world_size) as pool:
        return list(pool.map(run, range(world_size)))


def test_an_error_of_one_rank_is_raised_on_every_one():
    def work(ranks):
        with ranks.together():
            if ranks.rank == 1:
                raise ValueError("mine")
        return "went on"

    first, second, third = on_ranks(work)
    assert isinstance(second, ValueError)
    for other in (first, third):
        assert isinstance(other, RankError)
        assert (other.rank, str(other)) == (1, "on rank 1, and so all ranks stop: ValueError: mine")


def test_ranks_that_all_succeed_go_on():
    def work(ranks):
        with ranks.together():
            pass
        return "went on"

    assert on_ranks(work) == ["went on"] * 3


def test_an_error_within_a_part_is_agreed_on_outside_of_it_too():
    def work(ranks):
        with ranks.together(), ranks.together():
            if ranks.rank == 2:
                raise CheckpointError("gone")

    first, second, third = on_ranks(work)
    assert str(third) == "gone"
    for other in (first, second):
        assert isinstance(other, CheckpointError)
        assert str(other) == "on rank 2, and so all ranks stop: gone"


@pytest.mark.parametrize("failing", [0, 2])
def test_a_folder_has_its_name_only_where_all_ranks_have_written(tmp_path, failing):
    def write(ranks, fails):
        with staged(tmp_path / "checkpoint-1", ranks) as stage:
            (stage / f"part-{ranks.rank}").write_text("x")
            if fails and ranks.rank == failing:
                raise OSError(28, "No space left on device")

    for error in on_ranks(lambda ranks: write(ranks, True)):
        assert isinstance(error, CheckpointError)
        assert "No space left on device" in str(error)
    assert list(tmp_path.iterdir()) == []
    assert on_ranks(lambda ranks: write(ranks, False)) == [None] * 3
    assert sorted(path.name for path in (tmp_path / "checkpoint-1").iterdir()) == [
        MANIFEST_FILE,
        "part-0",
        "part-1",
        "part-2",
    ]

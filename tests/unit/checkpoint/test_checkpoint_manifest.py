"""A checkpoint that is not what was saved is named on all ranks, and what one rank meets is every rank's error."""

from __future__ import annotations

import json
import os
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial

import pytest

from file_damage import DAMAGES, harm
from lowpeak.checkpoint.atomic import stage_checkpoint
from lowpeak.checkpoint.manifest import MANIFEST_FILE, digest_files, verify_manifest, write_manifest
from lowpeak.errors import (
    AgreedMemoryError,
    CheckpointError,
    EngineError,
    LocalMemoryError,
    LostEngineError,
    RankError,
)
from lowpeak.ranks import Ranks

FILES = ("model.safetensors", "optimizer.pt", "shards/ranges.json", "reference/__0_0.distcp")


class ThreadRanks(Ranks):
    """Ranks that are threads: what each gives lies in a list that all of them see."""

    def __init__(self, rank, shared):
        super().__init__()
        self.rank, self.world_size, self._shared = rank, len(shared["items"]), shared

    def _gather_from_processes(self, item):
        self._shared["items"][self.rank] = item
        self._shared["barrier"].wait(10)
        items = list(self._shared["items"])
        self._shared["barrier"].wait(10)
        return items

    def _reduce(self, numbers, op):
        return [max(column) for column in zip(*self._gather_from_processes(numbers), strict=True)]


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


@pytest.mark.parametrize(
    ("own", "echoed", "text"),
    [(ValueError("mine"), RankError, "ValueError: mine"), (CheckpointError("gone"), CheckpointError, "gone")],
)
@pytest.mark.parametrize("depth", [1, 2])
def test_an_error_of_one_rank_is_raised_on_all_ranks_also_from_nested_blocks(own, echoed, text, depth):
    def work(ranks):
        with ranks.propagate_errors():
            if depth == 2:
                with ranks.propagate_errors():
                    fail(ranks)
            fail(ranks)

    def fail(ranks):
        if ranks.rank == 1:
            raise own

    first, second, third = on_ranks(work)
    assert second is own
    for other in (first, third):
        assert type(other) is echoed
        assert other.rank == 1
        assert str(other).endswith(f": {text}")


@pytest.mark.parametrize("depth", [1, 2])
def test_out_of_memory_on_one_rank_is_agreed_on_by_all_with_its_rank_and_reason(depth):
    def work(ranks):
        with ranks.propagate_errors() if depth == 2 else nullcontext():
            ranks.call_on_all(lambda: exhaust_memory(ranks))

    errors = on_ranks(work)
    assert {type(error) for error in errors} == {AgreedMemoryError}
    assert [(error.rank, error.reason) for error in errors] == [(1, "full"), (None, "full"), (1, "full")]


def test_a_rank_that_repeats_an_out_of_memory_error_of_its_peer_agrees_too():
    def work(ranks):
        with ranks.propagate_errors():
            exhaust_memory(ranks)
            if ranks.rank == 2:
                error = EngineError("rank 1 failed")
                error.rank = 1
                raise error

    errors = on_ranks(work)
    assert [(type(error), error.rank) for error in errors] == [(AgreedMemoryError, rank) for rank in (1, None, 1)]


def test_ranks_do_not_try_again_if_another_one_failed_for_another_reason_than_memory():
    def work(ranks):
        with ranks.propagate_errors():
            exhaust_memory(ranks)
            if ranks.rank == 2:
                raise CheckpointError("gone")

    errors = on_ranks(work)
    assert [(type(error), error.rank) for error in errors] == [
        (CheckpointError, 2),
        (CheckpointError, 2),
        (CheckpointError, None),
    ]


def test_ranks_that_lost_an_engine_try_again_with_one_that_ran_out_of_memory():
    def work(ranks):
        with ranks.propagate_errors():
            exhaust_memory(ranks)
            raise LostEngineError("gone")

    assert [type(error) for error in on_ranks(work)] == [AgreedMemoryError] * 3


def exhaust_memory(ranks):
    if ranks.rank == 1:
        raise LocalMemoryError("full, so choose smaller sizes", "full")


@pytest.mark.parametrize("failing", [0, 2])
def test_a_checkpoint_takes_its_name_only_if_all_ranks_have_written(tmp_path, failing):
    def write(ranks, fails):
        with stage_checkpoint(tmp_path / "checkpoint-1", ranks) as stage:
            (stage / f"part-{ranks.rank}").write_text("x")
            if fails and ranks.rank == failing:
                raise OSError(28, os.strerror(28))

    for error in on_ranks(lambda ranks: write(ranks, True)):
        assert isinstance(error, CheckpointError)
        assert os.strerror(28) in str(error)
    assert list(tmp_path.iterdir()) == []
    assert on_ranks(lambda ranks: write(ranks, False)) == [None] * 3  # ranks that all succeed go on
    found = sorted(path.name for path in (tmp_path / "checkpoint-1").iterdir())
    assert found == [MANIFEST_FILE, "part-0", "part-1", "part-2"]


def written(folder):
    for number, name in enumerate(FILES):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(bytes(range(1, 200)) * (number + 1))
    (folder / "lowpeak_random_0.pt").write_bytes(b"")
    write_manifest(folder, [digest_files(folder, Ranks())])
    return folder


def test_files_that_resuming_does_not_read_may_be_added_to_a_checkpoint(tmp_path):
    folder = written(tmp_path)
    verify_manifest(folder, Ranks())
    files = json.loads((folder / MANIFEST_FILE).read_text())["files"]
    assert set(files) == {*FILES, "lowpeak_random_0.pt"}
    (folder / ".cache").mkdir()
    for name in ("README.md", "scores.json", "ema.pt", ".cache/download.json"):
        (folder / name).write_text("{}")
    verify_manifest(folder, Ranks())


def replaced(file, text):
    file.unlink(missing_ok=True)
    if text is not None:
        file.write_text(text, encoding="latin-1")


MANIFESTS = (None, "", "{", "[]", '{"files": 3}', '{"files": {"a": 1}}', "[" * 60_000, "\xff")
UNSAVED = ("shards/__9_0.distcp", "pytorch_model.bin", "reference/ranges.json", "scaler.pt")


@pytest.mark.parametrize(
    ("name", "change"),
    [
        *((name, partial(harm, damage=damage)) for name in FILES for damage in DAMAGES),
        *((MANIFEST_FILE, partial(replaced, text=text)) for text in MANIFESTS),
        *((name, partial(replaced, text="more")) for name in UNSAVED),
    ],
)
def test_a_damaged_missing_or_foreign_file_is_named(tmp_path, name, change):
    folder = written(tmp_path)
    change(folder / name)
    with pytest.raises(CheckpointError, match=re.escape(str(folder / name))):
        verify_manifest(folder, Ranks())


def test_ranks_read_a_share_each_and_all_raise(tmp_path):
    def work(ranks):
        shares = ranks.gather(digest_files(tmp_path, ranks))
        if ranks.rank == 0:
            write_manifest(tmp_path, shares)
        ranks.max([0.0])
        verify_manifest(tmp_path, ranks)
        if ranks.rank == 1:
            harm(tmp_path / FILES[0], "flipped")
        ranks.max([0.0])
        verify_manifest(tmp_path, ranks)

    written(tmp_path)
    found = on_ranks(work)
    assert all(isinstance(error, CheckpointError) and FILES[0] in str(error) for error in found), found

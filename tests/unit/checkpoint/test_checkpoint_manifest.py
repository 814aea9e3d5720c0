"""A checkpoint that is not what was saved is named, by every kind of damage to any of its files, on all ranks."""

from __future__ import annotations

import json
import re

import pytest
from test_checkpoint_together import on_ranks

from damage import DAMAGES, harm
from lowpeak.checkpoint.manifest import MANIFEST_FILE, digest_share, verify_manifest, write_manifest
from lowpeak.errors import CheckpointError
from lowpeak.ranks import Ranks

FILES = ("model.safetensors", "optimizer.pt", "shards/ranges.json", "reference/__0_0.distcp")


def written(folder):
    for number, name in enumerate(FILES):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(bytes(range(1, 200)) * (number + 1))
    (folder / "lowpeak_random_0.pt").write_bytes(b"")
    write_manifest(folder, [digest_share(folder)])
    return folder


def test_what_was_saved_is_whole(tmp_path):
    folder = written(tmp_path)
    verify_manifest(folder, Ranks())
    files = json.loads((folder / MANIFEST_FILE).read_text())["files"]
    assert set(files) == {*FILES, "lowpeak_random_0.pt"}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", FILES)
def test_every_damage_to_any_file_is_named(tmp_path, name, damage):
    folder = written(tmp_path)
    assert harm(folder / name, damage)
    with pytest.raises(
        CheckpointError, match=f"{re.escape(str(folder / name))} is (damaged|missing).*another checkpoint"
    ):
        verify_manifest(folder, Ranks())


@pytest.mark.parametrize("text", [None, "", "{", "[]", '{"files": 3}', '{"files": {"a": 1}}', "[" * 60_000, "\xff"])
def test_a_manifest_that_is_missing_or_damaged_is_named(tmp_path, text):
    folder = written(tmp_path)
    if text is None:
        (folder / MANIFEST_FILE).unlink()
    else:
        (folder / MANIFEST_FILE).write_text(text, encoding="latin-1")
    with pytest.raises(CheckpointError, match=MANIFEST_FILE):
        verify_manifest(folder, Ranks())


@pytest.mark.parametrize("name", ["shards/__9_0.distcp", "pytorch_model.bin", "reference/ranges.json", "scaler.pt"])
def test_a_file_that_resuming_would_read_and_the_run_did_not_save_is_named(tmp_path, name):
    folder = written(tmp_path)
    (folder / name).write_bytes(b"more")
    with pytest.raises(
        CheckpointError, match=f"{re.escape(name)} is not one of the files that the run saved: remove it"
    ):
        verify_manifest(folder, Ranks())


def test_files_that_resuming_does_not_read_do_not_matter(tmp_path):
    folder = written(tmp_path)
    (folder / "README.md").write_text("my best run")
    (folder / "scores.json").write_text("{}")
    (folder / "ema.pt").write_bytes(b"of a callback")
    (folder / ".cache").mkdir()
    (folder / ".cache/download.json").write_text("{}")
    verify_manifest(folder, Ranks())


def test_ranks_read_a_share_each_and_all_raise(tmp_path):
    def work(ranks):
        shares = ranks.gather(digest_share(tmp_path, ranks))
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

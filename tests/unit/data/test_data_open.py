"""Opening data sets from files, folders and names, and every way in which that fails."""

from __future__ import annotations

import json
import time
from pathlib import Path

import datasets
import pytest
from datasets import Dataset, DatasetDict, IterableDataset

from lowpeak.data.open import open_dataset
from lowpeak.data.prompts import usable_rows
from lowpeak.errors import DataError

KINDS = [".json", ".jsonl", ".parquet", ".csv"]
ROWS = [{"prompt": "1+1=", "answer": "2"}, {"prompt": "2+2=", "answer": "4"}]


@pytest.fixture(autouse=True, scope="module")
def _own_cache(tmp_path_factory):
    """What `datasets` converts goes to a folder of the tests', by its own setting."""
    before = datasets.config.HF_DATASETS_CACHE
    datasets.config.HF_DATASETS_CACHE = tmp_path_factory.mktemp("cache")
    yield
    datasets.config.HF_DATASETS_CACHE = before


def write(path, rows=ROWS):
    table = Dataset.from_list(rows)
    if path.suffix == ".parquet":
        table.to_parquet(path)
    elif path.suffix == ".csv":
        path.write_text("prompt,answer\n" + "".join(f"{row['prompt']},'{row['answer']}'\n" for row in rows))
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def prompts(dataset):
    return [row["prompt"] for row in dataset]


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("suffix", KINDS)
def test_a_file_is_a_data_set(tmp_path, suffix, streaming):
    path = write(tmp_path / f"rows{suffix}")
    dataset = open_dataset(str(path), streaming=streaming)
    assert isinstance(dataset, IterableDataset if streaming else Dataset)
    assert prompts(dataset) == ["1+1=", "2+2="]


def test_files_and_patterns_are_one_data_set(tmp_path):
    paths = [write(tmp_path / f"rows{i}.jsonl", [{"prompt": str(i)}]) for i in range(3)]
    assert prompts(open_dataset(paths)) == ["0", "1", "2"]
    assert prompts(open_dataset(f"{tmp_path}/rows[12].jsonl")) == ["1", "2"]


def test_a_file_whose_name_looks_like_a_pattern_is_still_that_file(tmp_path):
    path = write(tmp_path / "rows[1].jsonl")
    assert prompts(open_dataset(str(path))) == ["1+1=", "2+2="]


def test_part_of_a_split_may_be_asked_for(tmp_path):
    assert prompts(open_dataset(write(tmp_path / "rows.jsonl"), split="train[:1]")) == ["1+1="]


@pytest.mark.parametrize("streaming", [False, True])
def test_a_folder_that_save_to_disk_wrote_is_a_data_set(tmp_path, streaming):
    Dataset.from_list(ROWS).save_to_disk(tmp_path / "saved")
    dataset = open_dataset(tmp_path / "saved", streaming=streaming)
    assert isinstance(dataset, IterableDataset if streaming else Dataset)
    assert prompts(dataset) == ["1+1=", "2+2="]


def test_a_saved_folder_with_splits_gives_the_one_asked_for_and_train_unasked(tmp_path):
    splits = {"train": Dataset.from_list(ROWS[:1]), "test": Dataset.from_list(ROWS[1:])}
    DatasetDict(splits).save_to_disk(tmp_path / "saved")
    assert prompts(open_dataset(tmp_path / "saved")) == ["1+1="]
    assert prompts(open_dataset(tmp_path / "saved", "test")) == ["2+2="]


def test_a_folder_of_data_files_has_the_splits_of_their_names(tmp_path):
    write(tmp_path / "train.jsonl", ROWS[:1])
    write(tmp_path / "test.jsonl", ROWS[1:])
    (tmp_path / "LICENSE").write_text("free")
    assert prompts(open_dataset(tmp_path)) == ["1+1="]
    assert prompts(open_dataset(tmp_path, "test")) == ["2+2="]


def test_the_only_split_is_taken_whatever_its_name(tmp_path):
    DatasetDict({"mine": Dataset.from_list(ROWS)}).save_to_disk(tmp_path / "saved")
    assert len(open_dataset(tmp_path / "saved")) == 2


@pytest.fixture(params=["saved", "files"])
def two_splits(request, tmp_path):
    folder = tmp_path / "data"
    if request.param == "saved":
        DatasetDict({name: Dataset.from_list(ROWS) for name in ("dev", "test")}).save_to_disk(folder)
    else:
        folder.mkdir()
        for name in ("dev", "test"):
            write(folder / f"{name}.jsonl")
    return folder


@pytest.mark.parametrize("split", ["other", None])
def test_a_missing_split_is_an_error_that_names_those_there(two_splits, split):
    wanted = split or "train"
    with pytest.raises(DataError, match=rf"'{wanted}'.* (dev|validation|test), (dev|validation|test)\b"):
        open_dataset(two_splits, split)


def test_a_saved_data_set_whose_rows_are_damaged_is_told_when_they_are_read(tmp_path):
    Dataset.from_list(ROWS).save_to_disk(tmp_path / "saved")
    file = next((tmp_path / "saved").glob("*.arrow"))
    column = Dataset.load_from_disk(tmp_path / "saved").data.column(0).chunk(0)
    offsets = column.buffers()[1].to_pybytes()[: 4 * (len(ROWS) + 1)]
    backwards = b"".join(i.to_bytes(4, "little") for i in range(len(ROWS), -1, -1))
    file.write_bytes(file.read_bytes().replace(offsets, backwards))
    with pytest.raises(DataError, match=r"Rows 0 to \d+"):
        usable_rows(open_dataset(tmp_path / "saved"), None)


@pytest.mark.parametrize("source", ["none.jsonl", "./none", "/none/at/all", "~/none/at/all", "data/deep/none.json"])
def test_a_missing_path_is_an_error_and_not_a_name_on_the_hub(source):
    with pytest.raises(DataError, match=str(Path(source.lstrip("~")))):
        open_dataset(source)


def saved(folder):
    Dataset.from_list(ROWS).save_to_disk(folder / "saved")
    return folder / "saved"


def written(path, content=""):
    path.write_text(content)
    return path


@pytest.mark.parametrize(
    ("source", "settings", "words"),
    [
        (lambda at: write(at / "rows.jsonl"), {"split": "dev[:1]"}, '"dev"'),
        (saved, {"split": "test"}, "split='test'"),
        (lambda at: [write(at / "rows.jsonl"), at / "none.jsonl"], {}, r"none\.jsonl"),
        (lambda at: f"{at}/*.jsonl", {}, r"\*\.jsonl"),
        (lambda at: [], {}, "empty"),
        (lambda at: [write(at / "rows.jsonl"), write(at / "rows.csv")], {}, r"\.csv, \.jsonl"),
        (lambda at: written(at / "rows.txt", "1"), {}, r"\.txt"),
        (lambda at: [at, write(at / "rows.jsonl")], {}, "{at}"),
        (lambda at: written(at / "rows.jsonl", '{"prompt": "1"}\n{"prompt": \n'), {}, r"rows\.jsonl.*JSON"),
        (lambda at: written(at / "rows.jsonl", "no json at all"), {}, r"rows\.jsonl.*JSON"),
        (lambda at: written(at / "state.json", "{}").parent, {}, "{at}"),
        *((lambda at, suffix=suffix: written(at / f"rows{suffix}"), {}, f"rows{suffix}") for suffix in KINDS),
        (lambda at: at, {}, "{at}"),
        (lambda at: write(at / "rows.jsonl"), {"name": "main"}, "'main'"),
    ],
)
def test_what_cannot_be_opened_is_named(tmp_path, source, settings, words):
    with pytest.raises(DataError, match=words.replace("{at}", str(tmp_path))):
        open_dataset(source(tmp_path), **settings)


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(("suffix", "line"), [(".jsonl", 3), (".json", 1), (".csv", 4)])
def test_a_text_file_that_is_not_utf_8_is_named_with_its_line(tmp_path, suffix, line, streaming):
    path = write(tmp_path / f"rows{suffix}", [*ROWS, {"prompt": "caf?", "answer": "4"}])
    path.write_bytes(path.read_bytes().replace(b"?", b"\xe9"))
    with pytest.raises(DataError, match=rf"{path} .*UTF-8: line {line} .*0xe9"):
        open_dataset(path, streaming=streaming)


def test_a_text_file_that_ends_within_a_character_is_named(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes('{"prompt": "1+1="}\n{"prompt": "é'.encode()[:-1])
    with pytest.raises(DataError, match=rf"{path} .*UTF-8: line 2 .*0xc3"):
        open_dataset(path)


def test_a_text_file_of_a_folder_that_is_not_utf_8_is_named(tmp_path):
    (tmp_path / "train.txt").write_bytes("1+1=\ncafé\n".encode("latin-1"))
    with pytest.raises(DataError, match=r"train\.txt .*UTF-8: line 2 .*0xe9"):
        open_dataset(tmp_path)


def test_text_beside_the_data_of_a_folder_may_be_in_any_encoding(tmp_path):
    write(tmp_path / "train.jsonl", ROWS)
    (tmp_path / "LICENSE.txt").write_bytes("© café".encode("latin-1"))
    assert len(open_dataset(tmp_path)) == len(ROWS)


def test_a_text_file_that_may_not_be_read_is_named(tmp_path, monkeypatch):
    path = write(tmp_path / "rows.jsonl", ROWS)

    def refuse(*of, **more):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(type(path), "open", refuse)
    with pytest.raises(DataError, match=r"rows\.jsonl .*Permission"):
        open_dataset(path)


@pytest.mark.parametrize("source", ["openai/gsm8k", "squad"])
def test_a_name_on_the_hub_fails_at_once_while_offline(source):
    start = time.monotonic()
    with pytest.raises(DataError, match=rf"^{source} .*HF_HUB_OFFLINE"):
        open_dataset(source)
    assert time.monotonic() - start < 5

"""Datasets from files, folders and names on the hub, and every failure."""

from __future__ import annotations

import json
import time
from pathlib import Path

import datasets
import pytest
from datasets import Dataset, DatasetDict, IterableDataset

from lowpeak.data.load_dataset import open_dataset
from lowpeak.data.row_reader import filter_rows
from lowpeak.errors import DataError

KINDS = [".json", ".jsonl", ".parquet", ".csv"]
ROWS = [{"prompt": "1+1=", "answer": "2"}, {"prompt": "2+2=", "answer": "4"}]


@pytest.fixture(autouse=True, scope="module")
def _own_cache(tmp_path_factory):
    """Let `datasets` store converted files in a folder of the tests."""
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


def saved(folder):
    Dataset.from_list(ROWS).save_to_disk(folder / "saved")
    return folder / "saved"


def prompts(dataset):
    return [row["prompt"] for row in dataset]


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("kind", [*KINDS, "saved"])
def test_a_file_and_a_folder_that_save_to_disk_wrote_are_data_sets(tmp_path, kind, streaming):
    path = saved(tmp_path) if kind == "saved" else write(tmp_path / f"rows{kind}")
    dataset = open_dataset(str(path), streaming=streaming)
    assert isinstance(dataset, IterableDataset if streaming else Dataset)
    assert prompts(dataset) == ["1+1=", "2+2="]


def test_files_and_patterns_are_one_data_set(tmp_path):
    paths = [write(tmp_path / f"rows{i}.jsonl", [{"prompt": str(i)}]) for i in range(3)]
    assert prompts(open_dataset(paths)) == ["0", "1", "2"]
    assert prompts(open_dataset(f"{tmp_path}/rows[12].jsonl")) == ["1", "2"]


def test_a_file_whose_name_looks_like_a_pattern_is_that_file_and_may_be_read_in_part(tmp_path):
    assert prompts(open_dataset(write(tmp_path / "rows[1].jsonl"), split="train[:1]")) == ["1+1="]


@pytest.mark.parametrize("make", ["saved", "files"])
@pytest.mark.parametrize("other", ["train", "dev"])
def test_a_folder_has_the_splits_of_its_files_and_a_missing_one_is_an_error_that_names_those_there(
    tmp_path, make, other
):
    splits = {other: ROWS[:1], "test": ROWS[1:]}
    if make == "saved":
        DatasetDict({name: Dataset.from_list(rows) for name, rows in splits.items()}).save_to_disk(tmp_path / "data")
    else:
        (tmp_path / "data").mkdir()
        (tmp_path / "data" / "LICENSE.txt").write_bytes("© café".encode("latin-1"))  # beside the data, any encoding
        for name, rows in splits.items():
            write(tmp_path / "data" / f"{name}.jsonl", rows)
    assert prompts(open_dataset(tmp_path / "data", "test")) == ["2+2="]
    if other == "train":
        assert prompts(open_dataset(tmp_path / "data")) == ["1+1="]
    for missing in ("other", None) if other == "dev" else ("other",):
        with pytest.raises(
            DataError, match=rf"'{missing or 'train'}'.* (train|dev|validation|test), (train|dev|validation|test)\b"
        ):
            open_dataset(tmp_path / "data", missing)


def test_the_only_split_is_taken_whatever_its_name(tmp_path):
    DatasetDict({"mine": Dataset.from_list(ROWS)}).save_to_disk(tmp_path / "saved")
    assert len(open_dataset(tmp_path / "saved")) == 2


def test_a_saved_data_set_whose_rows_are_damaged_is_told_when_they_are_read(tmp_path):
    folder = saved(tmp_path)
    file = next(folder.glob("*.arrow"))
    column = Dataset.load_from_disk(folder).data.column(0).chunk(0)
    offsets = column.buffers()[1].to_pybytes()[: 4 * (len(ROWS) + 1)]
    backwards = b"".join(i.to_bytes(4, "little") for i in range(len(ROWS), -1, -1))
    file.write_bytes(file.read_bytes().replace(offsets, backwards))
    with pytest.raises(DataError, match=r"Rows 0 to \d+"):
        filter_rows(open_dataset(folder), None)


@pytest.mark.parametrize("source", ["none.jsonl", "./none", "/none/at/all", "~/none/at/all", "data/deep/none.json"])
def test_a_missing_path_is_an_error_and_not_a_name_on_the_hub(source):
    with pytest.raises(DataError, match=str(Path(source.lstrip("~")))):
        open_dataset(source)


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
@pytest.mark.parametrize(
    ("name", "content", "line", "byte"),
    [
        ("rows.jsonl", b'{"prompt": "1"}\n{"prompt": "caf\xe9"}\n', 2, "0xe9"),
        ("rows.jsonl", '{"prompt": "1"}\n{"prompt": "é'.encode()[:-1], 2, "0xc3"),
        ("rows.json", b'[{"prompt": "caf\xe9"}]', 1, "0xe9"),
        ("rows.csv", b"prompt\n1\n2\ncaf\xe9\n", 4, "0xe9"),
        ("folder/train.txt", b"1+1=\ncaf\xe9\n", 2, "0xe9"),
    ],
)
def test_a_text_file_that_is_not_utf_8_is_named_with_its_line(tmp_path, name, content, line, byte, streaming):
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content)
    with pytest.raises(DataError, match=rf"{path} .*UTF-8: line {line} .*{byte}"):
        open_dataset(path.parent if "/" in name else path, streaming=streaming)


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

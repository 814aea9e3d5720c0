"""Datasets row by row: dropped and invalid rows, splits, streams; tokenizers that cannot be used."""

from __future__ import annotations

import logging

import pytest
from datasets import Dataset, DatasetDict

from lowpeak.data.preference import PreferenceReader
from lowpeak.data.prompts import PromptReader
from lowpeak.data.row_reader import check_tokenizer, filter_rows, num_rows, padding_id
from lowpeak.data.supervised import SupervisedReader
from lowpeak.errors import DataError, ModelError
from tiny_models import char_tokenizer


def plain_reader(**settings):
    return PromptReader(char_tokenizer("0123456789=+ab"), **settings)


@pytest.mark.parametrize(
    ("reader", "row"),
    [
        (PromptReader, {"prompt": "1"}),
        (SupervisedReader, {"prompt": "1", "completion": "2"}),
        (SupervisedReader, {"text": "12"}),
        (PreferenceReader, {"prompt": "1", "chosen": "2", "rejected": "3"}),
    ],
)
def test_template_arguments_that_rows_of_text_do_not_use_are_reported(reader, row):
    for kwargs, count in (({"a": 1}, 1), (None, 0)):
        reported = {}
        reads = reader(char_tokenizer("0123456789=+ab"), chat_template_kwargs=kwargs, report_idle=reported.__setitem__)
        reads.read(row, 4)
        assert list(reported) == [f"chat_template_kwargs={kwargs}"] * count
        assert all("row 4 is text" in reason for reason in reported.values())


@pytest.mark.parametrize("make", [Dataset.from_list, list])
def test_checking_a_data_set_keeps_the_rows_that_can_be_used_and_says_how_many_go(make, caplog):
    rows = [{"prompt": "1" * length} for length in (1, 9, 2, 4, 3)]
    with caplog.at_level(logging.WARNING):
        kept = filter_rows(make(rows), plain_reader(max_prompt_tokens=3, overlong="drop"))
    assert list(kept) == [rows[0], rows[2], rows[4]]
    (warning,) = caplog.records
    assert warning.args[:2] == (2, 5)


def test_checking_finds_the_one_bad_row_beyond_the_first_thousand():
    dataset = Dataset.from_list([{"prompt": "1"} for _ in range(1500)] + [{"prompt": ""}])
    with pytest.raises(DataError, match="row 1500 "):
        filter_rows(dataset, plain_reader())


def test_checking_applies_the_data_sets_own_transform():
    dataset = Dataset.from_list([{"question": "12"}]).with_transform(lambda rows: {"prompt": rows["question"]})
    assert filter_rows(dataset, plain_reader()) is dataset


@pytest.mark.parametrize(("rows", "words"), [([{"prompt": "1111"}] * 3, "3"), ([], "empty")])
def test_a_data_set_without_a_usable_row_is_an_error(rows, words):
    with pytest.raises(DataError, match=words):
        filter_rows(Dataset.from_list(rows), plain_reader(max_prompt_tokens=2, overlong="drop"))


def test_all_splits_at_once_are_an_error_that_names_them_and_a_stream_has_no_number_of_rows():
    rows = Dataset.from_list([{"prompt": "1"}])
    with pytest.raises(DataError, match="'test', 'train'"):
        num_rows(DatasetDict({"train": rows, "test": rows}))
    assert num_rows(rows.to_iterable_dataset()) is None


def test_padding_is_the_pad_token_else_the_end_token_else_an_error():
    tokenizer = char_tokenizer()
    assert padding_id(tokenizer) == 0
    tokenizer.pad_token = None
    assert padding_id(tokenizer) == 1
    assert tokenizer.pad_token is None
    tokenizer.eos_token = None
    with pytest.raises(ModelError, match=r"tokenizer\.eos_token"):
        check_tokenizer(tokenizer)


def test_an_image_processor_is_not_a_tokenizer():
    class Processor:
        tokenizer = char_tokenizer()
        image_processor = object()

    with pytest.raises(ModelError, match=r"processing_class .*\.tokenizer"):
        check_tokenizer(Processor())

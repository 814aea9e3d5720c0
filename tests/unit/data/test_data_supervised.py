"""Supervised rows to records: their texts, and which tokens count."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from lowpeak.data.cursor import make_cursor
from lowpeak.data.row_reader import read_all
from lowpeak.data.supervised import SupervisedReader, make_record
from lowpeak.errors import DataError
from tiny_models import char_tokenizer

ALPHABET = "0123456789=+ab"
GENERATION = (
    "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}<eos>{% endgeneration %}{% else %}{{ m.content }}<eos>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def turn(role, text):
    return {"role": role, "content": text}


def reader(chat=True, template=None, **settings):
    tokenizer = char_tokenizer(ALPHABET, chat=chat)
    if template is not None:
        tokenizer.chat_template = template
    return SupervisedReader(tokenizer, **settings)


def parts(record, chat=True):
    """Return the prompt's text, the completion's, and the text that counts."""
    tokenizer = char_tokenizer(ALPHABET, chat=chat)
    ids = record.completion.ids

    def text(tokens):
        return tokenizer.decode(tokens).replace(" ", "")

    return text(list(record.prompt_ids)), text(ids.tolist()), text(ids[record.completion.loss_mask].tolist())


def test_a_string_pair_is_a_record_of_zeros_without_rewards_and_without_a_warning(caplog):
    with caplog.at_level(logging.WARNING):
        record = reader().read({"prompt": "1+1=", "completion": "2"}, 3)
    completion = record.completion
    assert parts(record) == ("1+1=", "2<eos>", "2<eos>")
    assert (record.group, record.rewards, record.reward, record.advantages) == (3, (), 0.0, None)
    assert [each.dtype for each in (completion.ids, completion.loss_mask)] == [torch.int32, torch.bool]
    assert torch.equal(completion.logprobs, torch.zeros(2))
    assert caplog.messages == []


ONE_TURN = {"prompt": [turn("user", "1+1")], "completion": [turn("assistant", "2")]}
TWO_TURNS = [turn("user", "1"), turn("assistant", "2"), turn("user", "3"), turn("assistant", "4"), turn("user", "5")]
SPLIT = {"prompt": TWO_TURNS[:3], "completion": [*TWO_TURNS[3:], turn("assistant", "6")]}
ALL = {"prompt": "1+1=", "completion": "2"}
GPT = {"conversations": [{"from": who, "value": text} for who, text in (("system", "9"), ("human", "0"), ("gpt", "1"))]}
MARKED = {"template": GENERATION}


@pytest.mark.parametrize(
    ("row", "settings", "prompt", "completion", "counted"),
    [
        (ALL, {"completion_only": False}, "1", "+1=2<eos>", "+1=2<eos>"),
        ({"prompt": "1=", "completion": "1<eos>"}, {}, "1=", "1<eos>", "1<eos>"),
        (ONE_TURN, {}, "<user>1+1<eos><assistant>", "2<eos>", "2<eos>"),
        (
            {"prompt": TWO_TURNS[:2], "completion": [turn("assistant", "3")]},
            *({}, "<user>1<eos><assistant>2<eos><assistant>", "3<eos>", "3<eos>"),
        ),
        (
            {"prompt": TWO_TURNS[:2], "completion": TWO_TURNS[2:4]},
            *({}, "<user>1<eos><assistant>2<eos>", *["<user>3<eos><assistant>4<eos>"] * 2),
        ),
        ({"messages": TWO_TURNS[:2]}, {}, "<user>", *["1<eos><assistant>2<eos>"] * 2),
        *(
            (
                {"messages": TWO_TURNS},
                *({**template, only: True}, "<user>1<eos><assistant>", "2<eos><user>3<eos><assistant>4<eos>"),
                "2<eos>4<eos>",
            )
            for template in (MARKED, {})
            for only in ("completion_only", "assistant_only")
        ),
        (
            SPLIT,
            *({**MARKED, "assistant_only": True}, "<user>1<eos><assistant>2<eos><user>3<eos><assistant>"),
            *("4<eos><user>5<eos><assistant>6<eos>", "4<eos>6<eos>"),
        ),
        (GPT, {"assistant_only": True}, "<system>9<eos><user>0<eos><assistant>", "1<eos>", "1<eos>"),
        (
            {"conversations": [turn("system", "9"), *TWO_TURNS[:2]]},
            *({"assistant_only": True}, "<system>9<eos><user>1<eos><assistant>", "2<eos>", "2<eos>"),
        ),
        ({"text": "1+1=2"}, {}, "1", "+1=2<eos>", "+1=2<eos>"),
        ({"body": "12", "text": "3"}, {"text_field": "body"}, "1", "2<eos>", "2<eos>"),
        ({"prompt": "1+1=", "completion": "23456"}, {"max_length": 6}, "1+1=", "23", "23"),
    ],
)
def test_each_format_counts_what_trls_counts(row, settings, prompt, completion, counted):
    record = reader(**settings).read(row, 0)
    assert parts(record) == (prompt, completion, counted)
    assert record.completion.finish_reason == ("length" if "max_length" in settings else "stop")


def test_a_tokenizer_without_eos_ends_where_the_text_ends():
    tokenizer = char_tokenizer(ALPHABET)
    tokenizer.eos_token = None
    assert parts(SupervisedReader(tokenizer).read({"prompt": "1=", "completion": "1"}, 0), chat=False)[1] == "1"


def test_the_prompts_turns_need_not_be_told_apart_where_the_completion_alone_counts(caplog):
    rewrites = (
        "{% for m in messages %}<{{ m.role }}>{{ '0' if m.role == 'assistant' and loop.last }}{{ m.content }}<eos>"
    )
    rewrites += "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
    row = {"prompt": TWO_TURNS[:3], "completion": TWO_TURNS[3:4]}
    assert parts(reader(template=rewrites, assistant_only=True).read(row, 0))[2] == "04<eos>"
    assert caplog.text == ""
    both = reader(template=rewrites, assistant_only=True, completion_only=False).read(row, 0)
    assert parts(both)[2] == "04<eos>"
    assert [record.args[1:3] for record in caplog.records] == [(1, 2)]


@pytest.mark.parametrize(
    ("columns", "settings", "expected"),
    [
        ({}, {}, "1234"),
        ({"labels": [-100, -100, 5, -100, 7]}, {}, "24"),
        ({"labels": [-100, 4, 5, -100, -100], "completion_mask": [0, 0, 0, 1, 1]}, {}, "12"),
        ({"assistant_masks": [1, 0, 1, 0, 1]}, {}, "24"),
        ({"assistant_masks": [1, 0, 1, 0, 1]}, {"assistant_only": True}, "24"),
        ({"completion_mask": [0, 0, 1, 1, 1]}, {"completion_only": True}, "234"),
        ({"completion_mask": [0, 0, 1, 1, 1]}, {"completion_only": False}, "1234"),
        ({"completion_mask": [0, 0, 1, 1, 1], "assistant_masks": [0, 1, 1, 0, 1]}, {"completion_only": True}, "24"),
        ({"completion_mask": [0, 0, 1, 1, 1], "assistant_masks": [0, 1, 1, 0, 1]}, {"completion_only": False}, "124"),
        ({"labels": None, "assistant_masks": None, "completion_mask": None}, {}, "1234"),
        ({"labels": [-100, 4, 5, 6, 7]}, {"max_length": 3}, "12"),
    ],
)
@pytest.mark.parametrize("form", [None, "numpy", "torch"])
def test_a_row_of_token_ids_is_taken_as_it_is_and_its_labels_or_masks_say_what_counts(
    columns, settings, expected, form
):
    (row,) = Dataset.from_list([{"input_ids": [3, 4, 5, 6, 7], **columns}]).with_format(form)
    record = reader(chat=False, **settings).read(row, 0)
    counted = record.completion.ids[record.completion.loss_mask].tolist()
    assert counted == [3 + int(place) for place in expected]
    assert all(type(token) is int for token in record.prompt_ids)


@pytest.mark.parametrize(
    ("row", "settings"),
    [
        ({"prompt": "123456", "completion": "7"}, {"max_length": 6}),
        ({"text": ""}, {}),
        ({"messages": [turn("user", "1")]}, {"template": GENERATION, "completion_only": True}),
    ],
)
def test_a_row_without_a_token_that_counts_is_left_out(row, settings):
    assert reader(**settings).read(row, 0) is None


def merging_tokenizer():
    """Return a tokenizer with the token `=2`, so that a prompt that ends with `=` is tokenized differently before `2`."""
    vocabulary = {"<eos>": 0, "1": 1, "=": 2, "2": 3, "=2": 4}
    inner = Tokenizer(models.BPE(vocabulary, [("=", "2")]))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<eos>")


def test_a_completion_that_merges_into_its_prompt_starts_where_they_part_and_warns_once(caplog):
    merging = SupervisedReader(merging_tokenizer())
    with caplog.at_level(logging.WARNING):
        record, _ = (merging.read({"prompt": "1=", "completion": "2"}, i) for i in range(2))
    assert (record.prompt_ids, record.completion.ids.tolist()) == ((1,), [4, 0])
    assert [warning.args for warning in caplog.records] == [("row 0", 1, 2)]


def test_only_the_first_token_and_those_after_the_last_that_counts_are_left_away():
    assert make_record(0, [5], [True]) is make_record(0, [], []) is None
    for counted, prompt, ids in (([True, False, True, False], (5, 6), [7]), ([True] * 4, (5,), [6, 7, 8])):
        record = make_record(0, [5, 6, 7, 8], counted)
        assert (record.prompt_ids, record.completion.ids.tolist()) == (prompt, ids)
    assert make_record(0, [5, 6, 7], [False, True, False], max_length=2).completion.finish_reason == "stop"


@pytest.mark.parametrize("max_length", [5, None])
@pytest.mark.parametrize("is_stream", [False, True])
def test_truncated_rows_of_training_data_are_counted_or_in_a_stream_named_once(max_length, is_stream, caplog):
    data = Dataset.from_list([{"prompt": "1" * n, "completion": "22"} for n in (1, 3, 4, 9)])
    arguments = SimpleNamespace(seed=0, data_seed=None)
    source = data.to_iterable_dataset() if is_stream else data
    with caplog.at_level(logging.WARNING):
        make_cursor(source, reader(max_length=max_length), arguments, shuffle=False).take(6)
    logged = [record.args for record in caplog.records if "truncated" in record.getMessage()]
    assert logged == ([] if max_length is None else [(1, 5)] if is_stream else [(2, 4, 5)])


def test_all_records_of_a_data_set_are_counted_and_one_at_least_there_has_to_be(caplog):
    rows = [{"prompt": "1" * n, "completion": "22"} for n in (1, 9, 3)]
    with caplog.at_level(logging.WARNING):
        records = read_all(Dataset.from_list(rows), reader(max_length=5))
    assert [record.group for record in records] == [0, 2]
    assert [record.args[:2] for record in caplog.records] == [(1, 3), (1, 3)]
    with pytest.raises(DataError, match="1 "):
        read_all(Dataset.from_list(rows[1:2]), reader(max_length=5))

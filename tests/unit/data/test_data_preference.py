"""Preference rows to pairs of records: shared prompts, slots, dropped pairs."""

from __future__ import annotations

import logging

import pytest
import torch
from datasets import Dataset
from tokenizers.processors import TemplateProcessing

from lowpeak.data.preference import PreferenceReader, flatten_pairs
from lowpeak.data.row_reader import read_all
from lowpeak.errors import DataError
from lowpeak.rewards.model import ModelReward
from preference_data import tiny_classifier
from tiny_models import char_tokenizer

TOKENIZER = char_tokenizer(chat=True)


def turn(role, text):
    return {"role": role, "content": text}


def read(row, **settings):
    return PreferenceReader(TOKENIZER, **settings).read(row, 3)


def texts(pair):
    """Return prompt and answer of both records as text, without the slots."""
    return [
        (TOKENIZER.decode(list(r.prompt_ids)), TOKENIZER.decode(r.completion.ids[:-1].tolist())) for r in pair
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("row", "chosen", "rejected"),
    [
        ({"prompt": "12=", "chosen": "345", "rejected": "36"}, ("12=3", "45"), ("12=3", "6")),
        ({"chosen": "12=345", "rejected": "12=36"}, ("12=3", "45"), ("12=3", "6")),
        ({"prompt": "12=", "chosen": "3", "rejected": "34"}, ("12=3", ""), ("12=3", "4")),
        ({"chosen": "12", "rejected": "345"}, ("1", "2"), ("3", "45")),
        ({"chosen": "12<pad><pad>", "rejected": "13"}, ("1", "2"), ("1", "3")),
        ({"chosen_ids": [5, 6, 7], "rejected_ids": [5, 8]}, ("0", "12"), ("0", "3")),
    ],
    ids=["prompt", "whole", "one begins the other", "nothing in common", "padding at the end", "token ids"],
)
def test_the_prompt_of_a_pair_is_what_both_rows_begin_with(row, chosen, rejected):
    assert texts(read(row)) == [chosen, rejected]


def test_each_record_counts_its_slot_alone_and_says_which_row_of_the_pair_it_is():
    pair = read({"prompt": "1=", "chosen": "2", "rejected": "34", "margin": 0.5})
    for record, sign, gain in zip(pair, (1.0, -1.0), (0.5, 0.0), strict=True):
        assert record.group == 3
        assert record.completion.loss_mask.nonzero().flatten().tolist() == [len(record.completion) - 1]
        for values, expected in ((record.advantages, sign), (record.returns, gain)):
            assert values.tolist() == [0.0] * (len(record.completion) - 1) + [expected]
        assert record.completion.ids.dtype == torch.int32


def test_messages_go_through_the_chat_template_with_the_rows_own_settings():
    row = {"prompt": [turn("user", "1=")], "chosen": [turn("assistant", "2")], "rejected": [turn("assistant", "34")]}
    special = "<user>1=<eos><assistant>{}<eos>"
    reader = PreferenceReader(TOKENIZER)
    for pair in (reader.read(row, 0), reader.read({n: [*row["prompt"], *row[n]] for n in ("chosen", "rejected")}, 0)):
        for record, text in zip(pair, ("2", "34"), strict=True):
            ids = [*record.prompt_ids, *record.completion.ids[:-1].tolist()]
            assert ids == TOKENIZER(special.format(text), add_special_tokens=False)["input_ids"]
    template = "{{ opening }}{{ messages[-1]['content'] }}"
    options = {"opening": "9", "chat_template": template}
    assert texts(PreferenceReader(TOKENIZER, chat_template_kwargs=options).read(row, 0)) == [("9", "2"), ("9", "34")]
    own = {**row, "chat_template_kwargs": {"opening": "8"}}
    assert texts(PreferenceReader(TOKENIZER, chat_template_kwargs=options).read(own, 0)) == [("8", "2"), ("8", "34")]


@pytest.mark.parametrize("form", ["text", "messages"])
def test_a_row_has_the_tokens_that_the_reward_model_will_be_asked_with(form):
    tokenizer = char_tokenizer(chat=True)
    opening = TemplateProcessing(single="<eos> $A", special_tokens=[("<eos>", tokenizer.eos_token_id)])
    tokenizer.backend_tokenizer.post_processor = opening
    assert tokenizer("1")["input_ids"][0] == tokenizer.eos_token_id
    judge = ModelReward(tiny_classifier(len(tokenizer)), tokenizer)
    if form == "text":
        row = {"prompt": "12=", "chosen": "345", "rejected": "36"}
    else:
        row = {"prompt": [turn("user", "1=")], "chosen": [turn("assistant", "2")], "rejected": [turn("assistant", "3")]}
    pair_ids = judge._ids([row["prompt"]] * 2, [row["chosen"], row["rejected"]])
    trained = [
        [*record.prompt_ids, *record.completion.ids[:-1].tolist()]
        for record in PreferenceReader(tokenizer).read(row, 0)
    ]
    assert trained == pair_ids


def test_pairs_that_are_too_long_or_the_same_are_left_out_and_counted(caplog):
    rows = [
        {"chosen": "123", "rejected": "12"},
        {"chosen": "1234", "rejected": "12"},
        {"chosen": "12", "rejected": "1234"},
        {"chosen": "12", "rejected": "12"},
    ]
    with caplog.at_level(logging.WARNING):
        records = flatten_pairs(read_all(Dataset.from_list(rows), PreferenceReader(TOKENIZER, max_length=3)))
    assert [record.group for record in records] == [0, 0]
    (warning,) = caplog.records
    assert warning.args[:2] == (3, 4)
    with pytest.raises(DataError, match="3"):
        read_all(Dataset.from_list(rows[1:]), PreferenceReader(TOKENIZER, max_length=3))

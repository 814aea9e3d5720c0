"""Rows to supervised records: what stands in them, and which tokens count."""

from __future__ import annotations

import logging

import pytest
import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from lowpeak.data.cursor import PromptCursor
from lowpeak.data.prompts import check_rows
from lowpeak.data.supervised import SupervisedReader, make_record, read_records
from lowpeak.errors import DataError
from tiny import char_tokenizer

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
    """The prompt's text, the completion's, and the text that counts."""
    tokenizer = char_tokenizer(ALPHABET, chat=chat)
    ids = record.completion.ids

    def text(tokens):
        return tokenizer.decode(tokens).replace(" ", "")

    return text(list(record.prompt_ids)), text(ids.tolist()), text(ids[record.completion.loss_mask].tolist())


def test_a_string_pair_counts_its_completion_and_ends_with_eos():
    record = reader().read({"prompt": "1+1=", "completion": "2"}, 3)
    assert parts(record) == ("1+1=", "2<eos>", "2<eos>")
    assert record.group == 3
    assert record.rewards == ()
    assert record.reward == 0.0
    assert record.advantages is None
    assert record.completion.finish_reason == "stop"
    assert record.completion.ids.dtype == torch.int32
    assert record.completion.loss_mask.dtype == torch.bool
    assert record.completion.logprobs.dtype == torch.float32
    assert record.completion.logprobs.tolist() == [0.0, 0.0]


def test_an_eos_that_is_there_is_not_doubled():
    assert parts(reader().read({"prompt": "1=", "completion": "1<eos>"}, 0))[1] == "1<eos>"


def test_a_tokenizer_without_eos_ends_where_the_text_ends():
    tokenizer = char_tokenizer(ALPHABET)
    tokenizer.eos_token = None
    assert parts(SupervisedReader(tokenizer).read({"prompt": "1=", "completion": "1"}, 0), chat=False)[1] == "1"


def test_a_pair_may_count_its_prompt_too_but_never_the_first_token():
    record = reader(completion_only=False).read({"prompt": "1+1=", "completion": "2"}, 0)
    assert parts(record) == ("1", "+1=2<eos>", "+1=2<eos>")


def test_a_pair_of_messages_counts_the_answer_with_its_end():
    row = {"prompt": [turn("user", "1+1")], "completion": [turn("assistant", "2")]}
    assert parts(reader().read(row, 0)) == ("<user>1+1<eos><assistant>", "2<eos>", "2<eos>")


def test_after_a_prompt_that_ends_with_the_assistant_the_completion_alone_counts_as_in_trl():
    row = {"prompt": [turn("user", "1"), turn("assistant", "2")], "completion": [turn("assistant", "3")]}
    assert parts(reader().read(row, 0)) == ("<user>1<eos><assistant>2<eos><assistant>", "3<eos>", "3<eos>")


def test_a_conversation_counts_all_but_its_first_token():
    row = {"messages": [turn("user", "1"), turn("assistant", "2")]}
    assert parts(reader().read(row, 0)) == ("<user>", *["1<eos><assistant>2<eos>"] * 2)


@pytest.mark.parametrize("settings", [{"completion_only": True}, {"assistant_only": True}])
def test_a_template_with_generation_blocks_says_which_tokens_are_the_assistants(settings):
    turns = [turn("user", "1"), turn("assistant", "2"), turn("user", "3"), turn("assistant", "4"), turn("user", "5")]
    record = reader(template=GENERATION, **settings).read({"messages": turns}, 0)
    assert parts(record) == ("<user>1<eos><assistant>", "2<eos><user>3<eos><assistant>4<eos>", "2<eos>4<eos>")


def test_assistant_only_counts_within_the_completion_only():
    row = {
        "prompt": [turn("user", "1"), turn("assistant", "2"), turn("user", "3")],
        "completion": [turn("assistant", "4"), turn("user", "5"), turn("assistant", "6")],
    }
    record = reader(template=GENERATION, assistant_only=True).read(row, 0)
    assert parts(record)[2] == "4<eos>6<eos>"


@pytest.mark.parametrize("settings", [{"completion_only": True}, {"assistant_only": True}])
def test_a_template_without_generation_blocks_tells_the_assistants_turns_by_what_it_writes(settings):
    turns = [turn("user", "1"), turn("assistant", "2"), turn("user", "3"), turn("assistant", "4"), turn("user", "5")]
    record = reader(**settings).read({"messages": turns}, 0)
    assert parts(record)[2] == "2<eos>4<eos>"


def test_the_prompts_turns_need_not_be_told_apart_where_the_completion_alone_counts(caplog):
    rewrites = (
        "{% for m in messages %}<{{ m.role }}>{{ '0' if m.role == 'assistant' and loop.last }}{{ m.content }}<eos>"
    )
    rewrites += "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
    turns = [turn("user", "1"), turn("assistant", "2"), turn("user", "3"), turn("assistant", "4")]
    row = {"prompt": turns[:3], "completion": turns[3:]}
    assert parts(reader(template=rewrites, assistant_only=True).read(row, 0))[2] == "04<eos>"
    assert caplog.text == ""
    both = reader(template=rewrites, assistant_only=True, completion_only=False).read(row, 0)
    assert parts(both)[2] == "04<eos>"
    assert "1 of 2 assistant messages" in caplog.text


def test_a_completion_after_the_assistants_own_message_begins_with_the_next_one():
    row = {
        "prompt": [turn("user", "1"), turn("assistant", "2")],
        "completion": [turn("user", "3"), turn("assistant", "4")],
    }
    assert parts(reader().read(row, 0))[2] == "<user>3<eos><assistant>4<eos>"


@pytest.mark.parametrize("names", [("user", "assistant"), ("human", "gpt")])
def test_a_conversation_of_from_and_value_is_one_of_role_and_content(names):
    said = [{"from": name, "value": str(i)} for i, name in enumerate(names)]
    row = {"conversations": [{"from": "system", "value": "9"}, *said]}
    assert parts(reader(assistant_only=True).read(row, 0))[:2] == ("<system>9<eos><user>0<eos><assistant>", "1<eos>")
    assert row["conversations"][1] == {"from": names[0], "value": "0"}
    with_roles = {"conversations": [turn("system", "9"), turn("user", "0"), turn("assistant", "1")]}
    assert parts(reader().read(with_roles, 0)) == parts(reader().read(row, 0))


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


def test_text_counts_all_but_its_first_token_and_ends_with_eos():
    assert parts(reader().read({"text": "1+1=2"}, 0)) == ("1", "+1=2<eos>", "+1=2<eos>")
    assert parts(reader(text_field="body").read({"body": "12", "text": "3"}, 0))[1] == "2<eos>"


def test_a_long_row_loses_its_end_and_says_so():
    record = reader(max_length=6).read({"prompt": "1+1=", "completion": "23456"}, 0)
    assert parts(record) == ("1+1=", "23", "23")
    assert record.completion.finish_reason == "length"
    assert record.num_tokens == 6


@pytest.mark.parametrize(
    "row", [{"prompt": "123456", "completion": "7"}, {"text": ""}, {"messages": [turn("user", "1")]}]
)
def test_a_row_without_a_token_that_counts_is_left_out(row):
    assert (
        reader(template=GENERATION, max_length=6, completion_only=None if "text" in row else True).read(row, 0) is None
    )


@pytest.mark.parametrize(
    ("row", "settings", "message"),
    [
        ({"question": "1", "answer": "2"}, {}, "row 2 has the columns 'question', 'answer'; supervised training reads"),
        ({"prompt": "1"}, {}, "row 2 has the columns 'prompt'"),
        ({"prompt": "1", "completion": [turn("assistant", "2")]}, {}, "types str and list"),
        ({"prompt": "1", "completion": None}, {}, "types str and NoneType"),
        ({"text": None}, {}, "'text' of type NoneType"),
        ({"input_ids": None}, {}, "'input_ids' None; it must be a list of whole numbers"),
        ({"input_ids": [1, 2], "labels": [1]}, {}, "1 'labels' for 2 'input_ids'"),
        ({"input_ids": [1, 2], "labels": [-100, 3]}, {}, "a label that is neither its token nor -100"),
        ({"input_ids": [1, 2], "labels": [1, 2]}, {"completion_only": True}, "'labels', which say what counts; remove"),
        ({"input_ids": [1, 2]}, {"completion_only": True}, "no 'completion_mask', which completion_only_loss needs"),
        ({"input_ids": [1, 2]}, {"assistant_only": True}, "no 'assistant_masks', which assistant_only_loss needs"),
        ({"input_ids": [1, 2], "completion_mask": [0, 1]}, {}, "acts with completion_only_loss=True alone, as in TRL"),
        ({"input_ids": [1, 2], "seq_lengths": [1, 1]}, {}, "several rows in one"),
        ({"input_ids": [1, 99]}, {"num_embeddings": 13}, "the token 99"),
        ({"conversations": "1"}, {}, "'conversations' of type str"),
        ({"conversations": [{"from": "human"}]}, {}, "'conversations', message 0, has no 'content'"),
        ({"text": "1"}, {"completion_only": True}, "plain text, which has no completion"),
        ({"text": "1"}, {"assistant_only": True}, "assistant_only_loss needs messages"),
        ({"prompt": "1", "completion": "2"}, {"assistant_only": True}, "assistant_only_loss needs messages"),
        ({"messages": "1"}, {}, "'messages' of type str"),
        ({"messages": []}, {}, "'messages' is an empty list"),
        ({"messages": [{"role": "user"}]}, {}, "message 0, has no 'content'"),
        ({"messages": [turn("user", "1")]}, {"chat": False}, "the tokenizer has no chat template"),
        ({"messages": [turn("user", "1")]}, {"template": "{{ nothing.there }}"}, "does not pass the chat template"),
    ],
)
def test_a_row_that_cannot_be_used_is_named_with_the_reason(row, settings, message):
    with pytest.raises(DataError) as caught:
        reader(**settings).read(row, 0, index=2)
    assert message in str(caught.value)


def merging_tokenizer():
    """Knows the token `=2`, so that a prompt that ends with `=` is cut differently when `2` follows."""
    vocabulary = {"<eos>": 0, "1": 1, "=": 2, "2": 3, "=2": 4}
    inner = Tokenizer(models.BPE(vocabulary, [("=", "2")]))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<eos>")


def test_a_completion_that_merges_into_its_prompt_starts_where_they_part_and_warns_once(caplog):
    own = SupervisedReader(merging_tokenizer())
    with caplog.at_level(logging.WARNING):
        record = own.read({"prompt": "1=", "completion": "2"}, 0)
        own.read({"prompt": "1=", "completion": "2"}, 1)
    assert record.prompt_ids == (1,)
    assert record.completion.ids.tolist() == [4, 0]
    assert len(caplog.messages) == 1
    assert "(they part after 1 of 2)" in caplog.messages[0]


def test_a_prompt_that_is_a_prefix_does_not_warn(caplog):
    with caplog.at_level(logging.WARNING):
        reader().read({"prompt": "1=", "completion": "2"}, 0)
    assert caplog.messages == []


def test_tokens_after_the_last_that_counts_are_left_away():
    record = make_record(0, [5, 6, 7, 8, 9], [True, False, True, False, False])
    assert record.prompt_ids == (5, 6)
    assert record.completion.ids.tolist() == [7]


def test_the_first_token_never_counts():
    assert make_record(0, [5], [True]) is None
    assert make_record(0, [], []) is None
    assert make_record(0, [5, 6], [True, True]).prompt_ids == (5,)


def test_cutting_off_only_tokens_that_do_not_count_is_no_cut():
    assert make_record(0, [5, 6, 7], [False, True, False], max_length=2).completion.finish_reason == "stop"


def test_all_records_of_a_data_set_are_counted(caplog):
    dataset = Dataset.from_list([{"prompt": "1" * n, "completion": "22"} for n in (1, 9, 3)])
    with caplog.at_level(logging.WARNING):
        records = read_records(dataset, reader(max_length=5))
    assert [record.group for record in records] == [0, 2]
    assert caplog.messages == [
        "1 of 3 rows are left out: no token in them counts for the loss.",
        "1 of 3 rows are longer than max_length and lose their end.",
    ]


def test_a_data_set_without_a_token_that_counts_is_an_error():
    dataset = Dataset.from_list([{"prompt": "111", "completion": "2"}] * 2)
    with pytest.raises(DataError, match="All 2 rows are left out: no token in them counts"):
        read_records(dataset, reader(max_length=3))


def test_the_prompt_cursor_draws_records_too():
    dataset = Dataset.from_list([{"text": f"{i}0"} for i in range(4)])
    assert list(check_rows(dataset, reader())) == [0, 1, 2, 3]
    cursor = PromptCursor(dataset, reader(), shuffle=True, seed=0)
    records = cursor.take(6)
    assert [record.group for record in records] == list(range(6))
    assert sorted(parts(record)[0] for record in records[:4]) == ["0", "1", "2", "3"]

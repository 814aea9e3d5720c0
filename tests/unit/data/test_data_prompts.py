"""Rows to prompts: formats, templates, limits, and every row that cannot be used."""

from __future__ import annotations

import json
import logging

import pytest
from datasets import Dataset, DatasetDict
from tokenizers.processors import TemplateProcessing

from lowpeak.data import PromptReader, check_messages, check_tokenizer, num_rows, padding_id, usable_rows
from lowpeak.errors import DataError, ModelError
from tiny import char_tokenizer

ALPHABET = "0123456789=+ab"


def user(text, **more):
    return [{"role": "user", "content": text, **more}]


def plain_reader(**settings):
    return PromptReader(char_tokenizer(ALPHABET), **settings)


def chat_reader(template=None, **settings):
    tokenizer = char_tokenizer(ALPHABET, chat=True)
    if template is not None:
        tokenizer.chat_template = template
    return PromptReader(tokenizer, **settings)


def text_of(prompt, chat=True):
    return char_tokenizer(ALPHABET, chat=chat).decode(prompt.ids).replace(" ", "")


def test_a_string_is_tokenized_and_other_columns_are_kept():
    prompt = plain_reader().read({"prompt": "1+2=", "answer": "3", "completion": "x"}, 5)
    assert prompt.serial == 5
    assert list(prompt.ids) == char_tokenizer(ALPHABET)("1+2=")["input_ids"]
    assert prompt.source == "1+2="
    assert prompt.columns == {"answer": "3", "completion": "x"}
    assert not prompt.conversational


def test_a_tokenizer_that_adds_special_tokens_adds_them_to_strings():
    tokenizer = char_tokenizer(ALPHABET)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<eos> $A", special_tokens=[("<eos>", 1)])
    assert PromptReader(tokenizer).read({"prompt": "12"}, 0).ids[0] == 1


@pytest.mark.parametrize("begun", ["", "ab"])
def test_messages_pass_the_chat_template_and_open_a_new_turn_of_the_assistants_as_in_trl(begun):
    messages = [*user("1+1", name=None), *([{"role": "assistant", "content": begun}] if begun else [])]
    row = {"prompt": messages, "tools": None}
    prompt = chat_reader().read(row, 0)
    assert text_of(prompt) == "<user>1+1<eos>" + (f"<assistant>{begun}<eos>" if begun else "") + "<assistant>"
    assert (prompt.source, prompt.begun, prompt.conversational) == (messages, "", True)
    assert messages[0] == user("1+1", name=None)[0]
    assert row == {"prompt": messages, "tools": None}


PARTS = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content if m.content is string else m.content[0].text }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.mark.parametrize("content", ["ab", [{"type": "text", "text": "ab"}]])
def test_an_assistants_last_message_is_continued_where_that_is_asked_for(content):
    messages, options = [*user("1+1"), {"role": "assistant", "content": content}], {"continue_final_message": True}
    of_the_run = chat_reader(PARTS, chat_template_kwargs=options)
    for prompt in (
        of_the_run.read({"prompt": messages}, 0),
        chat_reader(PARTS).read({"prompt": messages, "chat_template_kwargs": options}, 0),
    ):
        assert (text_of(prompt), prompt.begun) == ("<user>1+1<eos><assistant>ab", "ab")
    others = of_the_run.read({"prompt": user("1+1")}, 1)
    assert (text_of(others), others.begun) == ("<user>1+1<eos><assistant>", "")


def test_keys_that_arrow_filled_with_none_do_not_reach_the_template():
    rows = Dataset.from_list([{"prompt": user("1")}, {"prompt": user("2", name="a")}])
    reader = chat_reader(
        "{% for m in messages %}{{ m.content }}{% if 'name' in m %}={{ m.name }}{% endif %}{% endfor %}"
    )
    assert [text_of(reader.read(row, i)) for i, row in enumerate(rows)] == ["1", "2=a"]


@pytest.mark.parametrize(
    ("message", "checked"),
    [
        (user("1", name=None)[0], user("1")[0]),
        (
            {"role": "assistant", "content": None, "tool_calls": [{"name": "ab"}]},
            {"role": "assistant", "tool_calls": [{"name": "ab"}]},
        ),
    ],
    ids=["empty keys", "tool calls in place of text"],
)
def test_checked_messages_have_no_empty_keys_and_leave_the_row_as_it_is(message, checked):
    before = dict(message)
    assert check_messages([message], "row 0") == [checked]
    assert message == before


def test_template_arguments_of_the_row_go_before_those_of_the_run():
    reader = chat_reader("{{ messages[0].content }}{{ x }}{{ y }}", chat_template_kwargs={"x": "a", "y": "a"})
    options = [{"x": "b", "z": None}, {"x": None, "z": "b"}]
    rows = Dataset.from_list([{"prompt": user("1"), "chat_template_kwargs": own} for own in options])
    assert [text_of(reader.read(row, i)) for i, row in enumerate(rows)] == ["1ba", "1aa"]


@pytest.mark.parametrize("pack", [json.dumps, lambda tools: tools])
def test_a_tools_column_reaches_the_template(pack):
    tools = [{"type": "function", "function": {"name": "ab", "description": "1", "parameters": {}}}]
    reader = chat_reader("{{ messages[0].content }}={{ '0' if tools is none else tools[0].function.name }}")
    assert text_of(reader.read({"prompt": user("1"), "tools": pack(tools)}, 0)) == "1=ab"
    assert text_of(reader.read({"prompt": user("1"), "tools": pack([])}, 1)) == "1=0"


def test_a_batch_reads_the_same_as_its_rows_one_by_one():
    rows = [
        {"prompt": user("1")},
        {"prompt": user("22")},
        {"prompt": [*user("3"), {"role": "assistant", "content": "a"}]},
        {"prompt": user("4"), "chat_template_kwargs": {"x": 1}},
        {"prompt": user("5")},
    ]
    assert chat_reader().read_batch(rows, 7) == [chat_reader().read(row, 7 + i) for i, row in enumerate(rows)]


@pytest.mark.parametrize(("first", "second"), [("1", user("1")), (user("1"), "1")])
def test_strings_and_messages_in_one_data_set_are_an_error(first, second):
    reader = chat_reader()
    reader.read({"prompt": first}, 0)
    with pytest.raises(DataError, match=r"row 1 .*prompt"):
        reader.read({"prompt": second}, 1)


def test_a_template_in_the_arguments_stands_in_for_the_tokenizers():
    reader = plain_reader(chat_template_kwargs={"chat_template": "{{ messages[0].content }}"})
    assert text_of(reader.read({"prompt": user("12")}, 0), chat=False) == "12"


def test_a_template_that_fails_names_the_row_also_within_a_batch():
    reader = chat_reader("{% if messages[0].content == '2' %}{{ raise_exception('twos') }}{% endif %}1")
    with pytest.raises(DataError, match=r"row 11.*twos"):
        reader.read_batch([{"prompt": user(x)} for x in "123"], 10)


@pytest.mark.parametrize("make", [Dataset.from_list, list])
def test_checking_a_data_set_keeps_the_rows_that_can_be_used_and_says_how_many_go(make, caplog):
    rows = [{"prompt": "1" * length} for length in (1, 9, 2, 4, 3)]
    with caplog.at_level(logging.WARNING):
        kept = usable_rows(make(rows), plain_reader(max_prompt_tokens=3, overlong="drop"))
    assert list(kept) == [rows[0], rows[2], rows[4]]
    (warning,) = caplog.records
    assert warning.args[:2] == (2, 5)


def test_checking_finds_the_one_bad_row_beyond_the_first_thousand():
    dataset = Dataset.from_list([{"prompt": "1"} for _ in range(1500)] + [{"prompt": ""}])
    with pytest.raises(DataError, match="row 1500 "):
        usable_rows(dataset, plain_reader())


def test_checking_applies_the_data_sets_own_transform():
    dataset = Dataset.from_list([{"question": "12"}]).with_transform(lambda rows: {"prompt": rows["question"]})
    assert usable_rows(dataset, plain_reader()) is dataset


@pytest.mark.parametrize(("rows", "words"), [([{"prompt": "1111"}] * 3, "3"), ([], "empty")])
def test_a_data_set_without_a_usable_row_is_an_error(rows, words):
    with pytest.raises(DataError, match=words):
        usable_rows(Dataset.from_list(rows), plain_reader(max_prompt_tokens=2, overlong="drop"))


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

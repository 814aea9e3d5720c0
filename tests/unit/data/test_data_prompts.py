"""Rows to prompts: formats, chat templates and their options."""

from __future__ import annotations

import json

import pytest
from datasets import Dataset
from tokenizers.processors import TemplateProcessing

from lowpeak.data.chat import check_messages
from lowpeak.data.prompts import PromptReader
from lowpeak.errors import DataError
from tiny_models import char_tokenizer

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


@pytest.mark.parametrize("assistant_prefix", ["", "ab"])
def test_messages_pass_the_chat_template_and_open_a_new_turn_of_the_assistants_as_in_trl(assistant_prefix):
    messages = [
        *user("1+1", name=None),
        *([{"role": "assistant", "content": assistant_prefix}] if assistant_prefix else []),
    ]
    row = {"prompt": messages, "tools": None}
    prompt = chat_reader().read(row, 0)
    turn = f"<assistant>{assistant_prefix}<eos>" if assistant_prefix else ""
    assert text_of(prompt) == f"<user>1+1<eos>{turn}<assistant>"
    assert (prompt.source, prompt.assistant_prefix, prompt.conversational) == (messages, "", True)
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
        assert (text_of(prompt), prompt.assistant_prefix) == ("<user>1+1<eos><assistant>ab", "ab")
    others = of_the_run.read({"prompt": user("1+1")}, 1)
    assert (text_of(others), others.assistant_prefix) == ("<user>1+1<eos><assistant>", "")


def test_keys_that_arrow_filled_with_none_do_not_reach_the_template():
    rows = Dataset.from_list([{"prompt": user("1")}, {"prompt": user("2", name="a")}])
    reader = chat_reader(
        "{% for m in messages %}{{ m.content }}{% if 'name' in m %}={{ m.name }}{% endif %}{% endfor %}"
    )
    assert [text_of(reader.read(row, i)) for i, row in enumerate(rows)] == ["1", "2=a"]


def test_a_message_may_have_tool_calls_in_place_of_text():
    called = {"role": "assistant", "tool_calls": [{"name": "ab"}]}
    assert check_messages([{**called, "content": None}], "row 0") == [called]


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


def test_a_template_that_fails_names_the_row_also_within_a_batch():
    reader = chat_reader("{% if messages[0].content == '2' %}{{ raise_exception('twos') }}{% endif %}1")
    with pytest.raises(DataError, match=r"row 11.*twos"):
        reader.read_batch([{"prompt": user(x)} for x in "123"], 10)


def test_a_row_of_token_ids_is_a_prompt_whose_text_rewards_get():
    tokenizer = char_tokenizer()
    rows = Dataset.from_list([{"input_ids": tokenizer(text).input_ids, "answer": text} for text in ("12=", "3=")])
    found = PromptReader(tokenizer).read_batch(list(rows), 0)
    assert [list(each.ids) for each in found] == list(rows["input_ids"])
    assert [each.source for each in found] == ["12=", "3="]
    assert [each.columns["answer"] for each in found] == ["12=", "3="]


@pytest.mark.parametrize(
    ("row", "names"),
    [({"input_ids": [99]}, "token 99"), ({"input_ids": "12"}, "integers"), ({"input_ids": []}, "empty")],
)
def test_a_row_of_token_ids_that_cannot_be_a_prompt_is_named(row, names):
    with pytest.raises(DataError, match=f"row 3 .*{names}"):
        PromptReader(char_tokenizer(), num_embeddings=13).read(row, 0, 3)

"""Rows to prompts: formats, templates, limits, and every row that cannot be used."""

from __future__ import annotations

import json
import logging

import pytest
from datasets import Dataset, DatasetDict, IterableDataset

from lowpeak.data.chat import check_messages
from lowpeak.data.prompts import PromptReader, check_rows, check_tokenizer, num_rows, padding_id
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
    from tokenizers.processors import TemplateProcessing

    tokenizer = char_tokenizer(ALPHABET)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<eos> $A", special_tokens=[("<eos>", 1)])
    assert PromptReader(tokenizer).read({"prompt": "12"}, 0).ids[0] == 1


def test_messages_pass_the_chat_template_and_open_the_assistants_turn():
    prompt = chat_reader().read({"prompt": user("1+1")}, 0)
    assert text_of(prompt) == "<user>1+1<eos><assistant>"
    assert prompt.source == user("1+1")
    assert prompt.conversational


BEGUN = [*user("1+1"), {"role": "assistant", "content": "ab"}]


def test_after_an_assistants_last_message_comes_a_new_one_as_in_trl():
    prompt = chat_reader().read({"prompt": BEGUN}, 0)
    assert text_of(prompt) == "<user>1+1<eos><assistant>ab<eos><assistant>"
    assert prompt.begun == ""


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


def test_checked_messages_have_no_empty_keys_and_leave_the_row_as_it_is():
    messages = user("1", name=None)
    assert check_messages(messages, "row 0") == user("1")
    assert messages == user("1", name=None)


def test_an_assistants_message_may_hold_tool_calls_instead_of_text():
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "ab"}]}
    assert check_messages([call], "row 0") == [{"role": "assistant", "tool_calls": [{"name": "ab"}]}]


def test_template_arguments_of_the_row_go_before_those_of_the_run():
    reader = chat_reader("{{ messages[0].content }}{{ x }}{{ y }}", chat_template_kwargs={"x": "a", "y": "a"})
    rows = Dataset.from_list(
        [
            {"prompt": user("1"), "chat_template_kwargs": {"x": "b", "z": None}},
            {"prompt": user("2"), "chat_template_kwargs": {"x": None, "z": "b"}},
        ]
    )
    assert [text_of(reader.read(row, i)) for i, row in enumerate(rows)] == ["1ba", "2aa"]


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


def test_an_overlong_prompt_is_an_error_with_its_numbers():
    reader = plain_reader(max_prompt_tokens=3, limit_reason="the model's context of 7 less max_completion_length 4")
    with pytest.raises(DataError) as caught:
        reader.read({"prompt": "12345"}, 4, index=17)
    assert str(caught.value) == (
        "row 17: the prompt has 5 tokens; the model's context of 7 less max_completion_length 4 leaves 3; "
        "shorten it or set overlong_prompts='drop'."
    )


def test_a_prompt_as_long_as_the_limit_stays_and_a_longer_one_is_dropped():
    reader = plain_reader(max_prompt_tokens=3, overlong="drop")
    assert reader.read({"prompt": "123"}, 0) is not None
    assert reader.read({"prompt": "1234"}, 1) is None


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"question": "1", "answer": "2"}, "row 3 has no 'prompt' column, only 'answer', 'question'"),
        ({"prompt": None}, "row 3 has an empty prompt"),
        ({"prompt": ""}, "row 3 has an empty prompt"),
        ({"prompt": []}, "row 3: the prompt is an empty list of messages"),
        ({"prompt": 7}, "row 3 has a prompt of type int"),
        ({"prompt": ["1"]}, "row 3: the prompt, message 0, is '1'"),
        ({"prompt": [{"content": "1"}]}, "row 3: the prompt, message 0, is"),
        ({"prompt": [{"role": "user"}]}, "message 0, has no 'content'"),
        ({"prompt": [*user("1"), {"role": "user", "content": 4}]}, "message 1, has content of type int"),
        ({"prompt": user([{"type": "image"}])}, "content part of type 'image'; lowpeak trains on text only"),
        ({"prompt": user("1"), "images": [1]}, "columns 'images' hold images"),
        ({"prompt": user("1"), "log_metric": 1, "prompts": 1}, "columns 'log_metric', 'prompts' are keywords"),
        ({"prompt": user("1"), "tools": "[1"}, "row 3 has a 'tools' column that is no JSON"),
        ({"prompt": user("1"), "chat_template_kwargs": "x"}, "'chat_template_kwargs' of type str"),
        ("prompt", "row 3 is a str; a row is a mapping"),
    ],
)
def test_a_row_that_cannot_be_used_is_named_with_the_reason(row, message):
    with pytest.raises(DataError) as caught:
        chat_reader().read(row, 0, index=3)
    assert message in str(caught.value)


def test_parts_of_text_are_messages_too():
    reader = chat_reader("{% for p in messages[0].content %}{{ p.text }}{% endfor %}")
    parts = [{"type": "text", "text": "1"}, {"type": "text", "text": "a"}]
    assert text_of(reader.read({"prompt": user(parts)}, 0)) == "1a"


def test_a_prompt_that_makes_no_token_is_an_error():
    with pytest.raises(DataError, match="row 2: the tokenizer makes no token"):
        chat_reader("{{ '' }}").read({"prompt": user("1")}, 2)


@pytest.mark.parametrize(("first", "second"), [("1", user("1")), (user("1"), "1")])
def test_strings_and_messages_in_one_data_set_are_an_error(first, second):
    reader = chat_reader()
    reader.read({"prompt": first}, 0)
    with pytest.raises(DataError, match=r"row 1 has a .* as its prompt, earlier rows have a .*; use one format"):
        reader.read({"prompt": second}, 1)


def test_messages_without_a_chat_template_are_an_error_with_the_remedy():
    with pytest.raises(
        DataError, match=r"row 0: the prompt is a list of messages, but .* set tokenizer\.chat_template"
    ):
        plain_reader().read({"prompt": user("1")}, 0)


def test_a_template_in_the_arguments_stands_in_for_the_tokenizers():
    reader = plain_reader(chat_template_kwargs={"chat_template": "{{ messages[0].content }}"})
    assert text_of(reader.read({"prompt": user("12")}, 0), chat=False) == "12"


def test_a_template_that_fails_names_the_row_also_within_a_batch():
    reader = chat_reader("{% if messages[0].content == '2' %}{{ raise_exception('no twos') }}{% endif %}1")
    with pytest.raises(DataError, match=r"row 11: the prompt does not pass the chat template: no twos"):
        reader.read_batch([{"prompt": user(x)} for x in "123"], 10)


def test_the_source_row_is_not_changed():
    row = {"prompt": user("1", name=None), "tools": None}
    chat_reader().read(row, 0)
    assert row == {"prompt": user("1", name=None), "tools": None}


def test_checking_a_data_set_returns_the_rows_that_stay_and_says_how_many_go(caplog):
    dataset = Dataset.from_list([{"prompt": "1" * length} for length in (1, 9, 2, 9, 3)])
    with caplog.at_level(logging.WARNING):
        kept = check_rows(dataset, plain_reader(max_prompt_tokens=3, overlong="drop"))
    assert list(kept) == [0, 2, 4]
    assert caplog.messages == ["2 of 5 rows are left out: the prompt has more than 3 tokens."]
    assert dataset.select(kept)["prompt"][:] == ["1", "11", "111"]


def test_checking_finds_the_one_bad_row_beyond_the_first_thousand():
    dataset = Dataset.from_list([{"prompt": "1"} for _ in range(1500)] + [{"prompt": ""}])
    with pytest.raises(DataError, match="row 1500 has an empty prompt"):
        check_rows(dataset, plain_reader())


def test_checking_also_takes_a_plain_list_of_rows():
    assert list(check_rows([{"prompt": "1"}, {"prompt": "2"}], plain_reader())) == [0, 1]


def test_checking_applies_the_data_sets_own_transform():
    dataset = Dataset.from_list([{"question": "12"}]).with_transform(lambda rows: {"prompt": rows["question"]})
    assert list(check_rows(dataset, plain_reader())) == [0]


def test_a_data_set_of_overlong_prompts_only_is_an_error():
    dataset = Dataset.from_list([{"prompt": "1111"}] * 3)
    with pytest.raises(DataError, match="All 3 rows are left out: the prompt has more than 2 tokens"):
        check_rows(dataset, plain_reader(max_prompt_tokens=2, overlong="drop"))


def test_an_empty_data_set_is_an_error():
    with pytest.raises(DataError, match="The data set is empty"):
        check_rows(Dataset.from_list([]), plain_reader())


def test_all_splits_at_once_are_an_error_that_names_them():
    splits = DatasetDict({"train": Dataset.from_list([{"prompt": "1"}]), "test": Dataset.from_list([{"prompt": "1"}])})
    with pytest.raises(DataError, match="has the splits 'test', 'train'; pass one of them"):
        num_rows(splits)


def test_a_stream_has_no_number_of_rows():
    assert num_rows(IterableDataset.from_generator(lambda: iter([{"prompt": "1"}]))) is None


def test_padding_is_the_pad_token_else_the_end_token_else_an_error():
    tokenizer = char_tokenizer()
    assert padding_id(tokenizer) == 0
    tokenizer.pad_token = None
    assert padding_id(tokenizer) == 1
    assert tokenizer.pad_token is None
    tokenizer.eos_token = None
    with pytest.raises(ModelError, match="neither a pad nor an eos token"):
        check_tokenizer(tokenizer)


def test_an_image_processor_is_not_a_tokenizer():
    class Processor:
        tokenizer = char_tokenizer()
        image_processor = object()

    with pytest.raises(ModelError, match=r"pass its \.tokenizer"):
        check_tokenizer(Processor())

from __future__ import annotations

import pytest
from datasets import Dataset

from lowpeak.cli.arguments import DataArguments
from lowpeak.cli.columns import in_chat_form, shape
from lowpeak.errors import DataError


def test_rows_that_have_prompts_are_left_as_they_are():
    dataset = Dataset.from_dict({"prompt": ["1+1="], "answer": ["2"]})
    assert shape(dataset, DataArguments()) is dataset


def test_a_question_becomes_the_prompt_and_other_columns_stay():
    dataset = Dataset.from_dict({"question": ["1+1?"], "answer": ["2"]})
    shaped = shape(dataset, DataArguments(prompt_column="question"))
    assert shaped[0] == {"prompt": "1+1?", "answer": "2"}


def test_a_chat_is_opened_by_the_system_and_asked_by_the_user():
    dataset = Dataset.from_dict({"prompt": ["1+1?"]})
    shaped = shape(dataset, DataArguments(conversational=True, system_prompt="Be brief."))
    assert shaped[0]["prompt"] == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1?"}]


def test_a_completion_becomes_the_assistant_s_message():
    row = {"prompt": "1+1?", "completion": "2"}
    assert in_chat_form(row, None, ["completion"]) == {
        "prompt": [{"role": "user", "content": "1+1?"}],
        "completion": [{"role": "assistant", "content": "2"}],
    }


def test_a_prompt_that_has_a_system_message_keeps_its_own():
    messages = [{"role": "system", "content": "Mine."}, {"role": "user", "content": "1+1?"}]
    assert in_chat_form({"prompt": messages}, "Yours.")["prompt"] == messages


def test_answers_are_the_completions_of_supervised_rows():
    dataset = Dataset.from_dict({"question": ["1+1?"], "answer": ["2"]})
    shaped = shape(dataset, DataArguments(prompt_column="question", completion_column="answer"), ["completion"])
    assert shaped[0] == {"prompt": "1+1?", "completion": "2"}


def test_both_answers_of_a_preference_become_the_assistants_messages():
    row = {"prompt": "1+1?", "chosen": "2", "rejected": "3"}
    assert in_chat_form(row, None, ["chosen", "rejected"]) == {
        "prompt": [{"role": "user", "content": "1+1?"}],
        "chosen": [{"role": "assistant", "content": "2"}],
        "rejected": [{"role": "assistant", "content": "3"}],
    }
    with pytest.raises(DataError, match="a chat is made of the column 'prompt', which the data set has not"):
        in_chat_form({"chosen": "1+1?2", "rejected": "1+1?3"}, None, ["chosen", "rejected"])


def test_a_column_that_is_not_there_is_an_error_that_names_those_that_are():
    dataset = Dataset.from_dict({"query": ["1+1?"], "answer": ["2"]})
    with pytest.raises(DataError, match="no column 'question' for the prompt; its columns are query, answer"):
        shape(dataset, DataArguments(prompt_column="question"))


def test_a_stream_is_shaped_as_it_comes():
    stream = Dataset.from_dict({"question": ["1+1?"]}).to_iterable_dataset()
    shaped = shape(stream, DataArguments(prompt_column="question", conversational=True))
    assert list(shaped) == [{"prompt": [{"role": "user", "content": "1+1?"}]}]


@pytest.mark.parametrize(
    ("row", "answers", "words"),
    [
        ({"prompt": None}, [], "a row has None where a chat is made of a text or a list of messages"),
        ({"prompt": []}, [], r"a row has \[\] where a chat"),
        ({"prompt": ["2+3"]}, [], r"a row has \['2\+3'\] where a chat"),
        (
            {"prompt": "2+3"},
            ["completion"],
            "the column 'completion' too, which the data set has not; set completion_column",
        ),
    ],
)
def test_a_row_that_makes_no_chat_is_told(row, answers, words):
    with pytest.raises(DataError, match=words):
        in_chat_form(row, "Yours.", answers)

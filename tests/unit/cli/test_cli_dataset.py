from __future__ import annotations

import pytest
from datasets import Dataset

from lowpeak.cli.arguments import DataArguments
from lowpeak.cli.dataset import map_columns, to_chat
from lowpeak.errors import DataError

QUESTION = DataArguments(prompt_column="question", completion_column="answer")


def message(role, content):
    return {"role": role, "content": content}


def test_only_the_columns_that_were_named_are_renamed():
    kept = Dataset.from_dict({"prompt": ["1+1="], "answer": ["2"]})
    assert map_columns(kept, DataArguments()) is kept
    dataset = Dataset.from_dict({"question": ["1+1?"], "answer": ["2"]})
    assert map_columns(dataset, QUESTION)[0] == {"prompt": "1+1?", "answer": "2"}
    assert map_columns(dataset, QUESTION, ["completion"])[0] == {"prompt": "1+1?", "completion": "2"}
    with pytest.raises(DataError, match=r"'query' .*prompt: .* question, answer"):
        map_columns(dataset, DataArguments(prompt_column="query"))


def test_a_stream_is_shaped_as_it_comes():
    stream = Dataset.from_dict({"question": ["1+1?"]}).to_iterable_dataset()
    shaped = map_columns(
        stream, DataArguments(prompt_column="question", conversational=True, system_prompt="Be brief.")
    )
    assert list(shaped) == [{"prompt": [message("system", "Be brief."), message("user", "1+1?")]}]


OWN = [message("system", "Mine."), message("user", "1+1?")]


@pytest.mark.parametrize(
    ("row", "system", "expected"),
    [
        ({"prompt": "1+1?"}, "Be brief.", {"prompt": [message("system", "Be brief."), message("user", "1+1?")]}),
        ({"prompt": OWN}, "Yours.", {"prompt": OWN}),
        ({"prompt": OWN, "completion": "2"}, None, {"prompt": OWN, "completion": [message("assistant", "2")]}),
        (
            {"prompt": OWN, "chosen": "2", "rejected": "3"},
            None,
            {"prompt": OWN, "chosen": [message("assistant", "2")], "rejected": [message("assistant", "3")]},
        ),
    ],
)
def test_a_row_becomes_a_chat_that_the_system_opens_and_the_assistant_answers(row, system, expected):
    assert to_chat(row, system, list(row)[1:]) == expected


@pytest.mark.parametrize(
    ("row", "answers", "pattern"),
    [
        ({"prompt": None}, [], "None"),
        ({"prompt": []}, [], r"\[\]"),
        ({"prompt": ["2+3"]}, [], r"\['2\+3'\]"),
        ({"prompt": "2+3"}, ["completion"], "'completion'.*completion_column"),
        ({"chosen": "1+1?2", "rejected": "1+1?3"}, ["chosen", "rejected"], "'prompt'.*prompt_column"),
    ],
)
def test_a_row_that_makes_no_chat_is_told(row, answers, pattern):
    with pytest.raises(DataError, match=pattern):
        to_chat(row, "Yours.", answers)

"""Rows of preferences as records: text, messages, token ids and implicit prompts, tokenized as TRL does."""

from __future__ import annotations

import pytest
from datasets import Dataset

from lowpeak.data.completions import LabelReader, PairReader, unpair
from lowpeak.errors import DataError
from tiny_models import char_tokenizer

PLAIN, CHAT = char_tokenizer(), char_tokenizer(chat=True)
END = PLAIN.eos_token_id


def ids(text):
    return PLAIN(text)["input_ids"]


def parts(reader, row):
    """The prompt's tokens, and each completion's with its marks and its finish reason."""
    records = reader.read(row, 5)
    assert {record.group for record in records} == {5}
    marks = [(r.completion.ids.tolist(), r.advantages.tolist(), r.completion.finish_reason) for r in records]
    return list(records[0].prompt_ids), *marks


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


TEXT = {"prompt": "12=", "chosen": "3", "rejected": "45"}
PAIR = (ids("12="), ([*ids("3"), END], [1.0, 1.0], "stop"), ([*ids("45"), END], [-1.0, -1.0, -0.5], "stop"))


@pytest.mark.parametrize(
    "row",
    [
        TEXT,
        {"chosen": "12=3", "rejected": "12=45"},
        {"prompt_ids": ids("12="), "chosen_ids": [*ids("3"), END], "rejected_ids": [*ids("45"), END]},
        {"chosen_ids": [*ids("12=3"), END], "rejected_ids": [*ids("12=45"), END]},
    ],
)
def test_a_pair_is_read_from_text_and_from_token_ids_with_or_without_its_prompt(row):
    reader = PairReader(PLAIN, tail_weight=0.5)
    assert parts(reader, row) == PAIR
    prepared = reader.prepare(row)
    assert prepared == {"prompt_ids": PAIR[0], "chosen_ids": PAIR[1][0], "rejected_ids": PAIR[2][0]}


@pytest.mark.parametrize("has_prompt", [True, False])
def test_a_pair_of_messages_follows_the_chat_template_without_another_end_token(has_prompt):
    turns = [[user("1"), assistant(text)] for text in ("2", "34")]
    row = {"prompt": turns[0][:1], "chosen": turns[0][1:], "rejected": turns[1][1:]}
    prompt, chosen, rejected = parts(
        PairReader(CHAT), row if has_prompt else dict(zip(("chosen", "rejected"), turns, strict=True))
    )
    wholes = [CHAT.apply_chat_template(each, return_dict=True)["input_ids"] for each in turns]
    opened = CHAT.apply_chat_template(turns[0][:1], add_generation_prompt=True, return_dict=True)["input_ids"]
    assert prompt == opened
    assert [prompt + chosen[0], prompt + rejected[0]] == wholes


@pytest.mark.parametrize("continues", [False, True])
def test_an_answer_continues_the_prompts_last_message_if_the_options_say_so(continues):
    prompt, options = [user("1"), assistant("2")], {"continue_final_message": True} if continues else {}
    row = {"prompt": prompt, "completion": [assistant("34")], "label": True}
    opened, (answer, *_) = parts(LabelReader(CHAT, chat_template_kwargs=options), row)
    whole = [user("1"), assistant("234")] if continues else [*prompt, assistant("34")]
    opening = options or {"add_generation_prompt": True}
    assert opened == CHAT.apply_chat_template(prompt, return_dict=True, **opening)["input_ids"]
    assert opened + answer == CHAT.apply_chat_template(whole, return_dict=True)["input_ids"]


def test_the_prompt_of_texts_ends_before_a_space_and_leaves_something_of_both():
    row = unpair(Dataset.from_list([{"chosen": "ab cd", "rejected": "ab ef"}, {"chosen": "ab", "rejected": "abc"}]))
    assert row["prompt"] == ["ab", "a", "ab", "a"]
    assert row["completion"] == [" cd", "b", " ef", "bc"]
    assert row["label"] == [True, True, False, False]


@pytest.mark.parametrize("kind", [list, tuple])
def test_a_list_of_pairs_is_unpaired_as_a_dataset_is(kind):
    texts = [{"id": i, "chosen": f"{i}=1", "rejected": f"{i}=2"} for i in range(1001)]
    for pairs in (texts, [{"id": 0, "chosen_ids": ids("1=3"), "rejected_ids": ids("1=4")}]):
        of_list = unpair(kind(pairs))
        assert of_list == unpair(Dataset.from_list(pairs)).to_list()
        assert all(LabelReader(PLAIN).read(row, 0) for row in of_list)


def test_a_pair_without_a_text_is_named_by_its_reader():
    rows = [{"chosen": "1=2", "rejected": "1=3"}, {"chosen": None, "rejected": "1=3"}]
    for unpaired in (unpair(Dataset.from_list(rows)), unpair(rows)):
        with pytest.raises(DataError, match=r"row 1.*'prompt'.*NoneType.*'completion'.*NoneType"):
            LabelReader(PLAIN).read(unpaired[1], 1)


def test_a_labelled_completion_of_token_ids_has_an_empty_prompt_or_one_of_its_own():
    row = {"prompt_ids": [], "completion_ids": [*ids("123"), END], "label": True}
    assert parts(LabelReader(PLAIN), row) == (ids("1"), ([*ids("23"), END], [1.0] * 3, "stop"))


def test_long_rows_are_truncated_and_those_without_a_completion_left_are_dropped():
    reader = PairReader(PLAIN, max_length=4)
    assert parts(reader, TEXT)[1:] == ((ids("3"), [1.0], "length"), (ids("4"), [-1.0], "length"))
    assert reader.read({**TEXT, "prompt": "123="}, 0) is None
    assert reader.is_truncated(reader.read(TEXT, 0))


def test_a_labelled_completion_is_marked_by_its_label():
    row = {"prompt": "12=", "completion": "3"}
    for label, mark in ((True, 1.0), (False, -1.0)):
        assert parts(LabelReader(PLAIN), {**row, "label": label}) == (PAIR[0], ([*ids("3"), END], [mark] * 2, "stop"))


@pytest.mark.parametrize(
    ("reader", "row", "pattern"),
    [
        (PairReader, {"prompt": "1", "chosen": "2"}, "row 0.*'chosen' and 'rejected'"),
        (PairReader, {**TEXT, "chosen": [assistant("3")]}, "row 0.*'chosen' of type list"),
        (PairReader, {"chosen": None, "rejected": "3"}, "row 0.*'chosen' of type NoneType"),
        (PairReader, {"chosen": 3, "rejected": 3}, "row 0.*'chosen' of type int"),
        (LabelReader, TEXT, "row 0 is a pair.*datasets.Dataset"),
        (LabelReader, {"prompt": "1", "completion": "2"}, "row 0.*'label'"),
        (LabelReader, {"prompt": "1", "completion": "2", "label": None}, "row 0.*None"),
    ],
)
def test_a_row_that_cannot_be_read_is_named(reader, row, pattern):
    with pytest.raises(DataError, match=pattern):
        reader(PLAIN).read(row, 0)

"""The cursor: every prompt once an epoch, over any number of epochs, resumed at the very next one."""

from __future__ import annotations

import json
import logging

import pytest
from datasets import Dataset, DatasetDict, IterableDataset

from lowpeak.data.cursor import DatasetCursor, permutation, read_eval_prompts
from lowpeak.data.prompts import PromptReader
from lowpeak.errors import CheckpointError, DataError
from tiny_models import char_tokenizer


def rows(count):
    return [{"prompt": str(i), "answer": i} for i in range(count)]


def reader(**settings):
    return PromptReader(char_tokenizer(), **settings)


def table(count):
    return Dataset.from_list(rows(count))


def stream(count):
    return IterableDataset.from_generator(lambda: iter(rows(count)))


def sharded(count):
    return table(count).to_iterable_dataset(num_shards=3)


def buffered(count):
    return sharded(count).shuffle(seed=5, buffer_size=4)


class PlainStream:
    """An iterable that is not a dataset of Hugging Face."""

    def __init__(self, count):
        self.count = count

    def __iter__(self):
        return iter(rows(self.count))


def cursor(dataset, shuffle=False, seed=0, **settings):
    return DatasetCursor(dataset, reader(**settings), shuffle=shuffle, seed=seed)


def answers(prompts):
    return [prompt.columns["answer"] for prompt in prompts]


def test_without_shuffle_prompts_come_in_order_over_epochs_and_serials_go_on():
    source = cursor(table(3))
    prompts = source.take(2) + source.take(5)
    assert answers(prompts) == [0, 1, 2, 0, 1, 2, 0]
    assert [prompt.serial for prompt in prompts] == list(range(7))
    assert source.rows_per_epoch == 3


def all_different(orders):
    return len(set(map(tuple, orders))) == len(orders)


@pytest.mark.parametrize(
    ("make", "shuffle", "size"),
    [*((make, False, 5) for make in (stream, sharded, buffered, PlainStream)), (stream, True, 40), (table, True, 50)],
)
def test_each_epoch_has_every_prompt_once_and_in_another_order_where_that_is_asked_for(make, shuffle, size):
    source = cursor(make(size), shuffle=shuffle, seed=1)
    epochs = [answers(source.take(size)) for _ in range(3)]
    assert all(sorted(epoch) == list(range(size)) for epoch in epochs)
    assert source.rows_per_epoch == (size if make is table else None)
    assert not shuffle or all_different([*epochs, range(size)])


def test_the_seed_alone_decides_the_order():
    orders = [answers(cursor(table(30), shuffle=True, seed=seed).take(40)) for seed in (3, 3, 4)]
    assert orders[0] == orders[1]
    assert orders[0] != orders[2]


def philox(key, block):
    """Return four numbers of Philox4x64-10, as Salmon et al. 2011 ("Random numbers: as easy as 1, 2, 3") define it."""
    words, (first, second) = [block, 0, 0, 0], key
    for _ in range(10):
        left, right = 0xD2E7470EE14C6C93 * words[0], 0xCA5A826395121157 * words[2]
        words = [(right >> 64) ^ words[1] ^ first, right % 2**64, (left >> 64) ^ words[3] ^ second, left % 2**64]
        first, second = (first + 0x9E3779B97F4A7C15) % 2**64, (second + 0xBB67AE8584CAA73B) % 2**64
    return words


@pytest.mark.parametrize(
    ("size", "seed", "epoch"), [(10, 42, 1), (1, 0, 0), (37, 2**40, 3), (5, 2**63 + 1, 0), (5, -1, 0)]
)
def test_the_permutation_is_the_order_in_which_philox_numbers_sort(size, seed, epoch):
    numbers = [number for block in range(1, 11) for number in philox((seed % 2**64, epoch), block)][:size]
    assert permutation(size, seed, epoch).tolist() == sorted(range(size), key=numbers.__getitem__)


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("make", [table, stream, sharded, buffered])
@pytest.mark.parametrize("used", [0, 1, 6, 7, 10, 14, 23])
def test_a_resumed_cursor_goes_on_with_exactly_the_next_prompts(make, shuffle, used):
    whole = cursor(make(7), shuffle=shuffle, seed=2)
    whole.take(used)
    state = json.loads(json.dumps(whole.state_dict()))
    resumed = cursor(make(7), shuffle=shuffle, seed=2)
    resumed.take(4)  # a cursor that was already used forgets it
    resumed.load_state_dict(state)
    assert resumed.take(20) == whole.take(20)
    assert resumed.state_dict() == whole.state_dict()


def test_a_stream_that_cannot_be_shuffled_says_so(caplog):
    with caplog.at_level(logging.WARNING):
        assert answers(cursor(PlainStream(3), shuffle=True).take(3)) == [0, 1, 2]
    assert [record.args for record in caplog.records] == [("PlainStream",)]


def test_a_stream_is_read_no_further_than_asked():
    read = []

    def generate():
        for row in rows(100):
            read.append(row["answer"])
            yield row

    source = cursor(IterableDataset.from_generator(generate))
    assert read == []
    source.take(3)
    assert read == [0, 1, 2]


def test_rows_with_random_access_are_read_one_by_one_when_drawn():
    read = []
    dataset = table(1000).with_transform(lambda rows: read.extend(rows["answer"]) or rows)
    assert answers(cursor(dataset, shuffle=True).take(3)) == read


def test_overlong_prompts_are_passed_over_and_counted_also_after_resuming():
    dataset = Dataset.from_list([{"prompt": "1" * length, "answer": length} for length in (1, 5, 2, 6, 3)])
    source = cursor(dataset, max_prompt_tokens=3, overlong="drop")
    prompts = source.take(4)
    assert answers(prompts) == [1, 2, 3, 1]
    assert [prompt.serial for prompt in prompts] == [0, 1, 2, 3]
    assert source.num_dropped == 2
    resumed = cursor(dataset, max_prompt_tokens=3, overlong="drop")
    resumed.load_state_dict(source.state_dict())
    assert answers(resumed.take(1)) == [2]
    assert resumed.num_dropped == 3


@pytest.mark.parametrize("make", [table, stream])
def test_an_epoch_of_overlong_prompts_only_is_an_error_and_not_an_endless_search(make):
    source = cursor(make(4), max_prompt_tokens=0, overlong="drop")
    with pytest.raises(DataError, match=r"4 rows.* 0 tokens"):
        source.take(1)


@pytest.mark.parametrize("dataset", [table(0), stream(0), DatasetDict({"train": table(2)})])
def test_what_has_no_rows_to_draw_is_an_error(dataset):
    with pytest.raises(DataError):
        cursor(dataset).take(1)
    with pytest.raises(DataError):
        read_eval_prompts(dataset, reader())


def test_an_error_names_the_row_of_the_data_set_and_not_the_draw():
    dataset = Dataset.from_list([{"prompt": "1"}, {"prompt": "2"}, {"prompt": ""}])
    source = cursor(dataset)
    source.take(2)
    with pytest.raises(DataError, match=r"row 2 .*prompt"):
        source.take(1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dataset": table(6)}, "num_rows=5.*num_rows=6"),
        ({"seed": 1}, "seed=0.*seed=1"),
        ({"shuffle": True}, "shuffle=False.*shuffle=True"),
    ],
)
def test_resuming_with_other_data_or_another_order_is_an_error(change, message):
    state = cursor(table(5)).state_dict()
    with pytest.raises(CheckpointError, match=message):
        cursor(**{"dataset": table(5), **change}).load_state_dict(state)


@pytest.mark.parametrize("make", [Dataset.from_list, lambda rows: IterableDataset.from_generator(lambda: iter(rows))])
def test_evaluation_prompts_come_all_in_order_with_serials_from_zero_and_without_a_gap(make, caplog):
    dataset = make([{"prompt": "1" * length, "answer": length} for length in (2, 1, 3, 1)])
    with caplog.at_level(logging.WARNING):
        prompts = read_eval_prompts(dataset, reader(max_prompt_tokens=2, overlong="drop"))
    assert answers(prompts) == [2, 1, 1]
    assert [prompt.serial for prompt in prompts] == [0, 1, 2]
    assert [record.args[:2] for record in caplog.records] == [(1, 4)]

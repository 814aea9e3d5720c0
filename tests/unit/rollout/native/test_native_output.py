"""Stop strings on a window equal stop strings on the whole text; a row's progress."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import pytest
import torch
from transformers import GenerationConfig

from lowpeak.arguments.sampling import Sampling
from lowpeak.errors import EngineError
from lowpeak.rollout.native.output import OutputBuffer, StopStrings, end_token_ids
from tiny_models import byte_tokenizer, char_tokenizer, metaspace_tokenizer, tiny_model

SAMPLING = Sampling(num_generations=1, max_new_tokens=1)


def _first_hit_naively(tokenizer, stop: list[str], ids: list[int]) -> int | None:
    for end in range(1, len(ids) + 1):
        text = tokenizer.decode(ids[:end], skip_special_tokens=False, clean_up_tokenization_spaces=False)
        if any(s in text for s in stop):
            return end
    return None


def _first_hit(stops: StopStrings, ids: list[int]) -> int | None:
    return next((end for end in range(1, len(ids) + 1) if stops.completed(ids[:end])), None)


@pytest.mark.parametrize("stop", [["ab"], [" b"], ["b "], ["aab", "bb"], ["b ba b"]])
def test_pieces_with_spaces_stop_where_the_whole_text_does(stop):
    tokenizer, generator = metaspace_tokenizer(), random.Random(0)
    stops = StopStrings(tokenizer, stop)
    for _ in range(200):
        ids = [generator.randrange(7) for _ in range(30)]
        assert _first_hit(stops, ids) == _first_hit_naively(tokenizer, stop, ids)


@pytest.mark.parametrize("stop", [["é"], ["日本"], ["🙂x"], ["\n\n", "END"]])
def test_characters_of_several_tokens_stop_where_the_whole_text_does(stop):
    tokenizer = byte_tokenizer()
    text = "aé日本語🙂🙂xy\n \n\nEN END"
    ids = tokenizer(text)["input_ids"]
    found = _first_hit(StopStrings(tokenizer, stop), ids)
    assert found is not None
    assert found == _first_hit_naively(tokenizer, stop, ids)


def test_a_special_token_can_be_a_stop_string():
    tokenizer = char_tokenizer(chat=True)
    ids = [*tokenizer("12")["input_ids"], tokenizer.convert_tokens_to_ids("<user>")]
    assert _first_hit(StopStrings(tokenizer, ["<user>"]), ids) == 3


def test_end_tokens_come_from_config_tokenizer_and_sampling():
    model, tokenizer = tiny_model(), char_tokenizer()
    model.generation_config = GenerationConfig(eos_token_id=[4, 5])
    sampling = Sampling(num_generations=1, max_new_tokens=1, stop_token_ids=(9,))
    assert end_token_ids(model, tokenizer, sampling) == {1, 4, 5, 9}
    model.generation_config = GenerationConfig(eos_token_id=6)
    assert end_token_ids(model, tokenizer, SAMPLING) == {1, 6}
    model.generation_config = GenerationConfig()
    tokenizer.eos_token = None
    assert end_token_ids(model, tokenizer, SAMPLING) == frozenset()


def _progress(num_rows: int, counted: list[tuple[int, int]] | None = None, max_new_tokens: int = 9) -> OutputBuffer:
    on_tokens = None if counted is None else lambda *counts: counted.append(counts)
    stops = StopStrings(char_tokenizer(), ["44"])
    return OutputBuffer(num_rows, max_new_tokens, frozenset({1}), stops, on_tokens, torch.device("cpu"))


class FixedDraw:
    """A draw of these tokens; for a sequence that is drawn from the whole vocabulary, of token 7."""

    def __init__(self, tokens_N: torch.Tensor, logprobs_N: torch.Tensor, again: float = math.nan) -> None:
        self.tokens_N, self.logprobs_N, self._again = tokens_N, logprobs_N, again

    def redraw_from_vocabulary(self, sequences: Sequence[int]) -> None:
        self.tokens_N[list(sequences)], self.logprobs_N[list(sequences)] = 7, self._again


def _add(
    progress: OutputBuffer, rows: list[int], tokens: list[int], logprob: float = -1.0, computed: int = 3
) -> list[bool]:
    draw = FixedDraw(torch.tensor(tokens), torch.full((len(rows),), logprob))
    return progress.add(torch.tensor(rows), draw, computed)


def test_rows_end_by_token_or_string_or_length_and_keep_what_ended_them():
    progress = _progress(4, max_new_tokens=3)
    four = char_tokenizer().convert_tokens_to_ids("4")
    assert _add(progress, [0, 1, 2], [four, four, four]) == [False, False, False]
    assert _add(progress, [2, 0, 1], [3, 1, four], -2.0) == [False, True, True]
    assert _add(progress, [3, 2], [1, 3], -3.0) == [True, True]
    made = progress.completions()
    assert [c.ids.tolist() for c in made] == [[four, 1], [four, four], [four, 3, 3], [1]]
    assert [c.finish_reason for c in made] == ["stop", "stop", "length", "stop"]
    assert made[2].logprobs.tolist() == [-1.0, -2.0, -3.0]
    assert all(c.loss_mask.all() and len(c.loss_mask) == len(c) for c in made)


def test_the_newest_tokens_are_those_that_rows_wrote_last():
    progress, rows = _progress(3), torch.tensor([2, 0])
    _add(progress, [0, 2], [5, 6])
    _add(progress, [2], [7])
    assert progress.written(rows).tolist() == [2, 1]
    assert progress.newest(rows, progress.written(rows)).tolist() == [7, 5]
    assert progress.tokens(rows, 2).tolist() == [[6, 7], [5, 0]]


def test_tokens_are_counted_beside_the_rows_that_were_computed():
    counted: list[tuple[int, int]] = []
    progress = _progress(2, counted)
    _add(progress, [0, 1], [1, 3], computed=2)
    _add(progress, [1], [3], computed=16)
    assert counted == [(2, 2), (1, 16)]


@pytest.mark.parametrize("bad", [float("nan"), float("-inf")])
def test_logits_that_are_not_finite_are_an_error(bad):
    with pytest.raises(EngineError, match="NaN"):
        _add(_progress(2), [1], [3], bad)


def test_a_sequence_that_needs_the_whole_vocabulary_is_drawn_again_and_counts_once():
    progress = _progress(3)
    _add(progress, [0, 1, 2], [3, 3, 3])
    draw = FixedDraw(torch.tensor([1, 5]), torch.tensor([math.nan, -2.0]), -0.5)
    assert progress.add(torch.tensor([2, 0]), draw, 2) == [False, False]
    made = progress.completions()
    assert [c.ids.tolist() for c in made] == [[3, 5], [3], [3, 7]]
    assert made[2].logprobs.tolist() == [-1.0, -0.5]

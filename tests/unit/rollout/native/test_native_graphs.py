"""Decode steps by graphs, without a GPU: a capture that runs the step, and repeats it on the tensors that stay."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from lowpeak.arguments.sampling import Sampling
from lowpeak.records import Group, Prompt
from lowpeak.rollout.native.decode_graphs import DecodeGraphs
from lowpeak.rollout.native.engine import NativeEngine
from tiny_models import char_tokenizer, tiny_model

SAMPLING = Sampling(num_generations=5, max_new_tokens=40, stop_token_ids=(3, 4))


@dataclass
class Repeating:
    """A capture that counts graphs and replays; `spoil` changes the logits of a replay."""

    spoil: Callable[[Tensor], object] = lambda logits_MV: None
    num_graphs: int = 0
    num_replays: int = 0

    def __call__(self, run: Callable[[], Tensor]) -> Callable[[], None]:
        self.num_graphs += 1

        def replay() -> None:
            self.num_replays += 1
            self.spoil(run())

        return replay


def generate(model: torch.nn.Module, graphs: DecodeGraphs | None) -> list[Group]:
    tokenizer = char_tokenizer()
    engine = NativeEngine(lambda: contextlib.nullcontext(model), tokenizer, lambda: 1 << 24, graphs=graphs)
    engine.load([], 0)
    texts = ("12=", "987654321=", "5=", "33333=")
    return engine.generate([Prompt(i, tuple(tokenizer(x)["input_ids"]), x) for i, x in enumerate(texts)], SAMPLING)


def assert_same(found: list[Group], expected: list[Group]) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        for mine, other in zip(ours.completions, theirs.completions, strict=True):
            assert mine.ids.tolist() == other.ids.tolist()
            torch.testing.assert_close(mine.logprobs, other.logprobs)


def test_graphs_repeat_the_steps_of_a_bucket_after_two_eager_ones():
    model, captures, shapes = tiny_model(), [], []
    graphs = DecodeGraphs(lambda: captures.append(Repeating()) or captures[-1])
    expected = generate(model, None)
    model.register_forward_pre_hook(lambda _, args, kwargs: shapes.append(kwargs["input_ids"].shape), with_kwargs=True)
    for rollout in (1, 2):
        assert_same(generate(model, graphs), expected)
        assert len(captures) == rollout  # graphs, and their memory, end with the rollout's cache
    decoding = [tuple(shape) for shape in shapes if shape[1] == 1]
    assert len({rows for rows, _ in decoding} - {1, 2, 4, 8, 16}) == 1  # the cache's slots
    num_graphs, num_replays = (sum(getattr(each, name) for each in captures) for name in ("num_graphs", "num_replays"))
    assert len(decoding) - num_replays >= 2 * num_graphs  # eager steps come first
    assert num_replays > 2 * num_graphs  # one compares


@pytest.mark.parametrize(
    ("spoil", "reason"), [(lambda logits_MV: logits_MV[0, 0].add_(1e-3), "differ"), (None, "no graph")]
)
def test_a_graph_that_differs_or_fails_ends_the_use_of_graphs_with_one_warning(caplog, spoil, reason):
    def fail(run: Callable[[], object]) -> Callable[[], None]:
        raise RuntimeError("no graph\nfor this model")

    model, graphs = tiny_model(), DecodeGraphs(lambda: Repeating(spoil) if spoil else fail)
    expected = generate(model, None)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert_same(generate(model, graphs), expected)
    assert len(caplog.records) == 1
    assert reason in caplog.text
    assert not graphs.is_enabled

"""The hashed uniforms, generate()'s filters, and the draw."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from lowpeak.arguments.sampling import Sampling
from lowpeak.device_kind import rehearse_device
from lowpeak.rollout.sampling import (
    BlockSums,
    Candidates,
    TokenDraw,
    apply_repetition_penalty,
    draw_tokens,
    sample_tokens,
)
from lowpeak.rollout.uniforms import MAX_DRAWS, UniformDraws, philox, uniforms

PLAIN = Sampling(num_generations=1, max_new_tokens=1)

# Known answers of Philox4x32-10 as published with Random123 (Salmon et al. 2011): counter, key, output.
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN)
def test_philox_gives_the_published_answers(counter, key, expected):
    words = philox([torch.tensor([word]) for word in counter], key)
    assert tuple(int(word) for word in words) == expected


def _assert_even(counts: torch.Tensor) -> None:
    """Chi-square is within three of its deviations of what even chances give."""
    expected, freedom = counts.sum() / len(counts), len(counts) - 1
    assert abs(float(((counts - expected) ** 2 / expected).sum()) - freedom) < 3 * math.sqrt(2 * freedom)


def test_a_million_uniforms_fill_a_thousand_bins_evenly_also_by_their_low_bits_and_are_uncorrelated():
    drawn = uniforms(replace(PLAIN, rollout=3), torch.arange(128), torch.arange(128) % 8, torch.arange(8192))
    assert drawn.numel() >= 1_000_000
    assert drawn.min() >= 0
    assert drawn.max() < 1
    _assert_even(torch.histc(drawn, bins=1000, min=0, max=1))
    low = (drawn * 2.0**53).long() & 1023
    _assert_even(torch.bincount(low.flatten(), minlength=1024))
    for neighbours in ((drawn[:-1], drawn[1:]), (drawn[:, :-1], drawn[:, 1:])):  # rows, positions
        product = (neighbours[0] - 0.5) * (neighbours[1] - 0.5)
        assert abs(float(product.mean())) * 12 * math.sqrt(product.numel()) < 3


def test_a_uniform_depends_on_its_own_five_numbers_only():
    sampling = replace(PLAIN, seed=5, rollout=2)
    together = uniforms(sampling, torch.tensor([9, 4, 7]), torch.tensor([0, 1, 2]), torch.arange(10))
    alone = uniforms(sampling, torch.tensor([4]), torch.tensor([1]), torch.tensor([6]))
    assert torch.equal(together[1:2, 6:7], alone)
    rows = (torch.arange(4), torch.zeros(4, dtype=torch.int64), torch.arange(16))
    for changed in ({"seed": 6}, {"seed": 5 + 2**32}, {"rollout": 3}):
        assert not (uniforms(sampling, *rows) == uniforms(replace(sampling, **changed), *rows)).any()


@pytest.mark.parametrize("num_generations", [2, MAX_DRAWS // 100])
def test_draws_are_those_of_each_position_asked_for_alone(num_generations):
    sampling = replace(PLAIN, max_new_tokens=150, seed=4, rollout=6)
    numbers, keys = (
        range(num_generations),
        {serial: [(serial, i) for i in range(num_generations)] for serial in (20, 30)},
    )
    draws = UniformDraws(2 * num_generations, sampling, torch.device("cpu"))
    draws.make(numbers, keys[20])
    draws.make(range(num_generations, 2 * num_generations), keys[30])  # begins later
    for first, serial in ((0, 20), (num_generations, 30)):
        completions = torch.arange(num_generations)
        expected = uniforms(sampling, torch.full_like(completions, serial), completions, torch.arange(150))
        positions = (completions + 77) % 150
        assert torch.equal(draws.at(first + completions, positions), expected[completions, positions])
    greedy = UniformDraws(4, replace(sampling, temperature=0.0), torch.device("cpu"))
    greedy.make([0, 1], keys[20][:2])
    assert greedy.at(torch.arange(2), torch.zeros(2, dtype=torch.int64)) is None


def _scores(num_rows: int = 16, vocab_size: int = 300, *, ties: bool = False) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    scores = 3 * torch.randn(num_rows, vocab_size, generator=generator)
    return scores.bfloat16().float() if ties else scores


def _by_transformers(scores: torch.Tensor, history: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    processors = LogitsProcessorList()
    if sampling.repetition_penalty != 1:
        processors.append(RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty))
    if sampling.temperature != 1:
        processors.append(TemperatureLogitsWarper(sampling.temperature))
    if sampling.top_k:
        processors.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        processors.append(TopPLogitsWarper(sampling.top_p))
    if sampling.min_p:
        processors.append(MinPLogitsWarper(sampling.min_p))
    return processors(history, scores)


def _filter_scores(scores: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Minus infinity for the tokens that filters remove."""
    scores = scores / sampling.temperature
    if not (sampling.top_k or sampling.top_p < 1 or sampling.min_p):
        return scores
    weights, sums = BlockSums.weights_and_sums(scores)
    kept = Candidates.of(weights, None).filter(sampling, sums.total_N1).weights_NR
    return scores.masked_fill(kept == 0, -math.inf)


FILTERS = {
    "none": {},
    "temperature": {"temperature": 0.7},
    "top-k": {"top_k": 20},
    "top-k of one": {"top_k": 1},
    "top-k beyond the vocabulary": {"top_k": 1000},
    "top-p": {"top_p": 0.8},
    "top-p of nearly nothing": {"top_p": 1e-15},
    "min-p": {"min_p": 0.05},
    "penalty": {"repetition_penalty": 1.3},
    "all": {"temperature": 1.4, "top_k": 40, "top_p": 0.9, "min_p": 0.02, "repetition_penalty": 1.2},
    "top-k and top-p": {"top_k": 90, "top_p": 0.7},
}


@pytest.mark.parametrize("settings", FILTERS.values(), ids=FILTERS)
def test_filters_leave_the_scores_that_transformers_leaves(settings):
    scores = _scores()
    sampling = replace(PLAIN, **settings)
    history = torch.randint(0, 300, (16, 9), generator=torch.Generator().manual_seed(2))
    ours = scores
    if sampling.repetition_penalty != 1:
        ours = apply_repetition_penalty(scores, history, sampling.repetition_penalty)
    torch.testing.assert_close(_filter_scores(ours, sampling), _by_transformers(scores, history, sampling))


TIED = ({"top_k": 20}, {"min_p": 0.05}, {"top_k": 20, "min_p": 0.3})


@pytest.mark.parametrize("settings", TIED)
def test_filters_treat_ties_as_transformers_does(settings):
    scores = _scores(ties=True)
    kept = _filter_scores(scores, replace(PLAIN, **settings))
    expected = _by_transformers(scores, torch.zeros(16, 1, dtype=torch.int64), replace(PLAIN, **settings))
    assert torch.equal(kept, expected)
    assert settings != {"top_k": 20} or int((kept > -math.inf).sum(-1).max()) > 20


@pytest.mark.parametrize("settings", [{"top_p": 0.97}, {"top_k": 100, "top_p": 0.97}])
def test_top_p_keeps_as_many_ties_as_transformers_does_with_the_largest_ids(settings):
    scores, sampling = _scores(vocab_size=1000, ties=True), replace(PLAIN, **settings)
    kept = _filter_scores(scores, sampling) > -math.inf
    expected = _by_transformers(scores, torch.zeros(16, 1, dtype=torch.int64), sampling) > -math.inf
    assert torch.equal(kept.sum(-1), expected.sum(-1))
    lowest = scores.masked_fill(~kept, math.inf).amin(-1, keepdim=True)
    tied = scores == lowest
    assert (tied & ~kept).any()
    assert torch.equal(tied & kept, tied & (tied.flip(-1).cumsum(-1).flip(-1) <= (tied & kept).sum(-1, keepdim=True)))


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize(
    "settings",
    [
        *({"top_p": 0.99}, {"top_p": 0.95, "temperature": 0.6}, {"top_p": 0.9, "min_p": 0.01}),
        *({"top_p": 0.9, "repetition_penalty": 1.5}, {"top_k": 30}, {"top_k": 30, "top_p": 0.9}, {"min_p": 0.05}),
    ],
)
def test_candidates_give_the_tokens_and_logprobs_of_the_whole_vocabulary_or_say_that_they_cannot(settings, ties):
    sampling, scores = replace(PLAIN, **settings), _scores(400, 3000, ties=ties)
    scores *= torch.linspace(0.1, 2, 400)[:, None]  # from flat to peaked
    rows = (torch.rand(400, generator=torch.Generator().manual_seed(0)).double(), torch.arange(1200).view(400, 3))
    every = sample_tokens(scores, sampling, *rows)
    tokens, logprobs = sample_tokens(scores, sampling, *rows, num_candidates=64)
    exact = logprobs.isfinite()
    assert 0.02 < exact.float().mean() <= 1
    assert torch.equal(tokens[exact], every[0][exact])
    assert torch.equal(logprobs[exact], every[1][exact])
    if not ties:  # torch's default sort, which transformers takes, leaves equal scores in any order
        assert torch.equal(every[0], draw_tokens(_by_transformers(scores, rows[1], sampling), rows[0]))
    draw = TokenDraw(scores, sampling, *rows)
    needed = draw.logprobs_N.isnan().nonzero()[:, 0].tolist()
    assert bool(needed) == ("top_k" not in settings)
    draw.redraw_from_vocabulary(needed or [0])
    assert torch.equal(draw.tokens_N, every[0])
    assert torch.equal(draw.logprobs_N, every[1])


def test_a_tie_that_the_candidates_cut_needs_the_whole_vocabulary():
    scores = torch.zeros(2, 3000)
    scores[0, :40] = 9.0
    scores[1, :80] = 9.0
    uniform = torch.full((2,), 0.999).double()
    tokens, logprobs = sample_tokens(scores, replace(PLAIN, top_k=30), uniform, None, num_candidates=64)
    assert logprobs.isfinite().tolist() == [True, False]
    assert tokens[0] == 39


def test_a_history_padded_with_its_own_token_is_penalized_once():
    scores = _scores(1, 10)
    once = apply_repetition_penalty(scores, torch.tensor([[3, 5]]), 1.5)
    assert torch.equal(apply_repetition_penalty(scores, torch.tensor([[3, 3, 3, 5]]), 1.5), once)


@pytest.mark.parametrize("vocab_size", [1, 5, 512, 513, 3000])
def test_a_draw_is_the_inverse_of_the_distribution_function(vocab_size):
    scores = _scores(200, vocab_size).double()
    scores[:, 1::3] = -math.inf
    drawn_at = uniforms(PLAIN, torch.arange(200), torch.arange(200), torch.arange(1))[:, 0]
    ends = scores.softmax(-1).cumsum(-1)
    expected = torch.searchsorted(ends, drawn_at[:, None], right=True)[:, 0]
    assert torch.equal(draw_tokens(scores.float(), drawn_at), expected)


@pytest.mark.parametrize("uniform", [0.0, 1 - 2.0**-53])
@pytest.mark.parametrize("vocab_size", [7, 1300])
def test_a_removed_token_is_not_drawn_at_either_end(uniform, vocab_size):
    scores = torch.full((1, vocab_size), -math.inf)
    scores[0, [2, vocab_size - 3]] = torch.tensor([1.0, -20.0])
    token = int(draw_tokens(scores, torch.tensor([uniform], dtype=torch.float64)))
    assert token == (2 if uniform == 0 else vocab_size - 3)


def test_without_float64_uniforms_are_the_first_24_bits_and_removed_tokens_are_not_drawn():
    numbers = (PLAIN, torch.arange(64), torch.arange(64), torch.arange(64))
    scores = _scores(512, 1300)
    scores[:, 1::3] = -math.inf
    with rehearse_device("mps"):
        drawn = uniforms(*numbers)
        tokens = draw_tokens(scores, torch.full((512,), 1 - 2.0**-24))
    assert drawn.dtype == torch.float32
    assert torch.equal(drawn.double(), (uniforms(*numbers) * 2.0**24).floor() * 2.0**-24)
    assert scores.gather(1, tokens[:, None]).isfinite().all()


def test_rare_tokens_of_a_large_vocabulary_keep_their_probability():
    vocab_size = 150_000
    scores = torch.full((1, vocab_size), math.log(1e-9))
    scores[0, 0] = 0.0
    tail = 1e-9 * (vocab_size - 1) / (1 + 1e-9 * (vocab_size - 1))
    inside = torch.tensor([1 - tail / 2], dtype=torch.float64)
    assert abs(int(draw_tokens(scores, inside)) - vocab_size / 2) < 0.001 * vocab_size


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_a_logprob_is_of_the_full_softmax_before_penalty_and_filters(temperature):
    scores = _scores()
    sampling = replace(PLAIN, temperature=temperature, top_k=3, top_p=0.5, repetition_penalty=1.5)
    tokens, logprobs = sample_tokens(
        scores, sampling, torch.full((16,), 0.4).double(), torch.zeros(16, 1, dtype=torch.int64)
    )
    expected = (scores / temperature).log_softmax(-1).gather(-1, tokens[:, None])[:, 0]
    torch.testing.assert_close(logprobs, expected)


def test_greedy_takes_the_largest_score_after_the_penalty_and_its_logprob_at_temperature_one():
    scores = torch.tensor([[3.0, 2.9, 0.0]])
    tokens, logprobs = sample_tokens(
        scores, replace(PLAIN, temperature=0.0, repetition_penalty=1.2), None, torch.tensor([[0]])
    )
    assert tokens.tolist() == [1]
    torch.testing.assert_close(logprobs, scores.log_softmax(-1)[:, 1])


@pytest.mark.parametrize("max_elements", [1, 300, 2000])
def test_a_large_batch_is_chosen_in_slices_with_the_same_result_and_arguments_stay(max_elements):
    sampling = replace(PLAIN, **FILTERS["all"])
    rows = (torch.rand(16, generator=torch.Generator().manual_seed(0)).double(), torch.arange(48).view(16, 3))
    scores, expected = _scores(), sample_tokens(_scores(), sampling, *rows)
    for mine, other in zip(sample_tokens(scores, sampling, *rows, max_elements=max_elements), expected, strict=True):
        assert torch.equal(mine, other)
    assert torch.equal(scores, _scores())  # left as they were


@pytest.mark.parametrize("name", ["none", "all"])
def test_rows_may_share_logits_that_stand_there_once(name):
    sampling, sources = replace(PLAIN, **FILTERS[name]), torch.tensor([3, 3, 0, 15, 3])
    rows = (torch.rand(5, generator=torch.Generator().manual_seed(1)).double(), torch.arange(15).view(5, 3))
    expected = sample_tokens(_scores()[sources], sampling, *rows)
    for mine, other in zip(sample_tokens(_scores(), sampling, *rows, sources), expected, strict=True):
        assert torch.equal(mine, other)


def test_the_logprob_of_a_token_that_nobody_would_draw_is_finite_and_right():
    scores = torch.ones(1, 700)
    scores[0, 3] = 500.0
    penalized = replace(PLAIN, temperature=0.0, repetition_penalty=1e6)
    tokens, logprobs = sample_tokens(scores, penalized, None, torch.tensor([[3]]))
    assert tokens.tolist() != [3]
    assert logprobs.tolist() == [-499.0]

"""Drawing one token per row: generate()'s filters, a hashed uniform, and the inverse of the distribution function.

Instead of torch's stateful generator a draw is Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as
1, 2, 3", SC 2011) of (seed, rollout, prompt serial, completion, position), so it depends on neither waves, slots,
order nor ranks, and no global random state moves. Filters follow transformers' logits processors, ties included.
Shapes: N rows, V vocabulary, K positions, L tokens seen so far.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lowpeak.arguments import Sampling
from lowpeak.records import Prompt

_LOW_16 = 0xFFFF
_LOW_32 = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10

_BLOCK = 512  # tokens of the vocabulary whose probabilities are added before the search looks inside
_LOG2_E = 1.4426950408889634
# Scores worked on at once: on a CPU what its second-level cache holds (larger temporaries are also fresh pages of the
# system each time: 64 rows of 151,936 took three times as long in one piece), elsewhere 128 MiB of fp32.
_MAX_ELEMENTS = {"cpu": 1 << 18}
_MAX_ELEMENTS_ELSEWHERE = 1 << 25
MAX_DRAWS = 1 << 18  # made at once: philox keeps about ten int64 words for each


def philox(counter: Sequence[Tensor], key: tuple[int, int]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Four random 32-bit words per counter, as int64: Philox4x32-10 of four 32-bit counter words and two key words.

    The words of `counter` may have any shapes that broadcast. Products are formed in 16-bit halves, so that nothing
    leaves int64 on any device.
    """
    c0, c1, c2, c3 = torch.broadcast_tensors(*counter)
    k0, k1 = key
    for _ in range(_ROUNDS):
        high0, low0 = _multiply(c0, _MULTIPLIERS[0])
        high1, low1 = _multiply(c2, _MULTIPLIERS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + _WEYL[0]) & _LOW_32, (k1 + _WEYL[1]) & _LOW_32
    return c0, c1, c2, c3


def _multiply(words: Tensor, factor: int) -> tuple[Tensor, Tensor]:
    """The high and the low 32 bits of the 64-bit products of 32-bit words with a 32-bit factor."""
    low = (words & _LOW_16) * factor
    high = (words >> 16) * factor + (low >> 16)
    return high >> 16, ((high & _LOW_16) << 16) | (low & _LOW_16)


def uniforms(sampling: Sampling, serials_N: Tensor, completions_N: Tensor, positions_K: Tensor) -> Tensor:
    """Float64 [N, K] in [0, 1): the draw of each row at each position of its completion, with 53 random bits.

    All arguments are int64 on one device; a serial, completion or position has at most 32 bits. Positions may also be
    [N, K], each row its own.
    """
    rollout = torch.full((), sampling.rollout & _LOW_32, dtype=torch.int64, device=serials_N.device)
    counter = (positions_K, completions_N[:, None], serials_N[:, None], rollout)
    first, second, _, _ = philox(counter, (sampling.seed & _LOW_32, (sampling.seed >> 32) & _LOW_32))
    return ((first << 21) | (second >> 11)).double() * 2.0**-53


class UniformDraws:
    """The uniforms of `num_rows` rows at all positions of their completions, 8 bytes each; none when greedy.

    They are made a whole group ahead: their making costs a hundred small operations each time.
    """

    def __init__(self, num_rows: int, sampling: Sampling, device: torch.device) -> None:
        self._sampling = sampling
        self._is_greedy = sampling.temperature == 0
        shape = (0, 0) if self._is_greedy else (num_rows, sampling.max_new_tokens)
        self._uniforms_RC = torch.empty(shape, dtype=torch.float64, device=device)

    def make(self, rows: Sequence[int], wave: Sequence[tuple[int, int]], prompts: Sequence[Prompt]) -> None:
        """Draw for `rows`, of which each is a (prompt, completion) of the `wave`."""
        if self._is_greedy:
            return
        device, num_positions = self._uniforms_RC.device, self._uniforms_RC.shape[1]
        serials = [prompts[prompt].serial for prompt, _ in wave]
        completions = [self._sampling.first_completion + completion for _, completion in wave]
        named = torch.tensor([rows, serials, completions]).to(device)
        positions_C = torch.arange(num_positions, device=device)
        for part in named.split(max(1, MAX_DRAWS // num_positions), dim=1):
            self._uniforms_RC[part[0]] = uniforms(self._sampling, part[1], part[2], positions_C)

    def at(self, rows_N: Tensor, positions_N: Tensor) -> Tensor | None:
        """The uniforms [N] of these rows, each at its own position; None when greedy."""
        return None if self._is_greedy else self._uniforms_RC[rows_N, positions_N]


def sample_tokens(
    logits_MV: Tensor,
    sampling: Sampling,
    uniforms_N: Tensor | None,
    history_NL: Tensor | None,
    sources_N: Tensor | None = None,
    max_elements: int | None = None,
) -> tuple[Tensor, Tensor]:
    """The next token of each row, int64 [N], and its log-prob, float32 [N].

    The log-prob is `log_softmax(logits / temperature)` over the full vocabulary, before penalty and filters; greedy
    (temperature 0) takes `argmax` after the penalty and the log-prob at temperature 1. `uniforms_N` may be None when
    greedy, `history_NL` (see `penalize`) when there is no penalty. Row n has the logits of row `sources_N[n]`, or of row
    n where that is None. Rows go in slices of at most `max_elements` scores, so that a large batch over a large vocabulary
    needs bounded memory beside its logits.
    """
    scores = Scores(logits_MV, sources_N, sampling.temperature or 1.0)
    max_elements = max_elements or _MAX_ELEMENTS.get(logits_MV.device.type, _MAX_ELEMENTS_ELSEWHERE)
    num_slice = max(1, max_elements // logits_MV.shape[-1])
    is_plain = _samples_full_softmax(sampling)
    sums, tokens = [], []
    for start in range(0, len(scores), num_slice):
        rows = slice(start, start + num_slice)
        raw_nV = scores.raw(rows)
        sums.append(BlockSums.of(_scale(raw_nV, scores.temperature)))
        if not is_plain:
            uniforms_n = None if uniforms_N is None else uniforms_N[rows]
            tokens.append(
                _sample_filtered(raw_nV, sampling, uniforms_n, None if history_NL is None else history_NL[rows])
            )
    all_sums = BlockSums(torch.cat([x.largest_N1 for x in sums]), torch.cat([x.sums_NM for x in sums]))
    if is_plain:
        assert uniforms_N is not None, "sampling needs one uniform per row"
        tokens.append(all_sums.draw(scores, uniforms_N))
    tokens_N = torch.cat(tokens)
    return tokens_N, all_sums.logprobs(scores.at(tokens_N[:, None]))[:, 0]


def _samples_full_softmax(sampling: Sampling) -> bool:
    """Whether tokens are drawn from the full softmax."""
    filters = sampling.top_k > 0 or sampling.top_p < 1 or sampling.min_p > 0
    return sampling.temperature > 0 and sampling.repetition_penalty == 1 and not filters


def _sample_filtered(
    logits_NV: Tensor, sampling: Sampling, uniforms_N: Tensor | None, history_NL: Tensor | None
) -> Tensor:
    scores_NV = logits_NV
    if sampling.repetition_penalty != 1:
        assert history_NL is not None, "a repetition penalty needs the tokens so far"
        scores_NV = apply_repetition_penalty(logits_NV, history_NL, sampling.repetition_penalty)
    if sampling.temperature == 0:
        return scores_NV.argmax(dim=-1)
    assert uniforms_N is not None, "sampling needs one uniform per row"
    return draw_tokens(filter_scores(scores_NV, sampling), uniforms_N)


class Scores(NamedTuple):
    """Logits over the temperature, in fp32, as they are asked for: row n is row `sources_N[n]` of the logits."""

    logits_MV: Tensor
    sources_N: Tensor | None
    temperature: float

    def __len__(self) -> int:
        return len(self.logits_MV if self.sources_N is None else self.sources_N)

    def raw(self, rows: slice) -> Tensor:
        """The logits [n, V] of some rows, in fp32, not over the temperature."""
        return self.logits_MV[rows if self.sources_N is None else self.sources_N[rows]].float()

    def at(self, tokens_NK: Tensor) -> Tensor:
        """The scores [N, K] of some tokens of each row."""
        if self.sources_N is None:
            return _scale(self.logits_MV.gather(-1, tokens_NK).float(), self.temperature)
        return _scale(self.logits_MV[self.sources_N[:, None], tokens_NK].float(), self.temperature)


def apply_repetition_penalty(scores_NV: Tensor, history_NL: Tensor, penalty: float) -> Tensor:
    """Scores in which each token of the row's history was divided (if positive) or multiplied by `penalty`, once.

    `history_NL` holds token ids, prompt and completion. A row is padded with any id that is in its history anyway: a
    repeated id changes nothing (Keskar et al. 2019, CTRL; transformers applies it to the prompt as well).
    """
    seen_NL = scores_NV.gather(-1, history_NL)
    seen_NL = torch.where(seen_NL < 0, seen_NL * penalty, seen_NL / penalty)
    return scores_NV.scatter(-1, history_NL, seen_NL)


def filter_scores(scores_NV: Tensor, sampling: Sampling) -> Tensor:
    """Scores over the temperature with what top-k, top-p and min-p remove, in this order, at minus infinity."""
    scores_NV = _scale(scores_NV, sampling.temperature)
    top_k = min(sampling.top_k, scores_NV.shape[-1])
    if top_k > 0:
        scores_NV = _keep_top_k(scores_NV, top_k)
    if sampling.top_p < 1:
        scores_NV = _keep_top_p(scores_NV, sampling.top_p, top_k)
    if sampling.min_p > 0:
        probs_NV = scores_NV.softmax(dim=-1)
        unlikely_NV = probs_NV < sampling.min_p * probs_NV.amax(dim=-1, keepdim=True)
        scores_NV = scores_NV.masked_fill(unlikely_NV, float("-inf"))
    return scores_NV


def _scale(scores_NV: Tensor, temperature: float) -> Tensor:
    return scores_NV if temperature == 1 else scores_NV / temperature


def _keep_top_k(scores_NV: Tensor, top_k: int) -> Tensor:
    """Without what is below the k-th largest score; all that tie with it stay."""
    kth_N1 = scores_NV.topk(top_k, dim=-1, sorted=True).values[:, -1:]
    return scores_NV.masked_fill(scores_NV < kth_N1, float("-inf"))


def _keep_top_p(scores_NV: Tensor, top_p: float, top_k: int) -> Tensor:
    """Without the least likely tokens, as many as fit into a probability of 1 - `top_p`; the likeliest one stays.

    After a top-k only its survivors are sorted. How many tied with the k-th is not known without asking the device,
    so there is room for as many again (64 at least); a larger tie is cut there, of tokens that are equally likely.
    """
    room = min(scores_NV.shape[-1], top_k + max(top_k, 64)) if top_k else scores_NV.shape[-1]
    if room < scores_NV.shape[-1]:
        largest = scores_NV.topk(room, dim=-1, sorted=True)
        values_NR, tokens_NR = largest.values.flip(-1), largest.indices.flip(-1)
    else:
        values_NR, tokens_NR = scores_NV.sort(dim=-1)
    unlikely_NR = cumulative_sum(values_NR.softmax(dim=-1)) <= 1 - top_p
    unlikely_NR[:, -1] = False
    values_NR = values_NR.masked_fill(unlikely_NR, float("-inf"))
    return torch.full_like(scores_NV, float("-inf")).scatter(-1, tokens_NR, values_NR)


def draw_tokens(scores_NV: Tensor, uniforms_N: Tensor) -> Tensor:
    """One token per row from softmax(scores): the first whose cumulative probability exceeds the uniform.

    `searchsorted(softmax(scores).cumsum(-1), uniforms, right=True)`. A score of minus infinity is never drawn.
    """
    return BlockSums.of(scores_NV).draw(Scores(scores_NV, None, 1.0), uniforms_N)


class BlockSums(NamedTuple):
    """Sums of `exp(scores - largest)` over blocks of the vocabulary: one visit serves the draw and the log-prob.

    They are added in float64, so that rare tokens at the end of a large vocabulary keep their probability, at the price of
    an fp32 running sum. The exponential is a power of two, since exp itself is thirty times slower on a CPU where
    it underflows, and of a filtered vocabulary most does.
    """

    largest_N1: Tensor
    sums_NM: Tensor

    @classmethod
    def of(cls, scores_NV: Tensor) -> BlockSums:
        largest_N1 = scores_NV.amax(dim=-1, keepdim=True)
        weights_NV = _exp_weights(scores_NV, largest_N1)
        whole = weights_NV.shape[-1] // _BLOCK * _BLOCK
        sums = [weights_NV[:, :whole].unflatten(-1, (-1, _BLOCK)).sum(dim=-1)] if whole else []
        if whole < weights_NV.shape[-1]:
            sums.append(weights_NV[:, whole:].sum(dim=-1, keepdim=True))
        return cls(largest_N1, torch.cat(sums, dim=-1).double())

    def draw(self, scores: Scores, uniforms_N: Tensor) -> Tensor:
        """The token [N] that each uniform falls on, searched in two levels: blocks, then the tokens of one block."""
        vocab_size = scores.logits_MV.shape[-1]
        block_N1, rest_N1 = torch.zeros_like(uniforms_N, dtype=torch.int64)[:, None], uniforms_N[:, None]
        if vocab_size > _BLOCK:
            block_N1, rest_N1 = _search(self.sums_NM, rest_N1)
        tokens_NB = block_N1 * _BLOCK + torch.arange(min(_BLOCK, vocab_size), device=block_N1.device)
        inside_NB = _exp_weights(scores.at(tokens_NB.clamp(max=vocab_size - 1)), self.largest_N1).double()
        token_N1, _ = _search(inside_NB.masked_fill(tokens_NB >= vocab_size, 0.0), rest_N1)
        return (block_N1 * _BLOCK + token_N1).clamp(max=vocab_size - 1)[:, 0]

    def logprobs(self, scores_NK: Tensor) -> Tensor:
        return (scores_NK - self.largest_N1 - self.sums_NM.sum(dim=-1, keepdim=True).log()).float()


def _exp_weights(scores_NV: Tensor, largest_N1: Tensor) -> Tensor:
    return (scores_NV - largest_N1).mul_(_LOG2_E).exp2_()


def cumulative_sum(values_NM: Tensor) -> Tensor:
    """`values.cumsum(-1)`; by shifted sums, in log2 M passes, where torch refuses CUDA's (full_determinism)."""
    refused = values_NM.is_cuda and torch.are_deterministic_algorithms_enabled()
    return shifted_cumulative_sum(values_NM) if refused else values_NM.cumsum(dim=-1)


def shifted_cumulative_sum(values_NM: Tensor) -> Tensor:
    """The running sum along the last dimension, each pass adding what stands twice as far to the left (Hillis and Steele 1986)."""
    sums_NM, distance = values_NM, 1
    while distance < values_NM.shape[-1]:
        sums_NM = torch.cat((sums_NM[:, :distance], sums_NM[:, distance:] + sums_NM[:, :-distance]), dim=-1)
        distance *= 2
    return sums_NM


def _search(weights_NM: Tensor, uniforms_N1: Tensor) -> tuple[Tensor, Tensor]:
    """The item that each uniform falls on, items being as wide as their weights, and where inside it, in [0, 1)."""
    ends_NM = cumulative_sum(weights_NM)
    target_N1 = uniforms_N1 * ends_NM[:, -1:]
    item_N1 = torch.searchsorted(ends_NM, target_N1, right=True).clamp(max=weights_NM.shape[-1] - 1)
    width_N1 = weights_NM.gather(-1, item_N1)
    inside_N1 = (target_N1 - (ends_NM.gather(-1, item_N1) - width_N1)) / width_N1
    return item_N1, inside_N1.clamp(0.0, 1 - 2.0**-53)

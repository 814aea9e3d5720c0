"""Token sampling of the native engine: generate()'s filters, a hashed uniform, and inverse transform sampling.

Instead of torch's stateful generator, a draw is Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1,
2, 3", SC 2011) of (seed, rollout, prompt serial, completion, position). It depends on neither waves, slots, order nor
ranks, and no global random state changes. Filters follow transformers' logits processors, including ties.
Shapes: N sequences, V vocabulary, K positions, L tokens seen so far, M rows of logits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import reduce
from typing import NamedTuple

import torch
from torch import Tensor

from lowpeak.arguments import Sampling
from lowpeak.device_kind import device_kind, widest_float

_LOW_16 = 0xFFFF
_LOW_32 = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10

_BLOCK = 512  # vocabulary tokens per sum: the search finds a block first, then a token within it
_LOG2_E = 1.4426950408889634
# Scores processed at once: on a CPU those that fit the L2 cache (larger temporaries are also allocated as new pages each time:
# 64 x 151,936 scores took three times as long in one piece), elsewhere 128 MiB of fp32.
_MAX_ELEMENTS = {"cpu": 1 << 18}
_MAX_ELEMENTS_ELSEWHERE = 1 << 25
_NUM_CANDIDATES = 1024  # likeliest tokens that filters look at first
_UNITS = 2.0**44  # of a weight of 1: the sum of half a million weights fits int64
MAX_DRAWS = 1 << 18  # per philox call, which needs about ten int64 words for each


def philox(counter: Sequence[Tensor], key: tuple[int, int]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return four random 32-bit words per counter, as int64: Philox4x32-10 of four counter words and two key words.

    The counter's words may have any shapes that broadcast. Products are computed in 16-bit halves, so that they fit
    int64 on any device.
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
    """Return the high and the low 32 bits of the products of 32-bit words with a 32-bit factor."""
    low = (words & _LOW_16) * factor
    high = (words >> 16) * factor + (low >> 16)
    return high >> 16, ((high & _LOW_16) << 16) | (low & _LOW_16)


def uniforms(sampling: Sampling, serials_N: Tensor, completions_N: Tensor, positions_K: Tensor) -> Tensor:
    """Return uniforms [N, K] in [0, 1), one per sequence and position: float64 with 53 random bits.

    On a device without float64: float32 with the first 24 bits. All arguments are int64 on one device; serials,
    completions and positions have at most 32 bits. Positions may also be [N, K].
    """
    rollout = torch.full((), sampling.rollout & _LOW_32, dtype=torch.int64, device=serials_N.device)
    counter = (positions_K, completions_N[:, None], serials_N[:, None], rollout)
    first, second, _, _ = philox(counter, (sampling.seed & _LOW_32, (sampling.seed >> 32) & _LOW_32))
    if widest_float(first.device) == torch.float32:
        return (first >> 8).float() * 2.0**-24
    return ((first << 21) | (second >> 11)).double() * 2.0**-53


class UniformDraws:
    """Uniforms of `num_rows` sequences at all completion positions, 8 bytes each; none when greedy.

    They are made for a whole group in advance, because each call takes about a hundred small operations.
    """

    def __init__(self, num_rows: int, sampling: Sampling, device: torch.device) -> None:
        self._sampling = sampling
        self._is_greedy = sampling.temperature == 0
        shape = (0, 0) if self._is_greedy else (num_rows, sampling.max_new_tokens)
        self._uniforms_RC = torch.empty(shape, dtype=widest_float(device), device=device)

    def make(self, rows: Sequence[int], keys: Sequence[tuple[int, int]]) -> None:
        """Draw for `rows` with their keys: a prompt's serial and a completion's number, or those of a later turn."""
        if self._is_greedy:
            return
        device, num_positions = self._uniforms_RC.device, self._uniforms_RC.shape[1]
        counters = torch.tensor([(row, *key) for row, key in zip(rows, keys, strict=True)]).T.to(device)
        positions_C = torch.arange(num_positions, device=device)
        for part in counters.split(max(1, MAX_DRAWS // num_positions), dim=1):
            self._uniforms_RC[part[0]] = uniforms(self._sampling, part[1], part[2], positions_C)

    def at(self, rows_N: Tensor, positions_N: Tensor) -> Tensor | None:
        """Return the uniforms [N] of these sequences at their positions; None when greedy."""
        return None if self._is_greedy else self._uniforms_RC[rows_N, positions_N]


class BannedTokens(NamedTuple):
    """Tokens that some sequences must not draw."""

    tokens_E: Tensor
    applies_N: Tensor

    def remove(self, logits_NV: Tensor, rows: slice) -> Tensor:
        kept_NE = logits_NV[:, self.tokens_E].masked_fill(self.applies_N[rows, None], -math.inf)
        return logits_NV.index_copy(-1, self.tokens_E, kept_NE)


class TokenDraw:
    """The next token of each sequence, int64 `tokens_N`, and its log-prob, float32 `logprobs_N`: see `sample_tokens`.

    Filters first search 1,024 candidates, with a top-k at least k + 64. A sequence whose filters may keep tokens beyond the
    candidates has log-prob NaN until `redraw_from_vocabulary`: the caller sees it in the read that it makes anyway.
    Takes logits [M, V], uniforms [N] in [0, 1) (None if greedy), the tokens so far [N, L] (None without a penalty), and the row
    of each sequence, `sources_N` (None: its own number).
    """

    def __init__(
        self,
        logits_MV: Tensor,
        sampling: Sampling,
        uniforms_N: Tensor | None,
        history_NL: Tensor | None,
        sources_N: Tensor | None = None,
        banned: BannedTokens | None = None,
    ) -> None:
        self._logits_MV, self._sampling, self._banned = logits_MV, sampling, banned
        self._uniforms_N, self._history_NL, self._sources_N = uniforms_N, history_NL, sources_N
        num_candidates = sampling.top_k + max(sampling.top_k, 64) if sampling.top_k else _NUM_CANDIDATES
        self.tokens_N, self.logprobs_N = sample_tokens(
            logits_MV, sampling, uniforms_N, history_NL, sources_N, None, num_candidates, banned
        )

    def redraw_from_vocabulary(self, sequences: Sequence[int]) -> None:
        """Draw the tokens of these sequences again, with filters over the whole vocabulary."""
        index_n = torch.tensor(sequences).to(self.tokens_N.device)
        sources_n = index_n if self._sources_N is None else self._sources_N[index_n]
        rows = (_select_rows(self._uniforms_N, index_n), _select_rows(self._history_NL, index_n), sources_n)
        # A sort takes about 48 bytes per score, four times what the first draw takes.
        max_elements = _max_elements(self._logits_MV.device) // 4
        banned = self._banned and self._banned._replace(applies_N=self._banned.applies_N[index_n])
        drawn = sample_tokens(self._logits_MV, self._sampling, *rows, max_elements, banned=banned)
        self.tokens_N[index_n], self.logprobs_N[index_n] = drawn


def sample_tokens(
    logits_MV: Tensor,
    sampling: Sampling,
    uniforms_N: Tensor | None,
    history_NL: Tensor | None,
    sources_N: Tensor | None = None,
    max_elements: int | None = None,
    num_candidates: int | None = None,
    banned: BannedTokens | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the next token of each sequence, int64 [N], and its log-prob, float32 [N].

    The log-prob is `log_softmax(logits / temperature)` over the full vocabulary, before penalty and filters; greedy
    (temperature 0) takes `argmax` after the penalty and the log-prob at temperature 1. `uniforms_N` may be None when
    greedy, `history_NL` (see `apply_repetition_penalty`) without a penalty. Sequence n has the logits of row
    `sources_N[n]`, or of row n if `sources_N` is None. Sequences are processed in slices of at most `max_elements`
    scores, which bounds the memory besides the logits. Filters look at the `num_candidates` likeliest tokens (None:
    all); a sequence whose filters may keep tokens beyond them has log-prob NaN.
    """
    scores = Scores(logits_MV, sources_N, sampling.temperature or 1.0)
    num_slice = max(1, (max_elements or _max_elements(logits_MV.device)) // logits_MV.shape[-1])
    slices = [slice(start, start + num_slice) for start in range(0, len(scores), num_slice)]
    rest = (uniforms_N, history_NL, banned, num_candidates)
    parts = [_sample_slice(scores.raw(rows), sampling, rows, *rest) for rows in slices]
    sums, tokens_N, exact_N = _SliceDraw.join(parts)
    if tokens_N is None:
        tokens_N = sums.draw(scores, uniforms_N)
    logprobs_N = sums.logprobs(scores.at(tokens_N[:, None]))[:, 0]
    return tokens_N, logprobs_N if exact_N is None else logprobs_N.where(exact_N, math.nan)


def _max_elements(device: torch.device) -> int:
    return _MAX_ELEMENTS.get(device_kind(device), _MAX_ELEMENTS_ELSEWHERE)


def _select_rows(values_N: Tensor | None, rows: slice | Tensor) -> Tensor | None:
    return None if values_N is None else values_N[rows]


class _SliceDraw(NamedTuple):
    """Sums of a slice; its tokens (None: draw them from the sums); whether each draw is exact (None: all are)."""

    sums: BlockSums
    tokens_N: Tensor | None = None
    exact_N: Tensor | None = None

    @classmethod
    def join(cls, parts: Sequence[_SliceDraw]) -> _SliceDraw:
        """Return the draw of all sequences; of one slice without a copy."""
        if len(parts) == 1:
            return parts[0]
        sums, tokens, exact = zip(*parts, strict=True)
        joined = BlockSums(*map(torch.cat, zip(*sums, strict=True)))
        return cls(joined, *(None if x[0] is None else torch.cat(x) for x in (tokens, exact)))


def _sample_slice(
    logits_NV: Tensor,
    sampling: Sampling,
    rows: slice,
    uniforms_N: Tensor | None,
    history_NL: Tensor | None,
    banned: BannedTokens | None,
    num_candidates: int | None,
) -> _SliceDraw:
    uniforms_N, history_NL = _select_rows(uniforms_N, rows), _select_rows(history_NL, rows)
    has_filters = sampling.top_k > 0 or sampling.top_p < 1 or sampling.min_p > 0
    weights_NV, sums = BlockSums.weights_and_sums(_scale(logits_NV, sampling.temperature or 1.0))
    filtered_sums = sums
    if sampling.repetition_penalty != 1:
        assert history_NL is not None, "a repetition penalty needs the tokens so far"
        logits_NV = apply_repetition_penalty(logits_NV, history_NL, sampling.repetition_penalty)
    if banned is not None:
        logits_NV = banned.remove(logits_NV, rows)
    if sampling.temperature == 0:
        return _SliceDraw(sums, logits_NV.argmax(dim=-1))
    assert uniforms_N is not None, "sampling needs one uniform per row"
    if sampling.repetition_penalty != 1 or banned is not None:
        scores_NV = _scale(logits_NV, sampling.temperature)
        if not has_filters:
            return _SliceDraw(sums, draw_tokens(scores_NV, uniforms_N))
        weights_NV, filtered_sums = BlockSums.weights_and_sums(scores_NV)
    if not has_filters:
        return _SliceDraw(sums)
    candidates = Candidates.of(weights_NV, num_candidates).filter(sampling, filtered_sums.total_N1)
    return _SliceDraw(sums, candidates.draw(uniforms_N), candidates.exact_N)


class Scores(NamedTuple):
    """Logits divided by the temperature, computed in fp32 on access; sequence n has row `sources_N[n]` of the logits."""

    logits_MV: Tensor
    sources_N: Tensor | None
    temperature: float

    def __len__(self) -> int:
        return len(self.logits_MV if self.sources_N is None else self.sources_N)

    def raw(self, rows: slice) -> Tensor:
        """Return the logits [n, V] of some sequences in fp32, not divided by the temperature."""
        return self.logits_MV[rows if self.sources_N is None else self.sources_N[rows]].float()

    def at(self, tokens_NK: Tensor) -> Tensor:
        """Return the scores [N, K] of some tokens of each sequence."""
        if self.sources_N is None:
            return _scale(self.logits_MV.gather(-1, tokens_NK).float(), self.temperature)
        return _scale(self.logits_MV[self.sources_N[:, None], tokens_NK].float(), self.temperature)


def apply_repetition_penalty(scores_NV: Tensor, history_NL: Tensor, penalty: float) -> Tensor:
    """Divide (if positive) or multiply the score of each token in the sequence's history by `penalty`, once.

    `history_NL` has the token ids of prompt and completion, padded with any id of the same history: a repeated id
    changes nothing (Keskar et al. 2019, CTRL; transformers applies the penalty to the prompt as well).
    """
    seen_NL = scores_NV.gather(-1, history_NL)
    seen_NL = torch.where(seen_NL < 0, seen_NL * penalty, seen_NL / penalty)
    return scores_NV.scatter(-1, history_NL, seen_NL)


def _scale(scores_NV: Tensor, temperature: float) -> Tensor:
    return scores_NV if temperature == 1 else scores_NV / temperature


class Candidates(NamedTuple):
    """The likeliest R tokens of each sequence, in the order of their ids, with weights `exp(score - largest score)`.

    A filter keeps tokens of the largest weights, and of equal weights the largest ids, as a stable sort of the vocabulary
    does. `exact_N` says for which sequences it is certain that no token beyond the candidates would stay (None: for all).
    """

    tokens_NR: Tensor | None  # None: all tokens of the vocabulary
    weights_NR: Tensor  # fp32, or after `filter` int64 in units of 1 / _UNITS, 0 for removed tokens
    exact_N: Tensor | None

    @classmethod
    def of(cls, weights_NV: Tensor, num_candidates: int | None) -> Candidates:
        if num_candidates is None or num_candidates >= weights_NV.shape[-1]:
            return cls(None, weights_NV, None)
        largest = weights_NV.topk(num_candidates, dim=-1, sorted=False)
        tokens_NR, order_NR = largest.indices.sort(dim=-1)
        return cls(tokens_NR, largest.values.gather(-1, order_NR), None)

    def filter(self, sampling: Sampling, total_N1: Tensor) -> Candidates:
        """Apply top-k, top-p and min-p, in this order; `total_N1` is the weight of the whole vocabulary.

        Sums are of integers, so that they do not depend on the number of candidates or on the order of additions. A
        top-k keeps tokens that tie with the k-th. A top-p keeps a token if the larger ones have less than `top_p` of the
        weight after the top-k.
        """
        # In ascending order: a stable sort keeps equal weights in the order of their ids.
        values_NR, order_NR = self.weights_NR.sort(dim=-1, stable=True)
        units_NR = (values_NR * _UNITS).long()
        kept = []
        if sampling.top_k > 0:
            kept.append(values_NR >= values_NR[:, -min(sampling.top_k, values_NR.shape[-1]), None])
            units_NR = units_NR.mul_(kept[-1])
        if sampling.top_p < 1:
            sums_NR = units_NR.cumsum(dim=-1)
            whole_N1 = sums_NR[:, -1:].to(total_N1.dtype) if sampling.top_k > 0 else total_N1 * _UNITS
            # At least one unit, so that the likeliest token stays.
            kept.append(sums_NR > sums_NR[:, -1:] - (whole_N1 * sampling.top_p).long().clamp(min=1))
        if sampling.min_p > 0:
            kept.append(values_NR >= sampling.min_p)
        units_NR = units_NR.mul_(reduce(torch.logical_and, kept))
        exact_N = None
        if self.tokens_NR is not None:
            # A token beyond the candidates may tie with the least likely one.
            exact_N = ~(units_NR * (values_NR == values_NR[:, :1])).any(dim=-1)
        return Candidates(self.tokens_NR, torch.empty_like(units_NR).scatter_(-1, order_NR, units_NR), exact_N)

    def draw(self, uniforms_N: Tensor) -> Tensor:
        """Return the token [N] that each uniform selects, in the order of ids as `draw_tokens` does."""
        sums_NR = self.weights_NR.cumsum(dim=-1)
        target_N1 = (uniforms_N[:, None] * sums_NR[:, -1:]).long() + 1
        # The first sum of at least `target` is of a token that was kept, also where the product was rounded up.
        index_N1 = torch.searchsorted(sums_NR, target_N1.minimum(sums_NR[:, -1:]))
        return (index_N1 if self.tokens_NR is None else self.tokens_NR.gather(-1, index_N1))[:, 0]


def draw_tokens(scores_NV: Tensor, uniforms_N: Tensor) -> Tensor:
    """Draw one token per sequence from softmax(scores): the first whose cumulative probability exceeds the uniform.

        searchsorted(softmax(scores).cumsum(-1), uniforms, right=True)

    A score of minus infinity is never drawn.
    """
    return BlockSums.of(scores_NV).draw(Scores(scores_NV, None, 1.0), uniforms_N)


class BlockSums(NamedTuple):
    """Sums of `exp(scores - largest)` over blocks of the vocabulary, shared by the draw and the log-prob.

    They are float64 where the device has it, so that rare tokens at the end of a large vocabulary keep their
    probability, at the cost of an fp32 running sum. The exponential is a power of two: on a CPU `exp` is thirty times
    slower for results that underflow, as most do in a filtered vocabulary.
    """

    largest_N1: Tensor
    sums_NM: Tensor

    @classmethod
    def of(cls, scores_NV: Tensor) -> BlockSums:
        return cls.weights_and_sums(scores_NV)[1]

    @classmethod
    def weights_and_sums(cls, scores_NV: Tensor) -> tuple[Tensor, BlockSums]:
        """Return `exp(scores - largest)` [N, V] and its sums."""
        largest_N1 = scores_NV.amax(dim=-1, keepdim=True)
        weights_NV = _exp_weights(scores_NV, largest_N1)
        num_in_blocks = weights_NV.shape[-1] // _BLOCK * _BLOCK
        sums = [weights_NV[:, :num_in_blocks].unflatten(-1, (-1, _BLOCK)).sum(dim=-1)] if num_in_blocks else []
        if num_in_blocks < weights_NV.shape[-1]:
            sums.append(weights_NV[:, num_in_blocks:].sum(dim=-1, keepdim=True))
        return weights_NV, cls(largest_N1, torch.cat(sums, dim=-1).to(widest_float(scores_NV.device)))

    @property
    def total_N1(self) -> Tensor:
        return self.sums_NM.sum(dim=-1, keepdim=True)

    def draw(self, scores: Scores, uniforms_N: Tensor | None) -> Tensor:
        """Return the token [N] that each uniform selects, by a search for its block and then within the block."""
        assert uniforms_N is not None, "sampling needs one uniform per row"
        vocab_size, rest_N1 = scores.logits_MV.shape[-1], uniforms_N[:, None]
        tokens_NB = torch.arange(min(_BLOCK, vocab_size), device=uniforms_N.device).expand(len(uniforms_N), -1)
        if vocab_size > _BLOCK:
            ends_NM, target_N1, block_N1 = _search(self.sums_NM, rest_N1)
            width_N1 = self.sums_NM.gather(-1, block_N1)
            inside_N1 = (target_N1 - (ends_NM.gather(-1, block_N1) - width_N1)) / width_N1
            tokens_NB = block_N1 * _BLOCK + tokens_NB
            rest_N1 = inside_N1.clamp(0.0, 1 - torch.finfo(inside_N1.dtype).eps / 2)
        inside_NB = _exp_weights(scores.at(tokens_NB.clamp(max=vocab_size - 1)), self.largest_N1)
        inside_NB = inside_NB.to(widest_float(inside_NB.device))
        _, _, item_N1 = _search(inside_NB.masked_fill(tokens_NB >= vocab_size, 0.0), rest_N1)
        return tokens_NB.gather(-1, item_N1).clamp(max=vocab_size - 1)[:, 0]

    def logprobs(self, scores_NK: Tensor) -> Tensor:
        return (scores_NK - self.largest_N1 - self.total_N1.log()).float()


def _exp_weights(scores_NV: Tensor, largest_N1: Tensor) -> Tensor:
    return (scores_NV - largest_N1).mul_(_LOG2_E).exp2_()


def cumulative_sum(values_NM: Tensor) -> Tensor:
    """Return `values.cumsum(-1)`, by shifted sums where torch's `full_determinism` forbids CUDA's cumsum."""
    refused = values_NM.is_cuda and torch.are_deterministic_algorithms_enabled()
    return shifted_cumulative_sum(values_NM) if refused else values_NM.cumsum(dim=-1)


def shifted_cumulative_sum(values_NM: Tensor) -> Tensor:
    """Return the running sum along the last dimension in log2(M) passes (Hillis and Steele 1986)."""
    # Each pass adds the values at twice the distance to the left.
    sums_NM, distance = values_NM, 1
    while distance < values_NM.shape[-1]:
        sums_NM = torch.cat((sums_NM[:, :distance], sums_NM[:, distance:] + sums_NM[:, :-distance]), dim=-1)
        distance *= 2
    return sums_NM


def _search(weights_NM: Tensor, uniforms_N1: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the running sums of the weights, each uniform's point along them, and the item at that point."""
    ends_NM = cumulative_sum(weights_NM)
    target_N1 = uniforms_N1 * ends_NM[:, -1:]
    return ends_NM, target_N1, torch.searchsorted(ends_NM, target_N1, right=True).clamp(max=weights_NM.shape[-1] - 1)

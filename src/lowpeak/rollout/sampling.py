"""Token sampling of the native engine: generate()'s filters, a hashed uniform, and inverse transform sampling.

Instead of torch's stateful generator, a draw is Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1,
2, 3", SC 2011) of (seed, rollout, prompt serial, completion, position). It depends on neither waves, slots, order nor
ranks, and no global random state changes. Filters follow transformers' logits processors, including ties.
Shapes: N sequences, V vocabulary, K positions, L tokens seen so far, M rows of logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lowpeak.arguments import Sampling
from lowpeak.device_kind import device_kind
from lowpeak.records import Prompt

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
    """Return float64 uniforms [N, K] in [0, 1) with 53 random bits: one per sequence and position.

    All arguments are int64 on one device; serials, completions and positions have at most 32 bits. Positions may also
    be [N, K].
    """
    rollout = torch.full((), sampling.rollout & _LOW_32, dtype=torch.int64, device=serials_N.device)
    counter = (positions_K, completions_N[:, None], serials_N[:, None], rollout)
    first, second, _, _ = philox(counter, (sampling.seed & _LOW_32, (sampling.seed >> 32) & _LOW_32))
    return ((first << 21) | (second >> 11)).double() * 2.0**-53


class UniformDraws:
    """Uniforms of `num_rows` sequences at all completion positions, 8 bytes each; none when greedy.

    They are made for a whole group in advance, because each call takes about a hundred small operations.
    """

    def __init__(self, num_rows: int, sampling: Sampling, device: torch.device) -> None:
        self._sampling = sampling
        self._is_greedy = sampling.temperature == 0
        shape = (0, 0) if self._is_greedy else (num_rows, sampling.max_new_tokens)
        self._uniforms_RC = torch.empty(shape, dtype=torch.float64, device=device)

    def make(self, rows: Sequence[int], wave: Sequence[tuple[int, int]], prompts: Sequence[Prompt]) -> None:
        """Draw for `rows`, each of which is the (prompt, completion) of the same index in `wave`."""
        if self._is_greedy:
            return
        device, num_positions = self._uniforms_RC.device, self._uniforms_RC.shape[1]
        serials = [prompts[prompt].serial for prompt, _ in wave]
        completions = [self._sampling.first_completion + completion for _, completion in wave]
        counters = torch.tensor([rows, serials, completions]).to(device)
        positions_C = torch.arange(num_positions, device=device)
        for part in counters.split(max(1, MAX_DRAWS // num_positions), dim=1):
            self._uniforms_RC[part[0]] = uniforms(self._sampling, part[1], part[2], positions_C)

    def at(self, rows_N: Tensor, positions_N: Tensor) -> Tensor | None:
        """Return the uniforms [N] of these sequences at their positions; None when greedy."""
        return None if self._is_greedy else self._uniforms_RC[rows_N, positions_N]


def sample_tokens(
    logits_MV: Tensor,
    sampling: Sampling,
    uniforms_N: Tensor | None,
    history_NL: Tensor | None,
    sources_N: Tensor | None = None,
    max_elements: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the next token of each sequence, int64 [N], and its log-prob, float32 [N].

    The log-prob is `log_softmax(logits / temperature)` over the full vocabulary, before penalty and filters; greedy
    (temperature 0) takes `argmax` after the penalty and the log-prob at temperature 1. `uniforms_N` may be None when
    greedy, `history_NL` (see `apply_repetition_penalty`) without a penalty. Sequence n has the logits of row
    `sources_N[n]`, or of row n if `sources_N` is None. Sequences are processed in slices of at most `max_elements`
    scores, which bounds the memory besides the logits.
    """
    scores = Scores(logits_MV, sources_N, sampling.temperature or 1.0)
    max_elements = max_elements or _MAX_ELEMENTS.get(device_kind(logits_MV.device), _MAX_ELEMENTS_ELSEWHERE)
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
    """Return whether tokens are drawn from the full softmax."""
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


def filter_scores(scores_NV: Tensor, sampling: Sampling) -> Tensor:
    """Apply temperature, top-k, top-p and min-p, in this order; removed tokens get minus infinity."""
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
    """Mask scores below the k-th largest; tokens that tie with it stay."""
    kth_N1 = scores_NV.topk(top_k, dim=-1, sorted=True).values[:, -1:]
    return scores_NV.masked_fill(scores_NV < kth_N1, float("-inf"))


def _keep_top_p(scores_NV: Tensor, top_p: float, top_k: int) -> Tensor:
    """Mask the least likely tokens, up to a total probability of 1 - `top_p`; the likeliest token always stays.

    After a top-k only its survivors are sorted. The number of ties with the k-th is unknown without a read from the
    device, so there is room for as many tokens again (at least 64); a larger tie is truncated, among equally likely
    tokens.
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
    """Draw one token per sequence from softmax(scores): the first whose cumulative probability exceeds the uniform.

        searchsorted(softmax(scores).cumsum(-1), uniforms, right=True)

    A score of minus infinity is never drawn.
    """
    return BlockSums.of(scores_NV).draw(Scores(scores_NV, None, 1.0), uniforms_N)


class BlockSums(NamedTuple):
    """Sums of `exp(scores - largest)` over blocks of the vocabulary, shared by the draw and the log-prob.

    They are float64, so that rare tokens at the end of a large vocabulary keep their probability, at the cost of an
    fp32 running sum. The exponential is a power of two: on a CPU `exp` is thirty times slower for results that
    underflow, as most do in a filtered vocabulary.
    """

    largest_N1: Tensor
    sums_NM: Tensor

    @classmethod
    def of(cls, scores_NV: Tensor) -> BlockSums:
        largest_N1 = scores_NV.amax(dim=-1, keepdim=True)
        weights_NV = _exp_weights(scores_NV, largest_N1)
        num_in_blocks = weights_NV.shape[-1] // _BLOCK * _BLOCK
        sums = [weights_NV[:, :num_in_blocks].unflatten(-1, (-1, _BLOCK)).sum(dim=-1)] if num_in_blocks else []
        if num_in_blocks < weights_NV.shape[-1]:
            sums.append(weights_NV[:, num_in_blocks:].sum(dim=-1, keepdim=True))
        return cls(largest_N1, torch.cat(sums, dim=-1).double())

    def draw(self, scores: Scores, uniforms_N: Tensor) -> Tensor:
        """Return the token [N] that each uniform selects, by a search for its block and then within the block."""
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


def _search(weights_NM: Tensor, uniforms_N1: Tensor) -> tuple[Tensor, Tensor]:
    """Return the item that each uniform selects, and the position within it in [0, 1).

    Items are as wide as their weights.
    """
    ends_NM = cumulative_sum(weights_NM)
    target_N1 = uniforms_N1 * ends_NM[:, -1:]
    item_N1 = torch.searchsorted(ends_NM, target_N1, right=True).clamp(max=weights_NM.shape[-1] - 1)
    width_N1 = weights_NM.gather(-1, item_N1)
    inside_N1 = (target_N1 - (ends_NM.gather(-1, item_N1) - width_N1)) / width_N1
    return item_N1, inside_N1.clamp(0.0, 1 - 2.0**-53)

"""Attention over a forest on CUDA: FlexAttention with a block mask that is built once per forest.

Blocks of 128 x 128 in which no token attends to another cost nothing; those in which every token attends to every other
need no mask (Dong et al., 2024, arXiv:2412.05496). The host computes the block mask from the trees' lengths, in
(L / 128)^2 steps; `create_block_mask` would compute all of [L, L].

Two numbers per token define the mask. `segment` counts prompts and completions along the L packed tokens, and `root` is
the segment of the tree's prompt (without a prompt, the token's segment). Token i attends to j <= i if segment[j] is
segment[i] or root[i]. Both increase along the tokens, so a block's extremes are at its ends. With windows or chunks the
position of j must also be at least the first that i attends to.

Tests run it uncompiled on the CPU, without backward. The compiled kernel and its gradients on CUDA are compared with
`forest_mask` when a run starts (`self_check.py`), and in the self-test `FlexAttention`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from lowpeak.attention.scores import PLAIN, ScoreModifiers
from lowpeak.attention.spans import FULL, Span
from lowpeak.records import Tree

BLOCK = 128
_A100_SHARED_MEMORY = 166_912  # bytes per thread block


def _block_sizes(forward: tuple[int, int], backward: tuple[int, int]) -> dict[str, int]:
    """Return options. `forward` is (queries, keys) per block, `backward` (stepped over, kept): for dK and dV queries are stepped
    over and keys kept, for dQ the other way round.
    """
    inner, outer = backward
    sizes = {"fwd_BLOCK_M": forward[0], "fwd_BLOCK_N": forward[1], "fwd_num_stages": 2, "fwd_num_warps": 8}
    sizes |= {"bwd_BLOCK_M1": inner, "bwd_BLOCK_N1": outer, "bwd_BLOCK_M2": outer, "bwd_BLOCK_N2": inner}
    return sizes | {"bwd_num_stages": 2, "bwd_num_warps": 8}


# By padded width of a head; `python -m benchmarks.kernel_resources` compiles the kernels for each GPU. Without TF32, fp32 has
# no tensor cores: a thread holds whole rows.
_FP32_SIZES = {
    64: _block_sizes((64, 32), (32, 32)),
    128: _block_sizes((32, 16), (16, 32)),
    256: _block_sizes((32, 16), (16, 16)),
}
# For bf16 and fp16: torch's block sizes with more threads, and smaller ones for GPUs with less shared memory than an A100.
_WARPS = {64: {"fwd_num_warps": 8, "bwd_num_warps": 8}, 128: {"bwd_num_warps": 8}, 256: {"bwd_num_warps": 8}}
_SMALL_SIZES = _block_sizes((64, 32), (32, 32))


def attend_flex(
    query_1HLE: Tensor, key_1KLE: Tensor, value_1KLF: Tensor, mask: Any, scale: float, scores: ScoreModifiers = PLAIN, *,
    compiled: bool = True,
) -> Tensor:  # fmt: skip
    """Return the same as `SdpaCalls.attend`, [1, L, H, F], given a `block_mask`."""
    attend = _compiled() if compiled else _flex_attention()
    width = max(query_1HLE.shape[-1], value_1KLF.shape[-1])
    options = kernel_options(query_1HLE.dtype, width, _shared_memory(query_1HLE.device)) if compiled else None
    settings = {"block_mask": mask, "scale": scale, "enable_gqa": True, "kernel_options": options}
    if scores.softcap is not None:
        settings["score_mod"] = _capped(scores.softcap)
    if scores.sinks_H is None:
        return attend(query_1HLE, key_1KLE, value_1KLF, **settings).transpose(1, 2).contiguous()
    out_1HLF, aux = attend(query_1HLE, key_1KLE, value_1KLF, **settings, return_aux=_lse_request())
    # A sink s makes exp(lse) / (exp(lse) + exp(s)) of the sum over keys.
    share_1HL = torch.sigmoid(aux.lse - scores.sinks_H[:, None])
    return (out_1HLF * share_1HL[..., None].to(out_1HLF.dtype)).transpose(1, 2).contiguous()


@cache
def _capped(softcap: float) -> Callable[..., Tensor]:
    """Return the change of a score; one function for each cap, since the kernel is compiled for the function."""

    def cap(score: Tensor, batch: Tensor, head: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return softcap * torch.tanh(score / softcap)

    return cap


def kernel_options(dtype: torch.dtype, width: int, shared_memory: int | None) -> dict[str, Any]:
    """Return torch's options for heads of a width, with sizes where its own do not fit or spill.

    `shared_memory` is in bytes per thread block, and None on ROCm, where torch's own sizes remain.
    """
    # The decoding kernel, which torch would choose for short inputs, lacks this mask's shape and some ratios of heads.
    options: dict[str, Any] = {"FORCE_USE_FLEX_ATTENTION": True}
    if shared_memory is None:
        return options
    # The kernels pad heads to a power of two.
    padded = 1 << (width - 1).bit_length()
    if dtype == torch.float32:
        return options | _FP32_SIZES.get(max(64, padded), {})
    if padded == 256 and shared_memory < _A100_SHARED_MEMORY:
        return options | _SMALL_SIZES
    return options | _WARPS.get(padded, {})


@cache
def _shared_memory(device: torch.device) -> int | None:
    return getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", None)


def block_mask(trees: tuple[Tree, ...], length: int, device: torch.device, span: Span = FULL) -> Any:
    """Return FlexAttention's BlockMask of `forest_mask` for `length` packed tokens; copies to `device` do not wait."""
    from torch.nn.attention.flex_attention import BlockMask

    segments_L, roots_L = _segments_and_roots(trees, length)
    some, every = _visible_blocks(segments_L, roots_L)
    is_limited = span.size is not None
    positions_L = _positions(trees, length) if is_limited else segments_L
    starts_L = span.start(positions_L)
    if is_limited:
        near, all_near = _near_blocks(positions_L, starts_L)
        # A block of queries sees itself, so that no row of padding is empty.
        some, every = some & (near | torch.eye(len(near), dtype=torch.bool)), every & all_near
    segments_L, roots_L, positions_L, starts_L = (
        x.to(device, non_blocking=True) for x in (segments_L, roots_L, positions_L, starts_L)
    )

    def attends(batch: Tensor, head: Tensor, i: Tensor, j: Tensor) -> Tensor:
        same_segment = segments_L[i] == segments_L[j]
        return (j <= i) & (same_segment | (roots_L[i] == segments_L[j]))

    def attends_near(batch: Tensor, head: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return attends(batch, head, i, j) & (positions_L[j] >= starts_L[i])

    attends_to = attends_near if is_limited else attends
    return BlockMask.from_kv_blocks(
        *_kv_blocks(some & ~every, device), *_kv_blocks(every, device), BLOCK, attends_to, seq_lengths=(length, length)
    )


def _positions(trees: tuple[Tree, ...], length: int) -> Tensor:
    """Return each token's position in its sequence, int32 [L]; those of padding count from 0."""
    parts: list[tuple[int, int]] = []
    for tree in trees:
        parts += [(0, tree.prompt), *((tree.prompt, tokens) for tokens in tree.completions)]
    parts.append((0, length - sum(tokens for _, tokens in parts)))
    return torch.cat([torch.arange(first, first + tokens, dtype=torch.int32) for first, tokens in parts])


def _near_blocks(positions_L: Tensor, starts_L: Tensor) -> tuple[Tensor, Tensor]:
    """Return, for N blocks of queries and keys, which may have some and which have only near pairs: bool [N, N] each."""
    padding = -len(positions_L) % BLOCK
    positions_NB, starts_NB = (
        torch.cat([x, x[-1:].expand(padding)]).unflatten(0, (-1, BLOCK)) for x in (positions_L, starts_L)
    )
    near = positions_NB.amax(1)[None, :] >= starts_NB.amin(1)[:, None]
    return near, positions_NB.amin(1)[None, :] >= starts_NB.amax(1)[:, None]


def _segments_and_roots(trees: tuple[Tree, ...], length: int) -> tuple[Tensor, Tensor]:
    """Return `segment` and `root` of each token, int32 [L]."""
    tokens: list[int] = []
    roots: list[int] = []
    for tree in trees:
        root = len(tokens)
        for number, part in enumerate((tree.prompt, *tree.completions)):
            roots.append(root if tree.prompt else root + number)
            tokens.append(part)
    # Padding is a separate segment, so that every token attends to some token.
    roots.append(len(tokens))
    tokens.append(length - sum(tokens))
    counts_S, roots_S = torch.tensor(tokens), torch.tensor(roots, dtype=torch.int32)
    segments_S = torch.arange(len(tokens), dtype=torch.int32)
    return _repeat(segments_S, counts_S, length), _repeat(roots_S, counts_S, length)


def _repeat(values_S: Tensor, counts_S: Tensor, length: int) -> Tensor:
    """Return each value repeated as often as its count says: [length]."""
    # With `output_size` the counts are not read from fake tensors.
    return values_S.repeat_interleave(counts_S, output_size=length)


def _visible_blocks(segments_L: Tensor, roots_L: Tensor) -> tuple[Tensor, Tensor]:
    """Return, for N blocks of queries and keys, which have some and which only visible pairs: bool [N, N] each."""
    first, last = segments_L[::BLOCK], segments_L[_block_ends(segments_L)]
    root_first, root_last = roots_L[::BLOCK], roots_L[_block_ends(segments_L)]
    index = torch.arange(len(first))
    below, at = index[:, None] > index[None, :], index[:, None] == index[None, :]
    in_segment = _overlap(first, last, first, last)
    in_prompt = _overlap(root_first, root_last, first, last)
    some = at | (below & (in_segment | in_prompt))
    # Blocks of a single segment, or with a single root.
    one_key_segment = (first == last)[None, :]
    all_in_segment = (first == last)[:, None] & one_key_segment & (first[:, None] == first[None, :])
    all_in_prompt = (root_first == root_last)[:, None] & one_key_segment & (root_first[:, None] == first[None, :])
    return some, below & (all_in_segment | all_in_prompt)


def _block_ends(values_L: Tensor) -> Tensor:
    length = len(values_L)
    return torch.arange(BLOCK - 1, length + BLOCK - 1, BLOCK).clamp(max=length - 1)


def _overlap(first_q: Tensor, last_q: Tensor, first_k: Tensor, last_k: Tensor) -> Tensor:
    """Return whether the ranges of query and key blocks overlap: [N, N].

    Exact for segments, which are consecutive; for roots some blocks without a visible pair count too.
    """
    return (first_k[None, :] <= last_q[:, None]) & (first_q[:, None] <= last_k[None, :])


def _kv_blocks(chosen: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return how many key blocks are chosen per query block, [1, 1, N], and all, the chosen first, [1, 1, N, N]."""
    order = torch.argsort(chosen.int(), dim=-1, descending=True, stable=True).int()
    listed = chosen.sum(-1, dtype=torch.int32)[None, None], order[None, None]
    return listed[0].to(device, non_blocking=True), listed[1].to(device, non_blocking=True)


def _lse_request() -> Any:
    from torch.nn.attention.flex_attention import AuxRequest

    return AuxRequest(lse=True)


def _flex_attention() -> Callable[..., Tensor]:
    from torch.nn.attention.flex_attention import flex_attention

    return flex_attention


@cache
def _compiled() -> Callable[..., Tensor]:
    """Return FlexAttention, compiled at its first use: seconds for the first length, and once more for any other."""
    # Each architecture and short inputs are further variants; beyond the limit torch would run uncompiled, in memory
    # of [L, L].
    torch._dynamo.config.recompile_limit = max(64, torch._dynamo.config.recompile_limit)
    return torch.compile(_flex_attention())

"""Attention over a forest on CUDA: FlexAttention with a block mask that is built once per forest.

Blocks of 128 x 128 in which no token attends to another cost nothing; those in which every token attends to every other
need no mask (Dong et al., 2024, arXiv:2412.05496). The host computes the block mask from the nodes' lengths, in
(L / 128)^2 steps; `create_block_mask` would compute all of [L, L].

One number per token defines the mask: `end` of the tokens of its node's subtree. Token i attends to token j if j <= i < end[j].
With windows or chunks the position of j must also be at least the first that i attends to.

Tests run it uncompiled on the CPU, without backward. The compiled kernel and its gradients on CUDA are compared with
`forest_mask` when a run starts (`self_check.py`), and in the self-test `FlexAttention`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from lowpeak.attention.scores import PLAIN, ScoreModifiers
from lowpeak.attention.spans import FULL, Span
from lowpeak.batching import token_ends
from lowpeak.records import Node

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


def block_mask(nodes: Sequence[Node], length: int, device: torch.device, span: Span = FULL) -> Any:
    """Return FlexAttention's BlockMask of `forest_mask` for `length` packed tokens; copies to `device` do not wait."""
    from torch.nn.attention.flex_attention import BlockMask

    ends_L = token_ends(nodes, length)
    some, every = _visible_blocks(ends_L)
    is_limited = span.size is not None
    positions_L = _positions(nodes, length) if is_limited else ends_L
    starts_L = span.start(positions_L)
    if is_limited:
        near, all_near = _near_blocks(positions_L, starts_L)
        # A block of queries sees itself, so that no row of padding is empty.
        some, every = some & (near | torch.eye(len(near), dtype=torch.bool)), every & all_near
    ends_L, positions_L, starts_L = (x.to(device, non_blocking=True) for x in (ends_L, positions_L, starts_L))

    def attends(batch: Tensor, head: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (j <= i) & (i < ends_L[j])

    def attends_near(batch: Tensor, head: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return attends(batch, head, i, j) & (positions_L[j] >= starts_L[i])

    attends_to = attends_near if is_limited else attends
    return BlockMask.from_kv_blocks(
        *_kv_blocks(some & ~every, device), *_kv_blocks(every, device), BLOCK, attends_to, seq_lengths=(length, length)
    )


def _positions(nodes: Sequence[Node], length: int) -> Tensor:
    """Return each token's position in its sequences, int32 [L]; those of padding count from 0."""
    parts = [(node.depth, node.length) for node in nodes]
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


def _visible_blocks(ends_L: Tensor) -> tuple[Tensor, Tensor]:
    """Return, for N blocks of queries and keys, which have some and which only visible pairs: bool [N, N] each."""
    ends_NB = torch.cat([ends_L, ends_L[-1:].expand(-len(ends_L) % BLOCK)]).unflatten(0, (-1, BLOCK))
    first_N = torch.arange(0, len(ends_L), BLOCK)
    last_N = (first_N + BLOCK).clamp(max=len(ends_L)) - 1
    below, at = first_N[:, None] > first_N[None, :], first_N[:, None] == first_N[None, :]
    some = at | (below & (ends_NB.amax(1)[None, :] > first_N[:, None]))
    return some, below & (ends_NB.amin(1)[None, :] > last_N[:, None])


def _kv_blocks(chosen: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the number of chosen key blocks per query block, [1, 1, N], and their order, [1, 1, N, N]: chosen ones first."""
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

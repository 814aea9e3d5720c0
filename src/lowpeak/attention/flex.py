"""Attention over a forest on CUDA: FlexAttention with a block mask that is built once per forest.

Blocks of 128 x 128 in which no token sees another cost nothing; those in which every token sees every other need no
mask (Dong et al., 2024, arXiv:2412.05496). The block mask is formed on the host from the trees' numbers, in
(L / 128)^2, where `create_block_mask` would form all of [L, L].

Two numbers per token say who sees whom. `segment` counts prompts and completions along the row, and `root` is the
segment of the tree's prompt (a token's own where the tree has none): token i sees token j <= i if segment[j] is
segment[i] or root[i]. Both grow along the row, so a block's extremes are its ends.

The tests run it uncompiled on the CPU, where it has no backward. Compiled, with gradients, on CUDA it is not covered by
them: there it is compared with `forest_mask` when a run starts (`forests_agree`), and in the self-test's row FlexAttention.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from lowpeak.records import Tree

BLOCK = 128


def flex_attention_row(
    query_1HLE: Tensor, key_1KLE: Tensor, value_1KLF: Tensor, mask: Any, scale: float, *, compiled: bool = True
) -> Tensor:
    """[1, L, H, F]: the same as `Calls.attend`, of a `block_mask`."""
    attend = _compiled() if compiled else _flex()
    # The decoding kernel, which short rows would take, knows neither this mask's shape nor every ratio of heads.
    options = {"FORCE_USE_FLEX_ATTENTION": True} if compiled else None
    out_1HLF = attend(
        query_1HLE, key_1KLE, value_1KLF, block_mask=mask, scale=scale, enable_gqa=True, kernel_options=options
    )
    return out_1HLF.transpose(1, 2).contiguous()


def block_mask(trees: tuple[Tree, ...], length: int, device: torch.device) -> Any:
    """FlexAttention's BlockMask of `forest_mask`, for a row of `length` tokens; copied to `device` without waiting."""
    from torch.nn.attention.flex_attention import BlockMask

    segments_L, roots_L = _segments(trees, length)
    some, every = _blocks(segments_L, roots_L)
    segments_L, roots_L = segments_L.to(device, non_blocking=True), roots_L.to(device, non_blocking=True)

    def sees(batch: Tensor, head: Tensor, i: Tensor, j: Tensor) -> Tensor:
        own = segments_L[i] == segments_L[j]
        return (j <= i) & (own | (roots_L[i] == segments_L[j]))

    return BlockMask.from_kv_blocks(
        *_listed(some & ~every, device), *_listed(every, device), BLOCK, sees, seq_lengths=(length, length)
    )


def _segments(trees: tuple[Tree, ...], length: int) -> tuple[Tensor, Tensor]:
    """`segment` and `root` of each token, int32 [L]; the padding is a segment of its own, so that no row is empty."""
    tokens: list[int] = []
    roots: list[int] = []
    for tree in trees:
        root = len(tokens)
        for number, part in enumerate((tree.prompt, *tree.completions)):
            roots.append(root if tree.prompt else root + number)
            tokens.append(part)
    roots.append(len(tokens))
    tokens.append(length - sum(tokens))
    counts_S, roots_S = torch.tensor(tokens), torch.tensor(roots, dtype=torch.int32)
    segments_S = torch.arange(len(tokens), dtype=torch.int32)
    return _each(segments_S, counts_S, length), _each(roots_S, counts_S, length)


def _each(values_S: Tensor, counts_S: Tensor, length: int) -> Tensor:
    """Each value as often as its count says; the length is given, so that the counts need not be read."""
    return values_S.repeat_interleave(counts_S, output_size=length)


def _blocks(segments_L: Tensor, roots_L: Tensor) -> tuple[Tensor, Tensor]:
    """Bool [N, N] for N blocks: where some token may see another, and where all tokens see all others."""
    first, last = segments_L[::BLOCK], segments_L[_ends(segments_L)]
    root_first, root_last = roots_L[::BLOCK], roots_L[_ends(segments_L)]
    index = torch.arange(len(first))
    below, at = index[:, None] > index[None, :], index[:, None] == index[None, :]
    own = _meet(first, last, first, last)
    prompt = _meet(root_first, root_last, first, last)
    some = at | (below & (own | prompt))
    column_single = (first == last)[None, :]
    whole_own = (first == last)[:, None] & column_single & (first[:, None] == first[None, :])
    whole_prompt = (root_first == root_last)[:, None] & column_single & (root_first[:, None] == first[None, :])
    return some, below & (whole_own | whole_prompt)


def _ends(values_L: Tensor) -> Tensor:
    length = len(values_L)
    return torch.arange(BLOCK - 1, length + BLOCK - 1, BLOCK).clamp(max=length - 1)


def _meet(first_q: Tensor, last_q: Tensor, first_k: Tensor, last_k: Tensor) -> Tensor:
    """Whether two ranges overlap: exact for segments, which are consecutive; for roots at worst a block too many."""
    return (first_k[None, :] <= last_q[:, None]) & (first_q[:, None] <= last_k[None, :])


def _listed(chosen: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
    """How many blocks of each row are chosen, [1, 1, N], and which, [1, 1, N, N], the chosen ones first."""
    order = torch.argsort(chosen.int(), dim=-1, descending=True, stable=True).int()
    listed = chosen.sum(-1, dtype=torch.int32)[None, None], order[None, None]
    return listed[0].to(device, non_blocking=True), listed[1].to(device, non_blocking=True)


def _flex() -> Callable[..., Tensor]:
    from torch.nn.attention.flex_attention import flex_attention

    return flex_attention


@cache
def _compiled() -> Callable[..., Tensor]:
    """Compiled at its first use: seconds, once for the first length and once more for any other.

    A policy, another architecture beside it, short rows: each is a variant, and beyond the limit they would run uncompiled,
    in memory of [L, L].
    """
    torch._dynamo.config.recompile_limit = max(64, torch._dynamo.config.recompile_limit)
    return torch.compile(_flex())

"""Prefill: one forward of each new prompt, shared by all sequences of its group.

Shapes: P prompts of one forward, L columns of the longest of them, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from lowpeak.rollout.native.cache import PromptLayer

_MAX_TOKENS = 16_384  # padded prompt tokens per forward, because activations take more bytes per token than the cache

Ids = Sequence[Sequence[int]]


def split_prefill(prompts: Sequence[int], lengths: Sequence[int], max_tokens: int = _MAX_TOKENS) -> Iterator[list[int]]:
    """Yield the prompts of each forward, in order: as many as `max_tokens` padded tokens allow, at least one."""
    part: list[int] = []
    longest = 0
    for prompt in prompts:
        longest = max(longest, lengths[prompt])
        if part and longest * (len(part) + 1) > max_tokens:
            yield part
            part, longest = [], lengths[prompt]
        part.append(prompt)
    if part:
        yield part


def prefill_prompts(model: nn.Module, prompts: Ids, device: torch.device) -> tuple[Tensor, Cache]:
    """Return the logits [P, V] of each prompt's first new token, and right-aligned keys and values."""
    lengths = [len(ids) for ids in prompts]
    mask_PL = left_mask(lengths, device)
    positions_PL = None if mask_PL is None else (mask_PL.cumsum(dim=-1) - 1).clamp(min=0)
    cache = Cache(layer_class_to_replicate=PromptLayer)
    output = model(
        input_ids=left_pad(prompts, device),
        attention_mask=mask_PL,
        position_ids=positions_PL,
        past_key_values=cache,
        use_cache=True,
        logits_to_keep=1,
    )
    return output.logits[:, -1], cache


def left_pad(prompts: Ids, device: torch.device) -> Tensor:
    """Return right-aligned ids [P, L], padded with each prompt's first token.

    The padding is masked, and a repetition penalty applies to this token anyway.
    """
    length = max(len(ids) for ids in prompts)
    rows = [[ids[0]] * (length - len(ids)) + list(ids) for ids in prompts]
    return torch.tensor(rows, dtype=torch.int64).to(device, non_blocking=True)


def left_mask(lengths: Sequence[int], device: torch.device) -> Tensor | None:
    """Return the mask [P, L] of left-padded sequences, 0 on padding; None without padding.

    Without a mask attention may use its fastest kernel, and transformers does not read from the device whether all is
    1.
    """
    num_columns = max(lengths)
    if min(lengths) == num_columns:
        return None
    first = torch.tensor([num_columns - length for length in lengths])[:, None]
    return (torch.arange(num_columns)[None, :] >= first).to(device, torch.int64, non_blocking=True)

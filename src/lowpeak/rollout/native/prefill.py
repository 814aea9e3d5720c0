"""Prefill: each prompt that begins goes through the model once, for all rows of its group.

Shapes: P prompts of one forward, L columns that the longest of the prompts takes, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from lowpeak.rollout.native.cache import PromptLayer

_MAX_TOKENS = 16_384  # padded prompt tokens of one forward: activations take more per token than the cache they leave

Ids = Sequence[Sequence[int]]


def split_prefill(prompts: Sequence[int], lengths: Sequence[int], max_tokens: int = _MAX_TOKENS) -> Iterator[list[int]]:
    """The prompts of each forward, in order: as many as `max_tokens` padded tokens allow, one at least."""
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
    """Logits [P, V] of the first new token of each prompt, and keys and values, right-aligned."""
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
    """Ids [P, L], right-aligned. A row is padded with its own first token: it is masked, and known to the history."""
    length = max(len(ids) for ids in prompts)
    rows = [[ids[0]] * (length - len(ids)) + list(ids) for ids in prompts]
    return torch.tensor(rows, dtype=torch.int64).to(device, non_blocking=True)


def left_mask(lengths: Sequence[int], device: torch.device) -> Tensor | None:
    """The mask [P, L] of left-padded rows, L the longest: 0 on padding; None where nothing is padded.

    Without a mask attention may use its fastest kernel, and transformers need not ask the device whether all is one.
    """
    num_columns = max(lengths)
    if min(lengths) == num_columns:
        return None
    first = torch.tensor([num_columns - length for length in lengths])[:, None]
    return (torch.arange(num_columns)[None, :] >= first).to(device, torch.int64, non_blocking=True)

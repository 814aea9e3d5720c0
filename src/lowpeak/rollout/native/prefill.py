"""Prefill: each prompt that enters goes through the model once, and its cache and logits are copied to its rows.

Shapes: P prompts of one forward, N rows that enter, L columns that the longest of the prompts takes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache

from lowpeak.rollout.native.cache import SlotCache
from lowpeak.rollout.native.waves import Wave

_MAX_TOKENS = 16_384  # padded prompt tokens of one forward: activations take more per token than the cache they leave

Ids = Sequence[Sequence[int]]


def prefill(
    model: nn.Module, wave: Wave, prompts: Ids, cache: SlotCache, first_row: int = 0, max_tokens: int = _MAX_TOKENS
) -> Tensor:
    """Logits [N, V] of the first new token of each row; keys and values go into rows `first_row` ... of `cache`.

    `prompts` are the ids of all prompts that the rows may name. Equal to a forward of each row's prompt; a prompt is
    forwarded once, whatever the number of its rows, with others while `max_tokens` padded tokens allow.
    """
    logits = []
    start = first_row
    for counts in _forwards(wave, prompts, max_tokens):
        rows = slice(start, start + sum(counts.values()))
        logits_PV, prefilled = _forward(model, [prompts[i] for i in counts])
        indices = torch.tensor([p for p, count in enumerate(counts.values()) for _ in range(count)])
        indices = indices.to(logits_PV.device)
        cache.place(prefilled, rows, indices)
        logits.append(logits_PV[indices])
        start = rows.stop
    return torch.cat(logits)


def _forwards(wave: Wave, prompts: Ids, max_tokens: int) -> Iterator[dict[int, int]]:
    """The prompts of each forward with the number of their rows, in the wave's order."""
    counts: dict[int, int] = {}
    for prompt, rows in groupby(row.prompt for row in wave):
        longest = max(len(prompts[i]) for i in (*counts, prompt))
        if counts and longest * (len(counts) + 1) > max_tokens:
            yield counts
            counts = {}
        counts[prompt] = len(list(rows))
    yield counts


def _forward(model: nn.Module, prompts: Ids) -> tuple[Tensor, DynamicCache]:
    device = next(model.parameters()).device
    lengths = [len(ids) for ids in prompts]
    mask_PL = left_mask(lengths, max(lengths), device)
    positions_PL = None if mask_PL is None else (mask_PL.cumsum(dim=-1) - 1).clamp(min=0)
    cache = DynamicCache()
    output = model(
        input_ids=left_padded(prompts, device),
        attention_mask=mask_PL,
        position_ids=positions_PL,
        past_key_values=cache,
        use_cache=True,
        logits_to_keep=1,
    )
    return output.logits[:, -1], cache


def left_padded(prompts: Ids, device: torch.device) -> Tensor:
    """Ids [P, L], right-aligned. A row is padded with its own first token: it is masked, and known to the history."""
    length = max(len(ids) for ids in prompts)
    rows = [[ids[0]] * (length - len(ids)) + list(ids) for ids in prompts]
    return torch.tensor(rows, dtype=torch.int64).to(device, non_blocking=True)


def left_mask(lengths: Sequence[int], num_columns: int, device: torch.device, num_new: int = 0) -> Tensor | None:
    """The mask [P, num_columns + num_new] of left-padded rows: 0 on padding; None where nothing is padded.

    Without a mask attention may use its fastest kernel, and transformers need not ask the device whether all is one.
    """
    if min(lengths) == num_columns:
        return None
    first = torch.tensor([num_columns - length for length in lengths])[:, None]
    return (torch.arange(num_columns + num_new)[None, :] >= first).to(device, torch.int64, non_blocking=True)

"""Rehearsal of the decode loop on fake tensors: its prefills, its first and last steps."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn

from lowpeak.arguments import Sampling
from lowpeak.memory import Kind
from lowpeak.plan.rehearsal.storage_meter import StorageMeter, run_methods_inside
from lowpeak.records import Prompt
from lowpeak.rollout import TokenDraw
from lowpeak.rollout.native import (
    DecodeGraphs,
    DecodeLoop,
    DecodeStep,
    OutputBuffer,
    PromptQueue,
    SlotCache,
    StopStrings,
    sequence_bytes,
)


def rehearse_decoding(
    model: nn.Module,
    prompts: Sequence[Prompt],
    sampling: Sampling,
    kv_cache_bytes: int,
    meter: StorageMeter,
    has_graphs: bool = False,
) -> None:
    """Run the parts of a decode loop in which its memory peaks, with completions of the maximal length.

    When all slots have ended, waiting prompts enter a cache of its full size.
    """
    device, num_rows = torch.device("cpu"), len(prompts) * sampling.num_generations
    output = EndlessOutput(num_rows, sampling.max_new_tokens, frozenset((0,)), StopStrings(None, ()), None, device)
    lengths = [len(prompt.ids) for prompt in prompts]

    def slots_of(tokens: int) -> int:
        return kv_cache_bytes // sequence_bytes(model, tokens)

    queue = PromptQueue(lengths, sampling.num_generations, sampling.max_new_tokens, slots_of)
    with run_methods_inside(SlotCache, {"allocate": partial(meter.counting_as, Kind.KV_CACHE)}):
        graphs = RehearsedGraphs(lambda: lambda run: lambda: None) if has_graphs else None
        loop = DecodeLoop(model, queue, kv_cache_bytes, prompts, sampling, output, graphs)
        for _ in range(2):
            loop.rehearse_wave()


class RehearsedGraphs(DecodeGraphs):
    """Graphs that capture nothing, and keep the logits of all slots: once for the reader, and once in their pool."""

    def run(self, step: DecodeStep, cache: SlotCache, tokens_N: Tensor, columns_N: Tensor, num_columns: int) -> Tensor:
        logits_NV = step(tokens_N, columns_N, num_columns)
        if self._logits_SV is None:
            self._logits_SV = logits_NV.new_empty(2, cache.num_slots, logits_NV.shape[1])
        return logits_NV


class EndlessOutput(OutputBuffer):
    """An output buffer whose sequences never end: nothing is read from the device.

    Each token is drawn twice, as it is if filters need the whole vocabulary.
    """

    def add(self, rows_N: Tensor, draw: TokenDraw, num_computed: int) -> list[bool]:
        draw.redraw_from_vocabulary(range(len(rows_N)))
        self.write(rows_N, draw.tokens_N, draw.logprobs_N)
        return [False] * len(rows_N)

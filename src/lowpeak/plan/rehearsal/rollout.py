"""Rehearsal of the native engine on fake tensors: the decode loop's prefills, its first and last steps, or `generate()`'s."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from lowpeak.arguments import Sampling
from lowpeak.heads import transformers_model
from lowpeak.memory import Kind
from lowpeak.plan.rehearsal.storage_meter import StorageMeter, run_methods_inside
from lowpeak.records import Prompt
from lowpeak.rollout import TokenDraw, UniformDraws
from lowpeak.rollout.native import (
    DecodeGraphs,
    DecodeLoop,
    DecodeStep,
    OutputBuffer,
    PromptQueue,
    SlotCache,
    StopStrings,
    TokenChooser,
    cache_argument,
    sequence_bytes,
    text_config,
    unsupported_reason,
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

    When all slots have ended, waiting prompts enter a cache of its full size. A model that the loop does not support runs the
    largest wave of `model.generate()`.
    """
    num_rows, lengths = len(prompts) * sampling.num_generations, [len(prompt.ids) for prompt in prompts]

    def slots_of(tokens: int) -> int:
        return kv_cache_bytes // sequence_bytes(model, tokens)

    if unsupported_reason(model) is not None:
        # All planned prompts have one length.
        num_rows = min(num_rows, max(1, slots_of(lengths[0] + sampling.max_new_tokens)))
        _rehearse_generate(model, num_rows, lengths[0], sampling, meter)
        return
    output = _endless_output(num_rows, sampling)
    queue = PromptQueue(lengths, sampling.num_generations, sampling.max_new_tokens, slots_of)
    with run_methods_inside(SlotCache, {"allocate": partial(meter.counting_as, Kind.KV_CACHE)}):
        graphs = RehearsedGraphs(lambda: lambda run: lambda: None) if has_graphs else None
        loop = DecodeLoop(model, queue, kv_cache_bytes, prompts, sampling, output, graphs)
        for _ in range(2):
            loop.rehearse_wave()


def _rehearse_generate(
    model: nn.Module, num_rows: int, prompt_length: int, sampling: Sampling, meter: StorageMeter
) -> None:
    """Run the first step of `model.generate()`, and the last with a cache that is filled while nothing is counted."""
    driver: Any = transformers_model(model)
    name, accepted = cache_argument(driver), inspect.signature(driver.forward).parameters
    output = _endless_output(num_rows, sampling)
    chooser = TokenChooser(sampling, UniformDraws(num_rows, sampling, output.device), output, num_rows)
    last_only = {"logits_to_keep": 1} if "logits_to_keep" in accepted else {}

    def forward(cached: int, new: int, cache: Any) -> Any:
        ids_NT, mask_NL = (torch.ones(num_rows, size, dtype=torch.int64) for size in (new, cached + new))
        given = {} if cache is None else {name: cache}
        return ids_NT, driver(input_ids=ids_NT, attention_mask=mask_NL, use_cache=True, **last_only, **given)

    kinds = {type(layer) for layer in DynamicCache(config=text_config(driver)).layers}
    with ExitStack() as stack:
        for kind in kinds:
            if hasattr(kind, "update"):
                stack.enter_context(run_methods_inside(kind, {"update": partial(meter.counting_as, Kind.KV_CACHE)}))
        last, cache = max(0, prompt_length + sampling.max_new_tokens - 2), None
        for cached, new in ((0, prompt_length), (last, 1)):
            if cached:
                with meter.paused():
                    cache = getattr(forward(0, cached, None)[1], name, None)
            ids_NT, out = forward(cached, new, cache)
            chooser(ids_NT, out.logits[:, -1].to(torch.float32, copy=True))
            del out  # with its cache


def _endless_output(num_rows: int, sampling: Sampling) -> EndlessOutput:
    ends = (frozenset((0,)), StopStrings(None, ()))
    return EndlessOutput(num_rows, sampling.max_new_tokens, *ends, None, torch.device("cpu"))


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

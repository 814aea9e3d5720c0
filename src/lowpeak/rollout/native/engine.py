"""The native engine: the policy generates by itself, with its own weights and no second copy of them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from lowpeak.arguments import Sampling
from lowpeak.errors import EngineError
from lowpeak.memory import has_memory
from lowpeak.records import Completion, Group, Prompt, Weights, WeightSlice
from lowpeak.rollout.engine import SliceForm, check_lengths
from lowpeak.rollout.native.cache import bytes_per_token, text_config
from lowpeak.rollout.native.decode_loop import DecodeLoop
from lowpeak.rollout.native.hf_generate import decode_by_generate, unsupported_reason
from lowpeak.rollout.native.output import OutputBuffer, StopStrings, end_token_ids
from lowpeak.rollout.native.scheduler import PromptQueue, SequenceId, form_waves

_logger = logging.getLogger(__name__)


@dataclass(eq=False, repr=False)
class NativeEngine:
    """A rollout engine over a transformers causal language model, in the slots that a KV-cache budget gives.

    `hold` gives the policy, ready to generate (eval mode, weights gathered, cache allowed), for as long as one call
    of `generate` takes. `kv_cache_bytes()` is asked at each call, since a resumed run has the bytes of
    the run that it goes on with. `on_tokens` hears of each forward how many tokens it added to completions, and how
    many rows it computed. It computes on `device`, which need not be where parameters wait; theirs unless named.
    The greedy tokens are those of `model.generate(do_sample=False)` on each prompt alone.
    """

    hold: Callable[[], AbstractContextManager[nn.Module]]
    tokenizer: Any
    kv_cache_bytes: Callable[[], int]
    on_tokens: Callable[[int, int], None] | None = None
    device: torch.device | None = None
    policy_version: int | None = field(default=None, init=False)
    cuts_groups = True
    slice_form = SliceForm()
    _warned = False

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling) -> list[Group]:
        if self.policy_version is None:
            raise EngineError("The engine holds no known weights yet: call load() before generate().")
        with self.hold() as model, torch.no_grad():
            context = getattr(text_config(model), "max_position_embeddings", None)
            check_lengths(prompts, sampling, context, "the model's", "shorten prompts or completions")
            completions = self._complete(model, prompts, sampling) if prompts else []
        size = sampling.num_generations
        return [Group(prompt, tuple(completions[i * size : (i + 1) * size])) for i, prompt in enumerate(prompts)]

    @contextmanager
    def held(self) -> Iterator[nn.Module]:
        """Hold the policy for all calls of `generate` in the block; every rank enters it."""
        with self.hold() as model:
            hold, self.hold = self.hold, lambda: nullcontext(model)
            try:
                yield model
            finally:
                self.hold = hold

    def load(self, slices: Iterable[WeightSlice], policy_version: int, weights: Weights = "merged") -> None:
        self.policy_version = policy_version

    def sleep(self) -> None:
        """Give back what torch's allocator kept of the last rollout's memory; a call's cache ends with the call."""
        if self.device is not None and has_memory(self.device):
            torch.get_device_module(self.device).empty_cache()

    def wake(self) -> None:
        pass

    def close(self) -> None:
        pass

    def _complete(self, model: nn.Module, prompts: Sequence[Prompt], sampling: Sampling) -> list[Completion]:
        kv_cache_bytes = self.kv_cache_bytes()
        max_tokens = kv_cache_bytes // bytes_per_token(model)
        shape = ([len(prompt.ids) for prompt in prompts], sampling.num_generations, sampling.max_new_tokens, max_tokens)
        ends = (end_token_ids(model, self.tokenizer, sampling), StopStrings(self.tokenizer, sampling.stop))
        device = self.device or next(model.parameters()).device
        if self._is_driven(model):
            num_rows = len(prompts) * sampling.num_generations
            progress = OutputBuffer(num_rows, sampling.max_new_tokens, *ends, self.on_tokens, device)
            with _inference_mode(model):
                DecodeLoop(model, PromptQueue(*shape), kv_cache_bytes, prompts, sampling, progress).run()
            return progress.completions()
        rows: dict[SequenceId, Completion] = {}
        for wave in form_waves(*shape):
            progress = OutputBuffer(len(wave), sampling.max_new_tokens, *ends, self.on_tokens, device)
            decode_by_generate(model, wave, prompts, sampling, progress)
            rows.update(zip(wave, progress.completions(), strict=True))
        return [rows[row] for row in sorted(rows)]

    def _is_driven(self, model: nn.Module) -> bool:
        """Whether the engine's own loop drives the model; one warning where it does not."""
        reason = unsupported_reason(model)
        if reason is not None and not self._warned:
            self._warned = True
            _logger.warning("%s generates through model.generate(), which is slower: %s.", type(model).__name__, reason)
        return reason is None


def _inference_mode(model: nn.Module) -> AbstractContextManager[Any]:
    """Inference mode, which saves a tenth of a short forward; nothing where parameters are not plain tensors.

    What a sharded parameter gathers is used again by training, which may not change a tensor made in inference mode.
    """
    is_plain = all(type(p) is nn.Parameter for p in model.parameters())
    return torch.inference_mode() if is_plain else nullcontext()

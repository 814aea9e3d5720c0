"""Native rollout engine: the policy generates with its training weights, without a second copy."""

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
from lowpeak.memory import has_device_memory
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
    """Rollout engine over a transformers causal language model, with a KV cache of bounded size.

    `hold` returns the policy, ready for generation (eval mode, weights gathered, cache allowed), for one call of
    `generate`. `kv_cache_bytes()` is read at each call, because a resumed run uses the value of its checkpoint.
    `on_tokens` receives, for each forward, the tokens added to completions and the sequences computed. `device` is
    where the engine computes, which may differ from the parameters' device (default: theirs). Greedy tokens equal
    those of `model.generate(do_sample=False)` on each prompt alone.
    """

    hold: Callable[[], AbstractContextManager[nn.Module]]
    tokenizer: Any
    kv_cache_bytes: Callable[[], int]
    on_tokens: Callable[[int, int], None] | None = None
    device: torch.device | None = None
    policy_version: int | None = field(default=None, init=False)
    supports_partial_groups = True
    slice_form = SliceForm()
    _warned = False

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling) -> list[Group]:
        if self.policy_version is None:
            raise EngineError("The engine has no known weights yet: call load() before generate().")
        with self.hold() as model, torch.no_grad():
            context = getattr(text_config(model), "max_position_embeddings", None)
            check_lengths(prompts, sampling, context, "the model's", "shorten prompts or completions")
            completions = self._complete(model, prompts, sampling) if prompts else []
        size = sampling.num_generations
        return [Group(prompt, tuple(completions[i * size : (i + 1) * size])) for i, prompt in enumerate(prompts)]

    @contextmanager
    def keep_gathered(self) -> Iterator[nn.Module]:
        """Keep the policy gathered for all calls of `generate` in the block; every rank enters it."""
        with self.hold() as model:
            hold, self.hold = self.hold, lambda: nullcontext(model)
            try:
                yield model
            finally:
                self.hold = hold

    def load(self, slices: Iterable[WeightSlice], policy_version: int, weights: Weights = "merged") -> None:
        self.policy_version = policy_version

    def sleep(self) -> None:
        """Return cached memory of torch's allocator; a call's KV cache ends with the call."""
        if self.device is not None and has_device_memory(self.device):
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
        if self._uses_decode_loop(model):
            num_rows = len(prompts) * sampling.num_generations
            output = OutputBuffer(num_rows, sampling.max_new_tokens, *ends, self.on_tokens, device)
            with _inference_mode(model):
                DecodeLoop(model, PromptQueue(*shape), kv_cache_bytes, prompts, sampling, output).run()
            return output.completions()
        completions: dict[SequenceId, Completion] = {}
        for wave in form_waves(*shape):
            output = OutputBuffer(len(wave), sampling.max_new_tokens, *ends, self.on_tokens, device)
            decode_by_generate(model, wave, prompts, sampling, output)
            completions.update(zip(wave, output.completions(), strict=True))
        return [completions[sequence] for sequence in sorted(completions)]

    def _uses_decode_loop(self, model: nn.Module) -> bool:
        """Return whether the decode loop supports the model; warn once if it does not."""
        reason = unsupported_reason(model)
        if reason is not None and not self._warned:
            self._warned = True
            _logger.warning("%s generates through model.generate(), which is slower: %s.", type(model).__name__, reason)
        return reason is None


def _inference_mode(model: nn.Module) -> AbstractContextManager[Any]:
    """Return inference mode if all parameters are plain tensors, otherwise a no-op."""
    # Inference mode saves a tenth of a short forward. Training reuses tensors that sharded parameters gather, and may not
    # modify tensors made in inference mode.
    is_plain = all(type(p) is nn.Parameter for p in model.parameters())
    return torch.inference_mode() if is_plain else nullcontext()

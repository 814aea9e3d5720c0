"""Fallback to `model.generate()`, for models with other caches than plain keys and values or without position ids.

Sliding windows, linear attention and state-space layers need transformers' bookkeeping. Every sequence forwards its
prompt, and ended sequences stay in the batch, so this is slower. Tokens and log-probs come from the same sampling
code, in a logits processor that leaves `generate()` one token to choose.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList
from transformers.cache_utils import DynamicCache, DynamicLayer

from lowpeak.arguments import Sampling
from lowpeak.models import transformers_model
from lowpeak.records import Prompt
from lowpeak.rollout.native.cache import text_config
from lowpeak.rollout.native.output import OutputBuffer
from lowpeak.rollout.native.prefill import left_mask, left_pad
from lowpeak.rollout.native.scheduler import Wave
from lowpeak.rollout.sampling import UniformDraws, sample_tokens

_NEEDED = ("attention_mask", "position_ids", "past_key_values", "logits_to_keep")


def unsupported_reason(model: nn.Module) -> str | None:
    """Return why the decode loop does not support `model`, or None if it does."""
    accepted = inspect.signature(transformers_model(model).forward).parameters
    missing = [name for name in _NEEDED if name not in accepted]
    if missing:
        return f"its forward does not accept {', '.join(missing)}"
    if "local" in (getattr(text_config(model), "attention_layers", None) or ()):
        return "its local layers measure their window in columns of the cache"
    # The cache that transformers creates for this config shows what each layer stores.
    other = {type(layer).__name__ for layer in DynamicCache(config=text_config(model)).layers} - {DynamicLayer.__name__}
    return f"its layers need {', '.join(sorted(other))}" if other else None


def decode_by_generate(
    model: nn.Module, wave: Wave, prompts: Sequence[Prompt], sampling: Sampling, output: OutputBuffer
) -> None:
    """Generate the sequences of `wave` into `output`, as `DecodeLoop.run` does."""
    device = output.device
    ids = [prompts[sequence.prompt].ids for sequence in wave]
    lengths = [len(x) for x in ids]
    mask_NL = left_mask(lengths, device)
    driver = transformers_model(model)
    draws = UniformDraws(len(wave), sampling, device)
    draws.make(range(len(wave)), wave, prompts)
    chooser = _TokenChooser(sampling, draws, output, len(wave))
    with _use_generation_config(driver, GenerationConfig(max_new_tokens=sampling.max_new_tokens, do_sample=False)):
        driver.generate(
            input_ids=(input_ids := left_pad(ids, device)),
            attention_mask=torch.ones_like(input_ids) if mask_NL is None else mask_NL,
            logits_processor=LogitsProcessorList([chooser]),
            stopping_criteria=StoppingCriteriaList([_StopEnded(chooser)]),
        )


class _TokenChooser(LogitsProcessor):
    """Logits processor that chooses each token as the decode loop does, and leaves it the only finite score."""

    def __init__(self, sampling: Sampling, draws: UniformDraws, output: OutputBuffer, num_rows: int) -> None:
        self._sampling = sampling
        self._draws = draws
        self._output = output
        self._position = 0
        self.ended = [False] * num_rows

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        rows_N = torch.arange(len(scores), device=scores.device)
        uniforms_N = self._draws.at(rows_N, torch.full_like(rows_N, self._position))
        tokens_N, logprobs_N = sample_tokens(scores, self._sampling, uniforms_N, input_ids)
        self._position += 1
        self._write(tokens_N, logprobs_N)
        return torch.full_like(scores, float("-inf")).scatter(-1, tokens_N[:, None], 0.0)

    def _write(self, tokens_N: Tensor, logprobs_N: Tensor) -> None:
        """Add the tokens of the running sequences; ended sequences stay in the batch until all have ended."""
        running = [row for row, ended in enumerate(self.ended) if not ended]
        rows_n = torch.tensor(running).to(tokens_N.device)
        ended = self._output.add(rows_n, tokens_N[rows_n], logprobs_N[rows_n], len(tokens_N))
        for row, has_ended in zip(running, ended, strict=True):
            self.ended[row] = has_ended


class _StopEnded(StoppingCriteria):
    def __init__(self, chooser: _TokenChooser) -> None:
        self._chooser = chooser

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: Any) -> Tensor:
        return torch.tensor(self._chooser.ended, device=input_ids.device)


@contextmanager
def _use_generation_config(model: Any, config: GenerationConfig) -> Iterator[None]:
    """Set the model's generation config to `config` in the block, because `generate()` merges the model's into its
    argument.
    """
    original, model.generation_config = model.generation_config, config
    try:
        yield
    finally:
        model.generation_config = original

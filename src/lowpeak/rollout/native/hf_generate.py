"""Waves by `model.generate()`, for models that keep more than plain keys and values or take no position ids.

Sliding windows, linear attention and state-space layers need transformers' own bookkeeping. Each row forwards its
prompt and ended rows stay in the batch, so this is slower; tokens, draws and log-probs are chosen by the same code,
in a logits processor that leaves `generate()` one token to take.
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
    """Why the engine's own decode loop cannot drive `model`, or None when it can."""
    accepted = inspect.signature(transformers_model(model).forward).parameters
    missing = [name for name in _NEEDED if name not in accepted]
    if missing:
        return f"its forward takes no {', '.join(missing)}"
    if "local" in (getattr(text_config(model), "attention_layers", None) or ()):
        return "its local layers count their window in columns of the cache"
    # The cache that transformers would make for this config says what each layer keeps.
    other = {type(layer).__name__ for layer in DynamicCache(config=text_config(model)).layers} - {DynamicLayer.__name__}
    return f"its layers need {', '.join(sorted(other))}" if other else None


def decode_by_generate(
    model: nn.Module, wave: Wave, prompts: Sequence[Prompt], sampling: Sampling, progress: OutputBuffer
) -> None:
    """Generate the rows of `wave` into `progress`, as `Batch.run` does."""
    device = progress.device
    ids = [prompts[row.prompt].ids for row in wave]
    lengths = [len(x) for x in ids]
    mask_NL = left_mask(lengths, device)
    driver = transformers_model(model)
    draws = UniformDraws(len(wave), sampling, device)
    draws.make(range(len(wave)), wave, prompts)
    chooser = _TokenChooser(sampling, draws, progress, len(wave))
    with _use_generation_config(driver, GenerationConfig(max_new_tokens=sampling.max_new_tokens, do_sample=False)):
        driver.generate(
            input_ids=(input_ids := left_pad(ids, device)),
            attention_mask=torch.ones_like(input_ids) if mask_NL is None else mask_NL,
            logits_processor=LogitsProcessorList([chooser]),
            stopping_criteria=StoppingCriteriaList([_StopEnded(chooser)]),
        )


class _TokenChooser(LogitsProcessor):
    """Chooses each row's token as the decode loop does, and leaves it as the only one with a finite score."""

    def __init__(self, sampling: Sampling, draws: UniformDraws, progress: OutputBuffer, num_rows: int) -> None:
        self._sampling = sampling
        self._draws = draws
        self._progress = progress
        self._position = 0
        self.over = [False] * num_rows

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        rows_N = torch.arange(len(scores), device=scores.device)
        uniforms_N = self._draws.at(rows_N, torch.full_like(rows_N, self._position))
        tokens_N, logprobs_N = sample_tokens(scores, self._sampling, uniforms_N, input_ids)
        self._position += 1
        self._write(tokens_N, logprobs_N)
        return torch.full_like(scores, float("-inf")).scatter(-1, tokens_N[:, None], 0.0)

    def _write(self, tokens_N: Tensor, logprobs_N: Tensor) -> None:
        """Give the tokens to the rows that run; the others stay in the batch until all have ended."""
        running = [row for row, over in enumerate(self.over) if not over]
        rows_n = torch.tensor(running).to(tokens_N.device)
        over = self._progress.add(rows_n, tokens_N[rows_n], logprobs_N[rows_n], len(tokens_N))
        for row, ended in zip(running, over, strict=True):
            self.over[row] = ended


class _StopEnded(StoppingCriteria):
    def __init__(self, chooser: _TokenChooser) -> None:
        self._chooser = chooser

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: Any) -> Tensor:
        return torch.tensor(self._chooser.over, device=input_ids.device)


@contextmanager
def _use_generation_config(model: Any, config: GenerationConfig) -> Iterator[None]:
    """`generate()` merges the model's own generation config into the one it is given; here the model's is `config`."""
    own, model.generation_config = model.generation_config, config
    try:
        yield
    finally:
        model.generation_config = own

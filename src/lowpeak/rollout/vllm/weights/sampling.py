"""Log-probs of sampled tokens as the policy's: of the full softmax at the sampling temperature, before top-k, top-p and penalties.

vLLM's "raw_logprobs" are at temperature 1, its "processed_logprobs" are renormalised over what top-k and top-p leave. In raw
mode its sampler computes them from the logits before anything else is done to these: there they are divided by each row's
temperature.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from lowpeak.errors import EngineError

_GREEDY = 1e-5  # vLLM's: at a lower temperature a row is greedy, and its log-probs are those at temperature 1


def score_at_temperature(sampler: Any) -> None:
    """Make a sampler of vLLM give its raw log-probs at each row's temperature; a second call changes nothing."""
    if getattr(sampler, "lowpeak_scores_at_temperature", False):
        return
    if getattr(sampler, "logprobs_mode", None) != "raw_logprobs":
        raise EngineError('vLLM was started with another logprobs_mode than "raw_logprobs": leave it at its default.')
    temperature: list[Tensor | None] = [None]
    compute: Callable[[Tensor], Tensor] = sampler.compute_logprobs
    forward: Callable[..., Any] = sampler.forward

    @wraps(forward)
    def forward_with_temperature(logits: Tensor, sampling_metadata: Any, *args: Any, **kwargs: Any) -> Any:
        temperature[0] = None if sampling_metadata.all_greedy else sampling_metadata.temperature
        try:
            return forward(logits, sampling_metadata, *args, **kwargs)
        finally:
            temperature[0] = None

    @wraps(compute)
    def compute_at_temperature(logits: Tensor) -> Tensor:
        rows = temperature[0]
        if rows is None:
            return compute(logits)
        divisor = torch.where(rows < _GREEDY, 1.0, rows).to(logits.device)
        return compute(logits.float() / divisor.unsqueeze(1))

    sampler.forward = forward_with_temperature
    sampler.compute_logprobs = compute_at_temperature
    sampler.lowpeak_scores_at_temperature = True

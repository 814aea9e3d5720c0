"""The results of `chunked.py` for a head that is any module: LoRA, 4-bit, parametrised, tensor subclasses.

The module computes each chunk's logits, and non-reentrant checkpointing computes them again in backward. So frozen and
trained parameters, dropout and hooks inside the module act as in an ordinary forward.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lowpeak.logprobs.chunked import HeadValues, TokenLoss, call_loss, concatenate
from lowpeak.logprobs.divergence import divergence_of_logits
from lowpeak.logprobs.matmul import wide_dtype
from lowpeak.logprobs.reference import ChunkSettings, is_top1, logprobs_and_entropy

Head = Callable[[Tensor], Tensor]  # hidden_CD -> logits_CV


def module_logprobs(head: Head, hidden_TD: Tensor, targets_T: Tensor, settings: ChunkSettings) -> HeadValues:
    """Return the results of `chunked_logprobs`."""
    chunks = [_module_chunk(head, hidden_TD, targets_T, settings, *span) for span in settings.spans(len(targets_T))]
    logprobs_T, entropy_T, divergence_T = concatenate(chunks)
    return logprobs_T, entropy_T, divergence_T


def module_loss(
    head: Head, hidden_TD: Tensor, targets_T: Tensor, loss: TokenLoss, settings: ChunkSettings
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Return the results of `fused_loss`."""
    spans = settings.spans(len(targets_T))
    chunks = [_module_chunk(head, hidden_TD, targets_T, settings, *span) for span in spans]
    losses = [call_loss(loss, chunk, span) for chunk, span in zip(chunks, spans, strict=True)]
    values = concatenate([tuple(None if x is None else x.detach() for x in chunk) for chunk in chunks])
    logprobs_T, entropy_T, divergence_T = values
    return torch.stack(losses).sum(), logprobs_T, entropy_T, divergence_T


def _module_chunk(
    head: Head, hidden_TD: Tensor, targets_T: Tensor, settings: ChunkSettings, start: int, stop: int
) -> HeadValues:
    hidden_CD, targets_C = hidden_TD[start:stop], targets_T[start:stop]
    if not torch.is_grad_enabled():
        return _module_forward(head, hidden_CD, targets_C, settings, start)
    return checkpoint(_module_forward, head, hidden_CD, targets_C, settings, start, use_reentrant=False)


def _module_forward(
    head: Head, hidden_CD: Tensor, targets_C: Tensor, settings: ChunkSettings, start: int
) -> HeadValues:
    logits_CV = head(hidden_CD)
    wide_CV = logits_CV.to(wide_dtype(logits_CV.dtype))
    final_CV, chunk = settings.scale.apply(wide_CV) / settings.temperature, slice(start, start + len(targets_C))
    logprobs_C, entropy_C = logprobs_and_entropy(final_CV, targets_C)
    divergence_C = None if settings.teacher is None else divergence_of_logits(wide_CV, targets_C, chunk, settings)
    # Last, because it saves nothing for backward: the recomputation stops before it.
    if settings.is_top1_T is not None:
        settings.is_top1_T[chunk] = is_top1(logits_CV.detach(), targets_C)
    if not settings.entropy:
        return logprobs_C, None, divergence_C
    return logprobs_C, entropy_C if settings.entropy_grad else entropy_C.detach(), divergence_C

"""The same as `chunked.py` for a head that is any module: under LoRA, in 4 bits, parametrised, of tensors of its own.

A chunk's logits come from the module itself; they are recomputed in backward, chunk by chunk, by non-reentrant
activation checkpointing, so that frozen and trained parameters, dropout and hooks inside the module behave as ever.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lowpeak.logprobs.chunked import TokenLoss
from lowpeak.logprobs.matmul import wide_dtype
from lowpeak.logprobs.reference import ChunkSettings, pick, top1

Head = Callable[[Tensor], Tensor]  # hidden_CD -> logits_CV
Values = tuple[Tensor, Tensor | None]  # log-probs, and entropies where they were asked for


def module_logprobs(
    head: Head, hidden_TD: Tensor, targets_T: Tensor, settings: ChunkSettings
) -> tuple[Tensor, Tensor | None]:
    """Log-probs [T] and entropies [T] (None unless asked): `chunked_logprobs` with `head(hidden)` as the logits."""
    chunks = [_chunk(head, hidden_TD, targets_T, settings, *span) for span in settings.spans(len(targets_T))]
    return _joined(chunks)


def module_loss(
    head: Head, hidden_TD: Tensor, targets_T: Tensor, loss: TokenLoss, settings: ChunkSettings
) -> tuple[Tensor, Tensor, Tensor | None]:
    """What `one_visit` returns, by recomputing: the summed loss, and the detached log-probs and entropies [T]."""
    spans = settings.spans(len(targets_T))
    chunks = [_chunk(head, hidden_TD, targets_T, settings, *span) for span in spans]
    losses = [loss(*chunk, *span) for chunk, span in zip(chunks, spans, strict=True)]
    logprobs_T, entropy_T = _joined([(x.detach(), None if h is None else h.detach()) for x, h in chunks])
    return torch.stack(losses).sum(), logprobs_T, entropy_T


def _joined(chunks: list[Values]) -> Values:
    entropies = [entropy_C for _, entropy_C in chunks if entropy_C is not None]
    return torch.cat([logprobs_C for logprobs_C, _ in chunks]), torch.cat(entropies) if entropies else None


def _chunk(head: Head, hidden_TD: Tensor, targets_T: Tensor, settings: ChunkSettings, start: int, stop: int) -> Values:
    hidden_CD, targets_C = hidden_TD[start:stop], targets_T[start:stop]
    if not torch.is_grad_enabled():
        return _picked(head, hidden_CD, targets_C, settings, start)
    return checkpoint(_picked, head, hidden_CD, targets_C, settings, start, use_reentrant=False)


def _picked(head: Head, hidden_CD: Tensor, targets_C: Tensor, settings: ChunkSettings, start: int) -> Values:
    logits_CV = head(hidden_CD)
    wide_CV = logits_CV.to(wide_dtype(logits_CV.dtype))
    logprobs_C, entropy_C = pick(settings.scale.apply(wide_CV) / settings.temperature, targets_C)
    # Last: the second run of a checkpoint stops before it, because nothing of it is saved for the backward pass.
    if settings.is_top1_T is not None:
        settings.is_top1_T[start : start + len(targets_C)] = top1(logits_CV.detach(), targets_C)
    if not settings.entropy:
        return logprobs_C, None
    return logprobs_C, entropy_C if settings.entropy_grad else entropy_C.detach()

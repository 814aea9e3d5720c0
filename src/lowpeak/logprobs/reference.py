"""Naive log-probs and divergences that define the fast paths, their settings, and the scales that models apply to logits.

Shapes: T chosen positions, D hidden, V vocabulary, C tokens of a chunk; E hidden and W rows of a teacher's head.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class HeadScale:
    """A model's scaling of its logits: `x = logits * logit_scale`, then `softcap * tanh(x / softcap)` if capped."""

    logit_scale: float = 1.0
    softcap: float | None = None

    def apply(self, logits_TV: Tensor) -> Tensor:
        """Return the scaled and capped logits as a new tensor."""
        scaled_TV = logits_TV * self.logit_scale
        return scaled_TV if self.softcap is None else self.softcap * torch.tanh(scaled_TV / self.softcap)


@dataclass(frozen=True)
class TeacherHead:
    """A teacher's final hidden states at the T tokens, and the head that computes its logits; it gets no gradient.

    `head` is a weight, or a module (adapters, 4 bits) that returns logits [C, W]; a module needs `num_ids`. Divergences are of
    the first K ids: those that both heads have, and no more than `num_ids`.
    """

    hidden_TE: Tensor
    head: Tensor | Callable[[Tensor], Tensor]
    bias_W: Tensor | None = None
    scale: HeadScale = HeadScale()
    num_ids: int | None = None

    def num_common(self, num_ids: int) -> int:
        """Return K for a student's head of `num_ids` rows."""
        known = (num_ids, self.num_ids, len(self.head) if isinstance(self.head, Tensor) else None)
        return min(number for number in known if number is not None)

    def __post_init__(self) -> None:
        assert self.num_ids or isinstance(self.head, Tensor), "a teacher's head that is a module needs num_ids"


@dataclass(frozen=True)
class ChunkSettings:
    """Settings of one pass over T tokens, C = `chunk_size` at a time.

    `entropy_grad` lets gradients flow through the entropy. `inplace_grad_scale` is the factor by which backward will multiply
    the loss; set it only if the head's gradient may be added to its `.grad` during forward (see `inplace_grad.py`).
    `is_top1_T`, bool [T], is an output buffer: True if no id has a greater logit than the target (ties are True).
    With a `teacher`, `beta` chooses its divergence from the student (see `naive_divergence`), and `teacher_logprobs_T`, [T],
    is an output buffer: the teacher's log-probs of the targets, -inf of ids that are not compared.
    """

    chunk_size: int
    temperature: float = 1.0
    scale: HeadScale = HeadScale()
    entropy: bool = False
    entropy_grad: bool = False
    inplace_grad_scale: float | None = None
    is_top1_T: Tensor | None = None
    teacher: TeacherHead | None = None
    beta: float = 1.0
    teacher_logprobs_T: Tensor | None = None

    @property
    def gain(self) -> float:
        """Factor between a raw and a final logit, without bias and cap."""
        return self.scale.logit_scale / self.temperature

    def __post_init__(self) -> None:
        assert self.chunk_size >= 1, f"chunk_size must be at least 1, got {self.chunk_size}"
        assert self.temperature > 0, f"temperature must be above 0, got {self.temperature}"
        assert self.entropy or not self.entropy_grad, "entropy_grad=True needs entropy=True"
        assert 0 <= self.beta <= 1, f"beta must be in [0, 1], got {self.beta}"

    def spans(self, num_tokens: int) -> list[tuple[int, int]]:
        """Return [start, stop) of each chunk."""
        # One empty chunk for no tokens, so that the autograd graph still reaches the head.
        starts = range(0, max(num_tokens, 1), self.chunk_size)
        return [(start, min(start + self.chunk_size, num_tokens)) for start in starts]


def naive_logprobs(
    hidden_TD: Tensor,
    weight_VD: Tensor,
    bias_V: Tensor | None,
    targets_T: Tensor,
    temperature: float = 1.0,
    scale: HeadScale = HeadScale(),
) -> tuple[Tensor, Tensor]:
    """Return the log-prob of each target and the entropy at each position, [T] and [T], from logits [T, V].

    `log_softmax(scale(hidden @ weight.T + bias) / temperature)[targets]` and `-sum(p * log(p))`.
    """
    logits_TV = torch.nn.functional.linear(hidden_TD, weight_VD, bias_V)
    return logprobs_and_entropy(scale.apply(logits_TV) / temperature, targets_T)


def logprobs_and_entropy(logits_TV: Tensor, targets_T: Tensor) -> tuple[Tensor, Tensor]:
    """Return the log-prob of each target and each position's entropy of final logits, in fp32 at least: [T] and [T]."""
    wide = torch.promote_types(logits_TV.dtype, torch.float32)
    logprobs_TV = torch.log_softmax(logits_TV, dim=-1, dtype=wide)
    logprobs_T = logprobs_TV.gather(-1, targets_T[:, None])[:, 0]
    return logprobs_T, -(logprobs_TV.exp() * logprobs_TV).sum(-1)


def naive_divergence(logits_TK: Tensor, teacher_TK: Tensor, beta: float) -> Tensor:
    """Return the divergence of student and teacher at each position, [T], from their final logits.

    With p and q the softmax of student and teacher, and m = (1 - beta) p + beta q: KL(q | p) for beta 0, KL(p | q) for 1,
    else the generalised JSD beta KL(q | m) + (1 - beta) KL(p | m) of arXiv 2306.13649.
    """
    log_p, log_q = (torch.log_softmax(each, -1) for each in (logits_TK, teacher_TK))
    if beta == 0:
        return (log_q.exp() * (log_q - log_p)).sum(-1)
    if beta == 1:
        return (log_p.exp() * (log_p - log_q)).sum(-1)
    log_m = torch.logaddexp(log_p + math.log(1 - beta), log_q + math.log(beta))
    parts = beta * log_q.exp() * (log_q - log_m) + (1 - beta) * log_p.exp() * (log_p - log_m)
    return parts.sum(-1)


def is_top1(logits_TV: Tensor, targets_T: Tensor) -> Tensor:
    """Return whether no logit is greater than the target's, bool [T]; ties are True."""
    return logits_TV.gather(-1, targets_T[:, None])[:, 0] >= logits_TV.amax(-1)


# Attribute of a text config -> how its value v multiplies the logits. Names as in transformers' modelling files.
_MULTIPLIERS = ("logit_scale", "lm_head_multiplier", "output_multiplier")  # Cohere, FalconH1, Muse
_DIVISORS = ("logits_scaling", "logits_mup_width_multiplier")  # Granite and MiniCPM3, Inkling (which divide the hidden)
_CAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")  # Gemma, RecurrentGemma, xLSTM


def head_scale(config: Any) -> HeadScale:
    """Return the scale and cap that a transformers config names; `verify_head` detects any other change of the logits.

    A divisor of the hidden states counts as a divisor of the logits: true without a bias, as in these models.
    """
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    scale = 1.0
    for name in _MULTIPLIERS:
        scale *= _number(text, name) or 1.0
    for name in _DIVISORS:
        value = _number(text, name) or 1.0
        # HyperCLOVAX uses Granite's attribute as a factor.
        scale = scale * value if str(getattr(text, "model_type", "")).startswith("hyperclovax") else scale / value
    caps = [cap for name in _CAPS if (cap := _number(text, name))]
    return HeadScale(scale, caps[0] if caps else None)


def _number(config: Any, name: str) -> float | None:
    value = getattr(config, name, None)
    return float(value) if isinstance(value, int | float) else None

"""What a log-prob is: the naive meaning that every fast path is tested against, and the scales that models give logits.

Shapes: T chosen positions, D hidden, V vocabulary, C tokens of a chunk.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class HeadScale:
    """What a model does to its logits: `x = logits * logit_scale`, then `softcap * tanh(x / softcap)` if capped."""

    logit_scale: float = 1.0
    softcap: float | None = None

    def apply(self, logits_TV: Tensor) -> Tensor:
        """The scaled and capped logits, as a new tensor."""
        scaled_TV = logits_TV * self.logit_scale
        return scaled_TV if self.softcap is None else self.softcap * torch.tanh(scaled_TV / self.softcap)


@dataclass(frozen=True)
class ChunkSettings:
    """How one pass is made: C = `chunk_size` tokens at a time. `entropy_grad` lets a gradient through the entropy.

    `promised_scale` is what backward will multiply the loss by, if that is known and the head's gradient may be added
    to its `.grad` where it is formed (see `direct.py`). `is_top1_T`, bool [T], is filled in: whether no id of the row
    has a greater logit than the target, so that a target that ties with the greatest counts.
    """

    chunk_size: int
    temperature: float = 1.0
    scale: HeadScale = HeadScale()
    entropy: bool = False
    entropy_grad: bool = False
    promised_scale: float | None = None
    is_top1_T: Tensor | None = None

    @property
    def gain(self) -> float:
        """What a logit is multiplied by where nothing caps it."""
        return self.scale.logit_scale / self.temperature

    def __post_init__(self) -> None:
        assert self.chunk_size >= 1, f"a chunk holds at least one token, got {self.chunk_size}"
        assert self.temperature > 0, f"log-probs need a temperature above 0, got {self.temperature}"
        assert self.entropy or not self.entropy_grad, "a gradient of the entropy needs the entropy"

    def spans(self, num_tokens: int) -> list[tuple[int, int]]:
        """[start, stop) of each chunk; one empty chunk for no tokens, so that the graph still reaches the head."""
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
    """Log-prob of each target and entropy at each position, [T] and [T], with all of [T, V] alive.

    `log_softmax(scale(hidden @ weight.T + bias) / temperature)[targets]` and `-sum(p * log(p))`.
    """
    logits_TV = torch.nn.functional.linear(hidden_TD, weight_VD, bias_V)
    return pick(scale.apply(logits_TV) / temperature, targets_T)


def pick(logits_TV: Tensor, targets_T: Tensor) -> tuple[Tensor, Tensor]:
    """Log-prob of each target and entropy of each row of final logits, in fp32 at least: [T] and [T]."""
    wide = torch.promote_types(logits_TV.dtype, torch.float32)
    logprobs_TV = torch.log_softmax(logits_TV, dim=-1, dtype=wide)
    logprobs_T = logprobs_TV.gather(-1, targets_T[:, None])[:, 0]
    return logprobs_T, -(logprobs_TV.exp() * logprobs_TV).sum(-1)


def top1(logits_TV: Tensor, targets_T: Tensor) -> Tensor:
    """Whether no logit of a row is greater than its target's: bool [T]; a target that ties with the greatest counts."""
    return logits_TV.gather(-1, targets_T[:, None])[:, 0] >= logits_TV.amax(-1)


# Attribute of a text config -> how its value v multiplies the logits. Names as in transformers' modelling files.
_MULTIPLIERS = ("logit_scale", "lm_head_multiplier", "output_multiplier")  # Cohere, FalconH1, Muse
_DIVISORS = ("logits_scaling", "logits_mup_width_multiplier")  # Granite and MiniCPM3, Inkling (which divide the hidden)
_CAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")  # Gemma, RecurrentGemma, xLSTM


def head_scale(config: Any) -> HeadScale:
    """The scale and cap that a transformers config names; whatever else a model does is found by `verify_head`.

    A divisor of the hidden states is a divisor of the logits where the head has no bias, which holds for these models.
    """
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    scale = 1.0
    for name in _MULTIPLIERS:
        scale *= _number(text, name) or 1.0
    for name in _DIVISORS:
        value = _number(text, name) or 1.0
        # HyperCLOVAX took Granite's name for a factor.
        scale = scale * value if str(getattr(text, "model_type", "")).startswith("hyperclovax") else scale / value
    caps = [cap for name in _CAPS if (cap := _number(text, name))]
    return HeadScale(scale, caps[0] if caps else None)


def _number(config: Any, name: str) -> float | None:
    value = getattr(config, name, None)
    return float(value) if isinstance(value, int | float) else None

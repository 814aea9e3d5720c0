"""Numbers of a model's parameters, from a model of fake tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from lowpeak.models import expert_bytes
from lowpeak.parallel import decoder_layers


@dataclass(frozen=True)
class ModelCounts:
    """Numbers of a model's parameters: all, trained, used by one token, of its largest layer and its three tensors, of its head.

    `loaded_bytes` are of all of them, as loaded, `frozen_bytes` of the frozen ones, `expert_bytes` of experts of three
    dimensions. `largest` is the largest tensor's.
    """

    total: int
    trained: int
    active: int
    largest_layer: int
    largest_three_of_layer: int
    head: int
    loaded_bytes: int
    frozen_bytes: int
    largest: int
    largest_trained: int
    expert_bytes: int

    @property
    def in_pass(self) -> int:
        """Parameters that a pass has on a device if it gets them layer by layer: a layer, the next one, embeddings, head."""
        return 2 * self.largest_layer + 2 * self.head

    @classmethod
    def of(cls, make_model: Callable[[], nn.Module]) -> ModelCounts:
        with FakeTensorMode(allow_non_fake_inputs=True):
            model: Any = make_model()
            head: Any = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
            parameters = list(model.parameters())
            layers = [list(layer.parameters()) for layer in decoder_layers(model)]
            return cls(
                _count(parameters),
                _count([p for p in parameters if p.requires_grad]),
                _active(model, _count(parameters)),
                max(map(_count, layers), default=0),
                max((_count(sorted(layer, key=lambda p: p.numel())[-3:]) for layer in layers), default=0),
                0 if head is None else int(head.weight.numel()),
                sum(p.nbytes for p in parameters),
                sum(p.nbytes for p in parameters if not p.requires_grad),
                max(p.numel() for p in parameters),
                max((p.numel() for p in parameters if p.requires_grad), default=0),
                expert_bytes(model),
            )


def _active(model: Any, total: int) -> int:
    """Return the parameters that one token uses: of a mixture of experts, those of the experts that it chooses."""
    text = model.config.get_text_config()
    experts = getattr(text, "num_experts", None) or getattr(text, "num_local_experts", None) or 0
    chosen = getattr(text, "num_experts_per_tok", None) or 0
    if not experts or not chosen:
        return total
    idle = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name) * (1 - chosen / experts)
    return int(total - idle)


def _count(parameters: list[nn.Parameter]) -> int:
    return sum(getattr(p, "unquantized_numel", p.numel()) for p in parameters)

"""The rehearsal of a deep model, from two rehearsals of few of its layers: every phase is linear in the layers.

bytes(L) = bytes(few) + (L - few) / (more - few) * (bytes(more) - bytes(few)), where `more` has one period of layers more than
`few`: one layer if all are alike, several if sliding and full attention take turns. Other models are rehearsed whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from lowpeak.parallel import decoder_layers
from lowpeak.plan.inputs import RunInputs
from lowpeak.plan.rehearsal import Rehearsal

_LEAST_LAYERS = 3  # of the smaller model


@dataclass(frozen=True)
class FewLayers:
    """Numbers of layers to rehearse in place of `layers`; all three are equal for a model that is rehearsed whole."""

    layers: int
    few: int
    more: int

    @classmethod
    def of(cls, inputs: RunInputs, least: int = _LEAST_LAYERS) -> FewLayers:
        """Return the least numbers of layers that show how the memory of a planned policy grows with its layers.

        At least three of them are rehearsed on ranks: two gathered layers and one whose gradients are summed are in memory
        together.
        """
        signatures = _signatures(inputs)
        layers = len(signatures)
        whole = cls(layers, layers, layers)
        # The last layers share a cache, of a small model, too.
        if getattr(inputs.config.get_text_config(), "num_kv_shared_layers", 0):
            return whole
        few, more = _small_models(signatures, least)
        if few + more >= layers or _signatures(inputs.with_layers(more)) != signatures[:more]:
            return whole
        return cls(layers, few, more)

    @property
    def saves(self) -> bool:
        """Return whether fewer layers than all of them are rehearsed."""
        return self.more < self.layers

    def rehearse(self, rehearse: Callable[[int], Rehearsal]) -> Rehearsal:
        """Return the rehearsal of all layers, extrapolated from two of `rehearse(number of layers)`."""
        few, more = rehearse(self.few), rehearse(self.more)
        return few.extended(more, self.layers - self.few, self.more - self.few)


def _signatures(inputs: RunInputs) -> list[Any]:
    """Return what tells a policy's layers apart: their parameters, and their kinds by the config."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        layers = decoder_layers(inputs.make_policy())
    kinds = getattr(inputs.config.get_text_config(), "layer_types", None) or ()
    if len(kinds) != len(layers):  # other lists of layers are among them, or none has a kind
        kinds = [None] * len(layers)
    return [(kind, *_parameters(layer)) for kind, layer in zip(kinds, layers, strict=True)]


def _parameters(layer: nn.Module) -> list[Any]:
    return [(name, p.shape, p.dtype, p.requires_grad) for name, p in layer.named_parameters()]


def _small_models(signatures: Sequence[Any], least: int) -> tuple[int, int]:
    """Return the least numbers of layers, a period apart; all layers twice if none are alike.

    Layers after the first ones repeat with the period; at least `least` of them are in the smaller model.
    """
    layers = len(signatures)
    best = (layers, layers)
    for period in range(1, layers):
        differ = [i for i in range(layers - period) if signatures[i] != signatures[i + period]]
        few = (differ[-1] + 1 if differ else 0) + period * -(-least // period)
        best = min(best, (few, few + period), key=lambda numbers: numbers[1])
    return best

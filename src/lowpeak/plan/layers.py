"""The rehearsal of a deep model, from rehearsals of few of its layers: every phase is linear in the layers of each kind.

bytes(all) = bytes(few) + sum over `more` of times * (bytes(more) - bytes(few)). If kinds of layers take turns, as sliding and
full attention do, the one model of `more` has a period of layers more than `few`; if they follow in another order, each of `more`
has one layer of a kind more. Models without layers that are alike are rehearsed whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from lowpeak.parallel import decoder_layers
from lowpeak.plan.inputs import RunInputs
from lowpeak.plan.rehearsal import Rehearsal

_LEAST_LAYERS = 3  # of the smaller model


class Extension(NamedTuple):
    """A model of more layers than `FewLayers.few`, which lacks times / divisor of their bytes."""

    layers: tuple[int, ...]
    times: int
    divisor: int


@dataclass(frozen=True)
class FewLayers:
    """Layers to rehearse in place of all, by number: `few`, and models of `more`; none of a model that is rehearsed whole."""

    few: tuple[int, ...]
    more: tuple[Extension, ...] = ()

    @classmethod
    def of(cls, inputs: RunInputs, least: int = _LEAST_LAYERS) -> FewLayers:
        """Return the least numbers of layers that show how the memory of a planned policy grows with its layers.

        At least three of them are rehearsed on ranks: two gathered layers and one whose gradients are summed are in memory
        together.
        """
        signatures = _signatures(inputs)
        # Layers that share a cache are the last ones, of a small model, too.
        shares_cache = getattr(inputs.config.get_text_config(), "num_kv_shared_layers", 0)
        for found in () if shares_cache else (_by_period(signatures, least), _by_kind(signatures, least)):
            models = [extension.layers for extension in found.more]
            if sum(map(len, (found.few, *models))) < len(signatures) and all(
                _signatures(inputs.with_layers(layers)) == [signatures[i] for i in layers] for layers in models
            ):
                return found
        return cls(tuple(range(len(signatures))))

    @property
    def extrapolates(self) -> bool:
        """Return whether fewer layers than all of them are rehearsed."""
        return bool(self.more)

    def rehearse(self, rehearse: Callable[[Sequence[int]], Rehearsal]) -> Rehearsal:
        """Return the rehearsal of all layers, extrapolated from those of `rehearse(layers)`."""
        return rehearse(self.few).extended([(rehearse(each.layers), each.times, each.divisor) for each in self.more])


def _signatures(inputs: RunInputs) -> list[Any]:
    """Return the kinds of a policy's layers: by their parameters, and by the config."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        layers = decoder_layers(inputs.make_policy())
    kinds = getattr(inputs.config.get_text_config(), "layer_types", None) or ()
    if len(kinds) != len(layers):  # other lists of layers are among them, or none has a kind
        kinds = [None] * len(layers)
    return [(kind, *_parameters(layer)) for kind, layer in zip(kinds, layers, strict=True)]


def _parameters(layer: nn.Module) -> list[Any]:
    return [(name, p.shape, p.dtype, p.requires_grad) for name, p in layer.named_parameters()]


def _by_period(signatures: Sequence[Any], least: int) -> FewLayers:
    """Return the least numbers of first layers, a period apart; all layers if none are alike.

    Layers after the first ones repeat with the period; at least `least` of them are in the smaller model.
    """
    layers = len(signatures)
    best = (layers, 0)
    for period in range(1, layers):
        differ = [i for i in range(layers - period) if signatures[i] != signatures[i + period]]
        few = (differ[-1] + 1 if differ else 0) + period * -(-least // period)
        best = min(best, (few, period), key=sum)
    few, period = best
    if few + period >= layers:
        return FewLayers(tuple(range(layers)))
    return FewLayers(tuple(range(few)), (Extension(tuple(range(few + period)), layers - few, period),))


def _by_kind(signatures: Sequence[Any], least: int) -> FewLayers:
    """Return two layers of each kind, the first ones, and models with one more of each; of a single kind `least`."""
    kinds: dict[Any, list[int]] = {}
    for i, signature in enumerate(signatures):
        kinds.setdefault(signature, []).append(i)
    per_kind = 2 if len(kinds) > 1 else least
    few = sorted(i for layers in kinds.values() for i in layers[:per_kind])
    more = [
        Extension(tuple(sorted([*few, layers[per_kind]])), len(layers) - per_kind, 1)
        for layers in kinds.values()
        if len(layers) > per_kind
    ]
    return FewLayers(tuple(few), tuple(more))

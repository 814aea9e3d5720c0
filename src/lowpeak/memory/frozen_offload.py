"""Frozen offloading: a frozen model's weights are in host memory, and are copied to the device unit by unit in each forward.

A unit is a decoder layer, or a module outside of the layers without a layer inside, such as the embeddings and the head. Its
weights are one flat buffer in page-locked memory, hence one copy. While a unit computes, the next one is copied on a separate
stream: two are on the device at a time. Buffers, and weights that are too small to be worth a copy, stay on the device.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import accumulate

import torch
from torch import Tensor, nn

from lowpeak.memory.activation_offload import LEAST_BYTES, AsyncHostMover
from lowpeak.memory.page_locked import empty_page_locked

_ALIGNMENT = 512  # bytes, as of torch's allocator on CUDA: kernels read aligned weights faster


def offload_frozen(
    model: nn.Module, layers: Collection[nn.Module], mover: AsyncHostMover, least_bytes: int = LEAST_BYTES
) -> None:
    """Move a model's weights to host memory; each forward copies them to the mover's device, unit by unit.

    Between forwards, also after one that raised, the model's parameters are those in host memory, which may be changed in place.
    """
    units, groups = _find_units(model, layers, least_bytes)
    stream = _UnitStream()
    for group in groups:
        if group.num_bytes < least_bytes:
            for weight in group.weights:
                weight.move(weight.parameter.detach().to(mover.device))
        else:
            group.move_to_host(mover)
    for unit in units:
        stream.follow(unit)
    model.register_forward_hook(lambda *_: stream.finish(), always_call=True)
    for module in model.modules():
        module._buffers.update(
            {name: each.to(mover.device) for name, each in module._buffers.items() if each is not None}
        )


def most_streamed_bytes(model: nn.Module, layers: Collection[nn.Module], least_bytes: int = LEAST_BYTES) -> int:
    """Return the most bytes of copied weights on the device at a time, for units in module order."""
    units, _ = _find_units(model, layers, least_bytes)
    outer = {group for unit in units if unit.has_units for group in unit.groups}
    inner = [unit.groups for unit in units if not unit.has_units]
    pairs = zip(inner, [*inner[1:], []], strict=False)
    return max((sum(group.num_bytes for group in outer.union(*pair)) for pair in pairs), default=0)


@dataclass(eq=False)
class _Unit:
    """A module whose forward needs the weights of these groups; `has_units`: other units run inside of it."""

    module: nn.Module
    has_units: bool
    groups: list[_Group] = field(default_factory=list)


@dataclass(eq=False)
class _Weight:
    """A parameter and its slots `module._parameters[name]`; a tied one has several."""

    parameter: nn.Parameter
    slots: list[tuple[nn.Module, str]] = field(default_factory=list)
    units: list[_Unit] = field(default_factory=list)

    def place(self, parameter: nn.Parameter) -> None:
        for module, name in self.slots:
            module._parameters[name] = parameter

    def move(self, values: Tensor) -> None:
        """Replace the parameter by one with `values`."""
        self.parameter = nn.Parameter(values, requires_grad=False)
        self.place(self.parameter)


class _Group:
    """Weights that the same units use: one buffer in host memory and, while they are needed, one on the device."""

    def __init__(self, weights: list[_Weight]) -> None:
        self.weights = weights
        sizes = [-(-weight.parameter.nbytes // _ALIGNMENT) * _ALIGNMENT for weight in weights]
        *self._starts, self.num_bytes = accumulate(sizes, initial=0)
        self._on_device: Tensor | None = None

    def move_to_host(self, mover: AsyncHostMover) -> None:
        self._mover = mover
        # Kept, because the pages are locked as long as this tensor lives.
        self._host = empty_page_locked(self.num_bytes, torch.uint8, mover.device)
        for weight, values in zip(self.weights, self._views(self._host), strict=True):
            weight.move(values.copy_(weight.parameter.detach()))

    def load(self) -> None:
        """Begin to copy the weights to the device."""
        self._on_device = self._mover.to_device(self._host)

    def place(self) -> None:
        """Let the model compute with the weights on the device, once they have arrived."""
        assert self._on_device is not None, "the weights were loaded"
        self._mover.wait(self._on_device)
        for weight, values in zip(self.weights, self._views(self._on_device), strict=True):
            weight.place(nn.Parameter(values, requires_grad=False))

    def unload(self) -> None:
        """Free the memory on the device."""
        assert self._on_device is not None, "the weights were loaded"
        # A copy that no unit waited for may be under way, and the freed memory goes to the stream that waits.
        self._mover.wait(self._on_device)
        self._on_device = None
        for weight in self.weights:
            weight.place(weight.parameter)

    def _views(self, flat: Tensor) -> Iterator[Tensor]:
        for weight, start in zip(self.weights, self._starts, strict=True):
            like = weight.parameter
            yield flat[start : start + like.nbytes].view(like.dtype).view(like.shape)


class _UnitStream:
    """Loads units before they run: the weights of the running ones are on the device, and of the one expected next.

    Units are expected in the order of the last forward.
    """

    def __init__(self) -> None:
        self._running: list[_Unit] = []
        self._order: list[_Unit] = []
        self._last_order: list[_Unit] = []
        self._loaded: list[_Group] = []

    def follow(self, unit: _Unit) -> None:
        """Load the unit for each of its forwards."""
        unit.module.register_forward_pre_hook(lambda *_: self._begin(unit), prepend=True)
        unit.module.register_forward_hook(lambda *_: self._running.remove(unit))

    def finish(self) -> None:
        """End the model's forward, which may have raised inside of units."""
        self._last_order, self._order = self._order, []
        self._running.clear()
        self._unload_except([])

    def _begin(self, unit: _Unit) -> None:
        self._running.append(unit)
        self._order.append(unit)
        self._unload_except(self._running)
        self._load(unit)
        for group in unit.groups:
            group.place()
        # The unit that ran after this one, at the same place, in the last forward.
        place = len(self._order)
        if self._last_order[place - 1 : place] == [unit]:
            for following in self._last_order[place : place + 1]:
                self._load(following)

    def _load(self, unit: _Unit) -> None:
        for group in unit.groups:
            if group not in self._loaded:
                group.load()
                self._loaded.append(group)

    def _unload_except(self, units: list[_Unit]) -> None:
        needed = {group for unit in units for group in unit.groups}
        for group in [group for group in self._loaded if group not in needed]:
            self._loaded.remove(group)
            group.unload()


def _find_units(model: nn.Module, layers: Collection[nn.Module], least_bytes: int) -> tuple[list[_Unit], list[_Group]]:
    """Return the units that have groups of at least `least_bytes`, in the order of modules, and all groups of weights."""
    units: list[_Unit] = []
    weights: dict[int, _Weight] = {}
    # A module may be the child of several.
    for module, holders in dict(_modules_with_weights(model, frozenset(layers))).items():
        unit = _Unit(module, has_units=len(holders) < len(list(module.modules())))
        units.append(unit)
        for holder in holders:
            for name, parameter in holder._parameters.items():
                if parameter is not None:
                    weight = weights.setdefault(id(parameter), _Weight(parameter))
                    weight.slots.append((holder, name))
                    if unit not in weight.units:
                        weight.units.append(unit)
    groups = _group_by_units(weights.values(), least_bytes)
    return [unit for unit in units if unit.groups], groups


def _group_by_units(weights: Iterable[_Weight], least_bytes: int) -> list[_Group]:
    """Return groups of weights that the same units use; units get those of at least `least_bytes`."""
    by_units: dict[tuple[_Unit, ...], list[_Weight]] = {}
    for weight in weights:
        by_units.setdefault(tuple(weight.units), []).append(weight)
    groups = [_Group(members) for members in by_units.values()]
    for users, group in zip(by_units, groups, strict=True):
        for unit in users if group.num_bytes >= least_bytes else ():
            unit.groups.append(group)
    return groups


def _modules_with_weights(
    module: nn.Module, layers: Collection[nn.Module]
) -> Iterator[tuple[nn.Module, list[nn.Module]]]:
    """Yield each unit's module, and the modules whose weights its forward needs: itself if layers are inside, otherwise all."""
    inside = list(module.modules())
    if module in layers or not any(each in layers for each in inside):
        yield module, inside
        return
    yield module, [module]
    for child in module.children():
        yield from _modules_with_weights(child, layers)

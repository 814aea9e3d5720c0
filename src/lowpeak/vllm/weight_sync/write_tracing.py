"""Tracing of vLLM's weight loading, and verification by reading the written regions back.

vLLM's loaders join tensors (q, k and v), shard them (tensor parallelism), pad them (the vocabulary) and share them (a
tied head), differently in each model. So nothing is assumed: while a tensor is loaded, every write to a parameter's
storage is recorded, with its region and the checksum of its source. After the update each region is read back and
summed. This detects a tensor that was damaged in transit or overwritten by a later one, a parameter that received
nothing, and any later change.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lowpeak.vllm.weight_sync.buckets import read_checksums
from lowpeak.vllm.weight_sync.checksum import tensor_checksum

RegionKey = tuple[str, int]  # tensor name, index of the region


@dataclass(frozen=True)
class Region:
    """Region of a parameter's storage that one tensor's values were written to.

    `num_read` counts the tensor's elements in it. `expected` is the checksum of the written source; None if that is
    the complete tensor as it was sent.
    """

    parameter: str
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    num_read: int
    expected: Tensor | None

    def of(self, parameters: Mapping[str, Tensor]) -> Tensor:
        return parameters[self.parameter].data.as_strided(self.size, self.stride, self.offset)

    @property
    def numel(self) -> int:
        return torch.Size(self.size).numel()


class WriteTracing(TorchDispatchMode):
    """Dispatch mode that records writes to parameters' storage while `tensor` is loaded."""

    def __init__(self, names: Mapping[int, str], tensor: Tensor, summing: bool) -> None:
        super().__init__()
        self.regions: list[Region] = []
        self.num_filled: dict[str, int] = {}
        self._names = names
        self._tensor = tensor
        self._summing = summing

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func._schema.is_mutable and args and isinstance(args[0], Tensor) and args[0].numel():
            name = self._names.get(args[0].untyped_storage().data_ptr())
            if name is not None:
                self._record(name, args[0], func, args[1:])
        return result

    def _record(self, name: str, target: Tensor, func: Any, rest: tuple[Any, ...]) -> None:
        # Any other write is padding.
        if func._overloadpacket is not torch.ops.aten.copy_:
            self.num_filled[name] = self.num_filled.get(name, 0) + target.numel()
            return
        source = rest[0]
        is_complete = target.is_contiguous() and _is_same_range(source, self._tensor) and source.dtype == target.dtype
        is_complete = is_complete or not self._summing
        expected = None if is_complete else tensor_checksum(source.expand_as(target), target.dtype)
        size, stride = tuple(target.shape), tuple(target.stride())
        self.regions.append(Region(name, size, stride, int(target.storage_offset()), source.numel(), expected))


def _is_same_range(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors are the same elements of the same storage in the same flat order."""
    return (
        one.data_ptr() == other.data_ptr()
        and one.numel() == other.numel()
        and one.is_contiguous()
        and other.is_contiguous()
    )


@dataclass
class Placement:
    """Regions in which vLLM stored each tensor of one model.

    `expected` and `received` are checksums by region and by tensor, once verified.
    """

    model: nn.Module
    regions: dict[str, list[Region]] = field(default_factory=dict)
    expected: dict[RegionKey, str] = field(default_factory=dict)
    received: dict[str, Tensor] = field(default_factory=dict)
    _num_filled: dict[str, int] = field(default_factory=dict)
    _names: dict[int, str] = field(default_factory=dict)
    _summing: bool = True

    def begin(self, summing: bool = True, skipped: Collection[str] = ()) -> None:
        """Record the parameters' storage, which a wake-up may move; ignore `skipped` parameters."""
        self._names, self._summing = {}, summing
        for name, parameter in self.model.named_parameters():
            if parameter.numel() and name not in skipped:
                self._names.setdefault(parameter.untyped_storage().data_ptr(), name)

    def load(self, name: str, tensor: Tensor, load: Callable[[], Any]) -> Any:
        """Call `load` and return its result; record what it wrote of `tensor`.

        The tensor's checksum is computed here unless its region's checksum is that of the complete tensor.
        """
        with WriteTracing(self._names, tensor, self._summing) as tracing:
            result = load()
        self.regions[name] = tracing.regions
        self._num_filled |= tracing.num_filled
        self.received.pop(name, None)
        if self._summing and (not tracing.regions or any(region.expected is not None for region in tracing.regions)):
            self.received[name] = tensor_checksum(tensor)
        return result

    def verify(self, sent: Mapping[str, str]) -> list[str]:
        """Return the tensors that differ in any bit from those that were sent; keep the checksums of the regions."""
        for name in self.regions.keys() - sent.keys():
            del self.regions[name]
        expected = self._expected(sent)
        actual = self._read()
        received = read_checksums({name: value for name, value in self.received.items() if name in sent})
        different = {key[0] for key in actual if actual[key] != expected[key]}
        different |= {name for name, value in received.items() if value != sent[name]}
        self.expected = actual
        return sorted(different)

    def changed(self) -> list[str]:
        """Return the tensors whose regions changed since they were verified."""
        actual = self._read()
        return sorted({key[0] for key in actual if actual[key] != self.expected.get(key)})

    def missing(self, sent: Iterable[str]) -> list[str]:
        """Return the parameters that the tensors did not fill completely; a remainder of zeros counts as padding."""
        parameters = dict(self.model.named_parameters())
        written: dict[str, list[Region]] = {}
        for name in sent:
            for region in self.regions.get(name, ()):
                written.setdefault(region.parameter, []).append(region)
        return [
            name
            for name in self._names.values()
            if not _is_covered(parameters, name, written.get(name, []), self._num_filled.get(name, 0))
        ]

    def num_placed(self, names: Iterable[str]) -> dict[str, int]:
        """Return how many elements of each tensor are in this worker's parameters."""
        return {name: sum(region.num_read for region in self.regions.get(name, ())) for name in names}

    def _expected(self, sent: Mapping[str, str]) -> dict[RegionKey, str]:
        partial = {
            (n, i): r.expected for n, rs in self.regions.items() for i, r in enumerate(rs) if r.expected is not None
        }
        complete = {(n, i): sent[n] for n, rs in self.regions.items() for i, r in enumerate(rs) if r.expected is None}
        return read_checksums(partial) | complete

    def _read(self) -> dict[RegionKey, str]:
        parameters = dict(self.model.named_parameters())
        return read_checksums(
            {
                (name, i): tensor_checksum(region.of(parameters))
                for name, regions in self.regions.items()
                for i, region in enumerate(regions)
            }
        )


def _is_covered(parameters: Mapping[str, Tensor], name: str, regions: list[Region], num_filled: int) -> bool:
    parameter = parameters[name]
    num_written = sum(region.numel for region in regions)
    if num_written + num_filled >= parameter.numel():
        return True
    nonzero = sum(int(torch.count_nonzero(region.of(parameters))) for region in regions)
    return num_written > 0 and int(torch.count_nonzero(parameter.data)) == nonzero

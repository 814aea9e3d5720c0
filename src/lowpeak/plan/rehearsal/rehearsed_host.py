"""Optimizers and host memory of a rehearsal: bytes on the host, and bytes copied."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily

from lowpeak.arguments import StorageFormat
from lowpeak.memory import COPIES_UNDER_WAY, Kind
from lowpeak.optim import CompactAdamW, HostMemory, TensorStep, copy_to_device
from lowpeak.parallel import place_optimizer
from lowpeak.plan.rehearsal.storage_meter import StorageMeter
from lowpeak.ranks import Ranks


class RehearsedHost(HostMemory):
    """Fake host memory: the meter counts the tensors of the device alone."""

    def __init__(self, meter: StorageMeter) -> None:
        super().__init__(torch.device("cpu"))
        self._meter = meter
        self.gradients = self.states = self.activations = self._live_activations = 0
        self.count_copies_from_here()

    def count_copies_from_here(self) -> None:
        """Set the counts of copied bytes to 0."""
        self.to_host = self.to_device = self.batches_to_host = self.batches_to_device = 0

    def of_phase(self, name: str) -> dict[Kind, int]:
        """Return the bytes that are in host memory in a phase; nothing has left the device while models load."""
        if name == "load":
            return {}
        kinds = {Kind.GRADIENTS: self.gradients, Kind.OPTIMIZER: self.states}
        return {**kinds, Kind.ACTIVATIONS: self.activations} if name in ("forward", "backward") else kinds

    def copy_activations(self, flat: Tensor) -> Tensor:
        """Return a host copy of activations, which counts until it is freed."""
        copy = self._uncounted(flat.numel(), flat.dtype)
        size = flat.nbytes
        self.batches_to_host += size
        self._live_activations += size
        self.activations = max(self.activations, self._live_activations)
        weakref.finalize(copy.untyped_storage(), self._free_activations, size)
        return copy

    def _free_activations(self, size: int) -> None:
        self._live_activations -= size

    def empty(self, size: int, dtype: torch.dtype) -> Tensor:
        buffer = self._uncounted(size, dtype)
        self.gradients += buffer.nbytes
        return buffer

    def zeros(self, size: int, dtype: torch.dtype) -> Tensor:
        buffer = self._uncounted(size, dtype)
        self.states += buffer.nbytes
        return buffer

    def _uncounted(self, size: int, dtype: torch.dtype) -> Tensor:
        with self._meter.paused():
            buffer = torch.empty(size, dtype=dtype)
        self._meter.ignore(buffer.untyped_storage())
        return buffer

    def add(self, total: Tensor, values: Tensor, overwrite: bool = False) -> None:
        self.batches_to_host += values.nbytes

    def add_rows(self, total_VD: Tensor, ids_N: Tensor, values_ND: Tensor) -> None:
        self.batches_to_host += values_ND.nbytes

    def multiply(self, total: Tensor, factor: Tensor) -> Tensor | None:
        return factor

    def visit(self, step: TensorStep, update: Callable[[TensorStep], None], factor: Tensor | None) -> None:
        states = sum(values.nbytes for values in step.tensor.state.values())
        self.to_device += states + step.gradients.nbytes
        self.to_host += states
        first, *_ = step.tensor.chunks(self.piece)
        # As many pieces as are under way at a time.
        under_way = [copy_to_device(step.slice(*first), step.gradients.device) for _ in range(self.num_pieces)]
        update(under_way[0])


class RehearsedMover:
    """The mover of an `ActivationOffload` between the rehearsed device and host."""

    device = torch.device("cpu")

    def __init__(self, host: RehearsedHost) -> None:
        self._host = host
        self._leaving: deque[Tensor] = deque(maxlen=COPIES_UNDER_WAY)

    def to_host(self, flat: Tensor) -> Tensor:
        self._leaving.append(flat)
        return self._host.copy_activations(flat)

    def to_device(self, host: Tensor) -> Tensor:
        self._leaving.clear()
        self._host.batches_to_device += host.nbytes
        return torch.empty_like(host)

    def wait(self, flat: Tensor) -> None:
        """Do nothing: fake tensors are copied at once."""


class RehearsedAdamW(CompactAdamW):
    """A CompactAdamW whose host memory is rehearsed."""

    rehearsed_host: RehearsedHost

    def host(self, parameter: nn.Parameter) -> HostMemory | None:
        return self.rehearsed_host if self.offload else None


def groups_by_mesh(parameters: Iterable[nn.Parameter]) -> list[dict[str, Any]]:
    """Return parameter groups without a mix of meshes or of DTensors and tensors, as transformers' Trainer makes them."""
    groups: dict[Any, list[nn.Parameter]] = {}
    for parameter in parameters:
        groups.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
    return [{"params": group} for group in groups.values()]


def rehearse_compact_adamw(
    named: Mapping[str, nn.Parameter], storage: StorageFormat, host: RehearsedHost, *, replicated: bool
) -> CompactAdamW:
    """Return the optimizer of a storage format, placed on fake ranks; replicated ranks divide the update."""
    bits: dict[str, Any] = {"weight_bits": storage.weight_bits, "state_bits": storage.state_bits}
    optimizer = RehearsedAdamW(named.values(), offload=storage.offload, **bits)
    optimizer.rehearsed_host = host
    replicas = Ranks() if replicated else None
    with unset_fake_temporarily():  # DTensor computes positions of shards with tensors, and reads them
        place_optimizer(optimizer, named, storage, replicas)
    return optimizer


def create_states(optimizer: torch.optim.Optimizer, parameters: Iterable[nn.Parameter]) -> None:
    """Create the optimizer's states, without a step of the run."""
    if isinstance(optimizer, CompactAdamW):
        for parameter in parameters:
            optimizer.tensor(parameter)
        return
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()

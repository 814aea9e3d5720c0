"""Tensor parallelism by transformers' own plans, alone or with FSDP2 over data ranks: both cut the model where it is loaded.

The devices that hold parts of one model's tensors, *peers*, are one rank: they run the same micro-batches and draw the same tokens,
since a sum over peers has the same bits on each of them and what is drawn depends on nothing else. FSDP2 cuts each one's part
between rows over the data ranks, so that a gather gives a rank its part, never the whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from lowpeak.errors import ArgumentError
from lowpeak.models import IN_PARTS, MEETING, styled
from lowpeak.parallel.base import Accelerated
from lowpeak.parallel.flat_shard import Added, FlatShard, rows_shard, whole
from lowpeak.parallel.frozen_models import freeze
from lowpeak.parallel.fsdp2 import Fsdp2
from lowpeak.parallel.lockstep import Peers
from lowpeak.parallel.partial_gather import Gatherer
from lowpeak.parallel.strategy import Frozen

_PEERS, _DATA = "tp", "fsdp"  # transformers' names of the axes


@dataclass(frozen=True)
class Block(FlatShard):
    """Rows and columns of a parameter, taken as a matrix, that this process alone has; all processes have one."""

    first_row: int = 0
    first_column: int = 0
    num_columns: int = 1

    def broadcast(self, first: int, last: int, into: Tensor, added: Added | None = None) -> Tensor:
        """Values [first, last) of the whole on every process: a sum of what each has, as bytes, so that not a bit changes."""
        width = self.numel // self.shape[0]
        top, bottom = first // width, -(-last // width)
        rows_RC = torch.zeros(bottom - top, width, dtype=into.dtype, device=self.device)
        local = self.local.view(-1, self.num_columns)
        start, stop = max(top, self.first_row), min(bottom, self.first_row + len(local))
        if start < stop:
            columns = slice(self.first_column, self.first_column + self.num_columns)
            rows_RC[start - top : stop - top, columns] = local[start - self.first_row : stop - self.first_row]
        dist.all_reduce(rows_RC.view(torch.uint8))
        return rows_RC.view(-1)[first - top * width : last - top * width]


class TensorParallel(Fsdp2):
    """Peers hold parts of one model; with several data ranks FSDP2 cuts those parts further, as `Fsdp2` has it."""

    def __init__(self, accelerator: Accelerator) -> None:
        super().__init__(accelerator)
        self._gatherer = Gatherer(self.ranks, self._device, peers=self._peers)
        self.cuts_parameters = self.ranks.world_size > 1  # over data ranks: peers' parts are never gathered

    @contextmanager
    def accumulate(self, model: nn.Module, last: bool) -> Iterator[None]:
        with super().accumulate(model, last):
            yield
        if last:
            group = self._accelerator.torch_device_mesh[_PEERS].get_group()
            for module in styled(self._accelerator.unwrap_model(model), IN_PARTS):
                for parameter in module.parameters(recurse=False):
                    if parameter.grad is not None:
                        dist.all_reduce(whole(parameter.grad).local, group=group)

    def prepare_frozen(self, model: nn.Module, room: int, on_host: bool) -> Frozen:
        """One that was cut as the policy was stays so; another one is a replica where there is `room`, else cut by rows."""
        if on_host:
            raise ArgumentError("offload_frozen_models does not go with tensor parallelism: leave one of the two out.")
        if _is_cut(model):
            return self._frozen(freeze(model))
        return Accelerated.prepare_frozen(self, model, room, on_host)

    def _peers(self, model: nn.Module) -> Peers | None:
        """Where peers meet within a forward of a model that they hold parts of: where transformers adds up or gathers."""
        if not _is_cut(model):
            return None
        group = self._accelerator.torch_device_mesh[_PEERS].get_group()
        return Peers([module for style in MEETING for module in styled(model, style)], group)

    def _shard(self, parameter: nn.Parameter) -> FlatShard | None:
        """The data ranks' rows of this peer's part, None where data ranks do not cut it."""
        names = _axes(parameter)
        if _PEERS not in names:
            return rows_shard(parameter, None, self._device)
        if _DATA not in names:
            return None
        assert isinstance(parameter, DTensor)
        mesh, placement = parameter.device_mesh, parameter.placements[names.index(_PEERS)]
        shape = torch.Size(compute_local_shape_and_global_offset(parameter.shape, mesh[_PEERS], [placement])[0])
        rows_per_rank = -(-shape[0] // mesh[_DATA].size())
        return FlatShard(
            shape,
            rows_per_rank * shape[1:].numel(),
            parameter.to_local().detach().reshape(-1),
            parameter.dtype,
            self._device,
            mesh.get_group(_DATA),
            partial(_seen, whole=parameter, mesh=mesh[_PEERS], placement=placement),
        )

    def _leaving(self, parameter: nn.Parameter) -> FlatShard | None:
        """What this process has of a parameter that is cut over peers; of another one, its range."""
        if _PEERS not in _axes(parameter):
            return self._shard(parameter)
        assert isinstance(parameter, DTensor)
        local, shape = parameter.to_local().detach(), parameter.shape
        _, offsets = compute_local_shape_and_global_offset(shape, parameter.device_mesh, parameter.placements)
        flat = local.reshape(-1)
        block = (offsets[0], offsets[1] if len(offsets) > 1 else 0, local.shape[1] if local.dim() > 1 else 1)
        return Block(shape, shape.numel(), flat, flat.dtype, self._device, None, None, *block)


def cut_alike(module: nn.Module, model: nn.Module) -> None:
    """Cut a module over the data ranks that hold rows of a model's parameters (`loading.in_parts`); nothing where none do yet."""
    for parameter in model.parameters():
        if _DATA in _axes(parameter):
            assert isinstance(parameter, DTensor)
            fully_shard(module, mesh=parameter.device_mesh[_DATA])
            return


def _axes(parameter: nn.Parameter) -> tuple[str, ...]:
    return (parameter.device_mesh.mesh_dim_names or ()) if isinstance(parameter, DTensor) else ()


def _is_cut(model: nn.Module) -> bool:
    return any(_PEERS in _axes(parameter) for parameter in model.parameters())


def _seen(part: Tensor, whole: DTensor, mesh: Any, placement: Any) -> Tensor:
    return DTensor.from_local(part, mesh, [placement], run_check=False, shape=whole.shape, stride=whole.stride())

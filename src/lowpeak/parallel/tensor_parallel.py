"""Tensor parallelism by transformers' plans, alone or with FSDP2 over data ranks; both shard the model while it is loaded.

The processes of a tensor parallel (TP) group are one rank: they run the same micro-batches and sample the same tokens, since a
sum over the group has the same bits on each process and sampling depends on nothing else. FSDP2 shards each process's part by
rows over the data ranks, so that a gather returns the part, never the whole parameter.
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
from lowpeak.models import COLLECTIVE_STYLES, GRAD_ALLREDUCE_STYLE, modules_with_style
from lowpeak.parallel.base import AccelerateStrategy, freeze
from lowpeak.parallel.fsdp2 import Fsdp2
from lowpeak.parallel.gradients import sum_replicated_gradient
from lowpeak.parallel.lockstep import TPCollectives
from lowpeak.parallel.parameters import FlatShard, LoraDelta, fsdp_shard
from lowpeak.parallel.partial_gather import Gatherer
from lowpeak.parallel.strategy import FrozenModel

_TP_AXIS, _DATA_AXIS = "tp", "fsdp"  # transformers' names of the mesh axes


@dataclass(frozen=True)
class MatrixBlock(FlatShard):
    """A block of rows and columns of a parameter, seen as a matrix; each process stores a different block."""

    first_row: int = 0
    first_column: int = 0
    num_columns: int = 1

    def broadcast(self, first: int, last: int, into: Tensor, delta: LoraDelta | None = None) -> Tensor:
        # The blocks are disjoint, so their sum is the values; as bytes, so that no bit of them changes.
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
    """Tensor parallelism within each rank; with several data ranks, FSDP2 shards the parts further."""

    def __init__(self, accelerator: Accelerator) -> None:
        super().__init__(accelerator)
        self._gatherer = Gatherer(self.ranks, self._device, tp_collectives=self._tp_collectives)
        # Sharded over data ranks only: the parts of a TP group are never gathered.
        self.shards_parameters = self.ranks.world_size > 1

    @contextmanager
    def preparing(self, model: nn.Module) -> Iterator[None]:
        yield  # transformers sharded the model while it was loaded

    def average_gradients(self, model: nn.Module) -> None:
        group = self._accelerator.torch_device_mesh[_TP_AXIS].get_group()
        for module in modules_with_style(self._accelerator.unwrap_model(model), GRAD_ALLREDUCE_STYLE):
            for parameter in module.parameters(recurse=False):
                sum_replicated_gradient(parameter, self._device, group)

    @property
    def survives_failed_passes(self) -> bool:
        return False

    def prepare_frozen(self, model: nn.Module, free_bytes: int, on_host: bool) -> FrozenModel:
        if on_host:
            raise ArgumentError("offload_frozen_models does not work with tensor parallelism: remove one of the two.")
        if _is_tensor_parallel(model):
            return self._frozen(freeze(model))
        return AccelerateStrategy.prepare_frozen(self, model, free_bytes, on_host)

    def _tp_collectives(self, model: nn.Module) -> TPCollectives | None:
        """Return the modules whose forwards transformers ends with a collective; None for a model that is not tensor parallel."""
        if not _is_tensor_parallel(model):
            return None
        group = self._accelerator.torch_device_mesh[_TP_AXIS].get_group()
        return TPCollectives(
            [module for style in COLLECTIVE_STYLES for module in modules_with_style(model, style)], group
        )

    def _shard(self, parameter: nn.Parameter) -> FlatShard | None:
        return tensor_parallel_shard(parameter, self._device)

    def _export_shard(self, parameter: nn.Parameter) -> FlatShard | None:
        """Return this process's block of a tensor parallel parameter; for any other parameter, its shard."""
        if _TP_AXIS not in _axes(parameter):
            return self._shard(parameter)
        assert isinstance(parameter, DTensor)
        local, shape = parameter.to_local().detach(), parameter.shape
        _, offsets = compute_local_shape_and_global_offset(shape, parameter.device_mesh, parameter.placements)
        flat = local.reshape(-1)
        block = (offsets[0], offsets[1] if len(offsets) > 1 else 0, local.shape[1] if local.dim() > 1 else 1)
        return MatrixBlock(shape, shape.numel(), flat, flat.dtype, self._device, None, None, *block)


def tensor_parallel_shard(parameter: nn.Parameter, device: torch.device) -> FlatShard | None:
    """Return this rank's rows of this process's part; None if FSDP2 does not shard the part."""
    names = _axes(parameter)
    if _TP_AXIS not in names:
        return fsdp_shard(parameter, None, device)
    if _DATA_AXIS not in names:
        return None
    assert isinstance(parameter, DTensor)
    mesh, placement = parameter.device_mesh, parameter.placements[names.index(_TP_AXIS)]
    shape = torch.Size(compute_local_shape_and_global_offset(parameter.shape, mesh[_TP_AXIS], [placement])[0])
    rows_per_rank = -(-shape[0] // mesh[_DATA_AXIS].size())
    return FlatShard(
        shape,
        rows_per_rank * shape[1:].numel(),
        parameter.to_local().detach().reshape(-1),
        parameter.dtype,
        device,
        mesh.get_group(_DATA_AXIS),
        partial(_as_dtensor, full=parameter, mesh=mesh[_TP_AXIS], placement=placement),
    )


def shard_like(module: nn.Module, model: nn.Module) -> None:
    """Apply FSDP2 on the data mesh to a module of a model sharded while loading; skip others."""
    for parameter in model.parameters():
        if _DATA_AXIS in _axes(parameter):
            assert isinstance(parameter, DTensor)
            fully_shard(module, mesh=parameter.device_mesh[_DATA_AXIS])
            return


def _axes(parameter: nn.Parameter) -> tuple[str, ...]:
    return (parameter.device_mesh.mesh_dim_names or ()) if isinstance(parameter, DTensor) else ()


def _is_tensor_parallel(model: nn.Module) -> bool:
    return any(_TP_AXIS in _axes(parameter) for parameter in model.parameters())


def _as_dtensor(part: Tensor, full: DTensor, mesh: Any, placement: Any) -> Tensor:
    return DTensor.from_local(part, mesh, [placement], run_check=False, shape=full.shape, stride=full.stride())

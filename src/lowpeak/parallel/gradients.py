"""Gradients of a step on ranks: sums, averages over replicas, norms, and each rank's updates."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate

from lowpeak.arguments import StorageFormat
from lowpeak.errors import ArgumentError
from lowpeak.optim import GradientSum, UpdatedShard, find_compact, find_sum, gradient_of, multiply_gradient
from lowpeak.parallel.checkpoint_state import first_position
from lowpeak.ranks import Ranks

_PIECE = 1 << 22  # values that are reduced, or widened for a norm, at a time
AVERAGE_BYTES = 4 << 20  # of the buffer in which small gradients are averaged


def place_optimizer(
    optimizer: torch.optim.Optimizer,
    named: Mapping[str, nn.Parameter],
    storage: StorageFormat,
    replicas: Ranks | None = None,
) -> None:
    """Tell a CompactAdamW which values this rank updates, and sum gradients outside of `.grad` where the format needs it.

    `replicas` are ranks with the same parameters: with `shard_states` each updates its rows alone. ArgumentError for another
    optimizer.
    """
    compact = find_compact(optimizer)
    if compact is None:
        raise ArgumentError(
            f"the optimizer {type(getattr(optimizer, 'optimizer', optimizer)).__name__} cannot store {storage}: remove it "
            "(create_optimizer of a subclass, or the attribute optimizer), pass it to the trainer as optimizers=(optimizer, None), "
            "or remove dtype, weight_bits and the other storage arguments."
        )
    remove_sums(named.values())
    for name, parameter in named.items():
        if storage.offload or _sum_dtype(name, parameter, storage) != parameter.dtype:
            GradientSum(parameter, _sum_dtype(name, parameter, storage), compact.host(parameter))
    rows_of = replicas if storage.shard_states else None
    compact.place({parameter: _updated_shard(name, parameter, rows_of) for name, parameter in named.items()})


def remove_sums(parameters: Iterable[nn.Parameter]) -> None:
    """Leave gradients to `.grad` again, after training or for another optimizer."""
    for parameter in parameters:
        found = find_sum(parameter)
        if found is not None:
            found.remove()


def _sum_dtype(name: str, parameter: nn.Parameter, storage: StorageFormat) -> torch.dtype:
    """Return the dtype of a gradient sum; LoRA's weights are fp32 in every format."""
    if "lora_" in name:
        return parameter.dtype
    return torch.bfloat16 if storage.gradient_bits == 16 else torch.float32


def _updated_shard(name: str, parameter: nn.Parameter, replicas: Ranks | None) -> UpdatedShard:
    if replicas is None or replicas.world_size == 1:
        local: Any = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        return UpdatedShard(name, first_position(parameter), 0, local.numel())
    rows = parameter.shape[0] if parameter.dim() else 1
    # Whole rows, because blocks of 8-bit states end with their row; the last ranks may have none.
    step, numel = -(-rows // replicas.world_size) * (parameter.numel() // max(1, rows)), parameter.numel()
    bounds = [min(rank * step, numel) for rank in range(replicas.world_size + 1)]
    first, last = bounds[replicas.rank], bounds[replicas.rank + 1]
    return UpdatedShard(name, first, first, last, partial(_publish, parameter, bounds))


def _publish(parameter: nn.Parameter, bounds: list[int]) -> None:
    """Copy the values that each rank has updated to all ranks."""
    flat = parameter.detach().view(-1)
    ranges = pairwise(bounds)
    sent = [dist.broadcast(flat[a:b], rank, async_op=True) for rank, (a, b) in enumerate(ranges) if a < b]
    for each in sent:
        each.wait()


class GradientAverage:
    """Averages gradients of replicas over ranks, in place: a rank must not fail between collectives.

    Large gradients are reduced as they are; small ones, and those in host memory, in a buffer of a few MB. Only a rank without
    a gradient that another rank has allocates memory: zeros.
    """

    def __init__(self, ranks: Ranks, device: torch.device) -> None:
        self._ranks = ranks
        self._buffer = torch.empty(AVERAGE_BYTES, dtype=torch.uint8, device=device)

    def average(self, parameters: Iterable[nn.Parameter]) -> None:
        """Average the gradients of these parameters; a rank without a gradient adds zeros."""
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        # A rank whose sequences do not use a parameter has no gradient, and still has to run the others' collective.
        anywhere = self._ranks.max([float(gradient_of(parameter) is not None) for parameter in trained])
        gradients = [
            _gradient_or_zeros(parameter) for parameter, is_any in zip(trained, anywhere, strict=True) if is_any
        ]
        for bucket in _buckets(gradients, self._buffer.device):
            if len(bucket) == 1 and bucket[0].device == self._buffer.device:
                self._average(bucket[0])
            else:
                self._average_in_buffer(bucket)

    def _average_in_buffer(self, bucket: Sequence[Tensor]) -> None:
        sizes = [gradient.numel() for gradient in bucket]
        joined = self._buffer.view(bucket[0].dtype)[: sum(sizes)]
        pieces = joined.split(sizes)
        for piece, gradient in zip(pieces, bucket, strict=True):
            piece.copy_(gradient)
        self._average(joined)
        for piece, gradient in zip(pieces, bucket, strict=True):
            gradient.copy_(piece)

    def _average(self, values: Tensor) -> None:
        dist.all_reduce(values)
        values.div_(self._ranks.world_size)


def _gradient_or_zeros(parameter: nn.Parameter) -> Tensor:
    """Return the flat gradient of a replica, in the memory that the optimizer reads."""
    found = find_sum(parameter)
    if found is not None:
        total = found.total()
        return found.zero() if total is None else total
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    elif not parameter.grad.is_contiguous():
        parameter.grad = parameter.grad.contiguous()
    return parameter.grad.view(-1)


def _buckets(gradients: Sequence[Tensor], device: torch.device) -> Iterator[list[Tensor]]:
    """Yield neighbours of one dtype and device that fit into the buffer together; larger ones alone, or in pieces of it."""
    bucket: list[Tensor] = []
    for gradient in gradients:
        most = AVERAGE_BYTES // gradient.element_size()
        for piece in (gradient,) if gradient.device == device else gradient.split(most):
            fits = sum(each.numel() for each in bucket) + piece.numel() <= most
            if bucket and not (fits and (bucket[0].dtype, bucket[0].device) == (piece.dtype, piece.device)):
                yield bucket
                bucket = []
            bucket.append(piece)
    if bucket:
        yield bucket


def discard_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Forget all gradients of a step that is run again."""
    for parameter in parameters:
        parameter.grad = None
        found = find_sum(parameter)
        if found is not None:
            found.clear()


def sum_replicated_gradient(parameter: nn.Parameter, device: torch.device, group: Any) -> None:
    """Add up a parameter's gradients over a tensor parallel group, each of whose processes has a part of their sum."""
    found, gradient = find_sum(parameter), parameter.grad
    if found is not None:
        total = found.total()
        for piece in () if total is None else total.split(_PIECE):  # one in host memory passes through the device
            here = piece.to(device)
            dist.all_reduce(here, group=group)
            if here is not piece:
                piece.copy_(here)
    elif gradient is not None:
        dist.all_reduce(gradient.to_local() if isinstance(gradient, DTensor) else gradient, group=group)


def clip_grad_norm(parameters: Iterable[nn.Parameter], max_norm: float, device: torch.device) -> Tensor:
    """Scale gradients to a global norm of at most `max_norm`; return the norm before, summed in fp32 also for bf16 gradients."""
    gradients = [(parameter, gradient) for parameter in parameters if (gradient := gradient_of(parameter)) is not None]
    norms: dict[Any, list[Tensor]] = {}  # by mesh and placements: a model's parameters may be sharded in several ways
    for parameter, gradient in gradients:
        sharding = (parameter.device_mesh, parameter.placements) if isinstance(parameter, DTensor) else None
        # On a CPU the norm of a bf16 tensor takes an fp32 copy of it.
        pieces = gradient.split(_PIECE)
        norms.setdefault(sharding, []).extend(torch.linalg.vector_norm(each, dtype=torch.float32) for each in pieces)
    # Gradients are on one device or in host memory: the sum of each group crosses once.
    squares = [
        _sum_of_shards(torch.stack(each).square().sum().to(device), sharding) for sharding, each in norms.items()
    ]
    norm = torch.stack(squares).sum().sqrt() if squares else torch.zeros((), device=device)
    # Gradients that are not finite stay as they are: the caller names them.
    factor = torch.where(norm.isfinite(), (max_norm / (norm + 1e-6)).clamp(max=1), 1.0)
    for parameter, _ in gradients:
        multiply_gradient(parameter, factor)
    return norm


def _sum_of_shards(squares: Tensor, sharding: Any) -> Tensor:
    """Return the sum of squares over the mesh axes that shard the parameter, given this rank's sum."""
    if sharding is None:
        return squares
    mesh, placements = sharding
    partials = [Replicate() if placement.is_replicate() else Partial() for placement in placements]
    total: Any = DTensor.from_local(squares, mesh, partials, run_check=False)
    return total.full_tensor()

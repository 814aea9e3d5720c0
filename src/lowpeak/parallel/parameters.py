"""Parameters as flat shards, the one form of a sharded parameter, and their export under the names of a checkpoint.

FSDP2 gives rank r the rows [r*c, (r+1)*c) with c = ceil(rows / ranks), ZeRO-3 the values [r*c, (r+1)*c) with c = ceil(values /
ranks). Both are ranges of the flattened parameter; the last ranges are short or padded. So gathering, exporting and looking up
rows are implemented once for FSDP2, ZeRO-3 and tensor parallelism.

A model is exported merged with its LoRA adapter or without, or the adapter alone. The rank that stores rows of a weight merges
the adapter: it adds `scaling * B[a:b] @ A` to them before it sends them. A and B are gathered for one layer at a time; neither
the merged model nor a merged layer is ever allocated.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial, reduce
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lowpeak.errors import ArgumentError
from lowpeak.heads import belongs_to_critic, transformers_model
from lowpeak.records import WeightLayout, Weights, WeightSlice

# Renamed in torch 2.13, where the old names warn.
all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def gather_numbers(number: int, device: torch.device, group: Any = None) -> list[int]:
    """Return the number of each rank of a group; in a rehearsal all ranks have the same."""
    world_size = dist.get_world_size(group)
    if dist.get_backend(group) == "fake":
        return [number] * world_size
    local = torch.tensor([number], device=device)
    numbers = local.new_empty(world_size)
    all_gather(numbers, local, group)
    return [int(value) for value in numbers.tolist()]


LoraDelta = Callable[[int, int], Tensor]  # (first, last) -> what LoRA adds to values [first, last) of a parameter
ShardOf = Callable[[nn.Parameter], "FlatShard | None"]  # None for a replicated parameter

_REPLICATED = object()  # the group of a replicated parameter, which needs no communication


@dataclass(frozen=True)
class FlatShard:
    """A sharded parameter of `shape`: rank r of the group stores the flat range [r * chunk, (r + 1) * chunk).

    `local` is a view of this rank's values, at most `chunk`; `dtype` is the dtype that the model computes in. `to_param`
    converts the gathered values to what the model expects: a DTensor under tensor parallelism.
    """

    shape: torch.Size
    chunk: int
    local: Tensor
    dtype: torch.dtype
    device: torch.device
    group: Any = None
    to_param: Callable[[Tensor], Tensor] | None = None

    @property
    def numel(self) -> int:
        return self.shape.numel()

    @property
    def nbytes(self) -> int:
        """Return the bytes of the gathered parameter in the dtype of computation."""
        return self.numel * self.dtype.itemsize

    @property
    def padded_numel(self) -> int:
        """Return the number of values that a gather writes: `chunk` for each rank."""
        return self.chunk * dist.get_world_size(self.group)

    @property
    def rank(self) -> int:
        return dist.get_rank(self.group)

    def padded_local(self) -> Tensor:
        """Return this rank's `chunk` values in `dtype` on `device`, with zeros beyond the parameter's end."""
        local = self.local.to(self.device, self.dtype, non_blocking=True)
        if local.numel() == self.chunk:
            return local
        padded = local.new_zeros(self.chunk)
        padded[: local.numel()] = local
        return padded

    def start_gather(self, into: Tensor) -> Any:
        """Start to gather the parameter into the first `padded_numel` values of a flat buffer; return a handle with `wait()`."""
        return all_gather(into[: self.padded_numel], self.padded_local(), group=self.group, async_op=True)

    def broadcast(self, first: int, last: int, into: Tensor, delta: LoraDelta | None = None) -> Tensor:
        """Broadcast values [first, last) from the rank that stores them; that rank adds `delta` first.

        Returns a view of the flat buffer `into`, in its dtype; the sender returns its own storage if dtype and device match.
        """
        owner, values = first // self.chunk, into[: last - first]
        if self.group is _REPLICATED or self.rank == owner:
            local = self.local[first - owner * self.chunk : last - owner * self.chunk]
            if delta is not None:
                local = (local.to(self.device) + delta(first, last)).to(local.dtype)
            matches = local.dtype == into.dtype and local.device == into.device
            values = local if matches else values.copy_(local)
        if self.group is not _REPLICATED:
            dist.broadcast(
                values, dist.get_process_group_ranks(self.group or dist.group.WORLD)[owner], group=self.group
            )
        return values

    def view(self, gathered: Tensor) -> Tensor:
        """Return the parameter as a view of a gathered buffer."""
        values = gathered[: self.numel].view(self.shape)
        return values if self.to_param is None else self.to_param(values)

    def full_tensor(self) -> Tensor:
        """Gather and return the whole parameter in its storage dtype, on every rank."""
        if self.group is _REPLICATED:
            return self.local.view(self.shape)
        stored = replace(self, dtype=self.local.dtype)
        buffer = torch.empty(self.padded_numel, dtype=stored.dtype, device=self.device)
        stored.start_gather(buffer).wait()
        return self.view(buffer)


def local_shard(values: Tensor) -> FlatShard:
    """Return all local values as one shard: of a replicated parameter, or of this process's part under tensor parallelism."""
    values = values.to_local() if isinstance(values, DTensor) else values
    return FlatShard(values.shape, values.numel(), values.reshape(-1), values.dtype, values.device, _REPLICATED)


def fsdp_shard(parameter: nn.Parameter, dtype: torch.dtype | None, device: torch.device) -> FlatShard | None:
    """Return the rows of a parameter that `fully_shard` gave this rank; None if the parameter is not sharded.

    `dtype` is the dtype that the model computes in (None: the parameter's). Under HSDP the shard is of this rank's replica.
    """
    if not isinstance(parameter, DTensor):
        return None
    dims = [dim for dim, placement in enumerate(parameter.placements) if placement.is_shard(0)]
    assert len(dims) == 1, "fully_shard shards rows, along one axis of the mesh"
    mesh, num_rows = parameter.device_mesh, parameter.shape[0]
    rows_per_rank = -(-num_rows // mesh.size(dims[0]))
    local = parameter.to_local().detach().reshape(-1)
    chunk = rows_per_rank * (parameter.numel() // num_rows)
    return FlatShard(parameter.shape, chunk, local, dtype or parameter.dtype, device, mesh.get_group(dims[0]))


@dataclass(frozen=True)
class ExportParam:
    """A parameter or buffer to export: its name for the receiver, its shard, and the LoRA delta to add.

    `make_delta` is called on every rank just before the parameter is exported, and may gather LoRA's factors. A buffer keeps its
    dtype: it may be of integers, or of numbers that decide between experts.
    """

    name: str
    shard: FlatShard
    make_delta: Callable[[], LoraDelta | None] = lambda: None
    is_buffer: bool = False


def broadcast_slices(params: Iterable[ExportParam], max_bytes: int, dtype: torch.dtype | None) -> Iterator[WeightSlice]:
    """Yield every parameter in flat slices of at most `max_bytes`, in order; each slice's owner broadcasts it to its group.

    A slice's values are valid until the next slice: all slices share one buffer.
    """
    buffer = torch.empty(0, dtype=torch.uint8)
    for param in params:
        shard, delta = param.shard, param.make_delta()
        target = shard.local.dtype if dtype is None or param.is_buffer else dtype
        count = max(1, max_bytes // target.itemsize)
        longest = min(count, shard.chunk, shard.numel) * target.itemsize
        if buffer.numel() < longest or buffer.device != shard.device:
            buffer = torch.empty(longest, dtype=torch.uint8, device=shard.device)
        into = buffer[: buffer.numel() // target.itemsize * target.itemsize].view(target)
        for start in range(0, shard.numel, max(1, shard.chunk)):
            stop = min(start + shard.chunk, shard.numel)
            for first in range(start, stop, count):
                values = shard.broadcast(first, min(first + count, stop), into, delta)
                yield WeightSlice(param.name, tuple(shard.shape), target, first, values)


_WRAPPERS = ("_checkpoint_wrapped_module.", "_fsdp_wrapped_module.", "_orig_mod.")
_PREFIX = "base_model.model."


def exported_parameters(model: nn.Module, shard_of: ShardOf, weights: Weights) -> Iterator[ExportParam]:
    """Yield the parameters to export (see `ParameterExport.slices`), in the same order on every rank."""

    def to_shard(parameter: nn.Parameter) -> FlatShard:
        return shard_of(parameter) or local_shard(parameter.detach())

    if weights == "adapter":
        for name, parameter in adapter_parameters(model).items():
            yield ExportParam(adapter_file_key(model, name), to_shard(parameter))
        return
    if not hasattr(model, "peft_config"):
        for name, parameter in policy_parameters(model):
            yield ExportParam(clean_parameter_name(name), to_shard(parameter))
    else:
        yield from _base_params(model, to_shard, merges=weights == "merged")
    yield from _buffers(model)


def layout(model: nn.Module, shard_of: ShardOf, weights: Weights) -> WeightLayout:
    """Return names, shapes and dtypes of the exported parameters, in their order, without communication."""
    params = exported_parameters(model, shard_of, weights)
    return {param.name: (tuple(param.shard.shape), param.shard.local.dtype) for param in params}


def unchanged_names(model: nn.Module) -> frozenset[str]:
    """Return the `merged` export's names of parameters that training does not change: frozen, and without an adapter."""
    frozen = {clean_parameter_name(name) for name, parameter in policy_parameters(model) if not parameter.requires_grad}
    if not hasattr(model, "peft_config"):
        return frozenset(frozen)
    names = (
        _checkpoint_name(name, active_adapters(model)) for name in frozen if not name.endswith(".base_layer.weight")
    )
    return frozenset(name for name in names if name is not None)


def policy_parameters(model: nn.Module, *, remove_duplicate: bool = True) -> Iterator[tuple[str, nn.Parameter]]:
    """Return a model's named parameters without its critic's, which is never exported with the policy."""
    named = model.named_parameters(remove_duplicate=remove_duplicate)
    return ((name, parameter) for name, parameter in named if not belongs_to_critic(name))


def clean_parameter_name(name: str) -> str:
    """Return a parameter's name without the prefixes of checkpointing, FSDP and torch.compile."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def adapter_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that training an adapter changes, by their names in the model."""
    return {clean_parameter_name(name): p for name, p in policy_parameters(model) if p.requires_grad}


def adapter_file_key(model: nn.Module, name: str) -> str:
    """Return an adapter parameter's name in peft's file, which leaves out the adapter's name."""
    for adapter in active_adapters(model):
        name = (
            name.replace(f".modules_to_save.{adapter}.", ".").replace(f".{adapter}.", ".").removesuffix(f".{adapter}")
        )
    return name


def adapter_state_dict(model: nn.Module, exported: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the exported `adapter` by its names in the model; a tied parameter is under each of its names."""
    export_names = {id(p): adapter_file_key(model, name) for name, p in adapter_parameters(model).items()}
    named = model.named_parameters(remove_duplicate=False)
    return {clean_parameter_name(name): exported[export_names[id(p)]] for name, p in named if id(p) in export_names}


def unties_head(model: nn.Module, exported_names: Collection[str]) -> bool:
    """Return whether the `merged` export has a separate head although the config ties it."""
    base = transformers_model(model)
    head = base.get_output_embeddings()
    name = next((clean_parameter_name(name) for name, module in base.named_modules() if module is head), "")
    return (
        bool(getattr(base.config.get_text_config(), "tie_word_embeddings", False))
        and f"{name}.weight" in exported_names
    )


def active_adapters(model: Any) -> list[str]:
    """Return the names of a peft model's active adapters."""
    return list(model.active_adapters)


def _base_params(model: Any, to_shard: Callable[[nn.Parameter], FlatShard], merges: bool) -> Iterator[ExportParam]:
    """Yield the base model's parameters; a tied parameter comes once for each distinct merged result."""
    adapters = active_adapters(model)
    layers = dict(_lora_weights(model))
    exported: set[tuple[int, int]] = set()
    for raw, parameter in policy_parameters(model, remove_duplicate=False):
        name = _checkpoint_name(clean_parameter_name(raw), adapters)
        layer = layers.get(raw)
        used = [] if layer is None or layer.merged or not merges else [a for a in adapters if a in layer.scaling]
        result = (id(parameter), id(layer) if used else 0)
        if name is None or result in exported:
            continue
        exported.add(result)
        shard = to_shard(parameter)
        if not used:
            yield ExportParam(name, shard)
        else:
            _check_mergeable(layer, used, name, shard.shape)
            yield ExportParam(name, shard, partial(_lora_delta, layer, used, to_shard, shard))


def _buffers(model: Any) -> Iterator[ExportParam]:
    """Yield the buffers that belong into a checkpoint; every rank has them unsharded."""
    adapters = active_adapters(model) if hasattr(model, "peft_config") else []
    for prefix, module in model.named_modules():
        for key, buffer in module._buffers.items():
            name = _checkpoint_name(clean_parameter_name(f"{prefix}.{key}".removeprefix(".")), adapters)
            is_saved = buffer is not None and key not in module._non_persistent_buffers_set
            if is_saved and name is not None and not belongs_to_critic(name):
                yield ExportParam(name, local_shard(buffer.detach()), is_buffer=True)


def _lora_weights(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the full name of each weight under LoRA, and its peft layer."""
    for path, layer in model.named_modules():
        if hasattr(layer, "lora_A"):
            weight = layer.get_base_layer().weight
            yield from ((f"{path}.{name}", layer) for name, p in layer.named_parameters() if p is weight)


def _checkpoint_name(name: str, adapters: list[str]) -> str | None:
    """Return a parameter's name in the base model's checkpoint; None if it is not exported."""
    name = name.removeprefix(_PREFIX)
    if ".original_module." in name or "lora_" in name:
        return None
    if ".modules_to_save." in name:
        before, _, after = name.partition(".modules_to_save.")
        adapter, _, rest = after.partition(".")
        return f"{before}.{rest}" if adapter in adapters else None
    return name.replace(".base_layer.", ".")


def _lora_product(
    layer: Any, adapter: str, to_shard: Callable[[nn.Parameter], FlatShard], base: FlatShard
) -> LoraDelta:
    """Return the delta `scaling * B @ A` of a weight [rows, columns]; it is computed for a range's rows alone."""
    if adapter in layer.lora_A:
        left, right = layer.lora_B[adapter].weight, layer.lora_A[adapter].weight
        left_OR, right_RI = to_shard(left).full_tensor(), to_shard(right).full_tensor()
    else:  # of an embedding, whose rows are tokens
        left, right = layer.lora_embedding_A[adapter], layer.lora_embedding_B[adapter]
        left_OR, right_RI = to_shard(left).full_tensor().T, to_shard(right).full_tensor().T
    if getattr(layer, "fan_in_fan_out", False):
        left_OR, right_RI = right_RI.T, left_OR.T
    # peft multiplies half precision in fp32 on CPUs; do the same, for the same bits.
    if left_OR.device.type == "cpu" and left_OR.dtype in (torch.bfloat16, torch.float16):
        left_OR, right_RI = left_OR.float(), right_RI.float()
    columns, scaling, dtype = base.shape[1], layer.scaling[adapter], left.dtype

    def delta(first: int, last: int) -> Tensor:
        top, bottom = first // columns, -(-last // columns)
        product = (left_OR[top:bottom] @ right_RI) * scaling
        return product.to(dtype).reshape(-1)[first - top * columns : last - top * columns]

    return delta


def _lora_delta(
    layer: Any, adapters: list[str], to_shard: Callable[[nn.Parameter], FlatShard], base: FlatShard
) -> LoraDelta:
    """Gather A and B, and return the sum of all active adapters' deltas; the function keeps A and B alive."""
    deltas = [_lora_product(layer, adapter, to_shard, base) for adapter in adapters]
    return lambda first, last: reduce(torch.add, (delta(first, last) for delta in deltas))


def _check_mergeable(layer: Any, adapters: list[str], name: str, shape: torch.Size) -> None:
    """Raise ArgumentError unless the adapters are plain LoRA (`W + scaling * B @ A`) of a matrix."""
    variants = getattr(layer, "lora_variant", {})
    known = all(adapter in layer.lora_A or adapter in layer.lora_embedding_A for adapter in adapters)
    biased = any(getattr(layer, "lora_bias", {}).get(adapter) for adapter in adapters)
    if not known or biased or len(shape) != 2 or any(adapter in variants for adapter in adapters):
        raise ArgumentError(
            f"the adapter of {name} cannot be merged for export: only plain LoRA (W + scaling * B @ A) of linear layers and "
            "embeddings can. Save the adapter alone, or train without DoRA and other variants."
        )

"""The base class of all strategies, replicas, and frozen models such as reference and reward models.

Under `Replicated` each rank has every parameter; under other strategies it stores a flat shard of each. Frozen models are sharded
in the same way as the policy, layer by layer, so that an average of both needs no communication. They run in
`Gatherer.gathered_model`, one layer at a time and in lockstep on all ranks. A separate DeepSpeed engine, or one FSDP unit around
the whole model, would gather the whole model in each forward."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lowpeak.arguments import StorageFormat
from lowpeak.memory import AsyncHostMover, has_device_memory, offload_frozen
from lowpeak.models import materialize_meta_params
from lowpeak.optim import rounding_noise, split_weights
from lowpeak.parallel.checkpoint_shards import load_torch_state, save_shards
from lowpeak.parallel.checkpoint_state import (
    first_position,
    optimizer_tensors,
    torch_training_state,
    trained_parameters,
)
from lowpeak.parallel.gradients import GradientAverage, place_optimizer, remove_sums
from lowpeak.parallel.parameters import (
    FlatShard,
    ShardOf,
    broadcast_slices,
    clean_parameter_name,
    exported_parameters,
    fsdp_shard,
    layout,
    local_shard,
)
from lowpeak.parallel.partial_gather import Gatherer, block_modules, decoder_layers
from lowpeak.parallel.strategy import FrozenModel, Strategy
from lowpeak.ranks import Ranks
from lowpeak.records import WeightLayout, Weights, WeightSlice


def tensor_parallel_size(accelerator: Accelerator) -> int:
    """Return the size of accelerate's tensor parallel axis: the processes of one group count as one rank."""
    return int(getattr(accelerator.parallelism_config, "tp_size", None) or 1)


def fsdp_mesh(accelerator: Any) -> Any:
    """Return the mesh on which accelerate applies FSDP2; None means all ranks."""
    mesh = getattr(accelerator, "torch_device_mesh", None)
    return None if mesh is None else mesh[tuple(accelerator.parallelism_config.fsdp_dim_names)]


class AccelerateStrategy(Strategy):
    """A strategy on top of an accelerator. Subclasses define gradient reduction, and by `_shard` how parameters are sharded."""

    shards_parameters = False
    shards_states = False

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        # accelerate may name the CPU "cpu:0", and a move from "cpu" to "cpu:0" copies the tensor.
        self._device = torch.device("cpu") if accelerator.device.type == "cpu" else accelerator.device
        self.ranks = Ranks(self._device, tensor_parallel_size(accelerator))
        self._gatherer = Gatherer(self.ranks, self._device)

    def backward(self, loss: Tensor, last: bool) -> None:
        self._accelerator.backward(loss)

    def place_optimizer(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, storage: StorageFormat | None
    ) -> None:
        if storage is None:
            remove_sums(model.parameters())
        else:
            place_optimizer(optimizer, trained_parameters(self._unwrapped(model)), storage)

    @contextmanager
    def gather_for_inference(
        self, model: nn.Module, budget: int | None, gather_head: bool = False
    ) -> Iterator[nn.Module]:
        inner = self._unwrapped(model)
        with self._gatherer.gathered_model(inner, self._shard, budget, gather_head):
            yield inner

    def slices(
        self, model: nn.Module, max_bytes: int, dtype: torch.dtype | None, weights: Weights = "merged"
    ) -> Iterator[WeightSlice]:
        return broadcast_slices(
            exported_parameters(self._unwrapped(model), self._export_shard, weights), max_bytes, dtype
        )

    def layout(self, model: nn.Module) -> WeightLayout:
        return layout(self._unwrapped(model), self._export_shard, "merged")

    def shards(self, model: nn.Module) -> dict[str, Tensor]:
        return {name: shard.local for name, shard in self._shards(model).items()}

    def offloadable_tensors(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
        return [] if optimizer is None else optimizer_tensors(optimizer)

    def save_state(self, checkpoint: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        state = torch_training_state(trained_parameters(self._unwrapped(model)), optimizer)
        save_shards(checkpoint, state, self.ranks.processes)

    def load_state(self, checkpoint: Path, model: nn.Module, optimizer: Any | None) -> None:
        load_torch_state(checkpoint, self._unwrapped(model), optimizer, self.ranks.processes)

    def prepare_frozen(self, model: nn.Module, free_bytes: int, on_host: bool) -> FrozenModel:
        model = freeze(model)
        # A quantised model stays on the device where its quantiser placed it. In a dry run a model may have no weights.
        has_none = self.ranks.world_size == 1 and any(p.is_meta for p in model.parameters())
        if not (getattr(model, "is_quantized", False) or has_none):
            self._place_frozen(model, free_bytes, on_host)
        return self._frozen(model)

    def _place_frozen(self, model: nn.Module, free_bytes: int, on_host: bool) -> None:
        too_large = self.ranks.max([float(parameter_bytes(model) > free_bytes)])[0]
        from_rank_0 = self._only_rank_0_has_weights(model)
        if self.ranks.world_size > 1 and (on_host or too_large):
            shard_layers(model, None, on_host, self._device if from_rank_0 else None)
        # Elsewhere the device's memory is the host's.
        elif on_host and has_device_memory(self._device):
            offload_frozen(model, decoder_layers(model), AsyncHostMover(self._device))
        elif from_rank_0:
            replicate(model, self._device)
        else:
            model.to(self._device)

    def average(self, reference: nn.Module, policy: nn.Module, share: float, noise_key: str) -> None:
        starts = {name: first_position(parameter) for name, parameter in named_parameters(self._unwrapped(reference))}
        average(self._shards(reference), self._shards(policy), share, starts, noise_key)

    def _unwrapped(self, model: nn.Module) -> nn.Module:
        """Return the model without wrappers, with its parameters sharded as they are stored."""
        return self._accelerator.unwrap_model(model)

    def _only_rank_0_has_weights(self, model: nn.Module) -> bool:
        """Return whether rank 0 must broadcast a frozen model's weights; if so, give the empty parameters rank 0's dtypes."""
        if not self.ranks.max([float(any(p.is_meta for p in model.parameters()))])[0]:
            return False
        dtypes = self.ranks.processes.call_on_first(lambda: {name: p.dtype for name, p in model.named_parameters()})
        for name, parameter in model.named_parameters():
            if parameter.is_meta:
                parameter.data = parameter.data.to(dtypes[name])
        return True

    def _frozen(self, model: nn.Module) -> FrozenModel:
        @contextmanager
        def ready() -> Iterator[nn.Module]:
            # Compute in the policy's dtype, so that log-probs of both round in the same way.
            with self._accelerator.autocast(), self.gather_for_inference(model, 0, gather_head=True) as inner:
                yield inner

        return FrozenModel(model, ready)

    def _shards(self, model: nn.Module) -> dict[str, FlatShard]:
        return shards_of(self._unwrapped(model), self._shard)

    def _shard(self, parameter: nn.Parameter) -> FlatShard | None:
        """Return this rank's shard of a parameter, None if it is replicated. Frozen models may be sharded under any strategy."""
        return fsdp_shard(parameter, None, self._device)

    def _export_shard(self, parameter: nn.Parameter) -> FlatShard | None:
        """Return the shard from which `slices` exports a parameter."""
        return self._shard(parameter)


class Replicated(AccelerateStrategy):
    """A replica on each rank, whose gradients are averaged after the step's last backward; one device is the degenerate case.

    torch's DDP is not used: a forward and backward has no collective, so a rank can fail in it without the others waiting.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        super().__init__(accelerator)
        self._average = GradientAverage(self.ranks, self._device) if self.ranks.world_size > 1 else None

    @property
    def inplace_grad_scale(self) -> float | None:
        if self._accelerator.scaler is not None:
            return None
        return self.ranks.world_size / self._accelerator.gradient_accumulation_steps

    @contextmanager
    def preparing(self, model: nn.Module) -> Iterator[None]:
        accelerator = self._accelerator
        accelerator.prepare_model = partial(accelerator.prepare_model, evaluation_mode=True)  # without DDP
        try:
            yield
        finally:
            del accelerator.prepare_model
        if self.ranks.world_size > 1:
            _broadcast_weights(model, accelerator.device)  # as DDP does

    @contextmanager
    def micro_batch_context(self, model: nn.Module, last: bool) -> Iterator[None]:
        self._accelerator.gradient_state._set_sync_gradients(last)
        yield

    @property
    def survives_failed_passes(self) -> bool:
        return True

    def average_gradients(self, model: nn.Module) -> None:
        if self._average is not None:
            self._average.average(model.parameters())

    def place_optimizer(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, storage: StorageFormat | None
    ) -> None:
        named = trained_parameters(self._unwrapped(model))
        remove_sums(named.values())
        if storage is not None:
            place_optimizer(optimizer, named, storage, self.ranks)


_PIECE_BYTES = 8 << 20


def freeze(model: nn.Module) -> nn.Module:
    """Return the model in eval mode, without gradients."""
    return model.requires_grad_(False).eval()


def shard_layers(model: nn.Module, mesh: Any, on_host: bool, from_rank_0: torch.device | None = None) -> nn.Module:
    """Apply `fully_shard` to each layer and to the rest; `on_host` stores the shards in (pinned) host memory.

    If rank 0 alone has read the weights, `from_rank_0` is the device for broadcasts. Each layer is broadcast just before it is
    sharded, so that no other rank ever stores all weights.
    """
    from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard

    options: dict[str, Any] = {"mesh": mesh, "offload_policy": CPUOffloadPolicy() if on_host else OffloadPolicy()}
    for part in (*block_modules(model), model):
        if from_rank_0 is not None:
            _broadcast_weights(part, from_rank_0)
        fully_shard(part, **options)
    return model


def replicate(model: nn.Module, device: torch.device) -> nn.Module:
    """Copy rank 0's weights to each rank's device, without using the other ranks' host memory."""
    materialize_meta_params(model, device)
    model.to(device)
    _broadcast_weights(model, device)
    return model


def _broadcast_weights(module: nn.Module, device: torch.device) -> None:
    """Broadcast rank 0's parameters and saved buffers in pieces of a few MB; parameters that are sharded already are skipped."""
    materialize_meta_params(module)
    for values in module.state_dict(keep_vars=True).values():
        if isinstance(values, DTensor):
            continue
        flat = values.detach().view(-1)
        for piece in flat.split(max(1, _PIECE_BYTES // flat.element_size())):
            buffer = piece.to(device)
            dist.broadcast(buffer, 0)
            # Rank 0's weights may be pages of a mapped file: a write would copy them into its private memory.
            if dist.get_rank() != 0:
                piece.copy_(buffer)


def parameter_bytes(model: nn.Module) -> int:
    """Return the bytes of the model's parameters; a tied parameter counts once."""
    return sum(p.numel() * p.element_size() for p in model.parameters())


def named_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the parameters with their names without wrappers."""
    return ((clean_parameter_name(name), parameter) for name, parameter in model.named_parameters())


def shards_of(model: nn.Module, shard_of: ShardOf) -> dict[str, FlatShard]:
    """Return this rank's shard of every parameter, by name; a replicated parameter is one shard."""
    return {name: shard_of(p) or local_shard(p.detach()) for name, p in named_parameters(model)}


def average(
    reference: Mapping[str, FlatShard],
    policy: Mapping[str, FlatShard],
    share: float,
    starts: Mapping[str, int],
    noise_key: str,
) -> None:
    """Update reference = share * policy + (1 - share) * reference in place, on this rank's shards.

    The policy's shard of a parameter must be the same range as the reference's, or the whole parameter. A bf16 reference is
    rounded stochastically, since nearest rounding would lose a small share: E[reference] is the fp32 average. The noise depends
    on `noise_key`, the name, and positions in the unsharded parameter, counted from this rank's first, `starts`.
    """
    with torch.no_grad():
        for name, target in reference.items():
            # Of a policy with low bits these are its bf16 weights: half a bf16 step away at most, which the average forgets.
            source = policy[name]
            values: Tensor = source.local
            if source.chunk != target.chunk:
                start = target.rank * target.chunk
                values = values[start : start + target.local.numel()]
            if target.local.dtype == torch.bfloat16:
                _average_bf16(target.local, values, share, starts[name], f"{noise_key}/{name}")
            else:
                target.local.lerp_(values.to(target.local), share)


def _average_bf16(target: Tensor, values: Tensor, share: float, start: int, noise_key: str) -> None:
    """Average in fp32, piece by piece, and round stochastically to bf16."""
    count = _PIECE_BYTES // 4
    for first in range(0, target.numel(), count):
        piece = target[first : first + count]
        mixed = piece.float().lerp_(values[first : first + count].to(piece.device, torch.float32), share)
        at = start + first
        noise = rounding_noise(noise_key, at, at + piece.numel(), 16, piece.device)
        piece.copy_(split_weights(mixed, 16, noise)[0])

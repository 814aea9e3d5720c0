"""FSDP2: each rank stores some rows of every parameter, and a layer is gathered when it runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, cast

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter

from lowpeak.arguments import StorageFormat
from lowpeak.parallel.base import AccelerateStrategy, freeze, fsdp_mesh, shard_layers
from lowpeak.parallel.parameters import FlatShard, fsdp_shard
from lowpeak.parallel.partial_gather import unit_classes
from lowpeak.parallel.strategy import FrozenModel


class Fsdp2(AccelerateStrategy):
    """torch's `fully_shard`, applied by accelerate; gradients are reduced in each micro-batch, so they stay sharded."""

    shards_parameters = True
    shards_states = True

    def __init__(self, accelerator: Accelerator) -> None:
        super().__init__(accelerator)
        self._collectives = PassCollectives()

    @contextmanager
    def preparing(self, model: nn.Module) -> Iterator[None]:
        plugin = self._accelerator.state.fsdp_plugin
        named = plugin.transformer_cls_names_to_wrap
        plugin.transformer_cls_names_to_wrap = named or unit_classes(model)
        broadcast = _broadcast_buffers(model, self._accelerator.device)
        try:
            with broadcast if plugin.cpu_ram_efficient_loading else nullcontext():
                yield
        finally:
            plugin.transformer_cls_names_to_wrap = named  # all trainers of the process share the plugin

    def micro_batch_context(self, model: nn.Module, last: bool) -> AbstractContextManager[None]:
        self._accelerator.gradient_state._set_sync_gradients(True)
        return nullcontext()

    def place_optimizer(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, storage: StorageFormat | None
    ) -> None:
        super().place_optimizer(model, optimizer, storage)
        if self.survives_failed_passes:
            self._collectives.attach(super()._unwrapped(model))

    @property
    def survives_failed_passes(self) -> bool:
        # Replicas of shards also sum gradients outside of the interface that FSDP2 has for its collectives.
        mesh = fsdp_mesh(self._accelerator)
        return hasattr(FSDPModule, "reset_iter_state") and (mesh is None or mesh.ndim == 1)

    def finish_failed_pass(self, model: nn.Module, run_masked: Callable[[], object]) -> None:
        self._collectives.finish(super()._unwrapped(model), run_masked)

    @contextmanager
    def gather_for_inference(
        self, model: nn.Module, budget: int | None, gather_head: bool = False
    ) -> Iterator[nn.Module]:
        with super().gather_for_inference(model, budget, gather_head) as inner, _model_generate(inner):
            yield inner

    def prepare_frozen(self, model: nn.Module, free_bytes: int, on_host: bool) -> FrozenModel:
        # Sharded on the policy's mesh even if a replica would fit: `average` then needs no communication.
        from_rank_0 = (
            self._only_rank_0_has_weights(model) or self._accelerator.state.fsdp_plugin.cpu_ram_efficient_loading
        )
        device = self._device if from_rank_0 else None
        return self._frozen(shard_layers(freeze(model), fsdp_mesh(self._accelerator), on_host, device))

    def _unwrapped(self, model: nn.Module) -> nn.Module:
        reshard(model)
        return super()._unwrapped(model)

    def _shard(self, parameter: nn.Parameter) -> FlatShard | None:
        policy = self._accelerator.state.fsdp_plugin.mixed_precision_policy
        compute = getattr(policy, "param_dtype", None) if parameter.is_floating_point() else None
        return fsdp_shard(parameter, compute, self._device)


@contextmanager
def _broadcast_buffers(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Broadcast rank 0's saved buffers, and hide them inside the block: accelerate takes them for sharded parameters."""
    saved = [
        (module, name)
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and name not in module._non_persistent_buffers_set
    ]
    for module, name in saved:
        buffer = module._buffers[name]
        assert buffer is not None
        values = torch.empty_like(buffer, device=device) if buffer.is_meta else buffer.to(device)
        dist.broadcast(values, 0)
        module._buffers[name] = values
        module._non_persistent_buffers_set.add(name)
    try:
        yield
    finally:
        for module, name in saved:
            module._non_persistent_buffers_set.discard(name)


class PassCollectives:
    """Counts the collectives of a pass, so that a rank on which it fails can join the rest.

    All ranks run the same collectives in a pass, in the same order, whatever their micro-batches are.
    """

    def __init__(self) -> None:
        self._num_begun = self._num_skipped = 0
        self._root: nn.Module | None = None

    def attach(self, root: nn.Module) -> None:
        """Count the collectives of all FSDP units of a model from now on."""
        if root is self._root:
            return
        self._root = root
        root.register_forward_pre_hook(self._begin, prepend=True)
        for module in root.modules():
            if isinstance(module, FSDPModule):
                module.set_custom_all_gather(_CountedAllGather(self))
                module.set_custom_reduce_scatter(_CountedReduceScatter(self))

    def count(self) -> bool:
        """Return whether this collective is run: not if this rank took part in it before the pass failed."""
        self._num_begun += 1
        return self._num_begun > self._num_skipped

    def finish(self, root: nn.Module, run_masked: Callable[[], object]) -> None:
        """Run a masked pass without its first collectives, those that this rank took part in."""
        unit = cast(FSDPModule, root)
        unit.reset_iter_state()
        self._num_skipped = self._num_begun
        try:
            run_masked()
        finally:
            self._num_begun = self._num_skipped = 0
            unit.reset_iter_state()  # what a skipped gather left is not the weights

    def _begin(self, root: nn.Module, *_: object) -> None:
        # A pass without gradients leaves embedding, norm and head gathered: the next one would have a collective less.
        reshard(root)
        self._num_begun = 0


class _CountedAllGather(DefaultAllGather):
    def __init__(self, collectives: PassCollectives) -> None:
        self._collectives = collectives

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return super().__call__(*args, **kwargs) if self._collectives.count() else None


class _CountedReduceScatter(DefaultReduceScatter):
    def __init__(self, collectives: PassCollectives) -> None:
        self._collectives = collectives

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return super().__call__(*args, **kwargs) if self._collectives.count() else None


def reshard(model: nn.Module) -> None:
    """Free parameters that FSDP2 keeps gathered: the root units' after a forward without gradients."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


@contextmanager
def _model_generate(model: nn.Module) -> Iterator[None]:
    """Restore the class's `generate`: transformers replaces it by one that gathers all parameters through FSDP2's hooks."""
    replacement = model.__dict__.pop("generate", None)
    try:
        yield
    finally:
        if replacement is not None:
            model.__dict__["generate"] = replacement

"""FSDP2: each rank stores some rows of every parameter, and a layer is gathered when it runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from torch import nn
from torch.distributed.fsdp import FSDPModule

from lowpeak.parallel.base import AccelerateStrategy, freeze, fsdp_mesh, shard_layers
from lowpeak.parallel.parameters import FlatShard, fsdp_shard
from lowpeak.parallel.strategy import FrozenModel


class Fsdp2(AccelerateStrategy):
    """torch's `fully_shard`, applied by accelerate; gradients are reduced in each micro-batch, so they stay sharded."""

    shards_parameters = True
    shards_states = True

    def micro_batch_context(self, model: nn.Module, last: bool) -> AbstractContextManager[None]:
        self._accelerator.gradient_state._set_sync_gradients(True)
        return nullcontext()

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


def reshard(model: nn.Module) -> None:
    """Free what FSDP2 left gathered: after a forward without gradients, the root's parameters until a backward."""
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

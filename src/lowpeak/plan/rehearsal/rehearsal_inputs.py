"""Inputs of a rehearsal: models, micro-batches, placement, formats."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import nn

from lowpeak.algorithms import Algorithm
from lowpeak.arguments import Sampling, StorageFormat
from lowpeak.records import MicroBatch, Prompt
from lowpeak.training import LogprobSettings

_FUSED_ADAMW = partial(torch.optim.AdamW, fused=True)  # transformers' default


@dataclass(frozen=True)
class RehearsedRollout:
    """The prompts that one rank's native engine generates for, and the bytes of its KV cache.

    `gather_budget` are the bytes of a sharded policy that stay gathered meanwhile, or of copies of fp32 weights; `has_graphs` says
    whether it captures CUDA graphs.
    """

    prompts: Sequence[Prompt]
    sampling: Sampling
    kv_cache_bytes: int
    gather_budget: int = 0
    has_graphs: bool = False


@dataclass(frozen=True)
class RewardPass:
    """A frozen reward model, and the tokens [B, L] of its largest batch."""

    make_model: Callable[[], nn.Module]
    shape: tuple[int, int]


@dataclass(frozen=True)
class MeshShape:
    """How the policy is placed on fake ranks: sharded over `shards` of them by FSDP2, in `replicas` copies.

    With one shard, several replicas are those of DDP. Tensor parallelism splits the policy into `parts` before that.
    """

    shards: int = 1
    replicas: int = 1
    parts: int = 1

    @property
    def world_size(self) -> int:
        return self.shards * self.replicas * self.parts


@dataclass(frozen=True)
class RehearsalInputs:
    """A step to rehearse, with its surroundings in a run.

    make_model             returns the model with its head installed; called under FakeTensorMode, where it takes no memory.
                           With several parts it is called with a function that splits a model, and so is `make_reference`
    micro_batches          rank 0's of a step, packed outside
    mesh_shape             how the policy is placed on ranks
    compute                torch.bfloat16 for a run with `bf16=True`
    storage                format to which the model is converted, with CompactAdamW as the optimizer
    scored                 micro-batches of the scoring passes that `algorithm.needs`; None: `micro_batches`
    reference_batches      of a reference or teacher; None: those of the policy
    make_reference         of a separate reference; without it scoring runs the policy, without its adapter if it has one
    activation_offloading  whether a forward's activations go to host memory
    device                 whose allocator's blocks are counted; on "cpu" copies in gloo and in kernels are counted, too
    updates                whether there are optimizer states and an optimizer phase
    """

    make_model: Callable[..., nn.Module]
    micro_batches: Sequence[MicroBatch]
    algorithm: Algorithm
    core: LogprobSettings
    mesh_shape: MeshShape = MeshShape()
    compute: torch.dtype | None = None
    make_optimizer: Callable[[Any], torch.optim.Optimizer] = _FUSED_ADAMW
    storage: StorageFormat | None = None
    max_grad_norm: float = 1.0
    scored: Sequence[MicroBatch] | None = None
    reference_batches: Sequence[MicroBatch] | None = None
    make_reference: Callable[..., nn.Module] | None = None
    rewards: Sequence[RewardPass] = ()
    rollout: RehearsedRollout | None = None
    activation_offloading: bool = False
    device: Literal["cuda", "cpu"] = "cuda"
    updates: bool = True

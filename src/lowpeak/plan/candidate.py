"""A candidate of `lowpeak plan --fit`: settings that the search may choose."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lowpeak.arguments import StorageFormat
from lowpeak.parallel import SHARDINGS, Sharding

# Arguments that a candidate may set.
FROZEN, STATES, ACTIVATIONS = OFFLOADS = ("offload_frozen_models", "offload_during_rollout", "activation_offloading")
SHARE, SLEEPS, PARALLEL = "vllm_gpu_memory_utilization", "vllm_enable_sleep_mode", "vllm_tensor_parallel_size"
CACHE, GATHER, BATCH = "kv_cache_bytes", "gather_budget", "per_device_train_batch_size"
USABLE_SHARE = 0.97  # of a device: what a quick plan may fill


@dataclass(frozen=True)
class Candidate:
    """Settings that the search may choose: arguments to set, and where the run is placed.

    `offloads` are the names of arguments that move memory to the host. `sleeps` and `engine_parallel` (its devices) are those of
    a colocated vLLM.
    """

    strategy: str
    tensor_parallel: int
    arguments: Mapping[str, Any]
    storage: StorageFormat | None
    checkpointing: bool
    tokens: int
    offloads: tuple[str, ...] = ()
    sleeps: bool = False
    engine_parallel: int = 1

    @property
    def sharding(self) -> Sharding:
        return SHARDINGS[self.strategy]

    def __str__(self) -> str:
        parts = [self.strategy if self.tensor_parallel == 1 else f"{self.strategy} (tp {self.tensor_parallel})"]
        parts.append("16 bytes per trained parameter" if self.storage is None else _storage_words(self.storage))
        parts.append("checkpointing" if self.checkpointing else "no checkpointing")
        parts.append(f"micro-batches of {self.tokens:,} tokens")
        parts += self.offloads
        if self.engine_parallel > 1:
            parts.append(f"vLLM over {self.engine_parallel} devices")
        if self.sleeps:
            parts.append("vLLM sleeps")
        return ", ".join(parts)


def _storage_words(storage: StorageFormat) -> str:
    words = f"{storage.total_bytes:.1f} bytes per trained parameter"
    return f"{words}, of which {storage.weight_bytes} on the device" if storage.offload else words

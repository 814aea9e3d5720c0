"""A candidate of `lowpeak plan --fit`: settings that the search may choose, and the estimate of a run with them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lowpeak.arguments import StorageFormat, show_bytes
from lowpeak.parallel import SHARDINGS, Sharding
from lowpeak.plan.hardware import Machine

# Arguments that a candidate may set.
FROZEN, STATES, ACTIVATIONS = OFFLOADS = ("offload_frozen_models", "offload_during_rollout", "activation_offloading")
SHARE, SLEEPS, PARALLEL = "vllm_gpu_memory_utilization", "vllm_enable_sleep_mode", "vllm_tensor_parallel_size"
CACHE, GATHER = "kv_cache_bytes", "gather_budget"
USABLE_SHARE = 0.97  # of a device: what an estimate may fill


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


@dataclass(frozen=True)
class Estimate:
    """The estimated peak of a candidate on a device, and of all processes in a host's memory, in bytes, and the seconds of a step.

    `sizes` are the arguments of its rollout.
    """

    candidate: Candidate
    peak: int
    host: int
    seconds: float
    sizes: Mapping[str, Any]

    def fits(self, machine: Machine) -> bool:
        """Return whether the device and the host have room."""
        on_host = machine.host_memory is None or self.host <= machine.host_memory
        return self.peak <= USABLE_SHARE * machine.memory and on_host

    def reason(self, machine: Machine) -> str:
        """Return why the candidate does not fit."""
        if self.peak > USABLE_SHARE * machine.memory:
            return f"about {show_bytes(self.peak)} on a device of {show_bytes(machine.memory)}"
        return self.reason_of_host(machine)

    def reason_of_host(self, machine: Machine) -> str:
        """Return the bytes of host memory that the candidate needs, of those that a host has."""
        return f"about {show_bytes(self.host)} of a host's memory of {show_bytes(machine.host_memory or 0)}"

"""What a run was told about vLLM: where it runs, how weights get there, how large a wave is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

SERVER_TOKEN = "LOWPEAK_SERVER_TOKEN"  # in the environment: what a server demands, and what the run gives it

VllmMode = Literal["colocate", "server"]
ModelImpl = Literal["vllm", "transformers", "auto"]
Transport = Literal["auto", "process", "nccl", "tcp"]


@dataclass(frozen=True)
class ColocateSettings:
    """An engine in each training process, or one over `tensor_parallel_size` of them.

    `gpu_memory_utilization` is vLLM's share of the device, `engine_kwargs` go to `vllm.LLM` as they are. With `sleeps` the
    engine gives memory back while training. `kv_cache_bytes` is the size of its KV cache (None: what vLLM finds in its share).
    """

    tensor_parallel_size: int = 1
    gpu_memory_utilization: float = 0.3
    max_model_length: int | None = None
    model_impl: ModelImpl = "vllm"
    sleeps: bool = False
    kv_cache_bytes: int | None = None
    engine_kwargs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ServerSettings:
    """Servers that answer over HTTP, one engine each; several share the prompts.

    `timeout` is how many seconds a server may take to be there (at the start, and after it died). `token` is what a server
    that demands one gets. `group_port` is where the trainer listens when weights go by NCCL or TCP (None: anywhere).
    """

    base_urls: tuple[str, ...]
    timeout: float = 240.0
    token: str | None = field(default=None, repr=False)
    group_port: int | None = None


@dataclass(frozen=True)
class VllmSettings:
    """Rollouts by vLLM.

    `batch_size` is the rows of a wave (None: as many as the KV cache holds at full length), `wave_timeout` the seconds a wave
    may take (None: no limit). Weights go in buckets of `bucket_bytes` over `transport`; with `verify` each load and wake is
    proved. `structured_regex` bounds what a completion may be; `sampling_kwargs` are more of vLLM's sampling parameters.
    """

    where: ColocateSettings | ServerSettings
    batch_size: int | None = None
    wave_timeout: float | None = None
    bucket_bytes: int = 64 << 20
    transport: Transport = "auto"
    verify: bool = True
    adapters: bool = True
    structured_regex: str | None = None
    sampling_kwargs: Mapping[str, Any] = field(default_factory=dict)

    @property
    def mode(self) -> VllmMode:
        """TRL's word for where the engine runs."""
        return "colocate" if isinstance(self.where, ColocateSettings) else "server"

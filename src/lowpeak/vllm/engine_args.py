"""vLLM's engine arguments: those common to all engines, and remedies for too little memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from lowpeak.arguments import ColocateSettings, ServerSettings

# For colocated engines and servers: weights arrive through lowpeak's worker methods, log-probs are of the full
# softmax, and a checkpoint's generation defaults do not apply.
COMMON_ENGINE_ARGS: Mapping[str, str] = {
    "worker_extension_cls": "lowpeak.vllm.weight_sync.worker.Extension",
    "logprobs_mode": "raw_logprobs",
    "generation_config": "vllm",
}
# With `kv_cache_memory_bytes` set, vLLM uses its share only for a check of the free device memory at start-up.
MIN_MEMORY_SHARE = 0.01


@dataclass(frozen=True)
class LaunchedServer:
    """Location of a server that the run's command started and the run's arguments size."""

    tensor_parallel_size: int


Location: TypeAlias = ColocateSettings | ServerSettings | LaunchedServer


def memory_remedy(where: ColocateSettings | LaunchedServer, batch_size: int | None = None) -> str:
    """Return a sentence with the arguments to change if memory or the context was too small.

    The sentence is conditional, because vLLM also fails for other reasons.
    """
    remedies = [
        f"{cache_size_remedy(where, 'change')}",
        f"lower {option_name(where, 'max_model_length')}",
        f"lower vllm_batch_size ({'unset' if batch_size is None else f'now {batch_size}'})",
        f"raise vllm_tensor_parallel_size (now {where.tensor_parallel_size})",
    ]
    if isinstance(where, ColocateSettings):
        remedies.append("set offload_during_rollout=True to free the trainer's memory")
    return f"If memory or the context was too small: {', or '.join(remedies)}."


def option_name(where: Location, name: str) -> str:
    """Return the spelling of an engine option in the place where this engine is configured."""
    if not isinstance(where, ServerSettings):
        return f"vllm_{name}"
    return f"`lowpeak serve --{'max_model_len' if name == 'max_model_length' else name}`"


def cache_size_remedy(where: Location, verb: str) -> str:
    """Return the options that size the KV cache: bytes if they were set, otherwise vLLM's share of the device."""
    if isinstance(where, ServerSettings):
        return f"{verb} {option_name(where, 'gpu_memory_utilization')} (or its --kv_cache_memory_bytes)"
    if isinstance(where, LaunchedServer):
        return f"{verb} vllm_gpu_memory_utilization (or kv_cache_bytes)"
    if where.kv_cache_bytes is not None:
        return f"{verb} kv_cache_bytes (now {where.kv_cache_bytes})"
    return f"{verb} vllm_gpu_memory_utilization (now {where.gpu_memory_utilization}) or set kv_cache_bytes"

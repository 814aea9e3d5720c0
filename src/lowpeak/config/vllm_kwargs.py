"""What may be handed to vLLM by name: engine arguments, and sampling parameters of generation_kwargs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lowpeak.config.declare import require
from lowpeak.config.rollout import EVERY_ENGINE

# vLLM's sampling parameters that say what an argument says, or that the way of asking decides.
_SAID_ELSEWHERE = {"n": "num_generations", "structured_outputs": "vllm_structured_outputs_regex"}
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
_ENGINE_OURS = ("model", "load_format", "distributed_executor_backend", "worker_extension_cls", "logprobs_mode")


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


def sampling_kwargs(given: Mapping[str, Any]) -> dict[str, Any]:
    """What generation_kwargs hands to vLLM beyond what every engine takes; ArgumentError for what it should not."""
    more = {name: value for name, value in given.items() if name not in EVERY_ENGINE}
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

"""What may be handed to vLLM by name: engine arguments, and sampling parameters of generation_kwargs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lowpeak.arguments.declare import MAPPING, require
from lowpeak.arguments.rollout import EVERY_ENGINE

# vLLM's sampling parameters beyond EVERY_ENGINE that a run takes: a server does not tell of a name that it does not know.
_PASSED_ON = (
    *("presence_penalty", "frequency_penalty", "min_tokens", "logit_bias", "allowed_token_ids", "bad_words"),
    *("thinking_token_budget", "skip_reading_prefix_cache"),
)
_ENDS = (
    "a completion ends with the tokenizer's end of sequence, a stop string or a stop token, or at max_completion_length; "
    "remove it"
)
# Why others are refused: what is said by an argument, what lowpeak sets itself, what would end a completion unknown to the run.
_NO_SAMPLING = {
    "n": "say it as num_generations",
    "structured_outputs": "say it as vllm_structured_outputs_regex",
    **dict.fromkeys(
        [
            "logprobs",
            "prompt_logprobs",
            "flat_logprobs",
            "output_kind",
            "detokenize",
            "skip_special_tokens",
            "extra_args",
        ],
        "lowpeak sets it itself to train on the answer; remove it",
    ),
    "ignore_eos": _ENDS,
    "repetition_detection": _ENDS,
}
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


def engine_kwargs(given: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return what vllm_engine_kwargs hands to vLLM; ArgumentError for what another argument says, or lowpeak sets itself."""
    require(MAPPING.fits(given), f"vllm_engine_kwargs {MAPPING.words}.")
    for name in given or {}:
        require(name not in _NO_ENGINE, f"vllm_engine_kwargs has {name}: {_NO_ENGINE.get(name)}.")
    return dict(given or {})


def sampling_kwargs(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return what generation_kwargs hands to vLLM beyond what every engine takes; ArgumentError for what it should not."""
    more = {name: value for name, value in given.items() if name not in EVERY_ENGINE}
    unknown = f"vLLM does not take it; it takes {', '.join((*EVERY_ENGINE, *_PASSED_ON))}"
    for name in more:
        require(name in _PASSED_ON, f"generation_kwargs has {name}: {_NO_SAMPLING.get(name, unknown)}.")
    if "logit_bias" in more:
        bias = more["logit_bias"]
        require(
            isinstance(bias, Mapping) and all(str(t).isdigit() and isinstance(b, int | float) for t, b in bias.items()),
            f"generation_kwargs has logit_bias={bias!r}, which is no mapping of token ids to numbers.",
        )
        more["logit_bias"] = {int(token): float(value) for token, value in bias.items()}  # JSON has texts for keys
    return more

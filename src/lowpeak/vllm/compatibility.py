"""Compatibility with vLLM: checks of its version and of the model that it loaded, and two patches of its workers.

A fingerprint is two hashes: of the sizes in the model's configuration, and of the tokenizer's vocabulary. It excludes the weights,
which the trainer sends. Trainer and workers compute it with the same function, each from what transformers loaded there.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
from collections.abc import Callable, Mapping
from functools import cache, wraps
from inspect import signature
from typing import TYPE_CHECKING, Any

from lowpeak.errors import EngineError, require_package
from lowpeak.vllm.protocol import EngineInfo
from lowpeak.vllm.serving import SERVES_TOKENS

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger(__name__)

OLDEST = (0, 31)
BELOW = (0, 34)
SUPPORTED = f">={OLDEST[0]}.{OLDEST[1]},<{BELOW[0]}.{BELOW[1]}"

SIZES = (
    "model_type",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
)


def require_vllm(what: str = "use_vllm=True") -> None:
    """Raise MissingPackageError if vLLM, which `what` needs, is not installed."""
    # Does not import vLLM, which takes many seconds.
    otherwise = "; without it the policy itself generates (use_vllm=False)" if what == "use_vllm=True" else ""
    require_package("vllm", what, "vllm", otherwise, named=f"vLLM {SUPPORTED}")


def warn_unsupported(version: str) -> None:
    """Log a warning if `version` is outside the supported range or cannot be parsed."""
    match = re.match(r"(\d+)\.(\d+)", version)
    if match is None or not OLDEST <= (int(match[1]), int(match[2])) < BELOW:
        logger.warning(
            "vLLM %s is outside the versions that lowpeak is tested with (%s): loading weights may fail.",
            version,
            SUPPORTED,
        )


def fingerprint(config: Any, vocabulary: Mapping[str, int]) -> str:
    """Return `model:tokenizer`, 16 hexadecimal digits each."""
    # Tokens without an embedding do not count: transformers may load a tokenizer as another class, which adds tokens, if a
    # model's config lies in the same folder.
    text = _text_config(config)
    return f"{_hash_sizes(text)}:{_hash_tokens(vocabulary, getattr(text, 'vocab_size', None))}"


def engine_fingerprint(model: Any) -> str:
    """Return the fingerprint of vLLM's `ModelConfig`, whose tokenizer is loaded for it."""
    text = _text_config(model.hf_config)
    if model.skip_tokenizer_init:
        return f"{_hash_sizes(text)}:{_hash_tokens({}, None)}"
    source = str(model.tokenizer), model.tokenizer_revision, bool(model.trust_remote_code)
    return f"{_hash_sizes(text)}:{_hash_tokenizer(*source, getattr(text, 'vocab_size', None))}"


def _text_config(config: Any) -> Any:
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def _hash_sizes(text: Any) -> str:
    return _digest({name: getattr(text, name, None) for name in SIZES})


def _hash_tokens(vocabulary: Mapping[str, int], size: int | None) -> str:
    return _digest(sorted(pair for pair in vocabulary.items() if size is None or pair[1] < size))


@cache
def _hash_tokenizer(name: str, revision: str | None, trust_remote_code: bool, size: int | None) -> str:
    """Hash the vocabulary that `AutoTokenizer` loads, as in the trainer; once per process."""
    from transformers import AutoTokenizer

    loaded = AutoTokenizer.from_pretrained(name, revision=revision, trust_remote_code=trust_remote_code)
    return _hash_tokens(loaded.get_vocab(), size)


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]


def read_engine_info(config: Any) -> EngineInfo:
    """Return the properties of the vLLM in this process from its `VllmConfig`, without a fingerprint."""
    import vllm

    model, cache = config.model_config, config.cache_config
    return EngineInfo(
        version=vllm.__version__,
        model=str(model.model),
        fingerprint="",
        dtype=str(model.dtype).removeprefix("torch."),
        max_model_len=int(model.max_model_len),
        max_num_seqs=int(config.scheduler_config.max_num_seqs),
        kv_tokens=int(cache.num_gpu_blocks or 0) * int(cache.block_size),
        max_loras=0 if config.lora_config is None else int(config.lora_config.max_loras),
        speculates=config.speculative_config is not None,
        serves_tokens=SERVES_TOKENS in os.environ,
    )


def check_adapters(info: EngineInfo, staleness: int) -> None:
    """Raise EngineError for a server that cannot hold an adapter per version; one version ahead, merged weights will do."""
    if staleness and info.max_loras <= staleness and not (staleness == 1 and not info.max_loras):
        raise EngineError(
            f"max_staleness={staleness} needs {staleness + 1} versions of the adapter at once, but the server of {info.model} "
            f"holds {info.max_loras}: start it with `lowpeak serve --enable-lora --max-loras {staleness + 1}`, or set "
            "vllm_adapters=False, which needs a server per version."
        )


def check_same_model(info: EngineInfo, model: Any, tokenizer: Any) -> None:
    """Raise EngineError, with both names, if vLLM has loaded another model or tokenizer than the trainer's."""
    name = getattr(model.config, "_name_or_path", "") or type(model).__name__
    sizes, vocabulary = fingerprint(model.config, tokenizer.get_vocab()).split(":")
    engine_sizes, engine_vocabulary = info.fingerprint.split(":")
    if sizes != engine_sizes:
        raise EngineError(
            f"vLLM has loaded {info.model!r}, whose sizes differ from those of the model that is trained, {name!r}: start it with "
            f"`lowpeak serve --model {name}`."
        )
    if vocabulary != engine_vocabulary:
        raise EngineError(
            f"vLLM's tokenizer, from {info.model!r}, has another vocabulary than the trainer's, "
            f"{getattr(tokenizer, 'name_or_path', '') or name!r}: start vLLM with the same tokenizer (--tokenizer)."
        )


# vLLM's threshold: below it a sequence is greedy, and its log-probs are those at temperature 1.
_GREEDY = 1e-5
# Arguments by which a V2 sampler's function finds the sequence of each row of logits.
_V2_ARGUMENTS = {"logprob_token_ids_state", "expanded_idx_mapping"}


def disable_cpu_repacking() -> None:
    """Make vLLM keep the weights of CPU models as they were loaded.

    vLLM repacks linear weights into oneDNN's format and empties the parameters, which prevents later loads and leaves a tied
    head with its old values.
    """
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        import vllm._custom_ops as custom_ops
        from vllm.model_executor.layers import utils

        custom_ops._supports_onednn = False
        utils.check_cpu_sgl_kernel = lambda *args, **kwargs: False


def score_at_temperature(sampler: Any) -> None:
    """Make a vLLM sampler return raw log-probs at each sequence's temperature; repeated calls have no effect.

    Log-probs of sampled tokens must be the policy's: of the full softmax at the sampling temperature, before top-k, top-p and
    penalties. vLLM's "raw_logprobs" have temperature 1; its "processed_logprobs" are renormalised after top-k and top-p. In raw
    mode vLLM's samplers compute them from the unmodified logits, so the logits are divided by each sequence's temperature there.
    vLLM 0.31 to 0.33 have two samplers: that of the V2 model runner, their default where Triton works, and V1's.
    """
    if getattr(sampler, "logprobs_mode", "raw_logprobs") != "raw_logprobs":
        raise EngineError('vLLM needs logprobs_mode="raw_logprobs": remove the option that changes it.')
    # V2's sampler calls a function of its module; one namespace serves all samplers of the process.
    namespace = getattr(type(sampler).__call__, "__globals__", {})
    compute = namespace.get("compute_topk_scores")
    if hasattr(sampler, "sampling_states") and compute and signature(compute).parameters.keys() >= _V2_ARGUMENTS:
        sampler.logprob_token_ids_state.lowpeak_sampling_states = sampler.sampling_states
        if not hasattr(compute, "lowpeak_scores_at_temperature"):
            namespace["compute_topk_scores"] = _score_v2_at_temperature(compute)
    elif hasattr(sampler, "compute_logprobs") and hasattr(sampler, "forward"):
        if not hasattr(sampler, "lowpeak_scores_at_temperature"):
            _score_v1_at_temperature(sampler)
    else:
        import vllm

        raise EngineError(
            f"vLLM {vllm.__version__} has a sampler ({type(sampler).__module__}.{type(sampler).__qualname__}) without log-probs at "
            f"the sampling temperature: install vLLM {SUPPORTED}, or set use_vllm=False."
        )


def _score_v2_at_temperature(compute: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(compute)
    def compute_at_temperature(logits: Tensor, *args: Any, **kwargs: Any) -> Any:
        states = getattr(kwargs["logprob_token_ids_state"], "lowpeak_sampling_states", None)
        # A copy of the logits costs memory, and most runs sample at temperature 1.
        if states is not None and ((states.temperature.np != 0) & (states.temperature.np != 1)).any():
            logits = _at_temperature(logits, states.temperature.gpu[kwargs["expanded_idx_mapping"]])
        return compute(logits, *args, **kwargs)

    compute_at_temperature.lowpeak_scores_at_temperature = True  # type: ignore[attr-defined]
    return compute_at_temperature


def _score_v1_at_temperature(sampler: Any) -> None:
    temperature: list[Tensor | None] = [None]
    compute: Callable[[Tensor], Tensor] = sampler.compute_logprobs
    forward: Callable[..., Any] = sampler.forward

    @wraps(forward)
    def forward_with_temperature(logits: Tensor, sampling_metadata: Any, *args: Any, **kwargs: Any) -> Any:
        temperature[0] = None if sampling_metadata.all_greedy else sampling_metadata.temperature
        try:
            return forward(logits, sampling_metadata, *args, **kwargs)
        finally:
            temperature[0] = None

    @wraps(compute)
    def compute_at_temperature(logits: Tensor) -> Tensor:
        temperatures = temperature[0]
        return compute(logits if temperatures is None else _at_temperature(logits, temperatures))

    sampler.forward = forward_with_temperature
    sampler.compute_logprobs = compute_at_temperature
    sampler.lowpeak_scores_at_temperature = True


def _at_temperature(logits: Tensor, temperatures: Tensor) -> Tensor:
    """Return the logits, in fp32, divided by the temperature of each row's sequence; a greedy one's is 1."""
    return logits / temperatures.masked_fill(temperatures < _GREEDY, 1.0).to(logits.device).unsqueeze(1)

"""Compatibility checks: vLLM's version, and the model and tokenizer that an engine has loaded.

A fingerprint is two hashes: of the sizes in the model's configuration, and of the tokenizer's vocabulary. It excludes the weights,
which the trainer sends. Trainer and workers compute it with the same function, each from what transformers loaded there.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Mapping
from functools import cache
from typing import Any

from lowpeak.errors import EngineError, require_package
from lowpeak.vllm.protocol import EngineInfo

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
    otherwise = "; without it the policy itself generates (use_vllm=False)"
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
        num_workers=int(config.parallel_config.world_size),
        serves_adapters=config.lora_config is not None,
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

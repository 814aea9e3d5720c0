"""What a vLLM is, told by its workers, and whether it is what a run trains.

A fingerprint is two hashes: of the sizes in the model's configuration, and of the tokenizer's vocabulary. The weights are not
in it: they are sent. Both sides compute it with the same function, each from what transformers loaded for it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from functools import cache
from typing import Any

from lowpeak.errors import EngineError
from lowpeak.vllm.protocol import Facts

SIZES = (
    "model_type",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
)


def fingerprint(config: Any, vocabulary: Mapping[str, int]) -> str:
    """`model:tokenizer`, 16 hexadecimal digits each.

    Tokens that the model does not embed do not count: with a model's config beside it, transformers may load a tokenizer as a class
    that adds tokens of its own.
    """
    text = _text(config)
    return f"{_sizes(text)}:{_tokens(vocabulary, getattr(text, 'vocab_size', None))}"


def _text(config: Any) -> Any:
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def _sizes(text: Any) -> str:
    return _digest({name: getattr(text, name, None) for name in SIZES})


def _tokens(vocabulary: Mapping[str, int], size: int | None) -> str:
    return _digest(sorted(pair for pair in vocabulary.items() if size is None or pair[1] < size))


def _digest(what: Any) -> str:
    return hashlib.sha256(json.dumps(what).encode()).hexdigest()[:16]


def facts_of(config: Any) -> Facts:
    """The facts of the vLLM that runs in this process, from its `VllmConfig`; without a fingerprint."""
    import vllm

    model, cache = config.model_config, config.cache_config
    return Facts(
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


def own_fingerprint(model: Any) -> str:
    """The fingerprint of vLLM's `ModelConfig`; its tokenizer is loaded for it."""
    text = _text(model.hf_config)
    if model.skip_tokenizer_init:
        return f"{_sizes(text)}:{_tokens({}, None)}"
    where = str(model.tokenizer), model.tokenizer_revision, bool(model.trust_remote_code)
    return f"{_sizes(text)}:{_tokens_of(*where, getattr(text, 'vocab_size', None))}"


@cache
def _tokens_of(name: str, revision: str | None, trust_remote_code: bool, size: int | None) -> str:
    """Of the vocabulary as `AutoTokenizer` has it, which is how the trainer loads it; read once a process."""
    from transformers import AutoTokenizer

    loaded = AutoTokenizer.from_pretrained(name, revision=revision, trust_remote_code=trust_remote_code)
    return _tokens(loaded.get_vocab(), size)


def check_same(facts: Facts, model: Any, tokenizer: Any) -> None:
    """EngineError with both names where vLLM holds another model or tokenizer than the trainer's."""
    name = getattr(model.config, "_name_or_path", "") or type(model).__name__
    sizes, vocabulary = fingerprint(model.config, tokenizer.get_vocab()).split(":")
    its_sizes, its_vocabulary = facts.fingerprint.split(":")
    if sizes != its_sizes:
        raise EngineError(
            f"vLLM has {facts.model!r} loaded, which has other sizes than the model that is trained, {name!r}: start it with "
            f"`lowpeak serve --model {name}`."
        )
    if vocabulary != its_vocabulary:
        raise EngineError(
            f"vLLM's tokenizer, from {facts.model!r}, has another vocabulary than the trainer's, "
            f"{getattr(tokenizer, 'name_or_path', '') or name!r}: start vLLM with the same (--tokenizer)."
        )

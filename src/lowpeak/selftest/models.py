"""Small models, a tokenizer, prompts and a reward for the self-test."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch

_ROLES = ("system", "user", "assistant", "tool")
# Qwen2.5-0.5B's shape, which most first runs have.
HALF_BILLION = {"num_ids": 151_936, "hidden": 896, "layers": 24, "heads": (14, 2), "intermediate": 4864}


def make_model(
    num_ids: int = 13,
    hidden: int = 128,
    layers: int = 2,
    heads: tuple[int, int] = (4, 4),
    *,
    intermediate: int | None = None,
    context: int = 64,
    tied: bool = True,
    dtype: torch.dtype = torch.float32,
) -> Any:
    """Return a Qwen2 with reproducible random weights; `heads` are the numbers of query and of key heads."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=num_ids,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads[0],
        num_key_value_heads=heads[1],
        intermediate_size=intermediate or 4 * hidden,
        max_position_embeddings=context,
        tie_word_embeddings=tied,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    model = Qwen2ForCausalLM(config)
    return model if dtype == torch.float32 else model.to(dtype)  # to() would fail on fake tensors


def make_tokenizer(num_ids: int = 13) -> Any:
    """Return a tokenizer with `num_ids` ids: padding, end, ten digits, `=`, and words that prompts never have."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "<eos>", *"0123456789=", *(f"<{i}>" for i in range(13, num_ids))]
    characters = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<pad>"))
    characters.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    characters.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=characters, pad_token="<pad>", eos_token="<eos>")


def make_chat_tokenizer() -> Any:
    """Return a tokenizer of bytes with a chat template that writes tool calls as JSON."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens = ["<pad>", "<end>", "<tool_call>", "</tool_call>", *(f"<{role}>" for role in _ROLES)]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE({token: i for i, token in enumerate([*tokens, *alphabet])}, []))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    inner.add_tokens([AddedToken(token, normalized=False, special=True) for token in tokens])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", eos_token="<end>")
    tokenizer.chat_template = (
        "{% for message in messages %}<{{ message.role }}>{{ message.content or '' }}{% for call in message.tool_calls or [] %}"
        "<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}<end>{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    return tokenizer


def make_prompts(num_rows: int) -> list[dict[str, str]]:
    """Return rows with reproducible prompts of six digits."""
    generator = random.Random(0)
    return [{"prompt": f"{generator.randrange(10**6):06d}="} for _ in range(num_rows)]


def even_share(completion_ids: Sequence[Sequence[int]], **columns: Any) -> list[float]:
    """Return the fraction of tokens with an even id: about 0.5 for a random model, 1 at best."""
    return [sum(token % 2 == 0 for token in ids) / len(ids) for ids in completion_ids]


def mib(num_bytes: float) -> str:
    """Return bytes as text in MiB."""
    return f"{num_bytes / 2**20:,.1f} MiB" if num_bytes < 10 << 20 else f"{num_bytes / 2**20:,.0f} MiB"

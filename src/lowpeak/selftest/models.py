"""What the self-test's rows run on: small models, a tokenizer, and a task that a policy learns from its reward alone.

The task, noisy sort: the prompt is six digits (`418302=`), the answer those digits in ascending order. Most demonstrations have
two neighbours swapped, so that a model trained on them knows what an answer looks like and sorts badly.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch

NUM_DIGITS = 6
WRONG_SHARE = 0.7
EOS = 1


def make_model(
    num_ids: int = 13,
    hidden: int = 128,
    layers: int = 2,
    heads: tuple[int, int] = (4, 4),
    *,
    context: int = 64,
    tied: bool = True,
    init: float = 0.02,
    dtype: torch.dtype = torch.float32,
) -> Any:
    """Make a Qwen2 with random weights, the same each time; `heads` are those of queries and of keys."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=num_ids,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads[0],
        num_key_value_heads=heads[1],
        intermediate_size=4 * hidden,
        max_position_embeddings=context,
        tie_word_embeddings=tied,
        initializer_range=init,
        pad_token_id=0,
        eos_token_id=EOS,
        bos_token_id=None,
    )
    model = Qwen2ForCausalLM(config)
    return model if dtype == torch.float32 else model.to(dtype)  # to() would not do on fake tensors


def make_tokenizer(num_ids: int = 13) -> Any:
    """Make a tokenizer of so many ids: padding, end, ten digits, `=`, and words that nobody writes."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "<eos>", *"0123456789=", *(f"<{i}>" for i in range(13, num_ids))]
    characters = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<pad>"))
    characters.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    characters.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=characters, pad_token="<pad>", eos_token="<eos>")


def make_prompts(num_rows: int, seed: int) -> list[dict[str, str]]:
    """Return rows of a prompt and its right answer."""
    draw = random.Random(seed)
    prompts = [f"{draw.randrange(10**NUM_DIGITS):0{NUM_DIGITS}d}=" for _ in range(num_rows)]
    return [{"prompt": prompt, "answer": "".join(sorted(prompt[:-1]))} for prompt in prompts]


def make_demonstrations(num_rows: int, seed: int) -> list[dict[str, str]]:
    """Return rows of a prompt and a completion to imitate, which is wrong in most rows."""
    draw = random.Random(seed)
    return [
        {"prompt": row["prompt"], "completion": _demonstrate(row["answer"], draw)}
        for row in make_prompts(num_rows, seed)
    ]


def _demonstrate(answer: str, draw: random.Random) -> str:
    digits = list(answer)
    if draw.random() < WRONG_SHARE:
        left = draw.randrange(NUM_DIGITS - 1)
        digits[left], digits[left + 1] = digits[left + 1], digits[left]
    return "".join(digits)


def sorted_exactly(completions: Sequence[str], answer: Sequence[str], **columns: Any) -> list[float]:
    """Reward 1 for the exact answer, else 0."""
    return [float(text == right) for text, right in zip(completions, answer, strict=True)]


def digits_in_place(completions: Sequence[str], answer: Sequence[str], **columns: Any) -> list[float]:
    """Reward the share of digits that stand where the answer has them."""
    pairs = zip(completions, answer, strict=True)
    return [sum(a == b for a, b in zip(text, right, strict=False)) / NUM_DIGITS for text, right in pairs]

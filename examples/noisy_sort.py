"""Noisy sort: a task on which two CPU cores show reinforcement learning work in a minute.

The prompt is six digits and an equals sign (`418302=`), the answer those digits in ascending order (`012348`). The
supervised start is wrong on purpose: in most of its demonstrations two neighbours are swapped, so that the model knows
what an answer looks like and sorts badly. What is left to learn is in the reward alone: 1 for the exact answer, else 0.

Every tenth prompt, by a checksum of its text, is held out: it is in neither the supervised nor the RL data.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

NUM_DIGITS = 6
MAX_COMPLETION_LENGTH = NUM_DIGITS + 1  # the digits and the end of the sequence
WRONG_SHARE = 0.7


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token per character: ten digits and `=`, after `<pad>` and `<eos>`."""
    vocabulary = {token: i for i, token in enumerate(["<pad>", "<eos>", *"0123456789="])}
    characters = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    characters.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    characters.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=characters, pad_token="<pad>", eos_token="<eos>")


def make_model(seed: int, hidden_size: int = 128) -> Qwen2ForCausalLM:
    """A transformer of Qwen2's shape with half a million parameters, or more, randomly initialised."""
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=13,
        hidden_size=hidden_size,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        intermediate_size=4 * hidden_size,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    return Qwen2ForCausalLM(config)


def answer_to(prompt: str) -> str:
    """The digits of the prompt in ascending order."""
    return "".join(sorted(prompt.removesuffix("=")))


def is_held_out(prompt: str) -> bool:
    """Whether the prompt is for evaluation only."""
    return zlib.crc32(prompt.encode()) % 10 == 0


def draw_prompts(num_prompts: int, seed: int, *, held_out: bool = False) -> list[str]:
    """Different prompts, all held out or none of them."""
    found: dict[str, None] = {}
    for prompt in _random_prompts(seed):
        if is_held_out(prompt) == held_out:
            found[prompt] = None
        if len(found) == num_prompts:
            break
    return list(found)


def _random_prompts(seed: int) -> Iterator[str]:
    draw = random.Random(seed)
    while True:
        yield f"{draw.randrange(10**NUM_DIGITS):0{NUM_DIGITS}d}="


def make_demonstrations(num_rows: int, seed: int, wrong_share: float = WRONG_SHARE) -> Dataset:
    """Prompts with completions to imitate, of which by default most are wrong: two neighbours are swapped."""
    draw = random.Random(seed)
    prompts = draw_prompts(num_rows, seed + 1)
    return Dataset.from_dict(
        {"prompt": prompts, "completion": [_demonstrate(prompt, draw, wrong_share) for prompt in prompts]}
    )


def _demonstrate(prompt: str, draw: random.Random, wrong_share: float) -> str:
    digits = list(answer_to(prompt))
    if draw.random() < wrong_share:
        left = draw.randrange(NUM_DIGITS - 1)
        digits[left], digits[left + 1] = digits[left + 1], digits[left]
    return "".join(digits)


def make_preferences(num_rows: int, seed: int, *, held_out: bool = False, hard: bool = False) -> Dataset:
    """Prompts with the right answer and one that comes near it, for a reward model.

    With `hard`, every other wrong answer is sorted, of digits that are not the prompt's: a policy finds such answers where a
    reward model has never been told that they are wrong.
    """
    draw = random.Random(seed)
    prompts = draw_prompts(num_rows, seed + 3, held_out=held_out)
    right = [answer_to(prompt) for prompt in prompts]
    return Dataset.from_dict(
        {"prompt": prompts, "chosen": right, "rejected": [_miss(answer, draw, hard) for answer in right]}
    )


def _miss(answer: str, draw: random.Random, hard: bool) -> str:
    """The answer with two digits swapped, or with one changed, left out or doubled; or with one to three changed, sorted."""
    wrong = answer
    while wrong == answer:
        if hard and draw.random() < 0.5:
            digits = list(answer)
            for place in draw.sample(range(NUM_DIGITS), draw.choice([1, 1, 2, 3])):
                digits[place] = str(draw.randrange(10))
            wrong = "".join(sorted(digits))
            continue
        place, other, digit = draw.randrange(NUM_DIGITS), draw.randrange(NUM_DIGITS), str(draw.randrange(10))
        swapped = list(answer)
        swapped[place], swapped[other] = answer[other], answer[place]
        before, after = answer[:place], answer[place + 1 :]
        wrong = draw.choice(
            ["".join(swapped), before + digit + after, before + after, before + 2 * answer[place] + after]
        )
    return wrong


def make_prompts(num_rows: int, seed: int, *, held_out: bool = False) -> Dataset:
    """Prompts with the answer beside them, which the reward reads."""
    prompts = draw_prompts(num_rows, seed + 2, held_out=held_out)
    return Dataset.from_dict({"prompt": prompts, "answer": [answer_to(prompt) for prompt in prompts]})


def sorted_exactly(completions: Sequence[str], answer: Sequence[str], **columns: Any) -> list[float]:
    """The reward: 1 for the exact answer, else 0."""
    return [float(text == right) for text, right in zip(completions, answer, strict=True)]

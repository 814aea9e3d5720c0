"""Calculator: sums that a tiny model gets right only by calling a tool.

The prompt is a sum of two-digit numbers (`48+88`). The tool `add(a, b)` returns the sum of two integers, and the last message has
to be the result: `[add(a=48, b=88)]`, then `136`. A sum of more numbers needs one call for each plus sign.

The supervised start is wrong on purpose: many calls and answers have a wrong digit, and at the end of the start most
demonstrations guess without a call. So the model knows how calls and answers look, but seldom makes both right. Every tenth
sum, by a checksum of its text, is held out: it is in neither the supervised nor the RL data.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from datasets import Dataset
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

MAX_COMPLETION_LENGTH = 40  # of a sum of two numbers: a call of 20 tokens, a result of 6, an answer of 4
WARM_STEPS = 160
WARM_ROWS = 64  # a step, each row seen once
GUESSING_SHARE = 0.2  # of the start, at its end, where most demonstrations guess
WRONG_SHARE = 0.4  # of the calls, and of the answers

CONTROL_TOKENS = ["<pad>", "<eos>", "<user>", "<assistant>", "<tool>"]
CALL_TOKENS = ["<|tool_call_start|>", "<|tool_call_end|>"]
CHARACTERS = [chr(code) for code in range(32, 127)]
# Calls are written as LFM 2.5's template writes them, in Python, which takes fewest characters.
CHAT_TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content or '' }}"
    "{% for call in message.tool_calls or [] %}<|tool_call_start|>[{{ call.function.name }}("
    "{% for key, value in call.function.arguments.items() %}"
    "{{ key }}={{ value | tojson }}{{ '' if loop.last else ', ' }}"
    "{% endfor %})]<|tool_call_end|>{% endfor %}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def add(a: int, b: int) -> int:
    """Add two integers.

    Args:
        a: The first integer.
        b: The second integer.
    """
    return a + b


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per character, and a chat template that writes tool calls."""
    vocabulary = {token: i for i, token in enumerate([*CONTROL_TOKENS, *CALL_TOKENS, *CHARACTERS])}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    inner.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in CONTROL_TOKENS])
    inner.add_tokens([AddedToken(token, special=False, normalized=False) for token in CALL_TOKENS])
    inner.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    inner.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>", additional_special_tokens=CONTROL_TOKENS[2:]
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def make_model(seed: int) -> LlamaForCausalLM:
    """Return a transformer of Llama's shape with half a million parameters, randomly initialised."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(CONTROL_TOKENS + CALL_TOKENS + CHARACTERS),
        hidden_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        intermediate_size=512,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    return LlamaForCausalLM(config)


def answer_to(prompt: str) -> str:
    """Return the sum."""
    return str(sum(map(int, prompt.split("+"))))


def is_held_out(prompt: str) -> bool:
    """Return whether the prompt is for evaluation only."""
    return zlib.crc32(prompt.encode()) % 10 == 0


def _random_prompts(draw: random.Random, num_terms: int, held_out: bool) -> Iterator[str]:
    while True:
        prompt = "+".join(str(draw.randint(10, 99)) for _ in range(num_terms))
        if is_held_out(prompt) == held_out:
            yield prompt


def make_demonstrations(num_rows: int, seed: int, num_terms: int = 2, guess_share: float | None = None) -> Dataset:
    """Return conversations to imitate, of which a share guesses the answer without a call.

    By default the share is 0.2, and 0.93 in the last `GUESSING_SHARE` of the rows.
    """
    draw = random.Random(seed)
    prompts = _random_prompts(draw, num_terms, held_out=False)
    rows = []
    for i in range(num_rows):
        default = 0.93 if i >= (1 - GUESSING_SHARE) * num_rows else 0.2
        rows.append({"messages": _demonstrate(next(prompts), draw, default if guess_share is None else guess_share)})
    return Dataset.from_list(rows)


def _demonstrate(prompt: str, draw: random.Random, guess_share: float) -> list[dict[str, Any]]:
    first, *terms = map(int, prompt.split("+"))
    messages: list[dict[str, Any]] = [{"role": "user", "content": prompt}]
    if draw.random() < guess_share:
        return [*messages, {"role": "assistant", "content": str(draw.randint(10, 100 * (1 + len(terms))))}]
    total = first
    for term in terms:
        arguments = {"a": total, "b": term}
        if draw.random() < WRONG_SHARE:
            spoilt = draw.choice("ab")
            arguments[spoilt] = _with_wrong_digit(arguments[spoilt], draw)
        call = {"type": "function", "function": {"name": "add", "arguments": arguments}}
        total = add(**arguments)
        messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
        messages.append({"role": "tool", "name": "add", "content": str(total)})
    answer = _with_wrong_digit(total, draw) if draw.random() < WRONG_SHARE else total
    return [*messages, {"role": "assistant", "content": str(answer)}]


def _with_wrong_digit(number: int, draw: random.Random) -> int:
    digits = list(str(number))
    place = draw.randrange(len(digits))
    digits[place] = draw.choice("123456789".replace(digits[place], ""))
    return int("".join(digits))


def make_prompts(num_rows: int, seed: int, *, held_out: bool = False, num_terms: int = 2) -> Dataset:
    """Return prompts in chat form with the answers that the reward reads."""
    prompts = _random_prompts(random.Random(seed + 2), num_terms, held_out)
    texts = [next(prompts) for _ in range(num_rows)]
    return Dataset.from_dict(
        {"prompt": [[{"role": "user", "content": text}] for text in texts], "answer": list(map(answer_to, texts))}
    )


def sum_is_right(completions: Sequence[Any], answer: Sequence[str], **columns: Any) -> list[float]:
    """Return 1 for each conversation whose last message is the sum, else 0."""
    last = [messages[-1] for messages in completions]
    return [
        float(message["role"] == "assistant" and not message.get("tool_calls") and message.get("content") == right)
        for message, right in zip(last, answer, strict=True)
    ]

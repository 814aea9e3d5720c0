"""A small model of one's own for examples/gsm8k.yaml, on a machine without a GPU.

    LOWPEAK_GSM8K=/path/to/gsm8k python examples/gsm8k_warm_start.py [--output_dir runs/gsm8k-small]

From the training questions and answers of GSM8K (`train.jsonl`) it trains a byte-pair tokenizer with a chat template,
makes a model of Qwen2's shape with two million parameters, and warm-starts it by supervised training on the answers
in chat form. Half of these end in other words than the system prompt asks for, on purpose: the model then ends with
`#### number` sometimes but not always, which is what the reward for the form has to work with. A model of this size
learns the form, not the arithmetic.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import yaml
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from lowpeak import SFTConfig, SFTTrainer
from lowpeak.errors import DataError

VOCABULARY = 2048
CONTEXT = 640
MAX_ANSWER_TOKENS = 100  # longer answers would be cut by max_completion_length, and teach never to end
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
OTHER_ENDINGS = ("The answer is {}.", "So it is {}.", "#### {} in all", "{}")
SPECIAL = ["<|pad|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]


def main() -> None:
    """Tokenizer, model, supervised training; the result is a folder for `--model`."""
    parser = argparse.ArgumentParser(description="Make and warm-start a small model for GSM8K.")
    parser.add_argument("--output_dir", default="runs/gsm8k-small")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    rows = list(read_rows(gsm8k_folder() / "train.jsonl"))
    tokenizer = train_tokenizer(text for row in rows for text in row.values())
    model = make_model(len(tokenizer), options.seed)
    print(f"{model.num_parameters() / 1e6:.1f}M parameters, {len(tokenizer)} tokens, {len(rows)} questions")
    trainer = SFTTrainer(
        model=model,
        args=SFTConfig(
            output_dir=options.output_dir,
            max_steps=options.steps,
            per_device_train_batch_size=16,
            learning_rate=3e-3,
            warmup_steps=20,
            lr_scheduler_type="linear",
            gradient_checkpointing=False,
            logging_steps=50,
            save_strategy="no",
            disable_tqdm=not sys.stderr.isatty(),
            seed=options.seed,
        ),
        train_dataset=in_chat_form(rows, tokenizer, options.seed),
        processing_class=tokenizer,
    )
    trainer.train()
    trainer.save_model()
    print(f"the model is in {options.output_dir}; the top of examples/gsm8k.yaml has the command that trains it")


def gsm8k_folder() -> Path:
    """The folder with train.jsonl and test.jsonl."""
    if "LOWPEAK_GSM8K" not in os.environ:
        raise DataError("set LOWPEAK_GSM8K to a folder with GSM8K's train.jsonl and test.jsonl")
    return Path(os.environ["LOWPEAK_GSM8K"])


def read_rows(path: Path) -> Iterator[dict[str, str]]:
    """Questions and answers; the calculator's annotations (`<<48/2=24>>`) are left out of the answers."""
    for line in path.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        yield {"question": row["question"], "answer": re.sub(r"<<[^>]*>>", "", row["answer"])}


def train_tokenizer(texts: Iterator[str]) -> PreTrainedTokenizerFast:
    """A byte-level byte-pair tokenizer in which every digit is a token, with a chat template."""
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    inner.decoder = decoders.ByteLevel()
    inner.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=VOCABULARY,
            special_tokens=SPECIAL,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token=SPECIAL[0], eos_token=SPECIAL[1], additional_special_tokens=SPECIAL[2:]
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def make_model(vocabulary: int, seed: int) -> Qwen2ForCausalLM:
    """A transformer of Qwen2's shape with about two million parameters, randomly initialised."""
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=vocabulary,
        hidden_size=192,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=576,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    return Qwen2ForCausalLM(config)


def in_chat_form(rows: list[dict[str, str]], tokenizer: Any, seed: int) -> Dataset:
    """Prompt and completion as messages, under the system prompt that examples/gsm8k.yaml trains with."""
    draw = random.Random(seed)
    config = yaml.safe_load((Path(__file__).parent / "gsm8k.yaml").read_text(encoding="utf-8"))
    system = {"role": "system", "content": config["system_prompt"]}
    short = [row for row in rows if len(tokenizer(row["answer"]).input_ids) <= MAX_ANSWER_TOKENS]
    return Dataset.from_dict(
        {
            "prompt": [[system, {"role": "user", "content": row["question"]}] for row in short],
            "completion": [[{"role": "assistant", "content": demonstrate(row["answer"], draw)}] for row in short],
        }
    )


def demonstrate(answer: str, draw: random.Random) -> str:
    """The answer, or every other time the same with its last line in another form."""
    if draw.random() < 0.5:
        return answer
    steps, _, number = answer.rpartition("#### ")
    return steps + draw.choice(OTHER_ENDINGS).format(number)


if __name__ == "__main__":
    main()

"""What the step benchmark trains: W1, the learning task, and W2, a Qwen2 shape with a large vocabulary.

W2's weights are random and made here: `python -m benchmarks.harness.shapes REQUEST` saves them with a tokenizer. Its
completions count down: a completion of n tokens is n, n - 1, ..., 1, and 1 is the end of the sequence.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

from benchmarks.harness.report import print_result

VOCABULARY, HIDDEN, LAYERS, INTERMEDIATE = 151_936, 512, 8, 1600
NUM_GENERATIONS, LONGEST = 8, 256
END, UNKNOWN = 1, 300  # of a completion, no word
_WORDS = range(LONGEST + 1, 4096)  # of which prompts are made; the model embeds many more tokens


def make_model(hidden: int = HIDDEN, layers: int = LAYERS, vocabulary: int = VOCABULARY) -> Any:
    """103M parameters, of which 78M are the tied embedding, unless told otherwise; fp32, random, seeded."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=vocabulary,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=max(1, hidden // 256),
        intermediate_size=INTERMEDIATE * hidden // HIDDEN,
        max_position_embeddings=32_768,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=END,
        pad_token_id=0,
    )
    return Qwen2ForCausalLM(config)


def make_family(model_type: str, settings: dict[str, Any]) -> Any:
    """A causal LM of any family; fp32, random, seeded."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    ids = {"bos_token_id": None, "eos_token_id": END, "pad_token_id": 0}
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **settings, **ids), dtype=torch.float32)


def make_tokenizer(vocabulary: int = VOCABULARY, *, knows_all: bool = False) -> Any:
    """One token a word: `w301` is 301; the start is the last of the model's vocabulary, of which it may know all ids."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {f"w{i}": i for i in range(2, vocabulary - 1 if knows_all else _WORDS.stop) if i != UNKNOWN}
    ids = {"<pad>": 0, "<eos>": END, "<unk>": UNKNOWN, **words, "<start>": vocabulary - 1}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", padding_side="left"
    )


def make_prompts(count: int, length: int, seed: int = 0) -> list[str]:
    """Random words, then the start."""
    draw = random.Random(seed)
    words = [f"w{i}" for i in _WORDS if i != UNKNOWN]
    return [" ".join([*draw.choices(words, k=length - 1), "<start>"]) for _ in range(count)]


def draw_lengths(count: int, seed: int, longest: int = LONGEST) -> list[int]:
    """Exponential with a mean of a quarter of the longest, cut there."""
    draw = random.Random(seed)
    return [min(longest, 1 + int(draw.expovariate(4 / longest))) for _ in range(count)]


def countdown(length: int) -> list[int]:
    """A completion of so many tokens, the end included."""
    return list(range(length, 0, -1))


def main(request: dict[str, Any]) -> None:
    """Save W2 into `folder`, a quick run's with one narrow layer; or a model of the `family`, with its `settings`."""
    folder, family = Path(request["folder"]), request.get("family")
    narrow = (64, 1) if request.get("quick") else ()
    model = make_family(family, request["settings"]) if family else make_model(*narrow)
    model.save_pretrained(folder)
    make_tokenizer(model.config.vocab_size).save_pretrained(folder)
    print_result({"folder": str(folder)})


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))

"""Held-out accuracy of saved models: the same code for both sides, through transformers' `generate()` alone.

Run apart: `python -m benchmarks.harness.accuracy REQUEST` prints the accuracies of each snapshot.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.harness.report import print_result
from benchmarks.harness.task import HELD_OUT_SEED, noisy_sort


def measure(model: Any, tokenizer: Any, prompts: Sequence[str], answers: Sequence[str]) -> dict[str, float]:
    """Shares of exact answers, decoded greedily and sampled at temperature 1; the global random state is left alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(HELD_OUT_SEED)
        sampled = complete(model, tokenizer, prompts, do_sample=True, temperature=1.0, top_k=0, top_p=1.0)
    greedy = complete(model, tokenizer, prompts, do_sample=False)
    return {"greedy": share_equal(greedy, answers), "sampled": share_equal(sampled, answers)}


def complete(model: Any, tokenizer: Any, prompts: Sequence[str], **decoding: Any) -> list[str]:
    """The text that the model writes after each of the equally long prompts."""
    prompts_BP = torch.tensor(tokenizer(list(prompts))["input_ids"])
    with torch.no_grad():
        rows_BL = model.generate(
            prompts_BP,
            attention_mask=torch.ones_like(prompts_BP),
            max_new_tokens=noisy_sort.MAX_COMPLETION_LENGTH,
            **decoding,
        )
    return tokenizer.batch_decode(rows_BL[:, prompts_BP.shape[1] :], skip_special_tokens=True)


def share_equal(found: Sequence[str], right: Sequence[str]) -> float:
    """The share of texts that are exactly right."""
    return sum(a == b for a, b in zip(found, right, strict=True)) / len(right)


def main(request: dict[str, Any]) -> None:
    """Measure each snapshot, a folder by its name, on the same held-out prompts."""
    tokenizer = AutoTokenizer.from_pretrained(request["tokenizer"])
    prompts = noisy_sort.draw_prompts(request["held_out"], HELD_OUT_SEED, held_out=True)
    answers = [noisy_sort.answer_to(prompt) for prompt in prompts]
    found = {}
    for name, folder in request["snapshots"].items():
        model = AutoModelForCausalLM.from_pretrained(Path(folder), dtype=torch.float32).eval()
        found[name] = measure(model, tokenizer, prompts, answers)
    print_result(found)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))

"""Runs of SmolLM2 on sums, in one process or on ranks, short enough for tests."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from sums import make_held_out, make_prompts
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from lowpeak.arguments.sampling import Sampling
from lowpeak.heads.lm_head import install_head
from lowpeak.records import Completion, Prompt
from lowpeak.rollout.native.engine import NativeEngine
from small_runs import DATA, make

QUESTIONS = (
    "What is the capital of France?",
    "Name three colours.",
    "Why is the sky blue?",
    "Write a haiku about rain.",
)
# Four prompts with two completions of up to eight tokens; micro-batches hold them all.
SMALL = {"max_completion_length": 8, "logprob_chunk_size": 64, "learning_rate": 1e-5}


def supervised_rows() -> Dataset:
    """Sums with their answers."""
    return Dataset.from_list(
        [{"prompt": row["prompt"], "completion": _turn(row["answer"])} for row in make_prompts(0).select(range(8))]
    )


def pair_rows() -> Dataset:
    """Sums with the right answer chosen and zero rejected."""
    rows = make_prompts(0).select(range(8))
    return Dataset.from_list(
        [{"prompt": row["prompt"], "chosen": _turn(row["answer"]), "rejected": _turn("0")} for row in rows]
    )


def _turn(text: str) -> list[dict[str, str]]:
    return [{"role": "assistant", "content": text}]


def length_reward(completions: list[Any], **columns: Any) -> list[float]:
    """A reward that differs within nearly every group: 1 for each character up to 24, divided by 24."""
    return [min(len(completion[0]["content"]), 24) / 24 for completion in completions]


def make_real(kind: str, folder: Path | str, smollm2: str, **changes: Any) -> Any:
    """A trainer of `kind` for the real model on sums; `changes` as for `make`."""
    data = {"SFT": supervised_rows, "Reward": pair_rows}.get(kind, lambda: make_prompts(0))()
    settings: dict[str, Any] = {"learning_rate": 1e-5} if kind in DATA else dict(SMALL)
    if kind not in DATA:
        settings |= {"reward_funcs": length_reward}
    if kind in ("GRPO", "RLOO", "OnlineDPO"):
        settings["num_generations"] = 2
    settings |= changes
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    return make(kind, folder, smollm2, data=data, tokenizer=tokenizer, **settings)


def chat_prompts(tokenizer: Any, count: int) -> list[Prompt]:
    """Four questions and held-out sums, in chat form."""
    turns = [[{"role": "user", "content": text}] for text in QUESTIONS]
    turns += [row["prompt"] for row in make_held_out()][: count - len(turns)]
    texts = [tokenizer.apply_chat_template(turn, add_generation_prompt=True, tokenize=False) for turn in turns]
    return [Prompt(i, tuple(tokenizer(text)["input_ids"]), text) for i, text in enumerate(texts)]


def generated(
    model: Any, tokenizer: Any, prompts: Sequence[Prompt], sampling: Sampling
) -> list[tuple[Completion, ...]]:
    """Completions of the native engine, of each prompt."""
    engine = NativeEngine(lambda: contextlib.nullcontext(model), tokenizer, lambda: 1 << 30)
    engine.load([], 0)
    return [group.completions for group in engine.generate(prompts, sampling)]


def assert_greedy_tokens(smollm2: str, tokenizer: Any, count: int, max_new_tokens: int) -> list[list[int]]:
    """Assert that the native engine's greedy tokens are those of `generate()` on each prompt alone, and return them."""
    model, prompts = AutoModelForCausalLM.from_pretrained(smollm2).eval(), chat_prompts(tokenizer, count)
    sampling = Sampling(num_generations=1, max_new_tokens=max_new_tokens, temperature=0.0)
    expected = []
    for prompt in prompts:
        ids = torch.tensor([prompt.ids])
        made = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_new_tokens, do_sample=False)
        expected.append(made[0, ids.shape[1] :].tolist())
    ours = [made[0].ids.tolist() for made in generated(install_head(model), tokenizer, prompts, sampling)]
    assert ours == expected
    return ours


def logprob_errors(smollm2: str, tokenizer: Any, dtype: torch.dtype, autocast: bool = False) -> Tensor:
    """Distances of sampled log-probs from those of transformers' forward in fp32 of the same weights, token by token."""
    model, prompts = AutoModelForCausalLM.from_pretrained(smollm2, dtype=dtype).eval(), chat_prompts(tokenizer, 6)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        groups = generated(install_head(model), tokenizer, prompts, Sampling(num_generations=2, max_new_tokens=16))
    plain, found = AutoModelForCausalLM.from_pretrained(smollm2, dtype=dtype).float().eval(), []
    for prompt, completions in zip(prompts, groups, strict=True):
        for completion in completions:
            ids = torch.tensor([[*prompt.ids, *completion.ids.tolist()]])
            with torch.no_grad():
                logprobs = plain(ids).logits[0, len(prompt.ids) - 1 : -1].log_softmax(-1)
            found.append(completion.logprobs - logprobs.gather(-1, completion.ids.long()[:, None])[:, 0])
    return torch.cat(found).abs()

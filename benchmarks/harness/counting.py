"""Generates completions of scripted lengths with either side: `python -m benchmarks.harness.counting REQUEST`.

A real model of random weights computes every forward in full; a hook then replaces what it says by counting: after
START comes a length n, and after n comes n - 1, down to the end of the sequence, which is 1. Our side draws the first
tokens from the asked distribution, each row of a group its own; the peer's rows are given the lengths that ours drew.
"""

from __future__ import annotations

import contextlib
import functools
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import Qwen2Config, Qwen2ForCausalLM

from benchmarks.harness.clock import PhaseClock
from benchmarks.harness.report import OURS, print_result

CERTAIN = 1e4  # added to the score of the only token that may come


@dataclass(frozen=True)
class CountingRequest:
    """One measured side; `lengths` (prompts x generations) for the peer, which reproduces them."""

    library: str
    skewed: bool
    seed: int
    hidden: int
    layers: int
    vocab_size: int
    num_prompts: int
    num_generations: int
    prompt_length: int
    max_new_tokens: int
    slots: int
    heads: int = 0  # 0: one for each 64 of the width
    kv_heads: int = 0  # 0: one for each 256 of the width
    repeats: int = 1  # where one call is too short to be timed
    lengths: tuple[int, ...] = ()

    @property
    def start(self) -> int:
        """The last token of every prompt."""
        return self.vocab_size - 1


def make_model(request: CountingRequest) -> Qwen2ForCausalLM:
    """A Qwen2 shape with random weights."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=request.vocab_size,
        hidden_size=request.hidden,
        num_hidden_layers=request.layers,
        num_attention_heads=request.heads or request.hidden // 64,
        num_key_value_heads=request.kv_heads or max(1, request.hidden // 256),
        intermediate_size=4 * request.hidden,
        max_position_embeddings=request.prompt_length + request.max_new_tokens,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    )
    return Qwen2ForCausalLM(config).eval()


def length_scores(request: CountingRequest) -> Tensor:
    """Scores [V] of the first token n: lengths are exponential with a mean of a quarter of the longest, cut there."""
    scores_V = torch.full((request.vocab_size,), -CERTAIN)
    longest, mean = request.max_new_tokens, request.max_new_tokens / 4
    if request.skewed:
        lengths = torch.arange(1, longest)
        scores_V[lengths] = -lengths / mean
        tail = torch.exp(torch.tensor(-longest / mean)) / (1 - torch.exp(torch.tensor(-1 / mean)))
        scores_V[longest] = tail.log()
    else:
        scores_V[longest] = 0.0
    return scores_V


class Counting:
    """The hook: scores of the next token from the newest one; `lengths` are the rows' first tokens where given."""

    def __init__(self, request: CountingRequest) -> None:
        self.lengths: Tensor | None = None
        self._start = request.start
        self._first_V = length_scores(request)

    def __call__(self, model: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        """Change the scores [N, V] of the newest token of each row in place."""
        newest_N = kwargs["input_ids"][:, -1]
        logits_NV = output.logits[:, -1]
        following_N1 = (newest_N - 1).clamp(min=0)[:, None]
        starts_N = newest_N == self._start
        if self.lengths is not None:
            following_N1 = torch.where(starts_N[:, None], self.lengths[:, None], following_N1)
        elif starts_N.any():
            logits_NV[starts_N] = self._first_V
            following_N1 = torch.where(starts_N[:, None], self._start, following_N1)
            logits_NV[:, self._start] -= CERTAIN * starts_N
        logits_NV.scatter_add_(-1, following_N1, torch.full(following_N1.shape, CERTAIN))


def make_prompts(request: CountingRequest) -> list[tuple[int, ...]]:
    """Random tokens, then START."""
    generator = torch.Generator().manual_seed(request.seed)
    shape = (request.num_prompts, request.prompt_length - 1)
    rows = torch.randint(2, request.start, shape, generator=generator).tolist()
    return [(*row, request.start) for row in rows]


class Tally:
    """Tokens of completions that a side wrote, and rows that it computed for them."""

    def __init__(self) -> None:
        self.useful = self.computed = 0

    def add(self, useful: int, computed: int) -> None:
        """One forward more."""
        self.useful += useful
        self.computed += computed


class NoText:
    """A tokenizer for tokens that stand for nothing."""

    eos_token_id = 1


def generate_ours(model: Qwen2ForCausalLM, request: CountingRequest, tally: Tally | None = None) -> list[int]:
    """Lengths, group by group, from the native engine under a KV-cache budget of `slots` full rows."""
    from lowpeak.config.rollout import Sampling
    from lowpeak.logprobs.head import install_head
    from lowpeak.records import Prompt
    from lowpeak.rollout.native.budget import bytes_per_token
    from lowpeak.rollout.native.engine import NativeEngine

    budget = request.slots * (request.prompt_length + request.max_new_tokens) * bytes_per_token(model)
    install_head(model)  # as the trainers do
    engine = NativeEngine(
        lambda: contextlib.nullcontext(model), NoText(), lambda: budget, None if tally is None else tally.add
    )
    engine.load([], 0)
    prompts = [Prompt(i, ids, "") for i, ids in enumerate(make_prompts(request))]
    sampling = Sampling(
        num_generations=request.num_generations, max_new_tokens=request.max_new_tokens, seed=request.seed
    )
    return [len(completion) for group in engine.generate(prompts, sampling) for completion in group.completions]


def generate_peer(
    model: Qwen2ForCausalLM, request: CountingRequest, counting: Counting, tally: Tally | None = None
) -> list[int]:
    """Lengths from transformers' generate() (SDPA, its dynamic cache), `slots` rows at a time."""
    rows = [ids for ids in make_prompts(request) for _ in range(request.num_generations)]
    lengths: list[int] = []
    for first in range(0, len(rows), request.slots):
        part = slice(first, first + request.slots)
        counting.lengths = torch.tensor(request.lengths[part])
        inputs = torch.tensor(rows[part])
        output = model.generate(
            inputs,
            attention_mask=torch.ones_like(inputs),
            max_new_tokens=request.max_new_tokens,
            do_sample=True,
            top_k=0,
        )
        found = written(output[:, request.prompt_length :].tolist())
        if tally is not None:
            tally.add(sum(found), len(found) * max(found))
        lengths += found
    return lengths


def written(rows: Sequence[Sequence[int]]) -> list[int]:
    """Tokens up to the end of the sequence, which counts as one."""
    return [row.index(1) + 1 if 1 in row else len(row) for row in rows]


def run_side(request: CountingRequest) -> dict[str, Any]:
    """Generate, and tell the lengths, CPU seconds of a call and of its forwards, and how far that is from the peak."""
    model, counting = make_model(request), Counting(request)
    forwards, tally = PhaseClock(), Tally()
    forwards.watch(model, "forward", "forward")
    model.register_forward_hook(counting, with_kwargs=True)
    with torch.no_grad():
        model(input_ids=torch.tensor([[2, 3]]))  # the first forward of a process pays for more than itself
        generate = _generate(model, request, counting, tally)
        if request.repeats > 1:
            generate()
        peak = matmul_flops()
        forwards.seconds.clear()
        tally.useful = tally.computed = 0
        times = []
        for _ in range(request.repeats):
            start = time.process_time()
            lengths = generate()
            times.append(time.process_time() - start)
        seconds = statistics.median(times)
    return {
        "cpu_seconds": round(seconds, 4),
        "forward_seconds": round(forwards.seconds["forward"] / request.repeats, 4),
        "useful": round(tally.useful / tally.computed, 4),
        "of_peak": round(needed_flops(model, request, sum(lengths)) / seconds / peak, 4),
        "peak_gflops": round(peak / 1e9, 1),
        "tokens": sum(lengths),
        "lengths": lengths,
    }


def _generate(
    model: Qwen2ForCausalLM, request: CountingRequest, counting: Counting, tally: Tally
) -> Callable[[], list[int]]:
    if request.library == OURS:
        return functools.partial(generate_ours, model, request, tally)
    return functools.partial(generate_peer, model, request, counting, tally)


def needed_flops(model: Qwen2ForCausalLM, request: CountingRequest, num_tokens: int) -> int:
    """Multiplications and additions with the weights for what must be computed: prompts once, and each token once.

    The newest token of a completion is never fed; attention's own products are left out.
    """
    head = request.vocab_size * request.hidden
    body = sum(p.numel() for p in model.parameters()) - head
    num_prompt_tokens = request.num_prompts * request.prompt_length
    num_fed = num_tokens - request.num_prompts * request.num_generations
    return 2 * (body * (num_prompt_tokens + num_fed) + head * (request.num_prompts + num_fed))


def matmul_flops(size: int = 2048, repeats: int = 5) -> float:
    """Operations a CPU-second in a large product of fp32 matrices: the arithmetic peak, best of a few."""
    left, right = torch.randn(size, size), torch.randn(size, size)
    best = 0.0
    for _ in range(repeats):
        start = time.process_time()
        torch.mm(left, right)
        best = max(best, 2 * size**3 / (time.process_time() - start))
    return best


if __name__ == "__main__":
    print_result(run_side(CountingRequest(**json.loads(sys.argv[1]))))

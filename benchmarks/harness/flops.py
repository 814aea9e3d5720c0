"""Operations that a step cannot do without: each prompt once, each completion token once, nothing padded or recomputed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

FORWARDS = {"rollout": 1, "score": 1, "train": 3}  # a backward is two forwards' worth


def useful_tokens(lengths: Sequence[int], prompt_length: int, num_generations: int) -> int:
    """Tokens of a step's groups: prompts once, completions whole."""
    return len(lengths) // num_generations * prompt_length + sum(lengths)


def forward_flops(model: Mapping[str, int], lengths: Sequence[int], prompt_length: int, num_generations: int) -> float:
    """Operations of one forward of a step's groups: 2 a weight and token, causal attention, the head on completions."""
    body = 2 * model["body"] * useful_tokens(lengths, prompt_length, num_generations)
    head = 2 * model["head"] * sum(lengths)
    groups = len(lengths) / num_generations
    pairs = groups * prompt_length**2 / 2 + sum(length * prompt_length + length**2 / 2 for length in lengths)
    return body + head + 4 * model["hidden"] * model["layers"] * pairs


def gflops_per_second(
    model: Mapping[str, int],
    lengths: Sequence[Sequence[int]],
    prompt_length: int,
    num_generations: int,
    seconds: Mapping[str, float],
) -> dict[str, float]:
    """1e9 useful operations a CPU second in each phase that has seconds; the means over the given steps."""
    steps = [forward_flops(model, step, prompt_length, num_generations) for step in lengths]
    one = sum(steps) / len(steps)
    return {
        phase: round(times * one / seconds[phase] / 1e9, 1)
        for phase, times in FORWARDS.items()
        if seconds.get(phase, 0.0) > 0.0
    }

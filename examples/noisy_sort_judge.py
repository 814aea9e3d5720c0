"""A judge of the quickstart's task: of two answers the one with more digits in their place is better.

A judge is any object with this method, TRL's pairwise judges among them; where it asks a model over the network, make `judge`
async, and set reward_timeout and reward_failures.
"""

from __future__ import annotations

from noisy_sort import answer_to


class SortJudge:
    """Compares two completions of a prompt."""

    def judge(self, prompts: list[str], completions: list[list[str]]) -> list[int]:
        """0 where the first is better, 1 where the second is, -1 where neither is."""
        return [_better(answer_to(prompt), pair) for prompt, pair in zip(prompts, completions, strict=True)]


def _better(right: str, pair: list[str]) -> int:
    first, second = (_in_place(text, right) for text in pair)
    return -1 if first == second else int(second > first)


def _in_place(text: str, right: str) -> int:
    """Digits at their place, and one more where there is nothing beside them."""
    return sum(a == b for a, b in zip(text, right, strict=False)) + (text == right)


judge = SortJudge()

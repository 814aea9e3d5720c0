"""A pairwise judge as a reward: the share of its comparisons that a completion wins.

Judges are biased by position. A checksum of the texts therefore decides which completion comes first: each does equally
often, and the order is the same on any number of ranks.
"""

from __future__ import annotations

import functools
import inspect
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from lowpeak.errors import ArgumentError, RewardError
from lowpeak.rewards.builtin import completion_text
from lowpeak.rewards.factory import as_list
from lowpeak.rewards.function import FunctionReward

NO_PREFERENCE = -1


class JudgeReward(FunctionReward):
    """A judge as a reward: the share of its group's pairs that a completion wins.

    No preference is half a win for both. `judge(prompts, completions)` gets pairs of completions and returns the index of the
    better one of each: 0, 1, or -1 for no preference. It may be async. A parameter `shuffle_order`, as TRL's judges have,
    gets False, because the order is fixed.

    Pairs of equal texts are not sent to the judge. A completion alone in its group has no reward. Time limits and failures
    are those of functions. The judge gets texts: of messages `role: content`, separated by an empty line.

    Raises:
        ArgumentError: the judge has no method `judge`.
        RewardError: it does not return 0, 1 or -1 for each pair.
    """

    def __init__(self, judge: Any, name: str | None = None, timeout: float | None = None) -> None:
        if inspect.isclass(judge) or not callable(getattr(judge, "judge", None)):
            raise ArgumentError(
                f"judge must be an object with a method judge(prompts, completions) that returns 0, 1 or -1 for each pair, got "
                f"{judge!r:.80}."
            )
        super().__init__(_reward_function(judge.judge), name or type(judge).__name__, timeout)


def resolve_reward_funcs(reward_funcs: Any, judge: Any) -> Any:
    """Return `reward_funcs` unchanged, or the judge as the only one; ArgumentError for both."""
    if judge is not None and as_list(reward_funcs):
        raise ArgumentError("pairs need reward_funcs or a judge, got both: pass one of them.")
    return reward_funcs if judge is None else [JudgeReward(judge)]


def _reward_function(judge: Callable[..., Any]) -> Callable[..., Any]:
    """Return a reward function that calls a judge's method; it is async if the method is."""
    if "shuffle_order" in inspect.signature(judge).parameters:
        judge = functools.partial(judge, shuffle_order=False)

    def compare(prompts: Any, completions: Any, groups: Any, log_metric: Any) -> list[float | None]:
        comparisons = Comparisons.of(prompts, completions, groups)
        verdicts = judge(*comparisons.judge_inputs()) if comparisons.undecided else []
        return comparisons.win_shares(verdicts, log_metric)

    async def compare_async(prompts: Any, completions: Any, groups: Any, log_metric: Any) -> list[float | None]:
        comparisons = Comparisons.of(prompts, completions, groups)
        verdicts = await judge(*comparisons.judge_inputs()) if comparisons.undecided else []
        return comparisons.win_shares(verdicts, log_metric)

    return compare_async if inspect.iscoroutinefunction(judge) else compare


@dataclass(frozen=True)
class Comparisons:
    """N completions and the pairs of indices within each group, in the order for the judge."""

    prompts: tuple[str, ...]
    texts: tuple[str, ...]
    pairs: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, prompts: Sequence[Any], completions: Sequence[Any], groups: Sequence[int]) -> Comparisons:
        """Return all pairs of each group, in an order that depends on the texts alone."""
        questions = tuple(transcript(prompt) for prompt in prompts)
        texts = tuple(completion_text(completion) for completion in completions)
        members: dict[int, list[int]] = {}
        for index, group in enumerate(groups):
            members.setdefault(group, []).append(index)
        pairs = []
        for first, second in (pair for indices in members.values() for pair in combinations(indices, 2)):
            checksum = zlib.crc32("\0".join((questions[first], texts[first], texts[second])).encode())
            pairs.append((second, first) if checksum & 1 else (first, second))
        return cls(questions, texts, tuple(pairs))

    @property
    def undecided(self) -> tuple[tuple[int, int], ...]:
        """Return the pairs of two different texts: those that the judge has to compare."""
        return tuple(pair for pair in self.pairs if self.texts[pair[0]] != self.texts[pair[1]])

    def judge_inputs(self) -> tuple[list[str], list[list[str]]]:
        """Return the judge's arguments: a prompt for each undecided pair, and the pair's two texts."""
        pairs = self.undecided
        return [self.prompts[first] for first, _ in pairs], [[self.texts[i] for i in pair] for pair in pairs]

    def win_shares(self, verdicts: Any, log_metric: Callable[[str, float], None]) -> list[float | None]:
        """Return the share of comparisons that each completion wins, given the verdicts on `undecided`.

        A completion without a comparison gets None.
        """
        verdict_of = dict(zip(self.undecided, _checked_verdicts(verdicts, len(self.undecided)), strict=True))
        wins, games = [0.0] * len(self.texts), [0] * len(self.texts)
        for pair in self.pairs:
            verdict = verdict_of.get(pair, NO_PREFERENCE)
            for position, index in enumerate(pair):
                wins[index] += 0.5 if verdict == NO_PREFERENCE else float(verdict == position)
                games[index] += 1
        if verdict_of:
            num_ties = sum(verdict == NO_PREFERENCE for verdict in verdict_of.values())
            log_metric("judge/no_preference", num_ties / len(verdict_of))
        return [won / played if played else None for won, played in zip(wins, games, strict=True)]


def transcript(prompt: Any) -> str:
    """Return a prompt as text, messages as `role: content` with an empty line between."""
    if isinstance(prompt, str):
        return prompt
    return "\n\n".join(f"{message.get('role', '?')}: {completion_text([message])}" for message in prompt)


def _checked_verdicts(verdicts: Any, num_pairs: int) -> list[int]:
    values = verdicts.tolist() if hasattr(verdicts, "tolist") else verdicts
    if not isinstance(values, list | tuple) or len(values) != num_pairs:
        raise RewardError(
            f"The judge returned {values!r:.80} for {num_pairs} pairs: return a list with 0, 1 or -1 for each."
        )
    invalid = [verdict for verdict in values if verdict not in (0, 1, NO_PREFERENCE)]
    if invalid:
        raise RewardError(f"The judge returned {invalid[0]!r:.40} for a pair: return 0, 1, or -1 for no preference.")
    return list(values)

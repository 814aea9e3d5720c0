"""A judge that compares completions two at a time, as a reward: the share of its comparisons that a completion wins.

Whoever judges pairs prefers a place, too: which completion comes first is told by a checksum of the texts, so that it is
either one as often, and the same on any number of ranks.
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
from lowpeak.rewards.answers import text_of
from lowpeak.rewards.function import FunctionReward
from lowpeak.rewards.make import listed

NO_PREFERENCE = -1


class JudgeReward(FunctionReward):
    """A judge as a reward: of all pairs of a group, the share that a row wins; half a win each where there is no preference.

    Of each prompt and its pair of completions `judge(prompts, completions)` says which one is better: 0, 1, or -1 where neither
    is. It may be async; a parameter `shuffle_order`, as TRL's judges have, gets False, since the order is settled.

    Equal texts are such without asking, and a row alone in its group has no reward. Limits of time and failures are those of
    functions. The judge sees texts: of messages `role: content`, one after another.

    Raises:
        ArgumentError: the judge has no method `judge`.
        RewardError: its answer is not 0, 1 or -1 for each pair.
    """

    def __init__(self, judge: Any, name: str | None = None, timeout: float | None = None) -> None:
        if inspect.isclass(judge) or not callable(getattr(judge, "judge", None)):
            raise ArgumentError(
                f"judge is {judge!r:.80}: pass an object with a method judge(prompts, completions), which says of each pair 0, 1 "
                "or -1."
            )
        super().__init__(_asks(judge.judge), name or type(judge).__name__, timeout)


def rewards_or_judge(reward_funcs: Any, judge: Any) -> Any:
    """Return `reward_funcs` as they are, or the judge as the only reward; ArgumentError for both or neither."""
    if (judge is None) == (not listed(reward_funcs)):
        given = "neither was" if judge is None else "both were"
        raise ArgumentError(f"pairs are chosen by reward_funcs or by a judge, and {given} given: pass one of the two.")
    return reward_funcs if judge is None else [JudgeReward(judge)]


def _asks(ask: Callable[..., Any]) -> Callable[..., Any]:
    """Return the reward function of a judge's method, async if the method is."""
    if "shuffle_order" in inspect.signature(ask).parameters:
        ask = functools.partial(ask, shuffle_order=False)  # the order is settled

    def compare(prompts: Any, completions: Any, groups: Any, log_metric: Any) -> list[float | None]:
        contest = Contest.of(prompts, completions, groups)
        return contest.shares(ask(*contest.questions()) if contest.asked else [], log_metric)

    async def compare_async(prompts: Any, completions: Any, groups: Any, log_metric: Any) -> list[float | None]:
        contest = Contest.of(prompts, completions, groups)
        return contest.shares(await ask(*contest.questions()) if contest.asked else [], log_metric)

    return compare_async if inspect.iscoroutinefunction(ask) else compare


@dataclass(frozen=True)
class Contest:
    """N rows and the comparisons among those of a group: `pairs` of rows, first shown first, of which `asked` have two texts."""

    prompts: tuple[str, ...]
    texts: tuple[str, ...]
    pairs: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, prompts: Sequence[Any], completions: Sequence[Any], groups: Sequence[int]) -> Contest:
        """Return all pairs of each group, in an order that the texts alone tell."""
        asked, texts = tuple(transcript(prompt) for prompt in prompts), tuple(text_of(each) for each in completions)
        members: dict[int, list[int]] = {}
        for row, group in enumerate(groups):
            members.setdefault(group, []).append(row)
        pairs = []
        for first, second in (pair for rows in members.values() for pair in combinations(rows, 2)):
            checksum = zlib.crc32("\0".join((asked[first], texts[first], texts[second])).encode())
            pairs.append((second, first) if checksum & 1 else (first, second))
        return cls(asked, texts, tuple(pairs))

    @property
    def asked(self) -> tuple[tuple[int, int], ...]:
        return tuple(pair for pair in self.pairs if self.texts[pair[0]] != self.texts[pair[1]])

    def questions(self) -> tuple[list[str], list[list[str]]]:
        """Return what the judge is asked: prompts, and two completions for each."""
        pairs = self.asked
        return [self.prompts[first] for first, _ in pairs], [[self.texts[row] for row in pair] for pair in pairs]

    def shares(self, verdicts: Any, log_metric: Callable[[str, float], None]) -> list[float | None]:
        """Return the share of its comparisons that each row wins, by the verdicts on `asked`; None for a row without one."""
        found = dict(zip(self.asked, _checked(verdicts, len(self.asked)), strict=True))
        wins, games = [0.0] * len(self.texts), [0] * len(self.texts)
        for pair in self.pairs:
            verdict = found.get(pair, NO_PREFERENCE)
            for place, row in enumerate(pair):
                wins[row] += 0.5 if verdict == NO_PREFERENCE else float(verdict == place)
                games[row] += 1
        if found:
            undecided = sum(verdict == NO_PREFERENCE for verdict in found.values())
            log_metric("judge/no_preference", undecided / len(found))
        return [won / played if played else None for won, played in zip(wins, games, strict=True)]


def transcript(prompt: Any) -> str:
    """Return a prompt as a judge reads it: a string as it is, messages as `role: content`, with an empty line between."""
    if isinstance(prompt, str):
        return prompt
    return "\n\n".join(f"{message.get('role', '?')}: {text_of([message])}" for message in prompt)


def _checked(verdicts: Any, num_pairs: int) -> list[int]:
    found = verdicts.tolist() if hasattr(verdicts, "tolist") else verdicts
    if not isinstance(found, list | tuple) or len(found) != num_pairs:
        raise RewardError(f"the judge answered {found!r:.80} to {num_pairs} pairs: return one of 0, 1 and -1 for each.")
    wrong = [verdict for verdict in found if verdict not in (0, 1, NO_PREFERENCE)]
    if wrong:
        raise RewardError(f"the judge answered {wrong[0]!r:.40} to a pair: return 0, 1, or -1 where neither is better.")
    return list(found)

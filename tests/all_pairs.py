"""Combinations of settings in which every pair of values stands at least once, and no combination that is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import combinations, product

Case = dict[str, str]
Pair = frozenset[tuple[str, str]]  # two (setting, value), of different settings


def all_pairs(settings: Mapping[str, Sequence[str]], allowed: Callable[[Case], bool] = lambda case: True) -> list[Case]:
    """Few of the allowed combinations that hold, together, each pair of values which any allowed one holds.

    Greedy: next comes the combination with the most pairs that were not there yet, the first of several. Each is one value
    of every setting; the same settings always give the same list.
    """
    candidates = [case for case in every(settings) if allowed(case)]
    missing = pairs_of(candidates)
    chosen = []
    while missing:
        best = max(candidates, key=lambda case: len(missing & pairs_in(case)))
        missing -= pairs_in(best)
        chosen.append(best)
    return chosen


def each_value(cases: Iterable[Case]) -> list[Case]:
    """Return the cases that hold a value which none before them holds."""
    chosen: list[Case] = []
    seen: set[tuple[str, str]] = set()
    for case in cases:
        if not case.items() <= seen:
            chosen.append(case)
            seen |= case.items()
    return chosen


def every(settings: Mapping[str, Sequence[str]]) -> list[Case]:
    """All combinations, the last setting moving fastest."""
    return [dict(zip(settings, values, strict=True)) for values in product(*settings.values())]


def pairs_in(case: Mapping[str, str]) -> set[Pair]:
    return {frozenset(pair) for pair in combinations(case.items(), 2)}


def pairs_of(cases: Iterable[Mapping[str, str]]) -> set[Pair]:
    found: set[Pair] = set()
    return found.union(*map(pairs_in, cases))

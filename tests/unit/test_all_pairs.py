"""The generator of combinations: every pair that is allowed stands somewhere, with few combinations."""

from __future__ import annotations

from itertools import combinations, product

import pytest

from all_pairs import all_pairs, every

SIZES = [(2, 2), (3, 1, 2), (2, 2, 2, 2), (6, 6, 3, 2, 2), (4, 4, 4)]


def settings_of(sizes):
    return {f"s{i}": [f"{i}{letter}" for letter in "abcdef"[:size]] for i, size in enumerate(sizes)}


def stands(cases, first, second):
    return any(set(case.values()) >= {first, second} for case in cases)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_every_pair_of_values_stands_in_a_combination(sizes):
    settings = settings_of(sizes)
    cases = all_pairs(settings)
    for one, other in combinations(settings.values(), 2):
        assert all(stands(cases, *pair) for pair in product(one, other))
    assert all(case.keys() == settings.keys() for case in cases)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_combinations_are_few_and_none_stands_twice(sizes):
    cases = all_pairs(settings_of(sizes))
    largest, second = sorted(sizes)[-1], sorted(sizes)[-2]
    assert largest * second <= len(cases) <= 1.5 * largest * second
    assert len({tuple(case.values()) for case in cases}) == len(cases)


def test_what_is_refused_is_in_no_combination_and_every_other_pair_still_is():
    settings = {"a": ["1", "2", "3"], "b": ["x", "y"], "c": ["p", "q"]}

    def allowed(case):
        return not (case["a"] == "1" and case["b"] == "x") and not (case["a"] == "1" and case["c"] == "q")

    cases = all_pairs(settings, allowed)
    assert all(allowed(case) for case in cases)
    assert not stands(cases, "1", "x")
    wanted = {pair for case in every(settings) if allowed(case) for pair in combinations(case.values(), 2)}
    assert all(stands(cases, *pair) for pair in wanted)
    assert ("1", "y") in wanted


def test_a_pair_that_only_refused_combinations_hold_is_not_asked_for():
    settings = {"a": ["1", "2"], "b": ["x", "y"], "c": ["p", "q"]}
    cases = all_pairs(settings, lambda case: case["a"] == "2" or (case["b"] == "y" and case["c"] == "p"))
    assert not stands(cases, "1", "q")
    assert stands(cases, "1", "p")


def test_the_same_settings_give_the_same_list():
    assert all_pairs(settings_of((4, 3, 2))) == all_pairs(settings_of((4, 3, 2)))


def test_settings_of_which_nothing_is_allowed_give_nothing():
    assert all_pairs(settings_of((2, 2)), lambda case: False) == []

"""Algorithms, strategies, engines, adapters and references together: every pair of them trains, evaluates and saves.

Which combinations these are is generated (`all_pairs`); those that cannot be are refused in a sentence.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from combinations import REFUSED, SETTINGS, cases, is_refused, make, name_of, refused_cases
from spawn import launch

from all_pairs import Case, every, pairs_in, pairs_of
from lowpeak.errors import ArgumentError

KINDS = {
    "single": "Replicated",
    "ddp": "Replicated",
    "fsdp2": "Fsdp2",
    "zero1": "Zero",
    "zero2": "Zero",
    "zero3": "Zero",
}
TOLERANCE = 5e-6
CASES = [pytest.param(case, id=f"{case['strategy']}-{name_of(case)}") for case in cases()]


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What every combination under a strategy came to, on each of its ranks; each strategy is launched once."""
    out: Path = tmp_path_factory.mktemp("combinations")

    @cache
    def outcome(strategy: str) -> list[dict[str, Any]] | AssertionError:
        num_ranks = 1 if strategy == "single" else 2
        try:
            launch("run_combinations.py", [strategy, str(out)], world_size=num_ranks)
        except AssertionError as error:
            return error
        return [torch.load(out / f"{strategy}-{rank}.pt") for rank in range(num_ranks)]

    def under(strategy: str) -> list[dict[str, Any]]:
        found = outcome(strategy)
        if isinstance(found, AssertionError):
            raise found
        return found

    return under


@pytest.mark.parametrize("case", CASES)
def test_a_combination_trains_evaluates_and_saves_what_one_process_does(launched: Any, case: Case) -> None:
    name = name_of(case)
    (alone,) = [ranks[name] for ranks in launched("single")]
    for ours in (ranks[name] for ranks in launched(case["strategy"])):
        assert ours["strategy"] == KINDS[case["strategy"]]
        assert ours["finite"]
        assert len(ours["steps"]) == 3
        assert len(ours["evaluations"]) == 1
        assert has_moved(ours)
        assert_same(ours, alone)
    assert_saved(launched(case["strategy"])[0][name], case)


def has_moved(run: dict[str, Any]) -> bool:
    """Whether a weight of the policy changed by more than any rounding."""
    policy = [name for name in run["after"] if "critic" not in name.split(".")]  # a module's name, or an adapter's
    return any(float((run["after"][name] - run["before"][name]).abs().max()) > 1e-3 for name in policy)


def assert_same(ours: dict[str, Any], alone: dict[str, Any]) -> None:
    """The same weights, losses and gradient norms, and the same held-out numbers."""
    assert ours["after"].keys() == alone["after"].keys()
    for name, values in alone["after"].items():
        torch.testing.assert_close(ours["after"][name], values, atol=TOLERANCE, rtol=0)
    torch.testing.assert_close(torch.tensor(ours["steps"]), torch.tensor(alone["steps"]), atol=1e-5, rtol=1e-4)
    for found, expected in zip(ours["evaluations"], alone["evaluations"], strict=True):
        assert found == pytest.approx(expected, abs=1e-5)


def assert_saved(run: dict[str, Any], case: Case) -> None:
    """The checkpoint holds the policy as it was trained, or its adapter; no critic is in either."""
    assert not [name for name in run["saved"] if "critic" in name]
    if case["tuning"] == "lora":
        assert all("lora_" in name for name in run["saved"])
        assert any(bool(values.any()) for name, values in run["saved"].items() if "lora_B" in name)
        return
    policy = {name: values for name, values in run["after"].items() if not name.startswith("critic.")}
    assert run["saved"].keys() == policy.keys()
    for name, values in policy.items():
        assert torch.equal(run["saved"][name].flatten(), values), name


def test_every_pair_that_is_not_refused_stands_in_a_combination() -> None:
    run = pairs_of(cases())
    for case in every(SETTINGS):
        assert is_refused(case) or pairs_in(case) <= run
    assert not any(is_refused(case) for case in cases())
    assert len(cases()) <= 48


@pytest.mark.parametrize(("case", "words"), [pytest.param(*each, id=name_of(each[0])) for each in refused_cases()])
def test_what_cannot_be_is_refused_in_a_sentence(tmp_path: Path, case: Case, words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        make(case, tmp_path)


def test_each_refusal_has_its_combinations() -> None:
    assert {words for _, words in refused_cases()} == {words for _, words in REFUSED}

"""Each family's greedy tokens are those of plain forwards, on every supported transformers."""

from __future__ import annotations

import pytest
import transformers
from family_checks import LIMITS, FamilyReport, check_greedy_tokens
from test_family_training import CLASSES

from case_selection import mark_extended
from model_families import FAMILIES, is_known, make_family

WRONG_BEFORE = {"Falcon-H1": "5.23"}  # versions of transformers


@pytest.mark.parametrize("family", mark_extended(list(FAMILIES), CLASSES, "release"))  # `make test-versions` runs all
def test_a_familys_greedy_tokens_have_the_largest_logits_of_plain_forwards(family):
    if not is_known(family):
        pytest.skip(f"this transformers has no {FAMILIES[family][0]}")
    if transformers.__version__ < WRONG_BEFORE.get(family, ""):
        pytest.skip("its generate() raises on padded prompts")
    report = FamilyReport()
    check_greedy_tokens(make_family(family), report)
    assert report.errors["greedy"] <= LIMITS["greedy"]

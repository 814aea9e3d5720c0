"""Each family's greedy tokens are those of plain forwards, on every supported transformers."""

from __future__ import annotations

import pytest
from family_checks import GENERATION_FAILS, LIMITS, FamilyReport, check_greedy_tokens, skip_unsupported
from test_family_training import CLASSES

from case_selection import mark_extended
from model_families import FAMILIES, make_family


@pytest.mark.parametrize("family", mark_extended(list(FAMILIES), CLASSES, "release"))  # `make test-versions` runs all
def test_a_familys_greedy_tokens_have_the_largest_logits_of_plain_forwards(family):
    skip_unsupported(family, GENERATION_FAILS)
    report = FamilyReport()
    check_greedy_tokens(make_family(family), report)
    assert report.errors["greedy"] <= LIMITS["greedy"]

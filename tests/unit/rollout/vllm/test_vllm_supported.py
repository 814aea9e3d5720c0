"""Which vLLM lowpeak works with is said in one place, and told where another one is found."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from lowpeak.rollout.vllm.versions import SUPPORTED, warn_unsupported

ROOT = Path(__file__).parents[4]


@pytest.mark.parametrize("version", ["0.31.0", "0.32.0+cpu", "0.33.1rc1"])
def test_a_supported_version_needs_no_word(version, caplog):
    with caplog.at_level(logging.WARNING):
        warn_unsupported(version)
    assert not caplog.records


@pytest.mark.parametrize("version", ["0.30.2", "0.34.0", "1.0", "dev"])
def test_another_version_is_a_warning_that_names_both(version, caplog):
    with caplog.at_level(logging.WARNING):
        warn_unsupported(version)
    (record,) = caplog.records
    assert version in record.getMessage()
    assert SUPPORTED in record.getMessage()


def test_what_is_installed_with_lowpeak_is_in_the_range():
    assert f'"vllm{SUPPORTED}"' in (ROOT / "pyproject.toml").read_text(encoding="utf-8")

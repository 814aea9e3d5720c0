"""Tests run offline; anything that would download fails at once. What `make check` leaves out is marked here."""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
TESTS = Path(__file__).parent
sys.path[:0] = [str(TESTS.parent), str(TESTS)]

LONG = ("training", "selftest", "watchdog", "benchmarks")  # folders of unit tests that train models or start processes
STARTERS = {"subprocess", "multiprocessing", "RemoteVllm"}  # names that a module of tests has


def pytest_collection_modifyitems(items):
    """Mark all but architecture and unit tests, and those that start processes or train models for long."""
    for item in items:
        kind, *rest = item.path.relative_to(TESTS).parts
        if kind != "architecture" and (kind != "unit" or rest[0] in LONG or STARTERS & vars(item.module).keys()):
            item.add_marker("processes")

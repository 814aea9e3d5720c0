"""Stored runs are built by the helpers of tests on ranks."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "distributed"))

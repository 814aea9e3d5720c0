"""Tests with a real vLLM: their own environment (`make test-vllm`), CPU settings in force before anything imports it."""

from __future__ import annotations

import os
import sys
from pathlib import Path

# Before vLLM is imported, here or in a child: no hub, one thread that binds nowhere, few words.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

sys.path.insert(0, str(Path(__file__).parents[1] / "distributed"))  # spawn.py: ranks for a test

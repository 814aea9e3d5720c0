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

if os.environ.get("TRITON_INTERPRET") == "1":
    # vLLM's V2 model runner on a CPU: Triton's interpreter runs its kernels, but is no backend in Triton's own list.
    from triton.backends import backends

    backends.setdefault("cpu", backends["nvidia"])
    from vllm.v1.sample.ops import topk_topp_sampler

    # The interpreter cannot run its kernel of top-k and top-p; vLLM has the same in torch.
    topk_topp_sampler.HAS_TRITON = False

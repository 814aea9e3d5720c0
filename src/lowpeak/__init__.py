"""Online RL post-training for LLMs that fits the memory you have."""

import os
import sys

from lowpeak.exports import lazy_exports

__version__ = "0.1.0"

if "torch" not in sys.modules:  # whose OpenMP runtime reads it once, when it is loaded
    # Threads that spin while they wait take the cores that other processes, or the slowest thread, need.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)

"""Online RL post-training for LLMs that fits the memory you have."""

import os
import sys

from lowpeak.exports import lazy_exports

__version__ = "0.1.0"

# torch's OpenMP runtime reads OMP_WAIT_POLICY once, when torch is loaded. With PASSIVE, idle threads sleep and leave the
# cores to other processes. Child processes inherit the variable.
if "torch" not in sys.modules:
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)

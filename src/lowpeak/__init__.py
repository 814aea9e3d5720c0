"""Online RL post-training for LLMs that fits the memory you have."""

from lowpeak.exports import lazy_exports

__version__ = "0.1.0"

__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)

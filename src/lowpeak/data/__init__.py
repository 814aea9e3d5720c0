"""Datasets of prompts, conversations and preference pairs, and the cursor over them."""

from lowpeak.exports import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)

"""Attention over a forest: several sequences in one row, and a prompt's completions beside each other, unpadded."""

from lowpeak.exports import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)

"""Sizes of a run from the memory that is free, from a memory budget, or from a plan of its memory."""

from lowpeak.exports import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)

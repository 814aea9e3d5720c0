"""Sizes of a run from free memory, from a memory budget, or from a plan."""

from lowpeak.exports import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)

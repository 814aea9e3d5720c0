"""Failure detection: which rank is gone, and the end of processes that nobody waits for."""

from lowpeak.exports import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)

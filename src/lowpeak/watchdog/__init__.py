"""Failure detection: ranks that are gone or failed, and processes whose parent has died."""

from lowpeak.exports import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)

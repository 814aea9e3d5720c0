"""The start of a run: checks before loading, consistent ranks, resuming, restarts."""

from lowpeak.exports import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)

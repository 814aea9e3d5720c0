"""The start of a run: what is there, what is resumed, where ranks meet after a restart."""

from lowpeak.exports import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)

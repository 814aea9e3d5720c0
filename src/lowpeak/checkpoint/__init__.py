"""Checkpoints: atomic writes, a manifest, resuming to the same bits, and exported models."""

from lowpeak.exports import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)

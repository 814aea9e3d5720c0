"""Micro-batches under a token budget: balanced over ranks, packed without padding, prompts shared."""

from lowpeak.exports import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)

"""Conversations of several turns: tools, environments, and what the chat template writes around turns."""

from lowpeak.exports import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)

"""Conversations of several turns: tools, environments, and the chat template's text around turns."""

from lowpeak.exports import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)

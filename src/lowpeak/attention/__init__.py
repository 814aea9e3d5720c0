"""Attention over packed sequences without padding, in which a prompt's completions share its tokens."""

from lowpeak.exports import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)

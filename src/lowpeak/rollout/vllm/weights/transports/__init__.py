"""The ways by which weights reach the workers of vLLM."""

from lowpeak.exports import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)

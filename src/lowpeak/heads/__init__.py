"""Heads on a model's hidden states: log-probs, scores and values; unwrapping of models."""

from lowpeak.exports import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)

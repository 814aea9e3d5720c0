"""Log-probs, entropies and their gradients from hidden states, chunk by chunk, without logits of shape [T, V]."""

from lowpeak.exports import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)

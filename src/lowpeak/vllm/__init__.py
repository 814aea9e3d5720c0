"""vLLM as a rollout engine: in the training process, or behind HTTP."""

from lowpeak.exports import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)

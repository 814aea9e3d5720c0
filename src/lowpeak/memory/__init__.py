"""Memory: the peak of each phase, measured or rehearsed on fake tensors; automatic sizes; offloading to the host."""

from lowpeak.exports import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)

"""Planning: what a run takes on each device and in host memory, which settings make it fit, and how long a step lasts."""

from lowpeak.exports import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)

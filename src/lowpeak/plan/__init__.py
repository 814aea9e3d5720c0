"""Plans of runs: memory on each device and in host memory, settings that fit, and the seconds of a step."""

from lowpeak.exports import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)

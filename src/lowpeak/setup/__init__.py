"""Everything before the first step: checks, models, critic, engine, sizes of a run; resuming and restarts."""

from lowpeak.exports import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)

"""Arguments as users write them, declared once, and the frozen settings that code reads."""

from lowpeak.exports import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)

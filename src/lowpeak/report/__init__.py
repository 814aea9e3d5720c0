"""The report of runs: one HTML page of their journals, which needs no network. Nothing here loads torch."""

from lowpeak.exports import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)

"""Rehearsal: the phases of a step on fake tensors, which count the bytes that a run would take."""

from lowpeak.exports import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)

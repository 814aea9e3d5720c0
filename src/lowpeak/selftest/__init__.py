"""`lowpeak env --selftest`: tests of this machine's GPUs and vLLM, as a table to paste into an issue; `lowpeak check`."""

from lowpeak.exports import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)

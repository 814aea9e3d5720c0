"""vLLM servers that lowpeak starts: command line, process, entry point, token."""

from lowpeak.exports import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)

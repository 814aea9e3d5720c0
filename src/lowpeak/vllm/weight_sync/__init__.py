"""Weight sync from the policy to vLLM: sent in buckets, checked by their sums, then committed."""

from lowpeak.exports import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)

"""Weight updates of vLLM: send the policy's weights, load them in the workers, and verify them."""

from lowpeak.exports import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)

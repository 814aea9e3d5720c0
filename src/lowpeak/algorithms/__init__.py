"""GRPO, RLOO, PPO, Online DPO, reward modelling and supervised training, as functions of tensors and numbers."""

from lowpeak.exports import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)

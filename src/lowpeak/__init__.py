"""Online RL post-training for LLMs that fits the memory you have."""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_WHERE = {
    "GRPOConfig": "lowpeak.training.arguments",
    "GRPOTrainer": "lowpeak.training.grpo",
    "PPOConfig": "lowpeak.training.arguments",
    "PPOTrainer": "lowpeak.training.ppo",
    "OnlineDPOConfig": "lowpeak.training.arguments",
    "OnlineDPOTrainer": "lowpeak.training.online_dpo",
    "RLOOConfig": "lowpeak.training.arguments",
    "RLOOTrainer": "lowpeak.training.rloo",
    "RewardConfig": "lowpeak.training.arguments",
    "RewardTrainer": "lowpeak.training.reward",
    "SFTConfig": "lowpeak.training.arguments",
    "SFTTrainer": "lowpeak.training.sft",
    "generate_rollout_completions": "lowpeak.rollout.function",
}

__all__ = sorted([*_WHERE, "__version__"])


def __getattr__(name: str) -> Any:
    """Load a public name when it is first used, so that `import lowpeak` loads no torch."""
    if name not in _WHERE:
        raise AttributeError(f"module 'lowpeak' has no attribute {name!r}")
    return getattr(importlib.import_module(_WHERE[name]), name)


def __dir__() -> list[str]:
    return list(__all__)

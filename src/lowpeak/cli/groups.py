"""Which arguments stand together in `--help`, and in what order."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

MODEL = "model"
DATA = "data"
REWARDS = "rewards"
GENERATION = "generation"
VLLM = "rollouts by vLLM"
ALGORITHM = "algorithm"
MEMORY = "memory"
DEVICES = "several devices"
EVALUATION = "evaluation"
LOGGING = "logging and saving"
TRAINING = "training (transformers)"

ORDER = (MODEL, DATA, REWARDS, GENERATION, VLLM, ALGORITHM, MEMORY, DEVICES, EVALUATION, LOGGING, TRAINING)

_TITLES = {"logging": LOGGING, "training": TRAINING, "vllm": VLLM}
_PREFIXES = {"log": LOGGING, "save_": LOGGING, "hub_": LOGGING, "push_": LOGGING, "trackio_": LOGGING,
             "report_to": LOGGING, "output_dir": LOGGING, "run_name": LOGGING, "project": LOGGING,
             "disable_tqdm": LOGGING, "resume_from": LOGGING, "eval_": EVALUATION,
             "gradient_checkpointing": MEMORY, "activation_checkpointing": MEMORY, "fsdp": DEVICES,
             "deepspeed": DEVICES, "ddp_": DEVICES, "parallelism_config": DEVICES}  # fmt: skip


def group_of(name: str, metadata: Mapping[str, Any]) -> str:
    """The group of one field: what its declaration says, else by its name; transformers' other fields come last."""
    if "group" in metadata:
        return _TITLES.get(metadata["group"], metadata["group"])
    return next((group for prefix, group in _PREFIXES.items() if name.startswith(prefix)), TRAINING)

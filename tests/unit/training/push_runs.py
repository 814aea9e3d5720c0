"""Trains a tiny model with each trainer and pushes it to the hub of HF_ENDPOINT; the first argument is a folder to write into."""

from __future__ import annotations

import sys
from pathlib import Path

from peft import LoraConfig

from small_runs import make, trained


def main(folder: Path) -> None:
    """Push one run of each kind, and one that is pushed at each save."""
    for kind in ("GRPO", "PPO"):
        trained(kind, folder / kind).push_to_hub(dataset_name="someone/sums")
    trained("SFT", folder / "SFT").push_to_hub()
    saving = {"save_strategy": "steps"}
    trained("Reward", folder / "Reward", **saving).push_to_hub(dataset_name="someone/pairs", tags=["math", "tiny"])
    run = make(
        "GRPO", folder / "adapter", **saving, save_steps=1, push_to_hub=True, hub_model_id="adapter", hub_token="secret",
        hub_always_push=True,  # by default transformers leaves a push out while the one before is under way
        hub_strategy="every_save",
        peft_config=LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"),
    )  # fmt: skip
    run.train()
    run.save_model()


if __name__ == "__main__":
    main(Path(sys.argv[1]))

"""Trains a tiny model with each trainer and pushes it to the hub of HF_ENDPOINT; the first argument is a folder to write into."""

from __future__ import annotations

import sys
from pathlib import Path

from datasets import Dataset
from peft import LoraConfig

import lowpeak
from preferences import tiny_classifier
from tiny import char_tokenizer, tiny_model

SMALL = {
    "per_device_train_batch_size": 4,
    "max_steps": 2,
    "learning_rate": 1e-2,
    "logging_steps": 1,
    "report_to": "none",
    "disable_tqdm": True,
    "use_cpu": True,
    "micro_batch_tokens": 64,
}
ONLINE = {"num_generations": 2, "max_completion_length": 4, "kv_cache_bytes": 1 << 24}
ROWS = [{"prompt": f"{i}=", "completion": str(i), "chosen": str(i), "rejected": str((i + 3) % 10)} for i in range(8)]


def ones(completions, **columns):
    return [float(text.count("1")) for text in completions]


def trainer_of(kind, folder, columns, model=None, peft_config=None, more=None, **parts):
    changes = {**SMALL, **(ONLINE if kind not in ("SFT", "Reward") else {}), **(more or {})}
    return getattr(lowpeak, f"{kind}Trainer")(
        model=model or tiny_model(),
        args=getattr(lowpeak, f"{kind}Config")(output_dir=str(folder), **changes),
        train_dataset=Dataset.from_list([{name: row[name] for name in columns} for row in ROWS]),
        processing_class=char_tokenizer(),
        peft_config=peft_config,
        **parts,
    )


def main(folder):
    lora = LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    for kind in ("GRPO", "RLOO", "PPO", "OnlineDPO"):
        run = trainer_of(kind, folder / kind, ["prompt"], reward_funcs=ones, more={"save_strategy": "no"})
        run.train()
        run.push_to_hub(dataset_name="someone/sums")
    run = trainer_of("SFT", folder / "SFT", ["prompt", "completion"], more={"save_strategy": "no"})
    run.train()
    run.push_to_hub()
    run = trainer_of("Reward", folder / "Reward", ["prompt", "chosen", "rejected"], tiny_classifier())
    run.train()
    run.push_to_hub(dataset_name="someone/pairs", tags=["math", "tiny"])
    saved = {
        "save_steps": 1,
        "push_to_hub": True,
        "hub_always_push": True,  # by default transformers leaves a push out while the one before is under way
        "hub_model_id": "adapter",
        "hub_token": "secret",
        "hub_strategy": "every_save",
    }
    run = trainer_of("GRPO", folder / "adapter", ["prompt"], peft_config=lora, reward_funcs=ones, more=saved)
    run.train()
    run.save_model()


if __name__ == "__main__":
    main(Path(sys.argv[1]))

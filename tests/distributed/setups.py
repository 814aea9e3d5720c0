"""Each strategy on CPU ranks, for real: what accelerate has to be told, and small runs to train under it."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import DistributedType
from datasets import Dataset
from transformers import Qwen2Config, Qwen2ForSequenceClassification

from tiny import char_tokenizer, tiny_model

STRATEGIES = ("ddp", "fsdp2", "zero1", "zero2", "zero3")


def prepare(strategy: str) -> dict[str, Any]:
    """The environment that makes accelerate take `strategy`; the arguments that a config needs for it."""
    if strategy == "fsdp2":
        os.environ.update(FSDP2)
    return {"use_cpu": True, **({"deepspeed": zero_config(int(strategy[-1]))} if "zero" in strategy else {})}


def tensor_parallel(tensor: int, data: int) -> dict[str, Any]:
    """The environment in which accelerate has tensors cut over so many ranks, and FSDP2 over so many; arguments for a config."""
    if tensor > 1:
        sizes = {"PARALLELISM_CONFIG_TP_SIZE": str(tensor), "PARALLELISM_CONFIG_DP_SHARD_SIZE": str(data)}
        os.environ.update(sizes, ACCELERATE_USE_PARALLELISM_CONFIG="true")
    return {"use_cpu": True}


def forget() -> None:
    """Let the next trainer of this process take another strategy: accelerate and transformers keep one for good."""
    from accelerate.state import AcceleratorState
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    AcceleratorState._reset_state(reset_partial_state=True)
    unset_hf_deepspeed_config()
    for name in [*FSDP2, "ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_PARALLELISM_CONFIG"]:
        os.environ.pop(name, None)


FSDP2 = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
    "FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "true",
}


def allow_meshes_on_cpu() -> None:
    """Between config and trainer: on a CPU accelerate would train DDP without a word, so it is told of several devices."""
    if "true" in (os.environ.get("ACCELERATE_USE_FSDP"), os.environ.get("ACCELERATE_USE_PARALLELISM_CONFIG")):
        state = PartialState._shared_state
        state["distributed_type"], state["device"] = DistributedType.MULTI_GPU, torch.device("cpu")


def zero_config(stage: int) -> dict[str, Any]:
    """A DeepSpeed config whose every number is the run's own."""
    return {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
    }


PROMPTS = [f"{a}{b}=" for a in range(6) for b in range(4)]


# What stands beside a prompt in the rows of trainers that generate nothing.
ANSWERS: dict[str, Callable[[str], dict[str, Any]]] = {
    "SFT": lambda p: {"completion": f"{p[0]}1"},
    "Reward": lambda p: {"chosen": p[0] * (1 + int(p[1])), "rejected": p[:2], "margin": int(p[1]) / 8},
}


def spread(completions: list[str], **columns: Any) -> list[float]:
    """A number from the text, so that rewards differ within a group."""
    return [sum(ord(c) * (i + 1) for i, c in enumerate(text)) % 7 / 7 for text in completions]


def named_models(folder: Path) -> tuple[str, str]:
    """A policy and a reward model in folders, to be loaded by name; both have a tokenizer beside them."""
    policy, judge, tokenizer = folder / "policy", folder / "judge", char_tokenizer()
    if not folder.exists():
        tiny_model(len(tokenizer)).save_pretrained(policy)
        torch.manual_seed(3)
        config = Qwen2Config(
            vocab_size=len(tokenizer),
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            intermediate_size=64,
            num_labels=1,
            initializer_range=0.2,
            pad_token_id=0,
        )
        Qwen2ForSequenceClassification(config).save_pretrained(judge)
        for path in (policy, judge):
            tokenizer.save_pretrained(path)
    return str(policy), str(judge)


def classes_of(algorithm: str) -> tuple[Any, Any]:
    """The configuration and the trainer of an algorithm: the library's, or of a user's own file."""
    name = "examples.own_algorithm" if algorithm == "Reinforce" else "lowpeak"
    where = importlib.import_module(name)
    return getattr(where, f"{algorithm}Config"), getattr(where, f"{algorithm}Trainer")


def build(
    algorithm: str, folder: Path, arguments: dict[str, Any], model: Any = None, rewards: Any = None, **more: Any
) -> Any:
    """A small trainer: 8 completions of 2 prompts a rollout, whatever the number of ranks."""
    config, trainer = classes_of(algorithm)
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    tokenizer = char_tokenizer()
    base = {
        "output_dir": str(folder),
        "report_to": "none",
        "disable_tqdm": True,
        "learning_rate": 1e-2,
        "adam_epsilon": 1e-3,  # with 1e-8, where a gradient is nearly zero its last bit would become a whole step
        "max_grad_norm": 0.5,
        "logging_steps": 1,
        "save_strategy": "no",
        "max_steps": 3,
        "per_device_train_batch_size": 8 // world_size,
        "micro_batch_tokens": 64,
        "logprob_chunk_size": 16,
        "num_generations": 4,
        "max_completion_length": 6,
        "kv_cache_bytes": 1 << 24,
    }
    rows = [{"prompt": p, **ANSWERS.get(algorithm, lambda p: {})(p)} for p in PROMPTS]
    if algorithm in ANSWERS:
        for name in ("num_generations", "max_completion_length", "kv_cache_bytes"):
            base.pop(name)
    else:
        more["reward_funcs"] = rewards or spread
    if algorithm == "Reward":
        base.pop("logprob_chunk_size")
    args = config(**{**base, **arguments})
    allow_meshes_on_cpu()
    return trainer(
        model=model if model is not None else tiny_model(len(tokenizer)),
        args=args,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        **more,
    )

"""Tests of whole runs on one device: GRPO that learns, resuming, LoRA, and a base in 4 bits."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import nn

from lowpeak.selftest.models import even_share, make_model, mib
from lowpeak.selftest.runs import make_trainer, same_run
from lowpeak.selftest.table import Bench, require, row

_REWARD_GAIN = 0.2
_ENGINE_TOLERANCE = 0.05  # in nats, on average: sampling and training round differently


@row("GRPO learns", seconds=300)
def grpo_learns(bench: Bench, num_steps: int = 30) -> str:
    """Train a random model with shared prompts, in bf16 on a GPU, and compare its first reward with its last."""
    trainer = make_trainer(bench, "learns", make_model(), even_share, max_steps=num_steps, bf16=bench.on_gpu)
    began = time.perf_counter()
    trainer.train()
    seconds = time.perf_counter() - began
    rewards = [line["reward"] for line in trainer.state.log_history if "reward" in line]
    drift = max(line.get("sampling/sampling_logp_difference/mean", 0.0) for line in trainer.state.log_history)
    choice = trainer.run.sizes.layout_choice
    bench.record(first_reward=rewards[0], last_reward=rewards[-1], step_seconds=seconds / num_steps, engine_drift=drift)
    numbers = (
        f"reward {rewards[0]:.2f} at first and {rewards[-1]:.2f} after {num_steps} steps, {seconds / num_steps:.2f} s per step, "
        f"the engine's log-probs within {drift:.0e} of the model's on average"
    )
    require(rewards[-1] >= rewards[0] + _REWARD_GAIN and drift <= _ENGINE_TOLERANCE, numbers)
    require(choice.layout == "shared", f"rows are padded: {choice.why}")
    return numbers


@row("resume", seconds=120)
def resume(bench: Bench) -> str:
    """Compare a run that resumes in the middle of a rollout with an uninterrupted one."""
    saved: dict[str, Any] = {"max_steps": 4, "num_iterations": 2, "save_strategy": "steps", "save_steps": 3}
    return same_run(bench, {"resume": str(bench.folder / "plain" / "checkpoint-3")}, **saved)


@row("LoRA", "peft", seconds=180)
def lora(bench: Bench) -> str:
    """Train an adapter, compare the engine's log-probs with the model's, and the base with itself before."""
    return _train_adapter(bench, make_model().to(bench.device))


@row("LoRA on 4 bits", "peft", "bitsandbytes", seconds=180)
def four_bits(bench: Bench) -> str:
    """Train an adapter on a base in 4 bits, as `LoRA` does."""
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    make_model().save_pretrained(bench.folder / "base")
    dtype = bench.pick(torch.bfloat16, torch.float32)
    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype)
    options = {"quantization_config": config, "device_map": {"": bench.device}}
    return _train_adapter(bench, AutoModelForCausalLM.from_pretrained(bench.folder / "base", **options))


def _train_adapter(bench: Bench, model: nn.Module) -> str:
    from peft import LoraConfig

    config = LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM")
    changes = {"max_steps": 3, "learning_rate": 5e-3, "bf16": bench.on_gpu, "padding_free": False}
    trainer = make_trainer(bench, "adapter", model, even_share, peft_config=config, **changes)
    before = {name: value.detach().clone() for name, value in trainer.model.named_parameters()}
    trainer.train()
    moved = [name for name, value in trainer.model.named_parameters() if not torch.equal(value, before[name])]
    base = [name for name in moved if "lora_" not in name]
    drift = max(line.get("sampling/sampling_logp_difference/mean", 0.0) for line in trainer.state.log_history)
    step = next(line for line in reversed(trainer.state.log_history) if "loss" in line)
    bench.record(engine_drift=drift, step_seconds=step["step_time"], train_peak_bytes=step["peak_memory/train"])
    require(not base, f"{len(base)} weights of the base changed, such as {base[:1]}")
    require(bool(moved), "no weight of the adapter changed")
    require(drift <= _ENGINE_TOLERANCE, f"the engine's log-probs differ from the model's by {drift:.1e} on average")
    return (
        f"{len(moved)} weights of the adapter moved and none of the base, the engine's log-probs within {drift:.0e}, "
        f"{step['step_time']:.2f} s and {mib(step['peak_memory/train'])} per step"
    )

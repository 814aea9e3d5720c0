"""Trains every case of `CASES` under one strategy and writes each one's losses and weights: `run_numbers.py STRATEGY OUT`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig
from setups import build, named_models, prepare, spread

from lowpeak.critic import critic_of
from lowpeak.logprobs.head import causal_lm
from tiny import char_tokenizer, tiny_experts

OWN_CRITIC = {"critic": "model", "value_learning_rate": 3e-3, "beta": 0.0, "num_generations": 1}
# Settings, of which each changes what ranks must agree on.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "grpo": ("GRPO", {}),
    "grpo_reused": ("GRPO", {"num_iterations": 2, "loss_type": "grpo", "max_steps": 4}),
    "grpo_accumulated": ("GRPO", {"gradient_accumulation_steps": 2, "steps_per_generation": 4, "max_steps": 4}),
    "grpo_sequence": ("GRPO", {"importance_sampling_level": "sequence", "num_iterations": 2, "loss_type": "bnpo"}),
    "grpo_one_group": ("GRPO", {"num_generations": 8}),
    "grpo_experts": ("GRPO", {"router_aux_loss_coef": 0.5, "micro_batch_tokens": 24}),
    "rloo": ("RLOO", {"beta": 0.0, "num_generations": 4}),
    "sft": ("SFT", {}),
    "ppo": ("PPO", {"num_iterations": 2, "max_steps": 4, "early_stop_kl": 5.0, "kl_target": 1.0, "kl_horizon": 100}),
    "ppo_own_critic": ("PPO", {**OWN_CRITIC, "num_iterations": 2, "max_steps": 4}),
    "ppo_second_adapter": ("PPO", {"critic": "adapter", "num_iterations": 2, "value_warmup_steps": 1}),
    "reward": ("Reward", {"center_rewards_coefficient": 0.1, "share_prompt": True}),
    "online_dpo": ("OnlineDPO", {"num_iterations": 2, "max_steps": 4, "num_generations": 2}),
    "frozen": (
        "GRPO",
        {"beta": 0.1, "num_iterations": 2, "max_steps": 5, "sync_ref_model": True, "ref_model_sync_steps": 2},
    ),
}


def weights_of(trainer: Any) -> dict[str, torch.Tensor]:
    """The policy's weights, and a critic's, put together from the strategy's slices."""
    critic = critic_of(causal_lm(trainer.accelerator.unwrap_model(trainer.model)))
    found = sliced(trainer, trainer.model_wrapped)
    return found if critic is None else found | {f"critic.{n}": w for n, w in sliced(trainer, critic).items()}


def sliced(trainer: Any, model: torch.nn.Module) -> dict[str, torch.Tensor]:
    found: dict[str, list[torch.Tensor]] = {}
    for piece in trainer.run.strategy.slices(model, 1 << 10, None):
        found.setdefault(piece.name, []).append(piece.values.clone())
    return {name: torch.cat(parts) for name, parts in found.items()}


def models_of(name: str, out: Path) -> dict[str, Any]:
    """Policy, reference and reward model loaded by name, where a case is about models that are never trained, or a new head; an
    adapter."""
    if name == "ppo_second_adapter":
        return {
            "model": named_models(out / "named")[0],
            "peft_config": LoraConfig(r=4, target_modules="all-linear", lora_alpha=16),
        }
    if name == "grpo_experts":
        return {"model": tiny_experts(len(char_tokenizer()))}
    if name not in ("frozen", "reward", "ppo_own_critic"):
        return {}
    policy, judge = named_models(out / "named")
    return {"model": policy, **({"rewards": [spread, judge]} if name == "frozen" else {})}


def critic_of_a_name(name: str, out: Path) -> dict[str, Any]:
    """The reward model that starts the critic, where it has a backbone of its own."""
    return {"value_model_path": named_models(out / "named")[1]} if name == "ppo_own_critic" else {}


def main() -> None:
    """All cases in one process group."""
    strategy, out = sys.argv[1], Path(sys.argv[2])
    for name, (algorithm, arguments) in CASES.items():
        told = {**prepare(strategy), **arguments, **critic_of_a_name(name, out)}
        trainer = build(algorithm, out / strategy / name, told, **models_of(name, out))
        trainer.train()
        weights = weights_of(trainer)
        steps = [(row["loss"], row["grad_norm"]) for row in trainer.state.log_history if "loss" in row]
        parameter = type(next(trainer.model.parameters())).__name__
        if trainer.is_world_process_zero():
            torch.save(
                {
                    "weights": weights,
                    "steps": steps,
                    "parameter": parameter,
                    "strategy": type(trainer.run.strategy).__name__,
                },
                out / f"{strategy}-{name}.pt",
            )


if __name__ == "__main__":
    main()

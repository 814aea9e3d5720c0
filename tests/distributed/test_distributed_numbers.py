"""One process, DDP, FSDP2 and ZeRO-1/2/3 on the same seeds: the same losses, gradient norms and weights.

Algorithms, engines and adapters are in test_distributed_combinations.py; here are settings of which each changes what ranks must
agree on, and models of other kinds.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from setups import assert_same_run, build, forget, keep, named_models, prepare, result_of, spread

from case_selection import mark_extended, selected_cases
from child_processes import succeed_on_ranks
from lowpeak.records import Branch, Group
from lowpeak.rollout.pending import GeneratedOnResult
from tiny_models import char_tokenizer, tiny_experts

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "accumulated": ("GRPO", {"gradient_accumulation_steps": 2, "steps_per_generation": 4, "loss_type": "grpo"}),
    "frozen": ("GRPO", {"beta": 0.1, "num_iterations": 2, "sync_ref_model": True, "ref_model_sync_steps": 2}),
    "ppo": ("PPO", {"num_iterations": 2, "early_stop_kl": 5.0, "kl_target": 1.0, "kl_horizon": 100}),
    "ppo_own_critic": (
        "PPO",
        {"critic": "model", "value_learning_rate": 3e-3, "beta": 0.0, "num_generations": 1, "num_iterations": 2},
    ),
    "one_group": ("GRPO", {"num_generations": 8}),
    "sequence": ("GRPO", {"importance_sampling_level": "sequence", "num_iterations": 2, "loss_type": "bnpo"}),
    "experts": ("GRPO", {"router_aux_loss_coef": 0.5, "micro_batch_tokens": 24}),
    "sft": ("SFT", {}),
    "reward": ("Reward", {"center_rewards_coefficient": 0.1, "share_prompt": True}),
    "dpo": ("DPO", {"loss_type": ["sigmoid", "sft"], "sync_ref_model": True, "ref_model_sync_steps": 2}),
    "kto": ("KTO", {"gradient_accumulation_steps": 2}),
    "distillation": ("Distillation", {"beta": 0.5, "gradient_accumulation_steps": 2, "micro_batch_tokens": 24}),
    "self_distillation": (
        "Distillation",
        {"teacher_model_kind": "live", "micro_batch_tokens": 24, "distillation_weight": 0.5},
    ),
    "twice": ("GRPO", {"optim": "sgd", "learning_rate": 0.1}),  # train() twice; AdamW would start anew under ZeRO alone
    "branches": ("GRPO", {"beta": 0.1, "num_iterations": 2, "micro_batch_tokens": 24}),
}
IN_FORCE = {"ddp": ("Parameter", "Replicated"), "fsdp2": ("DTensor", "Fsdp2")}
IN_FORCE |= dict.fromkeys(("zero1", "zero2", "zero3"), ("Parameter", "Zero"))
# ZeRO-1 and ZeRO-2 differ from ZeRO-3 in gradients and their accumulation.
NAMES = {"ddp": [*CASES], "fsdp2": [*CASES], "zero1": ["accumulated"], "zero2": [*CASES][:3], "zero3": [*CASES]}
PAIRS = [(strategy, name) for strategy, names in NAMES.items() for name in names]
EXTENDED_NAMES = ("dpo", "kto", "distillation", "self_distillation")
CORE = [
    pair
    for pair in PAIRS
    if (pair[0] == "fsdp2" and pair[1] not in EXTENDED_NAMES)
    or pair
    in (("ddp", "accumulated"), ("ddp", "branches"), ("zero3", "frozen"), ("zero3", "twice"), ("zero3", "branches"))
]
EXTENDED = [("ddp", "experts"), ("zero2", "frozen"), *(("fsdp2", name) for name in EXTENDED_NAMES)]
EXTENDED += [("zero3", name) for name in ("accumulated", "ppo", "experts", "distillation", "self_distillation")]


class BranchingEngine:
    """The engine of a run, whose longer completions fork inside the prompt and the completion, and have a start of their own."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def submit(self, prompts: Any, sampling: Any) -> GeneratedOnResult:
        pending = self._engine.submit(prompts, sampling)
        return GeneratedOnResult(lambda: [self._branched(group) for group in pending.result()])

    def _branched(self, group: Group) -> Group:
        forks = (Branch(1, 0), Branch(3, len(group.prompt.ids) + 1), Branch(4, -1))
        completions = []
        for completion in group.completions:
            own = [fork for fork in forks if fork.start < len(completion)]
            mask = completion.loss_mask.clone()
            mask[[fork.start for fork in own if fork.after < 0]] = False
            completions.append(replace(completion, branches=tuple(own), loss_mask=mask))
        return replace(group, completions=tuple(completions))


def train_all(place: Path, strategy: str, out: Path, names: list[str]) -> None:
    """Cases of a strategy in one process group."""
    for name in names:
        algorithm, arguments = CASES[name]
        policy, judge = named_models(out / "named")
        parts: dict[str, Any] = {"model": policy} if name in ("frozen", "reward", "ppo_own_critic") else {}
        if name == "frozen":
            parts["rewards"] = [spread, judge]
        if name == "ppo_own_critic":
            arguments = {**arguments, "value_model_path": judge}
        if name == "experts":
            parts["model"] = tiny_experts(len(char_tokenizer()))
        trainer = build(algorithm, place / name, {**prepare(strategy), **arguments}, **parts)
        if name == "branches":
            trainer.collector.engine = BranchingEngine(trainer.collector.engine)
        for _ in range(2 if name == "twice" else 1):
            trainer.train()
        keep(trainer, result_of(trainer), out / f"{strategy}-{name}.pt")
        forget()


@pytest.fixture(scope="module")
def runs(request, tmp_path_factory):
    """The selected runs, and each of their cases in one process; each strategy is started once."""
    out, pairs = tmp_path_factory.mktemp("numbers"), selected_cases(request, "strategy", "name")
    named_models(out / "named")
    names: dict[str, list[str]] = {"single": list(dict.fromkeys(name for _, name in pairs))}
    for strategy, name in pairs:
        names.setdefault(strategy, []).append(name)
    for strategy, own in names.items():
        succeed_on_ranks(train_all, out / strategy, strategy, out, own, world_size=1 if strategy == "single" else 2)
    return out


@pytest.mark.parametrize(
    ("strategy", "name"),
    [
        *mark_extended([*CORE, *EXTENDED], CORE),
        *(pytest.param(*pair, marks=pytest.mark.release) for pair in PAIRS if pair not in CORE + EXTENDED),
    ],
)
def test_a_run_on_two_ranks_is_the_run_of_one_process(runs, strategy, name):
    alone, ours = (torch.load(runs / f"{kind}-{name}.pt") for kind in ("single", strategy))
    assert_same_run(ours, alone)
    assert (ours["parameter"], ours["strategy"]) == IN_FORCE[strategy]

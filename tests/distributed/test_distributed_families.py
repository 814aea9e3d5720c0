"""One family of each class under DDP, FSDP2 and ZeRO-3 on two ranks: tokens, rewards, losses and weights of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from setups import assert_same_run, build, forget, keep, prepare, result_of
from transformers import TrainerCallback

from case_selection import selected_cases
from child_processes import succeed_on_ranks
from model_families import REPRESENTATIVES, is_known, make_family
from small_runs import saved

PAIRS = [(strategy, family) for strategy in ("ddp", "fsdp2", "zero3") for family in REPRESENTATIVES]
ADAPTED = ", adapted"
PAIRS.append(("zero3", "Falcon-H1" + ADAPTED))
CORE = [("fsdp2", "Qwen3.5"), ("fsdp2", "Gemma 4"), ("zero3", "Falcon-H1" + ADAPTED), ("zero3", "Gemma 3 with vision")]
RUN: dict[str, Any] = {"beta": 0.1, "num_iterations": 2, "max_completion_length": 12}


class Tokens(TrainerCallback):
    """Notes the tokens and rewards of each step's rollout."""

    def __init__(self, trainer: Any) -> None:
        self.trainer, self.found = trainer, list[Any]()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        records = self.trainer.rollout.records
        self.found.append([(each.completion.ids.tolist(), each.reward) for each in records])


def train_all(place: Path, strategy: str, out: Path, families: list[str]) -> None:
    for family in families:
        more: dict[str, Any] = {"peft_config": LoraConfig(target_modules="all-linear")} if ADAPTED in family else {}
        trainer = build(
            "GRPO", place / family, {**prepare(strategy), **RUN}, model=str(out / "models" / family), **more
        )
        tokens = Tokens(trainer)
        trainer.add_callback(tokens)
        trainer.train()
        keep(trainer, {**result_of(trainer), "tokens": tokens.found}, out / f"{strategy}-{family}.pt")
        forget()


@pytest.fixture(scope="module")
def runs(request, tmp_path_factory):
    """The selected runs, and those of one process; each strategy is started once."""
    out = tmp_path_factory.mktemp("ranks")
    names: dict[str, list[str]] = {"single": []}
    for strategy, family in selected_cases(request, "strategy", "family"):
        if is_known(family.removesuffix(ADAPTED)):
            names.setdefault(strategy, []).append(family)
            if family not in names["single"]:
                names["single"].append(family)
                saved(out / "models" / family, make_family(family.removesuffix(ADAPTED)))
    for strategy, own in names.items():
        succeed_on_ranks(train_all, out / strategy, strategy, out, own, world_size=1 if strategy == "single" else 2)
    return out


@pytest.mark.parametrize(
    ("strategy", "family"),
    [pytest.param(*pair, marks=pytest.mark.extended if pair in CORE else pytest.mark.release) for pair in PAIRS],
)
def test_a_family_on_two_ranks_trains_as_in_one_process(runs, strategy, family):
    if not is_known(family.removesuffix(ADAPTED)):
        pytest.skip(f"this transformers lacks {family}")
    alone, ours = (torch.load(runs / f"{kind}-{family}.pt") for kind in ("single", strategy))
    assert ours["tokens"] == alone["tokens"]
    assert_same_run(ours, alone)

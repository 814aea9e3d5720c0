"""Conversations with a tool and an environment under each strategy, against one process; and what ends them on all ranks."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from setups import (
    Failing,
    allow_meshes_on_cpu,
    assert_same_run,
    error_of,
    forget,
    keep,
    note,
    prepare,
    rank,
    result_of,
    seen,
    tensor_parallel,
)

import lowpeak
from agent_programs import ChatCalculator
from case_selection import mark_extended, selected_cases
from child_processes import succeed_on_ranks
from lowpeak.errors import EngineError
from scripted_turns import Score, add, calling_model, questions
from small_runs import kept_records, refused_model

STRATEGIES = ["ddp", "fsdp2", "zero3", "tp", "fsdp2-tp"]
CASES = [(strategy, run) for strategy in STRATEGIES for run in ("whole", "memory", "rounds", "programs")]
CORE = [
    ("fsdp2", "whole"),
    ("fsdp2", "memory"),
    ("fsdp2", "rounds"),
    ("fsdp2", "programs"),
    ("zero3", "whole"),
    ("tp", "whole"),
]
SIZES = {"single": (1, 1), "tp": (2, 1), "fsdp2-tp": (2, 2)}  # processes of a rank, and ranks; by default (1, 2)
MEASURED = ("eval_reward", "eval_greedy_reward", "eval_tools/call_frequency", "eval_completions/mean_length")
PARTS = ("", "model.layers.1.mlp", "lm_head")


class SlowScore(Score):
    """An environment whose calls wait, longer on some ranks; `started` counts its conversations in this process."""

    started = 0

    def reset(self, **row: object) -> str:
        SlowScore.started += 1
        return super().reset(**row)

    def increase(self, by: int) -> int:
        """Add to the total.

        Args:
            by: How much.
        """
        time.sleep(0.002 * (rank() + by % 3))
        return super().increase(by)


class SlowProgram(ChatCalculator):
    """A program that asks later on some ranks."""

    async def run(self, endpoint: Any) -> None:
        await asyncio.sleep(0.005 * rank())
        await super().run(endpoint)


def run_out(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    raise EngineError("too many calls")


run_out.__name__ = "add"


def build(
    place: Path,
    strategy: str,
    factory: Any = SlowScore,
    tools: Any = (add,),
    data: Any = None,
    model: str = "calling",
    **changes: Any,
) -> Any:
    """A trainer of eight conversations a rollout, which evaluates one prompt: a second rank has none."""
    group, ranks = SIZES.get(strategy, (1, 2))
    own = tensor_parallel(group, ranks) if group > 1 else prepare(strategy)
    sharded = {"gather_budget": "0"} if strategy in ("fsdp2", "zero3", "fsdp2-tp") else {}
    settings = {
        "output_dir": str(place), "report_to": "none", "disable_tqdm": True, "learning_rate": 1e-2, "adam_epsilon": 1e-3,
        "max_grad_norm": 0.5, "logging_steps": 1, "save_strategy": "no", "max_steps": 3, "num_generations": 4,
        "per_device_train_batch_size": 8 // ranks, "micro_batch_tokens": 256, "max_completion_length": 40,
        "kv_cache_bytes": 1 << 24, "eval_strategy": "steps", "eval_steps": 3,
    }  # fmt: skip
    args = lowpeak.GRPOConfig(**{**settings, **own, **sharded, **changes})
    allow_meshes_on_cpu()
    return lowpeak.GRPOTrainer(
        str(place.parents[1] / model),
        args=args,
        train_dataset=data or questions(),
        eval_dataset=questions(1).add_column("environment", ["a"]),
        tools=[*tools],
        environment_factory=factory,
    )


def train_all(place: Path, strategy: str, cases: list[str]) -> None:
    """Whole runs, one that a process without memory holds up, and runs that one process ends."""
    for run, model in (("whole", "calling"), ("rounds", "refused")):
        if run in cases:
            train(build(place / run, strategy, model=model), place / f"{run}.pt")
            forget()
    if "programs" in cases:
        train(build(place / "programs", strategy, SlowProgram, tools=()), place / "programs.pt")
        forget()
    if "memory" in cases:
        trainer = build(place / "memory", strategy)
        engine = trainer.collector.engine.engine
        for part in PARTS[1:]:
            engine.gather_policy = Failing(engine.gather_policy, part, torch.OutOfMemoryError("no room"))
        train(trainer, place / "memory.pt")
        forget()
    if "errors" in cases:
        fail_on_one(place, strategy)


def fail_on_one(place: Path, strategy: str) -> None:
    trainer, errors = build(place / "errors", strategy), {}
    engine = trainer.collector.engine.engine
    whole = engine.gather_policy
    for part in PARTS:
        engine.gather_policy = Failing(whole, part, ValueError("out of luck"))
        errors[part] = error_of(trainer.train)
    forget()
    note(place, started=SlowScore.started, errors=errors | fail_outside(place, strategy))


def train(trainer: Any, path: Path) -> None:
    """Train, and keep what the run came to and all rollouts' ids and rewards."""
    records = kept_records(trainer)
    trainer.train()
    rollouts = [[(each.completion.ids.tolist(), each.reward) for each in rollout] for rollout in records]
    evaluated = [{name: row.get(name) for name in MEASURED} for row in trainer.state.log_history if "eval_loss" in row]
    keep(trainer, {**result_of(trainer), "rollouts": rollouts, "evaluated": evaluated}, path)


def fail_outside(place: Path, strategy: str) -> dict[str, str]:
    """What each process raises after one has failed in a conversation, or before it."""
    errors = {}
    tools = (run_out,) if rank() == 0 else (add,)
    errors["conversation"] = error_of(build(place / "conversation", strategy, tools=tools).train)
    forget()
    rows = [{**row, "environment": "a" if i else "b"} for i, row in enumerate(questions())]
    unknown = build(
        place / "unknown",
        strategy,
        {"a": SlowScore},
        data=Dataset.from_list(rows).to_iterable_dataset(),
        shuffle_dataset=False,
    )
    errors["unknown"] = error_of(unknown.train)
    return errors


@pytest.fixture(scope="module")
def runs(request, tmp_path_factory):
    out = tmp_path_factory.mktemp("tools")
    calling, tokenizer = calling_model()
    # Its turns are rounds of `model.generate()`, of which ranks have different numbers.
    refused = refused_model(len(tokenizer))
    refused.generation_config = calling.generation_config
    for name, model in (("calling", calling), ("refused", refused)):
        model.save_pretrained(out / name)
        tokenizer.save_pretrained(out / name)
    runs_of: dict[str, list[str]] = {"single": ["whole", "rounds", "programs"]}
    for strategy, run in selected_cases(request, "strategy", "run"):
        runs_of.setdefault(strategy, []).append(run)
    for strategy, own in runs_of.items():
        group, ranks = SIZES.get(strategy, (1, 2))
        succeed_on_ranks(train_all, out / strategy, strategy, own, world_size=group * ranks)
    return out


@pytest.mark.parametrize(("strategy", "run"), mark_extended(CASES, CORE, "release"))
def test_conversations_are_those_of_one_process_also_after_one_of_several_had_no_memory(runs, strategy, run):
    alone = torch.load(runs / f"single/{'whole' if run == 'memory' else run}.pt")
    ours = torch.load(runs / strategy / f"{run}.pt")
    assert ours["rollouts"] == alone["rollouts"]
    assert ours["evaluated"] == alone["evaluated"] != []
    assert sum(reward > 0 for rollout in alone["rollouts"] for _, reward in rollout) > 12
    assert_same_run(ours, alone)


@pytest.mark.parametrize(
    ("strategy", "run"), mark_extended([(each, "errors") for each in STRATEGIES], [("fsdp2", "errors")], "release")
)
def test_errors_of_one_process_end_conversations_on_all(runs, strategy, run):
    group, ranks = SIZES.get(strategy, (1, 2))
    for number, found in enumerate(seen(runs / strategy, group * ranks)):
        errors = found["errors"]
        assert all("out of luck" in errors[part] for part in PARTS)
        assert "too many calls" in errors["conversation"]
        assert "environment='b'" in errors["unknown"]
        assert (found["started"] > 0) == (number % group == 0)

"""Tensor parallelism, alone on two ranks and with FSDP2 on four, against one process.

Checkpoints go from each to each, and what one peer has no memory for in a rollout ends it on all.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from setups import (
    SAVED,
    Failing,
    assert_same_bits,
    assert_same_run,
    build,
    error_of,
    forget,
    keep,
    note,
    rank,
    result_of,
    seen,
    spread,
    tensor_parallel,
)
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from case_selection import mark_extended, selected_cases
from child_processes import succeed_on_ranks
from tiny_models import char_tokenizer, tiny_model

# Models and settings, of which each lies on the ranks in its own way, or changes what they must agree on.
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "saved": ("GRPO", "tied", {**SAVED, "weight_decay": 0.1, "beta": 0.1}),
    "online_dpo": (
        "OnlineDPO",
        "untied",
        {"micro_batch_tokens": 48, "sync_ref_model": True, "ref_model_sync_steps": 2, "gather_budget": "0"},
    ),
    "ppo": ("PPO", "tied", {"num_iterations": 2, "vf_coef": 0.5}),
    "rloo": ("RLOO", "qwen3", {"beta": 0.0, "num_generations": 4, "micro_batch_tokens": 24, "num_iterations": 2}),
    "sft": ("SFT", "tied", {}),
}
# Devices that tensors are cut over, and data ranks; the sharding of FSDP2 is the same for all algorithms.
SIZES = {"1x1": [*CASES], "2x1": [*CASES], "2x2": [*CASES][:4]}
PARTS = ("", "model.layers.0.self_attn", "model.layers.1.mlp", "model.norm", "lm_head")


def save_models(folder: Path) -> None:
    """Models in folders: tied or not, with biases, or with norms of single heads, whose gradients peers have in parts."""
    torch.manual_seed(0)
    qwen3 = Qwen3Config(
        vocab_size=16, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        intermediate_size=64, initializer_range=0.2, pad_token_id=0, eos_token_id=1, bos_token_id=None,
        tie_word_embeddings=False,
    )  # fmt: skip
    models = {
        "tied": tiny_model(16),
        "untied": tiny_model(16, tied=False),
        "qwen3": Qwen3ForCausalLM(qwen3),
    }
    for kind, model in models.items():
        model.save_pretrained(folder / kind)
        char_tokenizer("0123456789=+-*").save_pretrained(folder / kind)


def train_all(place: Path, tensor: int, data: int, names: list[str], sources: list[str]) -> None:
    """The cases of these names, and runs that go on from these sizes' checkpoints."""
    for name in names:
        train(place, tensor, data, name)
    for source in sources:
        train(place, tensor, data, "saved", place.parent / source / "saved/checkpoint-3", f"from-{source}")


def train(place: Path, tensor: int, data: int, case: str, resumed: Path | None = None, name: str = "") -> None:
    algorithm, model, arguments = CASES[case]
    own = {key: value for key, value in arguments.items() if key != "gather_budget" or data > 1}

    def spread_once(completions: list[str], **columns: Any) -> list[float]:
        assert rank() % tensor == 0  # asked on one of the devices that tensors are cut over
        return spread(completions)

    each = {"per_device_train_batch_size": 8 // data, **tensor_parallel(tensor, data), **own}
    rewards = {} if algorithm == "SFT" else {"rewards": spread_once}
    trainer = build(algorithm, place / (name or case), each, str(place.parent / model), **rewards)
    trainer.train(resume_from_checkpoint=None if resumed is None else str(resumed))
    keep(trainer, result_of(trainer), place / f"{name or case}.pt")
    forget()


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tensor")
    save_models(folder)
    return folder


@pytest.fixture(scope="module")
def runs(request, models):
    """Cases in one process and under the selected sizes, runs that go on, and runs from each other's checkpoint."""
    chosen = {"1x1", *selected_cases(request, "sizes")}
    for sizes, again, sources in (
        ("1x1", True, []),
        ("2x1", True, ["2x1"]),
        ("2x2", True, ["2x2", "2x1"]),
        ("2x1", False, ["2x2"]),
        ("1x1", False, ["2x1", "2x2"]),
    ):
        tensor, data = map(int, sizes.split("x"))
        names, sources = SIZES[sizes] if again else [], [source for source in sources if source in chosen]
        if sizes not in chosen or not (names or sources):
            continue
        succeed_on_ranks(train_all, models / sizes, tensor, data, names, sources, world_size=tensor * data)
    return models


def read(runs: Path, sizes: str, name: str) -> dict[str, Any]:
    return torch.load(runs / sizes / f"{name}.pt")


CASES_OF_SIZES = [(sizes, name) for sizes in ("2x1", "2x2") for name in SIZES[sizes]]
BOTH_SIZES = mark_extended(["2x1", "2x2"], ["2x1"], "release")


@pytest.mark.parametrize(
    ("sizes", "name"), mark_extended(CASES_OF_SIZES, [case for case in CASES_OF_SIZES if case[0] == "2x1"], "release")
)
def test_a_run_whose_tensors_are_cut_is_the_run_of_one_process(runs, sizes, name):
    ours = read(runs, sizes, name)
    assert ours["strategy"] == "TensorParallel"
    assert_same_run(ours, read(runs, "1x1", name))


@pytest.mark.parametrize("sizes", BOTH_SIZES)
def test_a_resumed_run_whose_tensors_are_cut_is_the_run_that_was_not_cut_off(runs, sizes):
    again, whole = read(runs, sizes, f"from-{sizes}"), read(runs, sizes, "saved")
    assert_same_bits(again["weights"], whole["weights"])
    assert again["steps"] == whole["steps"]


@pytest.mark.parametrize(
    ("source", "sizes"),
    mark_extended([("2x1", "2x2"), ("2x2", "2x1"), ("2x1", "1x1"), ("2x2", "1x1")], [("2x1", "1x1")], "release"),
)
def test_a_run_whose_tensors_are_cut_goes_on_under_another_cut(runs, source, sizes):
    assert_same_run(read(runs, sizes, f"from-{source}"), read(runs, source, "saved"))


@pytest.mark.parametrize("sizes", BOTH_SIZES)
def test_a_checkpoint_of_cut_tensors_is_a_model(runs, sizes):
    folder = runs / sizes / "saved/checkpoint-5"
    assert_same_bits(
        dict(AutoModelForCausalLM.from_pretrained(folder).named_parameters()), read(runs, sizes, "saved")["weights"]
    )
    assert "tp_size" not in (folder / "config.json").read_text()


def exhaust(place: Path, model: str, sizes: tuple[int, int], budgets: list[str | None]) -> None:
    """Runs whose rollouts fail once on one peer, before a forward or at a part of it, and then a run without a failure."""
    errors, step = {}, 0
    for budget in budgets:
        more = {} if budget is None else {"gather_budget": budget}
        arguments = {"per_device_train_batch_size": 8 // sizes[1], "max_steps": 1, **tensor_parallel(*sizes), **more}
        trainer = build("GRPO", place / f"run{budget}", arguments, model)
        engine = trainer.collector.engine
        whole, large = engine.gather_policy, trainer.run.sizes
        for part in PARTS:
            trainer.run = trainer.run.with_sizes(large)
            engine.gather_policy = Failing(whole, part, torch.OutOfMemoryError("no room"))
            errors[f"{budget} {part}"] = error_of(trainer.train)
        engine.gather_policy = whole
        trainer.train()
        step += trainer.state.global_step
        forget()
    note(place, errors=errors, step=step)


@pytest.mark.parametrize(
    ("sizes", "budgets"),
    [
        ((2, 1), [None]),
        pytest.param((2, 2), ["0"], marks=pytest.mark.extended),
        pytest.param((2, 2), ["1GiB"], marks=pytest.mark.release),
    ],
)
def test_a_rollout_runs_again_on_all_after_a_peer_had_no_memory_anywhere_in_it(tmp_path, models, sizes, budgets):
    num = sizes[0] * sizes[1]
    succeed_on_ranks(exhaust, tmp_path, str(models / "tied"), sizes, budgets, world_size=num)
    for found in seen(tmp_path, num):
        assert found["step"] == len(budgets)
        assert found["errors"] == {f"{budget} {part}": "no error" for budget in budgets for part in PARTS}

"""Algorithms, strategies, engines, adapters and references together: every pair of them trains, evaluates and saves.

Which combinations these are is generated (`all_pairs`); those that cannot be are refused.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from safetensors.torch import load_file
from setups import assert_same_bits, assert_same_run, build, forget, prepare, rank, result_of, weights_of

from all_pairs import Case, all_pairs, each_value, every, pairs_in, pairs_of
from case_selection import mark_extended, selected_cases
from child_processes import succeed_on_ranks
from fake_vllm import END, engine_over, scripted
from lowpeak.errors import ArgumentError
from lowpeak.ranks import Ranks
from lowpeak.vllm.engine import EngineSharing
from lowpeak.vllm.protocol import Answer, Request

SETTINGS = {
    "strategy": ["ddp", "fsdp2", "zero3"],
    "algorithm": ["grpo", "rloo", "ppo_head", "ppo_model", "ppo_adapter", "online_dpo", "own"],
    "engine": ["native", "function", "vllm", "ahead"],
    "tuning": ["full", "lora"],
    "reference": ["with", "without"],
}
# What cannot be, and the argument that is named where it is refused.
REFUSED: list[tuple[Case, str]] = [
    ({"algorithm": "ppo_adapter", "tuning": "full"}, "critic='adapter'.*LoRA"),
    ({"algorithm": "online_dpo", "reference": "without"}, "beta"),
    ({"algorithm": "own", "engine": "ahead"}, "max_staleness"),
]
ALGORITHMS: dict[str, tuple[str, dict[str, Any]]] = {
    "grpo": ("GRPO", {}),
    "rloo": ("RLOO", {}),
    "ppo_head": ("PPO", {"num_iterations": 2}),
    "ppo_model": ("PPO", {"num_iterations": 2, "critic": "model"}),
    "ppo_adapter": ("PPO", {"num_iterations": 2, "critic": "adapter", "value_warmup_steps": 1}),
    "online_dpo": ("OnlineDPO", {}),
    "own": ("Reinforce", {}),  # examples/own_algorithm.py
}
KINDS = {"ddp": "Replicated", "fsdp2": "Fsdp2", "zero3": "Zero"}
SAID_LOGPROB = -2.5  # of each token that was not written by the policy: near the tiny model's own
SHORT = {"max_steps": 3, "eval_strategy": "steps", "eval_steps": 3, "save_strategy": "steps", "save_steps": 3}
MEASURED = ("eval_reward", "eval_loss", "eval_entropy", "eval_reward_std", "eval_frac_reward_zero_std")


def is_refused(case: Case) -> bool:
    return any(held.items() <= case.items() for held, _ in REFUSED)


@cache
def cases() -> list[Case]:
    """Every pair of values that can be stands in one of these."""
    return all_pairs(SETTINGS, lambda case: not is_refused(case))


def cases_of(strategy: str, chosen: Sequence[Case]) -> list[Case]:
    """The combinations to run under one strategy; one process runs those of all."""
    if strategy != "single":
        return [case for case in chosen if case["strategy"] == strategy]
    return [{**case, "strategy": "single"} for case in chosen]


def name_of(case: Case) -> str:
    """A name of the combination without its strategy."""
    return "-".join(value for setting, value in case.items() if setting != "strategy")


def make(case: Case, folder: Path) -> Any:
    """The combination's trainer, which is to train three steps, evaluate once and save."""
    name, arguments = ALGORITHMS[case["algorithm"]]
    more: dict[str, Any] = {"eval_dataset": [{"prompt": "12="}, {"prompt": "4="}, {"prompt": "35="}]}
    if case["tuning"] == "lora":
        more["peft_config"] = LoraConfig(r=4, target_modules="all-linear", lora_alpha=16)
    if case["engine"] == "function":
        more["rollout_func"] = from_its_text
    given = {**prepare(case["strategy"]), **SHORT, **arguments, "beta": 0.1 if case["reference"] == "with" else 0.0}
    is_ahead, is_vllm = case["engine"] == "ahead", case["engine"] in ("vllm", "ahead")
    if is_vllm:
        given |= {"use_vllm": True, "vllm_mode": "server", "kv_cache_bytes": None, "max_staleness": int(is_ahead)}
    trainer = build(name, folder, given, **more)
    if is_vllm:
        engine = engine_over(scripted(answer), sharing=EngineSharing(Ranks().subgroup(1)))
        engine.close()  # of what it was made with
        trainer.collector.engine = replace(engine, in_background=is_ahead)
    return trainer


def from_its_text(prompts: list[str], trainer: Any) -> dict[str, list[Any]]:
    """A `rollout_func` whose completions are told by the prompt, the step and their number, whatever rank is asked."""
    tokenizer, number = trainer.processing_class, trainer.num_generations
    rows = [written(f"{prompt}/{trainer.state.global_step}/{i % number}") for i, prompt in enumerate(prompts)]
    return {
        "prompt_ids": [tokenizer(prompt)["input_ids"] for prompt in prompts],
        "completion_ids": rows,
        "logprobs": [[SAID_LOGPROB] * len(row) for row in rows],
        "env_mask": [[int(i != 1) for i in range(len(row))] for row in rows],
    }


def answer(request: Request) -> Answer:
    """What the scripted vLLM says, which is told by the prompt and the request's seed."""
    ids = tuple(written(f"{request.prompt_ids}/{request.params.get('seed', 0)}"))
    return Answer(ids, (SAID_LOGPROB,) * len(ids), "stop" if ids[-1] == END else "length")


def written(name: str) -> list[int]:
    """Three to six tokens, half of the time with an end."""
    number = zlib.crc32(name.encode())
    ids = [2 + (number >> 4 * i) % 11 for i in range(2 + number % 4)]
    return [*ids, END if number & 64 or len(ids) < 5 else 5]


def run_all(place: Path, strategy: str, chosen: Sequence[Case]) -> None:
    """The chosen combinations that stand under one strategy, in one process group."""
    found = {}
    for case in cases_of(strategy, chosen):
        found[name_of(case)] = run(case, place / name_of(case))
        forget()
    torch.save(found, place / f"{rank()}.pt")


def run(case: Case, folder: Path) -> dict[str, Any]:
    """Train, evaluate and save one combination: its weights before and after, its numbers, what was saved."""
    trainer = make(case, folder)
    before = weights_of(trainer)
    trainer.train()
    history = trainer.state.log_history
    return {
        **result_of(trainer),
        "before": before,
        "evaluations": [{name: row[name] for name in MEASURED} for row in history if "eval_reward" in row],
        "finite": all(math.isfinite(value) for row in history for value in row.values() if isinstance(value, float)),
        "saved": load_file(*(folder / "checkpoint-3").glob("*model.safetensors")) if rank() == 0 else {},
    }


@pytest.fixture(scope="module")
def launched(request, tmp_path_factory):
    """What each selected combination under a strategy came to, on each of its ranks; each strategy is started once."""
    out: Path = tmp_path_factory.mktemp("combinations")
    chosen = [CASES[name] for name in selected_cases(request, "name")]

    @cache
    def started(strategy: str) -> AssertionError | None:
        try:
            succeed_on_ranks(run_all, out / strategy, strategy, chosen, world_size=1 if strategy == "single" else 2)
        except AssertionError as error:
            return error
        return None

    @cache
    def under(strategy: str) -> list[dict[str, Any]]:
        if error := started(strategy):
            raise error
        return [torch.load(file) for file in sorted((out / strategy).glob("?.pt"))]

    return under


CASES = {f"{case['strategy']}-{name_of(case)}": case for case in cases()}
CORE = [name for name, case in CASES.items() if case in each_value(cases())]


@pytest.mark.parametrize("name", mark_extended(list(CASES), CORE))
def test_a_combination_trains_evaluates_and_saves_what_one_process_does(launched, name):
    case = CASES[name]
    name = name_of(case)
    (alone,) = [ranks[name] for ranks in launched("single")]
    for ours in (ranks[name] for ranks in launched(case["strategy"])):
        assert ours["strategy"] == KINDS[case["strategy"]]
        assert ours["finite"]
        assert len(ours["steps"]) == 3
        assert has_moved(ours)
        assert_same_run(ours, alone)
        assert [pytest.approx(each, abs=1e-5) for each in alone["evaluations"]] == ours["evaluations"]
        assert len(ours["evaluations"]) == 1
    assert_saved(launched(case["strategy"])[0][name], case)


def has_moved(run: dict[str, Any]) -> bool:
    """Whether a weight of the policy changed by more than any rounding."""
    policy = [name for name in run["before"] if "critic" not in name.split(".")]  # a module's name, or an adapter's
    return any(float((run["weights"][name] - run["before"][name]).abs().max()) > 1e-3 for name in policy)


def assert_saved(run: dict[str, Any], case: Case) -> None:
    assert not [name for name in run["saved"] if "critic" in name]
    if case["tuning"] == "lora":
        assert all("lora_" in name for name in run["saved"])
        assert any(bool(values.any()) for name, values in run["saved"].items() if "lora_B" in name)
        return
    assert_same_bits(run["saved"], {n: values for n, values in run["weights"].items() if not n.startswith("critic.")})


def test_every_pair_that_is_not_refused_stands_in_a_combination():
    run = pairs_of(cases())
    for case in every(SETTINGS):
        assert is_refused(case) or pairs_in(case) <= run
    assert not any(is_refused(case) for case in cases())
    assert len(cases()) <= 28


@pytest.mark.parametrize("held", range(len(REFUSED)))
def test_what_cannot_be_is_refused_by_the_name_of_an_argument(tmp_path, held):
    setting, words = REFUSED[held]
    alone = [case for case in every({**SETTINGS, "strategy": ["single"]}) if setting.items() <= case.items()]
    assert alone
    for case in alone:
        with pytest.raises(ArgumentError, match=words):
            make(case, tmp_path)

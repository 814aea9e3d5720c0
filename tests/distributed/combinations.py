"""Combinations of algorithm, strategy, engine, adapter and reference: which are run, which are refused, and how each is made."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

from peft import LoraConfig
from setups import STRATEGIES, build, prepare

from all_pairs import Case, all_pairs, every
from lowpeak.ranks import Ranks
from lowpeak.rollout.vllm.engine import Callers
from lowpeak.rollout.vllm.vllm import Answer, Request
from vllms import END, engine_over, scripted

SETTINGS = {
    "strategy": ["single", *STRATEGIES],
    "algorithm": ["grpo", "rloo", "ppo_head", "ppo_model", "ppo_adapter", "online_dpo", "own"],
    "engine": ["native", "function", "vllm"],
    "tuning": ["full", "lora"],
    "reference": ["with", "without"],
}
# What cannot be, and the words with which it is refused.
REFUSED: list[tuple[Case, str]] = [
    ({"algorithm": "ppo_adapter", "tuning": "full"}, "critic='adapter' needs a policy under LoRA"),
    ({"algorithm": "online_dpo", "reference": "without"}, "must be a number above 0, or a list of such"),
]
ALGORITHMS: dict[str, tuple[str, dict[str, Any]]] = {
    "grpo": ("GRPO", {}),
    "rloo": ("RLOO", {}),
    "ppo_head": ("PPO", {"num_iterations": 2}),
    "ppo_model": ("PPO", {"num_iterations": 2, "critic": "model"}),
    "ppo_adapter": ("PPO", {"num_iterations": 2, "critic": "adapter"}),
    "online_dpo": ("OnlineDPO", {}),
    "own": ("Reinforce", {}),  # examples/own_algorithm.py
}
SAID_LOGPROB = -2.5  # of each token that was not written by the policy: near the tiny model's own


def is_refused(case: Case) -> bool:
    """Whether the combination cannot be."""
    return any(held.items() <= case.items() for held, _ in REFUSED)


def cases() -> list[Case]:
    """Every pair of values that can be stands in one of these."""
    return all_pairs(SETTINGS, lambda case: not is_refused(case))


def refused_cases() -> list[tuple[Case, str]]:
    """Each combination on one device that cannot be, with the words that say so."""
    alone = every({**SETTINGS, "strategy": ["single"]})
    return [(case, words) for case in alone for held, words in REFUSED if held.items() <= case.items()]


def cases_of(strategy: str) -> list[Case]:
    """The combinations to run under one strategy; one device runs those of every other, too."""
    if strategy != "single":
        return [case for case in cases() if case["strategy"] == strategy]
    return list({name_of(case): {**case, "strategy": "single"} for case in cases()}.values())


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
    if case["engine"] == "vllm":
        given |= {"use_vllm": True, "vllm_mode": "server", "kv_cache_bytes": None}
    trainer = build(name, folder, given, **more)
    if case["engine"] == "vllm":
        trainer.maker.engine = engine_over(scripted(answer), callers=Callers(Ranks().teams(1)))
        trainer.maker.engine.close()  # of what it was made with
    return trainer


SHORT = {"max_steps": 3, "eval_strategy": "steps", "eval_steps": 3, "save_strategy": "steps", "save_steps": 3}


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

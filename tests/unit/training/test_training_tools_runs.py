"""Runs whose tiny model calls tools by itself: with everything that makes, uses or repeats a rollout."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig

from scripted_turns import Score, calling_model, questions
from small_runs import OutOfMemory, column, journal, kept_records, make, same, weights

COUNTS = Counter[str]()


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    COUNTS["calls"] += 1
    return a + b


class Counted(Score):
    """An environment that counts how often it is opened and called; `seconds` is the time of a call."""

    seconds = 0.0

    def reset(self, **row: object) -> str:
        COUNTS["resets"] += 1
        return super().reset(**row)

    def increase(self, by: int) -> int:
        """Add to the total.

        Args:
            by: How much.
        """
        COUNTS["calls"] += 1
        time.sleep(self.seconds * (by % 4))
        return super().increase(by)


def train(folder: Path, fails: Any = None, **changes: Any) -> tuple[Any, list[Any]]:
    """A run of two steps, and the ids, log-probs and rewards of its rollouts; `fails` hooks the model."""
    COUNTS.clear()
    model, tokenizer = calling_model()
    if fails is not None:
        model.model.layers[1].mlp.register_forward_pre_hook(fails)
    settings = {"max_completion_length": 40, "tools": [add], "environment_factory": Counted, "reward_funcs": []}
    run = make("GRPO", folder, model, questions(), tokenizer, **{**settings, "adam_epsilon": 1e-3, **changes})
    records = kept_records(run)
    run.train()
    return run, [
        [(each.completion.ids.tolist(), each.completion.logprobs.tolist(), each.reward) for each in rollout]
        for rollout in records
    ]


def ids(rollouts: list[Any]) -> list[Any]:
    return [[(tokens, reward) for tokens, _, reward in rollout] for rollout in rollouts]


@pytest.fixture(scope="module")
def calm(tmp_path_factory):
    run, rollouts = train(tmp_path_factory.mktemp("calm"))
    return run, rollouts, Counter(COUNTS)


def test_an_adapter_trains_on_the_conversations_of_its_base(tmp_path, calm):
    lora = LoraConfig(r=4, target_modules="all-linear", lora_alpha=16)
    run, rollouts = train(tmp_path, peft_config=lora)
    assert ids(rollouts)[0] == ids(calm[1])[0]
    assert any("lora_B" in name and value.any() for name, value in weights(run).items())


def test_an_evaluation_converses_and_changes_nothing_of_the_training(tmp_path, calm):
    run, rollouts = train(tmp_path, eval_dataset=questions(3), eval_strategy="steps", eval_steps=1)
    assert ids(rollouts) == ids(calm[1])
    assert same(weights(run), weights(calm[0]))
    assert column(run, "tools/call_frequency") == column(calm[0], "tools/call_frequency")
    assert all(calls > 1 for calls in column(run, "eval_tools/call_frequency"))
    assert len(column(run, "eval_rewards/Counted/mean")) == 2


def test_dynamic_sampling_converses_again_for_groups_that_it_drops(tmp_path):
    class Even(Counted):
        def get_reward(self) -> float:
            return super().get_reward() if int(self.row["answer"]) % 2 == 0 else 0.0

    run, _ = train(tmp_path, environment_factory=Even, dynamic_sampling_rounds=4, max_steps=1)
    assert len(journal(tmp_path, "rollouts")) == COUNTS["resets"] > 8
    assert column(run, "tools/call_frequency") == [COUNTS["calls"] / COUNTS["resets"]]


@pytest.mark.parametrize(
    "reuse", [{"num_iterations": 2}, {"steps_per_generation": 2, "per_device_train_batch_size": 4}]
)
def test_a_rollout_that_serves_two_steps_converses_once(tmp_path, calm, reuse):
    run, rollouts = train(tmp_path, **reuse)
    assert ids(rollouts) == ids(calm[1])[:1]
    assert COUNTS["resets"] == 8
    assert len(column(run, "loss")) == 2


@pytest.mark.parametrize(
    ("at", "is_new_attempt"),
    [
        ((20,), False),  # the engine halves its cache by itself
        ((20, 21, 22, 23), True),  # down to nothing
    ],
)
def test_conversations_go_on_after_memory_ran_out_and_no_tool_runs_twice(tmp_path, calm, at, is_new_attempt):
    run, rollouts = train(tmp_path, OutOfMemory(*at), kv_cache_bytes=1 << 17)
    assert (tmp_path / "journal/events.jsonl").exists() == is_new_attempt
    assert ids(rollouts) == ids(calm[1])
    assert same(weights(run), weights(calm[0]))
    assert calm[2] == COUNTS


def test_a_training_pass_that_runs_out_of_memory_uses_the_same_conversations(tmp_path, calm):
    class InTraining(OutOfMemory):
        def __call__(self, module: Any, inputs: Any) -> None:
            if torch.is_grad_enabled():
                super().__call__(module, inputs)

    run, rollouts = train(tmp_path, InTraining(1))
    assert ids(rollouts) == ids(calm[1])
    assert calm[2] == COUNTS
    for name, value in weights(calm[0]).items():
        torch.testing.assert_close(weights(run)[name], value, atol=5e-6, rtol=0)


def test_with_full_determinism_bits_do_not_depend_on_the_speed_of_tools(tmp_path, monkeypatch):
    found = []
    for seconds in (0.0, 0.01):
        monkeypatch.setattr(Counted, "seconds", seconds)
        try:
            run, rollouts = train(tmp_path / str(seconds), full_determinism=True)
        finally:
            torch.use_deterministic_algorithms(False)
        found.append((rollouts, weights(run)))
    assert found[0][0] == found[1][0]
    assert same(found[0][1], found[1][1])

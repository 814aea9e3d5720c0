"""One family of each class: resumed runs, memory that runs out, conversations that wait for tools, bf16."""

from __future__ import annotations

import contextlib
import random
from collections import Counter
from typing import Any

import pytest
import torch
from family_checks import LIMITS, TEMPERATURE, Comparison, FamilyReport, distance, gradients

from lowpeak.arguments.sampling import Sampling
from lowpeak.models.lora import expert_parameters
from lowpeak.parallel import decoder_layers
from lowpeak.records import Prompt
from lowpeak.rollout.native.cache_bytes import sequence_bytes
from lowpeak.rollout.native.engine import NativeEngine
from model_families import REPRESENTATIVES, is_known, make_family
from small_runs import TOKENIZER, column, make, same, saved, spread, weights
from turn_programs import Programs, by_generate

CORE = ("Qwen3.5", "Gemma 3", "gpt-oss")
TOLERANCE = 5e-6  # of weights, as of runs on ranks
# A rollout serves two steps; the first checkpoint is in the middle of one.
RUN: dict[str, Any] = {
    "beta": 0.1, "num_iterations": 2, "temperature": TEMPERATURE, "max_completion_length": 8, "micro_batch_tokens": 160,
    "reward_funcs": spread, "optim": "sgd", "learning_rate": 1e-2, "max_steps": 3, "save_strategy": "steps", "save_steps": 1,
}  # fmt: skip


def families(*core: str) -> Any:
    """One family of each class; those that are not in `core` run in releases' tests."""
    marked = {each: pytest.mark.extended if each in core else pytest.mark.release for each in REPRESENTATIVES}
    return pytest.mark.parametrize("family", [pytest.param(each, marks=mark) for each, mark in marked.items()])


FAMILY = families(*CORE)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """A family's run to its end: the model's name, the run's folder, weights and losses."""
    known: dict[str, tuple[str, Any, dict[str, Any], list[Any]]] = {}

    def run(family: str) -> tuple[str, Any, dict[str, Any], list[Any]]:
        if not is_known(family):
            pytest.skip(f"this transformers lacks {family}")
        if family not in known:
            folder = tmp_path_factory.mktemp("undisturbed")
            name = saved(folder / "model", make_family(family))
            trainer = make("GRPO", folder / "run", name, **RUN)
            trainer.train()
            known[family] = (name, folder / "run", weights(trainer), column(trainer, "loss"))
        return known[family]

    return run


@FAMILY
def test_a_run_resumed_in_mid_rollout_ends_with_the_same_bits(undisturbed, family):
    name, folder, expected, losses = undisturbed(family)
    trainer = make("GRPO", folder, name, **RUN)
    trainer.train(resume_from_checkpoint=str(folder / "checkpoint-1"))
    assert same(weights(trainer), expected)
    assert column(trainer, "loss") == losses


@FAMILY
def test_a_run_that_runs_out_of_memory_in_each_phase_ends_as_one_that_does_not(undisturbed, tmp_path, family):
    name, _, expected, losses = undisturbed(family)
    trainer = make("GRPO", tmp_path, name, **RUN)
    calls, phases = Counter[str](), {f"phase {phase}" for phase in ("rollout", "score", "train")}

    def fail(module: Any, args: Any) -> None:
        phase = trainer.run.tracker.current_phase
        calls[phase] += 1
        if phase in phases and calls[phase] == 2:
            raise torch.OutOfMemoryError("full")

    decoder_layers(trainer.model)[0].register_forward_pre_hook(fail)
    trainer.train()
    assert trainer.run.sizes.lowered >= {"micro_batch_tokens", "kv_cache_bytes"}
    assert all(calls[phase] > 2 for phase in phases)
    for key, values in weights(trainer).items():
        torch.testing.assert_close(values, expected[key], atol=TOLERANCE, rtol=0)
    assert column(trainer, "loss") == pytest.approx(losses, abs=1e-5)


@families(*CORE, "Jamba")  # whose scans start from no state
@pytest.mark.parametrize("slots", [6, 2])
def test_turns_between_which_tools_wait_are_those_of_their_tokens_by_themselves(tmp_path, family, slots):
    if not is_known(family):
        pytest.skip(f"this transformers lacks {family}")
    model, sampling = make_family(family), Sampling(num_generations=2, max_new_tokens=30, stop_token_ids=(3, 4))
    rng = random.Random(1)
    prompts = [Prompt(i, tuple(rng.randrange(2, 13) for _ in range(length)), "") for i, length in enumerate((3, 9, 14))]

    def engine(kv_cache_bytes: int) -> NativeEngine:
        made = NativeEngine(lambda: contextlib.nullcontext(model), TOKENIZER, lambda: kv_cache_bytes)
        made.load([], 0)
        return made

    log = Programs(
        prompts, sampling, delay=lambda conversation, turn: random.Random(f"{conversation}{turn}").random() * 0.05
    ).run(engine(slots * sequence_bytes(model, 44)))
    assert len(log) > 12
    for request, turn in log:
        expected = by_generate(engine(1 << 24), request, sampling)
        assert turn.ids == expected.ids.tolist()
        torch.testing.assert_close(torch.tensor(turn.logprobs), expected.logprobs, atol=LIMITS["sample"], rtol=0)


class Bf16Comparison(Comparison):
    """Compares, before an optimizer step, log-probs and gradient with those of plain forwards in bf16 and in float32."""

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        found = torch.cat([record.reference for record in self.trainer.rollout.records])
        (plain, gradient), (exact, exact_gradient) = (self.plain_pass(args, bf16=bf16) for bf16 in (True, False))
        add = self.report.add
        add("log-probs", float((found - plain).abs().mean()))
        add("rounding of log-probs", float((plain - exact).abs().mean()))
        add("gradient", distance(gradients(self.trainer.model), gradient))
        add("rounding of gradient", distance(exact_gradient, gradient))


@FAMILY
def test_bf16_differs_from_plain_forwards_in_bf16_by_less_than_those_do_from_float32(undisturbed, tmp_path, family):
    name, *_ = undisturbed(family)
    comparison = Bf16Comparison(name, FamilyReport())
    trainer = make(
        "GRPO",
        tmp_path,
        name,
        callbacks=[comparison],
        **{**RUN, "bf16": True, "num_iterations": 1, "max_steps": 1, "max_grad_norm": 1e9},
    )
    comparison.trainer = trainer
    trainer.train()
    errors = comparison.report.errors
    for number in ("log-probs", "gradient"):
        assert errors[number] <= errors[f"rounding of {number}"]
    if not expert_parameters(trainer.model):  # of which rounding chooses others
        assert errors["log-probs"] <= 0.01
        assert errors["gradient"] <= 0.05

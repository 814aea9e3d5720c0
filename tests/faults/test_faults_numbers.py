"""NaN and infinities: the run stops before the optimizer moves, says what it was, and leaves a good checkpoint."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from fault_runs import STANDARD, At, Case, build, checkpoints, ending, run_resumed, run_until_error, steps

from case_selection import mark_extended
from child_processes import succeed
from lowpeak.errors import NonFiniteError
from tiny_models import digest

BROKEN = "model.layers.1.mlp.up_proj.weight"


def break_weight(hook: str, step: int, trainer: Any) -> None:
    """Make one number of a weight NaN, at a hook's call when `step` steps are done."""
    trainer.add_callback(At(hook, step, lambda model: model.get_parameter(BROKEN).data[0, 0].fill_(torch.nan)))


@pytest.mark.parametrize(
    ("hook", "step", "words"),
    mark_extended(
        [
            ("on_step_begin", 5, "step 6: .*loss is nan"),
            ("on_step_end", 4, "after step 4"),  # before a rollout
            ("on_optimizer_step", 5, "after step 6"),  # before a save
        ],
        [("on_optimizer_step", 5, "after step 6")],
    ),
)
def test_a_broken_weight_stops_the_run_and_is_never_saved(tmp_path, left_alone, hook, step, words):
    succeed(run_until_error, STANDARD, tmp_path, partial(break_weight, hook, step))
    good = tmp_path / "run/checkpoint-3"
    message = (tmp_path / "error.txt").read_text()
    assert re.match(rf"NonFiniteError: {words}.*\({BROKEN}\).*{good}", message), message
    assert checkpoints(tmp_path / "run") == ["checkpoint-3"]
    succeed(run_resumed, STANDARD, tmp_path)
    assert ending(tmp_path) == left_alone(STANDARD)


def fail_by_a_gradient(case: Case, place: Path, number: float, words: str) -> None:
    trainer = build(case, place / "run")
    seen: dict[str, Any] = {}

    def spoil(gradient: torch.Tensor) -> torch.Tensor | None:
        if trainer.state.global_step != 5:
            return None
        seen["weights"] = digest(trainer.model)
        seen["states"] = states_of_optimizer(trainer)
        return torch.full_like(gradient, number)

    trainer.model.get_parameter(BROKEN).register_hook(spoil)
    with pytest.raises(NonFiniteError) as caught:
        trainer.train()
    assert re.match(f"step 6: .*{words}", str(caught.value))
    assert digest(trainer.model) == seen["weights"]
    after = states_of_optimizer(trainer)
    assert after.keys() == seen["states"].keys()
    assert all(torch.equal(after[key], state) for key, state in seen["states"].items())
    assert any("low_bits" in key for key in after) == (case.args.get("weight_bits") == 32)
    assert trainer.state.global_step == 5


def states_of_optimizer(trainer: Any) -> dict[tuple[int, str], torch.Tensor]:
    """A copy of every state: moments, numbers of steps, low bits of bf16 weights."""
    states = enumerate(trainer.optimizer.state.values())
    return {(number, key): torch.as_tensor(value).clone() for number, state in states for key, value in state.items()}


NAN, INF = float("nan"), float("inf")
# Every pair of a number, a norm and a format.
BAD_GRADIENTS = [(NAN, 1.0, {}), (INF, 0.0, {}), (INF, 1.0, {"weight_bits": 32}), (NAN, 0.0, {"weight_bits": 32})]
BAD_GRADIENTS += [(NAN, 0.0, {"weight_bits": 16}), (INF, 1.0, {"weight_bits": 16})]


@pytest.mark.parametrize(
    ("number", "max_grad_norm", "storage"), mark_extended(BAD_GRADIENTS, BAD_GRADIENTS[:3:2]), ids=str
)
def test_a_bad_gradient_moves_neither_weights_nor_the_optimizer(tmp_path, number, max_grad_norm, storage):
    words = f"inf.*{BROKEN}" if number == INF and max_grad_norm else str(number)
    case = Case(args={**STANDARD.args, "max_grad_norm": max_grad_norm, **storage}, dropout=0.1)
    succeed(fail_by_a_gradient, case, tmp_path, number, words)
    assert [row["step"] for row in steps(tmp_path / "run")] == [1, 2, 3, 4, 5]
    assert checkpoints(tmp_path / "run") == ["checkpoint-3"]


@pytest.mark.extended
@pytest.mark.parametrize(
    ("trainer", "words"), [("grpo", "EngineError: .*logits"), ("sft", "NonFiniteError: step 2: .* is nan.*bf16=False")]
)
def test_a_learning_rate_far_too_high_stops_the_run_with_a_sentence(tmp_path, trainer, words):
    case = Case(trainer, {"learning_rate": 1e30, "lr_scheduler_type": "constant"})
    succeed(run_until_error, case, tmp_path, id)  # nothing is prepared: it fails by its settings
    assert re.match(words, (tmp_path / "error.txt").read_text())

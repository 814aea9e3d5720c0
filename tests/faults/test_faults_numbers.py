"""NaN and infinities: the run stops before the optimizer moves, says what it was, and leaves a good checkpoint."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from fault_runs import STANDARD, Case, build, checkpoints, ending, run_resumed, run_until_error, steps, weights
from transformers import TrainerCallback

from children import succeed
from lowpeak.errors import NonFiniteError

BROKEN = "model.layers.1.mlp.up_proj.weight"


class BreakWeight(TrainerCallback):
    """Make one number of a weight NaN, at a hook's call when `step` steps are done."""

    def __init__(self, hook: str, step: int) -> None:
        self._step = step
        setattr(self, hook, self._break)

    def _break(self, args: Any, state: Any, control: Any, model: Any, **kwargs: Any) -> None:
        if state.global_step == self._step:
            with torch.no_grad():
                model.get_parameter(BROKEN)[0, 0] = torch.nan


def break_before_a_step_is_trained(trainer: Any) -> None:
    trainer.add_callback(BreakWeight("on_step_begin", 5))


def break_before_a_rollout(trainer: Any) -> None:
    trainer.add_callback(BreakWeight("on_step_end", 4))


def break_before_a_save(trainer: Any) -> None:
    trainer.add_callback(BreakWeight("on_optimizer_step", 5))


@pytest.mark.parametrize(
    ("break_it", "words"),
    [
        (
            break_before_a_step_is_trained,
            f"step 6: the loss is nan, and weights are already not finite ({BROKEN}). The optimizer step was not taken",
        ),
        (break_before_a_rollout, f"after step 4: weights are not finite ({BROKEN}). They were not saved"),
        (break_before_a_save, f"after step 6: weights are not finite ({BROKEN}). They were not saved"),
    ],
)
def test_a_broken_weight_stops_the_run_and_is_never_saved(tmp_path, left_alone, break_it, words):
    succeed(run_until_error, STANDARD, tmp_path, break_it)
    good = tmp_path / "run/checkpoint-3"
    said = (tmp_path / "error.txt").read_text()
    assert said.startswith(f"NonFiniteError: {words}, and the last good checkpoint is {good}.") or said.startswith(
        f"NonFiniteError: {words} and the last good checkpoint is {good}."
    )
    assert "Lower the learning rate" in said
    assert checkpoints(tmp_path / "run") == ["checkpoint-3"]
    succeed(run_resumed, STANDARD, tmp_path)
    assert ending(tmp_path) == left_alone(STANDARD)


def fail_by_a_gradient(case: Case, place: Path, number: float, words: str) -> None:
    trainer = build(case, place / "run")
    seen: dict[str, Any] = {}

    def spoil(gradient: torch.Tensor) -> torch.Tensor | None:
        if trainer.state.global_step != 5:
            return None
        seen["weights"] = weights(trainer.model)
        seen["moments"] = weights_of_optimizer(trainer)
        return torch.full_like(gradient, number)

    trainer.model.get_parameter(BROKEN).register_hook(spoil)
    with pytest.raises(NonFiniteError) as caught:
        trainer.train()
    assert str(caught.value).startswith(f"step 6: the gradient norm is {words}. The optimizer step was not taken")
    assert weights(trainer.model) == seen["weights"]
    assert weights_of_optimizer(trainer) == seen["moments"]
    assert trainer.state.global_step == 5


def weights_of_optimizer(trainer: Any) -> list[float]:
    return [float(state["exp_avg"].sum()) for state in trainer.optimizer.state.values()]


@pytest.mark.parametrize("max_grad_norm", [1.0, 0.0])
@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_a_bad_gradient_moves_neither_weights_nor_the_optimizer(tmp_path, number, max_grad_norm):
    words = f"inf, from gradients of {BROKEN}" if number == float("inf") and max_grad_norm else str(number)
    case = Case(args={**STANDARD.args, "max_grad_norm": max_grad_norm}, dropout=0.1)
    succeed(fail_by_a_gradient, case, tmp_path, number, words)
    assert [row["step"] for row in steps(tmp_path / "run")] == [1, 2, 3, 4, 5]
    assert checkpoints(tmp_path / "run") == ["checkpoint-3"]


DIVERGED = {
    "grpo": "EngineError: The model's logits are NaN or infinite while generating: the policy's weights are broken "
    "(a diverged step or a checkpoint that was not loaded).",
    "sft": "NonFiniteError: step 2: the {loss or gradient norm} is nan. The optimizer step was not taken and there is no "
    "checkpoint yet. Lower the learning rate, check the rewards' scale, or train in fp32 (bf16=False).",
}


@pytest.mark.parametrize("trainer", DIVERGED)
def test_a_learning_rate_far_too_high_stops_the_run_with_a_sentence(tmp_path, trainer):
    case = Case(trainer, {"learning_rate": 1e30, "lr_scheduler_type": "constant"})
    succeed(run_until_error, case, tmp_path, change_nothing)
    said = (tmp_path / "error.txt").read_text()  # which of the two overflows first is the processor's rounding
    assert re.sub("the (loss|gradient norm) is nan", "the {loss or gradient norm} is nan", said) == DIVERGED[trainer]


def change_nothing(trainer: Any) -> None:
    """The run fails by its own settings."""

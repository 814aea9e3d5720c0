"""Every trainer adds a mixture of experts' load-balancing loss, whatever its config's flag says, and logs it."""

from __future__ import annotations

import pytest

from case_selection import mark_extended
from small_runs import make, spread, steps
from tiny_models import tiny_experts

ARGUMENTS = {
    "GRPO": {"num_iterations": 2},
    "PPO": {"beta": 0.0, "num_generations": 4},
    "OnlineDPO": {},
    "SFT": {},
}


def trainer(tmp_path, name, model, **changes):
    kind = {} if name == "SFT" else {"reward_funcs": spread}
    return make(
        name, tmp_path, model, **{**kind, "micro_batch_tokens": 40, "max_steps": 1, **ARGUMENTS[name], **changes}
    )


def steps_of(run):
    run.train()
    return steps(run)


@pytest.mark.parametrize("name", mark_extended(list(ARGUMENTS), ["GRPO", "SFT"]))
def test_every_trainer_trains_with_it_and_logs_it(tmp_path, name):
    with_it, without = (
        steps_of(
            trainer(tmp_path / str(weight), name, tiny_experts(router_aux_loss_coef=0.5), router_aux_loss_coef=weight)
        )
        for weight in (None, 0.0)
    )
    assert all(2.0 <= row["aux_loss"] < 4.0 for row in with_it)  # k experts of E: 2 is balance
    assert all("aux_loss" not in row for row in without)
    assert with_it[0]["loss"] == pytest.approx(without[0]["loss"] + 0.5 * with_it[0]["aux_loss"], abs=1e-5)


def test_a_model_that_reports_router_logits_generates_and_evaluates_with_it(tmp_path):
    model = tiny_experts(output_router_logits=True, router_aux_loss_coef=0.5)
    run = trainer(tmp_path, "GRPO", model, beta=0.1)
    assert all(row["aux_loss"] >= 2.0 for row in steps_of(run))
    sft = trainer(tmp_path, "SFT", tiny_experts(router_aux_loss_coef=0.5))
    plain = trainer(tmp_path, "SFT", tiny_experts(), router_aux_loss_coef=0.0)
    found, without = (each.evaluate(each.train_dataset) for each in (sft, plain))
    assert found["eval_loss"] == pytest.approx(without["eval_loss"] + 0.5 * found["eval_aux_loss"], abs=1e-5)

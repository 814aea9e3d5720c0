"""A step of streamed log-probs over token-budget micro-batches has the gradients of the plain padded way."""

from __future__ import annotations

from dataclasses import replace

import pytest
from step_cases import BASE, assert_same_gradients, plain_grpo_loss, plain_rloo_loss, ragged_records, streamed_loss

from closeness import assert_each_close_to_largest
from lowpeak.algorithms.grpo import make_grpo
from lowpeak.algorithms.rloo import make_rloo
from lowpeak.config.rloo import RLOOSettings
from lowpeak.logprobs.head import install_head
from tiny import tiny_model


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("max_tokens", [12, 30, 1000])
@pytest.mark.parametrize("beta", [0.0, 0.04])
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("loss_type", ["grpo", "bnpo", "dr_grpo", "dapo", "cispo"])
def test_a_grpo_step_equals_the_plain_padded_way(loss_type, level, beta, max_tokens, tied):
    model = tiny_model(tied=tied)
    records = ragged_records(model)
    install_head(model)
    clip_low = None if loss_type == "cispo" else 0.2
    settings = replace(BASE, loss_type=loss_type, importance_level=level, beta=beta, clip_low=clip_low)
    algorithm = make_grpo(settings)
    assert_same_gradients(
        model,
        lambda m: plain_grpo_loss(settings, m, records),
        lambda m: streamed_loss(algorithm, m, records, max_tokens)[0],
    )


@pytest.mark.parametrize("max_tokens", [12, 1000])
def test_an_rloo_step_equals_the_plain_padded_way(max_tokens):
    """In float64: a sequence's ratio multiplies its gradients, so that fp32's rounding alone comes to more than 1e-6."""
    model = tiny_model().double()
    records = ragged_records(model)
    install_head(model)
    algorithm = make_rloo(RLOOSettings(0.2, 0.28, 0.0, "k1", False, None, False, False, True))
    assert_same_gradients(
        model,
        lambda m: plain_rloo_loss(m, records),
        lambda m: streamed_loss(algorithm, m, records, max_tokens)[0],
        loss_close=1e-6,
        gradients_close=1e-6,
    )


def test_a_smaller_budget_really_cuts_the_step():
    model = tiny_model()
    records = ragged_records(model)
    install_head(model)
    assert (
        streamed_loss(make_grpo(BASE), model, records, 12)[1] > streamed_loss(make_grpo(BASE), model, records, 1000)[1]
    )


def test_activation_checkpointing_changes_no_gradient():
    model = tiny_model()
    records = ragged_records(model)
    install_head(model)
    algorithm = make_grpo(BASE)
    streamed_loss(algorithm, model, records, 30)
    expected = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    model.train()
    getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
    streamed_loss(algorithm, model, records, 30)
    assert_each_close_to_largest({name: p.grad for name, p in model.named_parameters()}, expected, 1e-6)

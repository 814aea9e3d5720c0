"""A step of pairs has the gradients of the classifier's plain forwards, in every layout and however it is cut."""

from __future__ import annotations

import pytest
import torch
from step_cases import micro_batches

from lowpeak.algorithms.reward_model import make_reward_model
from lowpeak.attention.install import install_attention
from lowpeak.batching.packing import TokenBudget
from lowpeak.heads.score_head import install_score_head
from lowpeak.training.step import LogprobSettings, measure_step, run_step
from preference_data import plain_loss, records_of, tiny_classifier
from rounding import assert_each_close_to_largest
from step_settings import LocalStrategy

CORE = LogprobSettings(1.0, 16, torch.device("cpu"))


@pytest.mark.parametrize("layout", ["padded", "rows", "shared"])
@pytest.mark.parametrize(
    ("max_tokens", "center", "checkpointing"), [(1, 0.0, True), (24, 0.2, False), (1000, 0.2, True), (1000, 0.0, False)]
)
def test_a_step_of_pairs_equals_plain_forwards_row_by_row(center, max_tokens, layout, checkpointing):
    plain, model = (tiny_classifier(dtype=torch.float64) for _ in range(2))
    expected = plain_loss(plain, center=center)
    expected.backward()
    install_score_head(model)
    install_attention(model)
    model.train()
    if checkpointing:
        model.gradient_checkpointing_enable()
    algorithm, records = make_reward_model(center), records_of()
    batches = micro_batches(algorithm, records, TokenBudget(max_tokens, layout=layout))
    assert len(batches) == {1: 5, 1000: 1}.get(max_tokens, len(batches))
    loss, _ = run_step(model, batches, algorithm, CORE, LocalStrategy(), {})
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    ours, theirs = ({name: p.grad for name, p in each.named_parameters()} for each in (model, plain))
    assert_each_close_to_largest(ours, theirs, 2e-6)


@pytest.mark.parametrize("layout", ["padded", "shared"])
def test_an_evaluation_measures_what_a_step_does_and_learns_nothing(layout):
    model = install_score_head(tiny_classifier())
    install_attention(model)
    algorithm, records = make_reward_model(0.1), records_of()
    batches = micro_batches(algorithm, records, TokenBudget(24, layout=layout))
    loss, metrics = measure_step(model, batches, algorithm, CORE, LocalStrategy().ranks)
    assert all(parameter.grad is None for parameter in model.parameters())
    trained, same = run_step(model, batches, algorithm, CORE, LocalStrategy(), {})
    assert loss.item() == pytest.approx(trained.item(), rel=1e-6)
    assert {n: m.value() for n, m in metrics.items()} == pytest.approx(
        {n: m.value() for n, m in same.items()}, rel=1e-5
    )

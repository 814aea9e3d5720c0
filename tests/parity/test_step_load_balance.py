"""A step of a mixture of experts has the load-balancing loss of the whole step, and its gradients, however it is cut."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module

import pytest
import torch
from step_cases import BASE, TEMPERATURE, grouped_records, micro_batches, name_of, plain_grpo_loss, plain_paths, ready
from transformers import (
    AutoModelForCausalLM,
    GptOssConfig,
    GraniteMoeConfig,
    MixtralConfig,
    OlmoeConfig,
    Qwen3MoeConfig,
)

from lowpeak.algorithms.grpo import make_grpo
from lowpeak.algorithms.supervised import make_supervised
from lowpeak.attention.install import packing_unsupported_reason
from lowpeak.batching.packing import TokenBudget
from lowpeak.errors import ArgumentError, ModelError
from lowpeak.heads.experts import LoadBalance, balance_loss, load_balance_of
from lowpeak.heads.self_check import verify_load_balance
from lowpeak.training.step import LogprobSettings, measure_step, run_step
from rounding import assert_each_close_to_largest
from step_settings import LocalStrategy
from tiny_models import tiny_model

COEFFICIENT = 0.7
SHAPE = {
    "vocab_size": 13, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 16, "initializer_range": 0.3, "num_experts_per_tok": 2, "pad_token_id": 0,
}  # fmt: skip
FAMILIES = {
    "Qwen3": (Qwen3MoeConfig, {"num_experts": 4, "moe_intermediate_size": 16, "head_dim": 8}),
    "Mixtral": (MixtralConfig, {"num_local_experts": 4}),
    "Olmoe": (OlmoeConfig, {"num_experts": 5}),
    "GraniteMoe": (GraniteMoeConfig, {"num_local_experts": 4}),
    "GptOss": (GptOssConfig, {"num_local_experts": 4, "head_dim": 8}),
}
BUDGETS = [TokenBudget(1000), TokenBudget(28)]
BUDGETS += [TokenBudget(1000, layout="shared"), TokenBudget(28, layout="shared"), TokenBudget(30, layout="rows")]


def mixture(family="Qwen3", **changes):
    config, own = FAMILIES[family]
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config(**{**SHAPE, **own, **changes})).eval()


def balance_of(model):
    return replace(load_balance_of(model, None), coefficient=COEFFICIENT)


def transformers_balance_loss(model, records):
    """transformers' own function over one padded batch, masked after what predicts a row's last counted token."""
    paths = [(record, path) for record in records for path, _ in plain_paths(record)]
    width = max(len(path) for _, path in paths)
    ids, mask = torch.zeros(len(paths), width, dtype=torch.int64), torch.zeros(len(paths), width)
    counted = set()
    for b, (record, path) in enumerate(paths):
        ids[b, : len(path)] = torch.tensor([*record.prompt_ids, *record.completion.ids.tolist()])[path]
        is_loss = [False] * len(record.prompt_ids) + record.completion.loss_mask.tolist()
        last = max((i for i, token in enumerate(path) if is_loss[token]), default=0)
        for i, token in enumerate(path[:last]):  # a token that branches share counts once
            mask[b, i] = (id(record), token) not in counted
            counted.add((id(record), token))
    logits = model.model(input_ids=ids, output_router_logits=True).router_logits
    function = import_module(type(model).__module__).load_balancing_loss_func
    return function(logits, logits[0].shape[-1], model.num_experts_per_tok, mask)


def core_of(model):
    return LogprobSettings(TEMPERATURE, 5, torch.device("cpu"), load_balance=balance_of(model))


@pytest.mark.parametrize("budget", BUDGETS, ids=name_of)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_load_balancing_loss_is_transformers_own_over_the_whole_step(family, budget):
    model = ready(mixture(family))
    if budget.layout != "padded" and packing_unsupported_reason(model) is not None:
        pytest.skip("the family's rows are padded")
    # Fewer rows than elsewhere: both sums round in float32, which these models need.
    records = [record for i, record in enumerate(grouped_records(model)) if i % 2 or record.completion.branches]
    assert sum(bool(record.completion.branches) for record in records) == 5
    batches = micro_batches(make_grpo(BASE), records, budget)
    assert len(batches) > 1 or budget.max_tokens == 1000
    aux_loss = transformers_balance_loss(model, records)
    naive = plain_grpo_loss(BASE, model, records) + COEFFICIENT * aux_loss
    naive.backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    loss, metrics = run_step(model, batches, make_grpo(BASE), core_of(model), LocalStrategy(), {})
    assert metrics["aux_loss"].value() == pytest.approx(aux_loss.item(), rel=4e-6)
    assert loss.item() == pytest.approx(naive.item(), rel=4e-6)
    assert_each_close_to_largest({name: p.grad for name, p in model.named_parameters()}, expected, 2e-5)


def test_an_evaluation_has_it_too_and_moves_no_weight():
    model = ready(mixture())
    records = grouped_records(model)
    algorithm = make_supervised()
    batches = micro_batches(algorithm, records, TokenBudget(28))
    trained, _ = run_step(model, batches, algorithm, core_of(model), LocalStrategy(), {})
    gradients = [p.grad.clone() for p in model.parameters()]
    measured, metrics = measure_step(model, batches, algorithm, core_of(model), LocalStrategy.ranks)
    assert measured.item() == pytest.approx(trained.item(), rel=4e-6)
    assert metrics["aux_loss"].value() == pytest.approx(transformers_balance_loss(model, records).item(), rel=1e-5)
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), gradients, strict=True))


def test_activation_checkpointing_changes_no_gradient_of_it():
    model = ready(mixture())
    records = grouped_records(model)
    batches = micro_batches(make_grpo(BASE), records, TokenBudget(40, layout="shared"))
    run_step(model, batches, make_grpo(BASE), core_of(model), LocalStrategy(), {})
    expected = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    model.train()
    model.gradient_checkpointing_enable()
    run_step(model, batches, make_grpo(BASE), core_of(model), LocalStrategy(), {})
    assert_each_close_to_largest({name: p.grad for name, p in model.named_parameters()}, expected, 1e-6)


def test_perfect_balance_gives_the_number_of_experts_of_a_token_by_hand():
    choices_E, probabilities_E = torch.full((4,), 6.0), torch.full((4,), 3.0)  # 12 tokens, 2 experts each
    assert balance_loss(choices_E, probabilities_E, 2).item() == pytest.approx(2.0)
    assert balance_loss(torch.zeros(4), torch.zeros(4), 2).item() == 0.0  # of a step without tokens


@pytest.mark.parametrize("family", FAMILIES)
def test_each_familys_own_loss_is_recognised_at_the_start(family):
    model = ready(mixture(family))
    balance = load_balance_of(model, None)
    assert balance == LoadBalance(model.config.router_aux_loss_coef, 2)
    verify_load_balance(model, balance)
    with pytest.raises(ModelError, match="router_aux_loss_coef=0"):
        verify_load_balance(model, replace(balance, top_k=1))


def test_what_the_argument_says_goes_before_the_config():
    model = mixture(router_aux_loss_coef=0.25)
    assert load_balance_of(model, None).coefficient == 0.25
    assert load_balance_of(model, 0.5).coefficient == 0.5
    assert load_balance_of(model, 0.0) is None
    assert load_balance_of(mixture(router_aux_loss_coef=0.0), None) is None
    assert load_balance_of(tiny_model(), None) is None
    with pytest.raises(ArgumentError, match=r"router_aux_loss_coef=0\.1.*Qwen2ForCausalLM"):
        load_balance_of(tiny_model(), 0.1)

"""A PPO step with each of the critic's layouts has the loss and gradients of the plain padded way; so have scores."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from step_cases import (
    TEMPERATURE,
    assert_same_gradients,
    grouped_records,
    micro_batches,
    name_of,
    plain_logprobs,
    plain_paths,
    ready,
    streamed_loss,
)
from transformers import Qwen2ForSequenceClassification

from lowpeak.algorithms.algorithm import VALUES_GRADIENT
from lowpeak.algorithms.ppo import make_ppo
from lowpeak.attention.install import install_attention
from lowpeak.batching.loss_tokens import num_loss_tokens
from lowpeak.batching.packing import TokenBudget
from lowpeak.heads.lm_head import causal_lm
from lowpeak.heads.value_heads import (
    AdapterCritic,
    SeparateCritic,
    SharedCritic,
    ValueHead,
    add_critic,
    install_adapter_switches,
    keep_critic_trainable,
)
from lowpeak.training.step import LogprobSettings, run_step, score
from rounding import assert_close_to_largest, assert_each_close_to_largest
from step_settings import PPO, LocalStrategy
from tiny_models import tiny_model

BUDGETS = [
    TokenBudget(40),
    TokenBudget(1000, layout="rows"),
    TokenBudget(1000, layout="shared"),
    TokenBudget(28, layout="shared"),
]
LAYOUTS = ["head", "model", "adapter"]


def random_score(hidden=32, seed=3):
    made = ValueHead(hidden)
    torch.nn.init.normal_(made.weight, std=0.3, generator=torch.Generator().manual_seed(seed))
    return made


def with_critic(layout):
    """A tiny model with a critic of this layout, whose values are no zeros."""
    if layout == "adapter":
        return under_adapters()
    model = tiny_model()
    if layout == "head":
        add_critic(model, SharedCritic(random_score()))
    else:
        config = copy.deepcopy(model.config)
        config.num_labels = 1
        torch.manual_seed(5)
        classifier = Qwen2ForSequenceClassification(config).eval()
        classifier.score = random_score()
        install_attention(classifier)
        add_critic(model, SeparateCritic(classifier))
    return ready(model)


def under_adapters():
    """LoRA for the policy, and a second one for the critic, both with effect."""
    model = get_peft_model(tiny_model(), LoraConfig(r=2, target_modules=["q_proj", "v_proj", "down_proj"]))
    with keep_critic_trainable(model):
        model.add_adapter("critic", copy.deepcopy(model.peft_config["default"]))
        model.set_adapter("default")
    generator = torch.Generator().manual_seed(7)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.2, generator=generator)
    critic = AdapterCritic(random_score())
    add_critic(causal_lm(model), critic)
    install_adapter_switches(critic, causal_lm(model).model.layers)
    critic.score.requires_grad_(True)
    return ready(model)


def plain_values(model, layout, records):
    """Each row's values over its completion, branch by branch, without a critic's module."""
    causal = causal_lm(model)
    found = []
    for row, (path, own) in [(record, each) for record in records for each in plain_paths(record)]:
        ids = torch.tensor([*row.prompt_ids, *row.completion.ids.tolist()])[None, path]
        if layout == "head":
            hidden = causal.model(ids).last_hidden_state
        elif layout == "model":
            hidden = causal.critic.classifier.model(ids).last_hidden_state
        else:
            use_adapter(model, "critic")
            hidden = causal.model(ids).last_hidden_state
            use_adapter(model, "default")
        weight = (causal.critic.classifier if layout == "model" else causal.critic).score.weight
        values = torch.nn.functional.pad((hidden[0, :-1] @ weight.T)[:, 0], (1, 0))
        found.append(values[len(path) - own :])
    return list(torch.cat(found).split([len(record.completion) for record in records]))


def use_adapter(model, adapter):
    """Put an adapter in force, peft's own way, with every adapter still trained."""
    model.set_adapter(adapter)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.requires_grad_(True)


def plain_ppo_loss(model, layout, records):
    total, num_tokens = 0.0, sum(num_loss_tokens(record) for record in records)
    rows = zip(records, plain_logprobs(model, records), plain_values(model, layout, records), strict=True)
    for record, logprobs, values in rows:
        mask = record.completion.loss_mask
        ratio, advantages = (logprobs - record.old)[mask].exp(), record.advantages[mask]
        policy = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.28) * advantages)
        v, old, target = values[mask], record.values[mask], record.returns[mask]
        held = old + (v - old).clamp(-0.2, 0.2)
        total = total + (policy + 0.25 * torch.maximum((v - target) ** 2, (held - target) ** 2)).sum()
    return total / num_tokens


def valued_records(model):
    generator = torch.Generator().manual_seed(11)
    records = []
    for record in grouped_records(model):
        draw = torch.randn(2, len(record.completion), generator=generator)
        records.append(replace(record, values=draw[0], returns=draw[0] + draw[1]))
    return records


@pytest.mark.parametrize("budget", BUDGETS, ids=name_of)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_ppo_step_and_scored_values_equal_the_plain_way(layout, budget):
    model = with_critic(layout)
    records, algorithm = valued_records(model), make_ppo(PPO)
    batches = micro_batches(algorithm, records, budget)
    scored = score(model, batches, LogprobSettings(TEMPERATURE, 5, torch.device("cpu")), values=True)
    expected = plain_values(model, layout, records)
    indices = [i for batch in batches for i in batch.record_indices]
    wanted = torch.cat([expected[i][records[i].completion.loss_mask] for i in indices])
    assert_close_to_largest(torch.cat([found["values"] for found in scored]), wanted.detach(), 6e-6)
    for parameter in model.parameters():
        parameter.requires_grad_(layout != "adapter" or parameter.requires_grad)
    trained = torch.nn.Module()
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            trained.register_parameter(name.replace(".", "/"), parameter)
    assert_same_gradients(
        trained,
        lambda _: plain_ppo_loss(model, layout, records),
        lambda _: streamed_loss(algorithm, model, records, budget)[0],
    )


def test_recomputed_activations_are_of_the_adapter_that_the_layer_ran_under():
    model = with_critic("adapter")
    records, algorithm = valued_records(model), make_ppo(PPO)

    def gradients(checkpointing):
        model.zero_grad(set_to_none=True)
        if checkpointing:
            model.train()
            causal_lm(model).gradient_checkpointing_enable({"use_reentrant": False})
            model.enable_input_require_grads()
        streamed_loss(algorithm, model, records, 1000)
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.requires_grad}

    plain, recomputed = gradients(False), gradients(True)
    assert {name.split(".")[-2] for name in plain} >= {"critic", "default"}
    assert all(gradient.any() for gradient in plain.values())
    assert_each_close_to_largest(recomputed, plain, 1e-6)


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_a_share_of_the_values_gradient_reaches_the_policys_backbone(share):
    model = with_critic("head")
    records = valued_records(model)
    algorithm = make_ppo(replace(PPO, value_warmup_steps=1))

    def gradients(of_values):
        model.zero_grad(set_to_none=True)
        state = {**algorithm.coefficients(), VALUES_GRADIENT: of_values}
        core = LogprobSettings(TEMPERATURE, 5, torch.device("cpu"))
        run_step(model, micro_batches(algorithm, records, TokenBudget(1000)), algorithm, core, LocalStrategy(), state)
        return {name: p.grad.clone() for name, p in model.named_parameters()}

    whole, part = gradients(1.0), gradients(share)
    expected = {name: (1.0 if name.startswith("critic.") else share) * gradient for name, gradient in whole.items()}
    assert_each_close_to_largest(part, expected, 1e-6)

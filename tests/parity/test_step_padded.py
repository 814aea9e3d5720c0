"""A step of streamed log-probs over token-budget micro-batches has the gradients of the plain padded way.

The plain way: all rows in one batch, padded on the left, full logits, log_softmax, the paper's normalisation spelt out.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

from lowpeak.algorithms.algorithm import StepCounts
from lowpeak.algorithms.grpo import make_grpo
from lowpeak.algorithms.rloo import make_rloo
from lowpeak.batching.packing import Budget, num_counted, pack
from lowpeak.config.algorithm import GRPOSettings, RLOOSettings
from lowpeak.logprobs.head import install_head
from lowpeak.ranks import Ranks
from lowpeak.records import Completion, Record
from lowpeak.training.step import Core, run_step
from tiny import tiny_model

TEMPERATURE = 0.8
MAX_LENGTH = 9
BASE = GRPOSettings(
    loss_type="grpo",
    importance_level="token",
    clip_low=0.2,
    clip_high=0.28,
    delta=None,
    scale_rewards="group",
    aggregation="sum_then_normalize",
    reward_weights=(1.0,),
    beta=0.0,
    kl_estimator="k3",
    bias_corrected_kl=False,
    entropy_bonus=None,
    top_entropy_quantile=1.0,
    mask_truncated=False,
    max_completion_length=MAX_LENGTH,
    drop_equal_groups=False,
    score_old=True,
)


class LocalStrategy:
    ranks = Ranks()

    promised_scale = 1.0

    def accumulate(self, model, last):
        return nullcontext()

    def backward(self, loss, last):
        loss.backward()


def ragged_records(model, seed=0):
    """Rows of uneven lengths with masked tokens, whose old log-probs are near the policy's so that some ratios clip."""
    generator = torch.Generator().manual_seed(seed)
    records = []
    for prompt_length, length in [(3, 9), (5, 2), (2, 6), (4, 1), (1, 7), (6, 4)]:
        ids = torch.randint(2, 13, (prompt_length + length,), generator=generator)
        with torch.no_grad():
            logits = model(ids[None]).logits[0, prompt_length - 1 : -1] / TEMPERATURE
        exact = logits.log_softmax(-1).gather(1, ids[prompt_length:, None]).squeeze(1)
        noise = torch.randn(length, generator=generator)
        mask = torch.ones(length, dtype=torch.bool)
        mask[1:2] = length < 3
        advantage = torch.randn(1, generator=generator).item()
        completion = Completion(ids[prompt_length:].int(), exact, mask, "stop")
        records.append(
            Record(
                0,
                tuple(ids[:prompt_length].tolist()),
                completion,
                (0.0,),
                0.0,
                old=exact + 0.25 * noise,
                reference=exact + 0.5 * noise.flip(0),
                advantages=torch.full((length,), advantage),
            )
        )
    return records


def plain_logprobs(model, records):
    """Each row's log-probs over its completion, from one left-padded batch of full logits."""
    width = max(record.num_tokens for record in records)
    ids = torch.zeros(len(records), width, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for b, record in enumerate(records):
        row = torch.tensor([*record.prompt_ids, *record.completion.ids.tolist()])
        ids[b, width - len(row) :], mask[b, width - len(row) :] = row, 1
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    logits = model(input_ids=ids, attention_mask=mask, position_ids=positions).logits / TEMPERATURE
    logprobs = logits[:, :-1].log_softmax(-1).gather(2, ids[:, 1:, None]).squeeze(2)
    return [logprobs[b, -len(record.completion) :] for b, record in enumerate(records)]


def plain_grpo_loss(settings, model, records):
    total, num_tokens = 0.0, sum(num_counted(record) for record in records)
    for record, logprobs in zip(records, plain_logprobs(model, records), strict=True):
        mask = record.completion.loss_mask
        p, old, reference, advantage = (x[mask] for x in (logprobs, record.old, record.reference, record.advantages))
        ratio = (p - old).exp()
        if settings.importance_level == "sequence":
            ratio = (p - old).mean().exp().expand_as(p)
        if settings.loss_type == "cispo":
            losses = -ratio.detach().clamp(max=1 + settings.clip_high) * advantage * p
        else:
            clipped = ratio.clamp(1 - settings.clip_low, 1 + settings.clip_high)
            losses = -torch.minimum(ratio * advantage, clipped * advantage)
        if settings.beta:
            gap = reference - p
            losses = losses + settings.beta * (gap.exp() - gap - 1)
        scale = {"grpo": 1 / (len(p) * len(records)), "dr_grpo": 1 / (len(records) * MAX_LENGTH)}
        total = total + losses.sum() * scale.get(settings.loss_type, 1 / num_tokens)
    return total


def plain_rloo_loss(model, records):
    total = 0.0
    for record, logprobs in zip(records, plain_logprobs(model, records), strict=True):
        mask = record.completion.loss_mask
        ratio, advantage = (logprobs - record.old)[mask].sum().exp(), record.advantages[0]
        total = total - torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.28) * advantage)
    return total / len(records)


def streamed_loss(algorithm, model, records, max_tokens):
    counts = StepCounts(len(records), sum(num_counted(record) for record in records))
    batches = pack(
        records,
        range(len(records)),
        Budget(max_tokens),
        lambda record: algorithm.reduction(num_counted(record), counts),
        per_sequence=algorithm.unit != "token",
    )
    core = Core(TEMPERATURE, 5, torch.device("cpu"))
    loss, _ = run_step(model, batches, algorithm, core, LocalStrategy(), algorithm.state)
    return loss, len(batches)


def assert_same_gradients(model, naive, streamed):
    """Loss and every parameter's gradient, the tied embedding's included."""
    plain = naive(model)
    plain.backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    loss = streamed(model)
    torch.testing.assert_close(loss, plain.detach(), rtol=1e-5, atol=1e-6)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-4, atol=1e-6, msg=name)


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
    model = tiny_model()
    records = ragged_records(model)
    install_head(model)
    algorithm = make_rloo(RLOOSettings(0.2, 0.28, 0.0, "k1", False, None, False, False, True))
    assert_same_gradients(
        model,
        lambda m: plain_rloo_loss(m, records),
        lambda m: streamed_loss(algorithm, m, records, max_tokens)[0],
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
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], msg=name)

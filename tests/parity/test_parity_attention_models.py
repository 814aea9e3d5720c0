"""A forest through real models gives what plain rows one by one give: hidden states, log-probs and every gradient."""

from __future__ import annotations

import copy
import threading

import pytest
import torch
from peft import LoraConfig, get_peft_model

from forest_cases import NUM_IDS, cases_of, forest_of, length_of, model_of, rows_of
from lowpeak.attention.install import forward_arguments, install_attention
from rounding import assert_close_to_largest
from tiny_models import tiny_model

# RMS norms compute in fp32 whatever the model's dtype, and their gradients round there; GPT-2's do not.
IN_FP32_NORMS = 1e-6
FOREST = forest_of((6, (3, 1, 4)), (0, (7,)), (2, (5, 2)), (0, (3,)), (4, ((2, (3, 6)), 1)), padding=3)


def ids_1L():
    return torch.randint(2, NUM_IDS, (1, length_of(FOREST)), generator=torch.Generator().manual_seed(0))


def loss_of(logits):
    """A sum over the completion's predictions that weighs each token and each id differently."""
    weights = torch.linspace(-1, 1, NUM_IDS, dtype=logits.dtype)
    return (logits.log_softmax(-1) * weights).sum() + logits.square().mean(-1).sum()


def forest_logits(model, **more):
    return model(ids_1L(), **forward_arguments(FOREST, "cpu"), use_cache=False, **more).logits


def together(model):
    logits = forest_logits(model)
    return sum(loss_of(logits[:, row]) for row in rows_of(FOREST)), logits


def alone(model):
    rows = rows_of(FOREST)
    each = [model(ids_1L()[:, row], use_cache=False).logits for row in rows]
    return sum(loss_of(logits) for logits in each), each


def gradients(model):
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def backward(model, run):
    model.zero_grad(set_to_none=True)
    loss, logits = run(model)
    loss.backward()
    return loss.detach(), logits, gradients(model)


def assert_same(grads, meant, tolerance=IN_FP32_NORMS, slack=0.0):
    for name, grad in meant.items():
        assert (grads[name] - grad).norm() <= tolerance * grad.norm() + slack, name


def check(model, other, tolerance, gradient_tolerance):
    """A forest on `model` against plain rows on `other`."""
    loss, logits, grads = backward(model, together)
    plain_loss, each, plain_grads = backward(other, alone)
    torch.testing.assert_close(loss, plain_loss, rtol=tolerance, atol=tolerance)
    for row, meant in zip(rows_of(FOREST), each, strict=True):
        assert_close_to_largest(logits[:, row], meant, tolerance)
    assert grads.keys() == plain_grads.keys()
    assert_same(grads, plain_grads, gradient_tolerance, 1e-9)


@pytest.mark.parametrize(("name", "dtype"), cases_of(torch.float64, torch.float32), ids=str)
def test_a_forest_gives_the_values_and_gradients_of_plain_rows(name, dtype):
    model = model_of(name, dtype)
    other = copy.deepcopy(model)
    install_attention(model)
    exact = (1e-9, 1e-10 if name == "GPT-2" else IN_FP32_NORMS)
    check(model, other, *(exact if dtype == torch.float64 else (3e-5, 1e-5)))


def adapted(model):
    torch.manual_seed(0)
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False)
    return get_peft_model(model, config).to(torch.float64)


@pytest.mark.parametrize("adapter", [False, True])
@pytest.mark.parametrize("reentrant", [None, False, True])
def test_activation_checkpointing_and_adapters_change_nothing(reentrant, adapter):
    model = tiny_model(NUM_IDS, dtype=torch.float64).train()
    model = adapted(model) if adapter else model
    other = copy.deepcopy(model)
    install_attention(model)
    if reentrant is not None:
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.enable_input_require_grads()
    check(model, other, 1e-9, IN_FP32_NORMS)


def test_a_checkpointed_backward_in_another_thread_recomputes_the_same():
    model = tiny_model(NUM_IDS, dtype=torch.float64).train()
    other = copy.deepcopy(model)
    install_attention(model)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    loss, _ = together(model)
    thread = threading.Thread(target=loss.backward)
    thread.start()
    thread.join(timeout=60)
    _, _, meant = backward(other, alone)
    assert_same(gradients(model), meant)


def test_under_autocast_a_forest_is_as_close_to_plain_rows_as_bf16_is():
    model = tiny_model(NUM_IDS)
    _, _, exact = backward(model, alone)
    with torch.autocast("cpu", torch.bfloat16):
        _, _, plain = backward(model, alone)
    install_attention(model)
    with torch.autocast("cpu", torch.bfloat16):
        _, logits, found = backward(model, together)
    assert logits.isfinite().all()
    for name, grad in exact.items():
        assert (found[name] - grad).norm() <= 2 * (plain[name] - grad).norm() + 1e-3 * grad.norm(), name

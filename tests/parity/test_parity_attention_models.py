"""A forest through real models gives what plain rows one by one give: hidden states, log-probs and every gradient."""

from __future__ import annotations

import copy
import threading

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch._subclasses import FakeTensorMode

from closeness import assert_close_to_largest
from forests import MODELS, NUM_IDS, forest_of, length_of, model_of, rows_of
from lowpeak.attention.definition import forest_mask
from lowpeak.attention.install import forward_arguments, install_attention
from lowpeak.logprobs.head import HeadRequest, install_head
from tiny import tiny_model

# RMS norms compute in fp32 whatever the model's dtype, and their gradients round there; GPT-2's do not.
IN_FP32_NORMS = 1e-6
FOREST = forest_of((6, (3, 1, 4)), (0, (7,)), (2, (5, 2)), (0, (3,)), padding=3)


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


def check(model, other, tolerance, gradient_tolerance):
    """A forest on `model` against plain rows on `other`."""
    loss, logits, grads = backward(model, together)
    plain_loss, each, plain_grads = backward(other, alone)
    torch.testing.assert_close(loss, plain_loss, rtol=tolerance, atol=tolerance)
    for row, meant in zip(rows_of(FOREST), each, strict=True):
        assert_close_to_largest(logits[:, row], meant, tolerance)
    assert grads.keys() == plain_grads.keys()
    for name, grad in grads.items():
        assert (grad - plain_grads[name]).norm() <= gradient_tolerance * plain_grads[name].norm() + 1e-9, name


@pytest.mark.parametrize("name", MODELS)
def test_in_float64_a_forest_gives_the_values_and_gradients_of_plain_rows(name):
    model = model_of(name, torch.float64)
    other = copy.deepcopy(model)
    install_attention(model)
    check(model, other, 1e-9, 1e-10 if name == "GPT-2" else IN_FP32_NORMS)


@pytest.mark.parametrize("name", MODELS)
def test_in_fp32_a_forest_gives_the_values_and_gradients_of_plain_rows(name):
    model = model_of(name)
    other = copy.deepcopy(model)
    install_attention(model)
    check(model, other, 3e-5, 1e-5)


@torch.no_grad()
@pytest.mark.parametrize("name", MODELS)
def test_the_definitions_mask_gives_the_same_on_an_untouched_model(name):
    model = model_of(name, torch.float64)
    mask = forest_mask(FOREST, length_of(FOREST))
    mask = mask | ~mask.any(1)[:, None]
    additive = torch.zeros(mask.shape, dtype=torch.float64).masked_fill(~mask, float("-inf"))[None, None]
    meant = model(ids_1L(), attention_mask=additive, position_ids=FOREST.position_ids_1L).logits
    install_attention(model)
    real = [i for row in rows_of(FOREST) for i in row]
    torch.testing.assert_close(forest_logits(model)[:, real], meant[:, real], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_recomputes_the_same(reentrant):
    model = tiny_model(NUM_IDS, dtype=torch.float64).train()
    other = copy.deepcopy(model)
    install_attention(model)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    if reentrant:
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
    for name, grad in gradients(model).items():
        assert (grad - meant[name]).norm() <= IN_FP32_NORMS * meant[name].norm(), name


@pytest.mark.parametrize("checkpointing", [False, True])
def test_adapters_get_the_gradients_of_plain_rows(checkpointing):
    torch.manual_seed(0)
    base = tiny_model(NUM_IDS, dtype=torch.float64)
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False)
    model = get_peft_model(base, config).to(torch.float64).train()
    other = copy.deepcopy(model)
    install_attention(model)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    check(model, other, 1e-9, IN_FP32_NORMS)


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


@pytest.mark.parametrize("one_visit", [False, True])
def test_the_log_prob_core_takes_a_forest(one_visit):
    """Several targets of one position: the first tokens of completions that share a prompt."""
    positions, targets = [], []
    for row in rows_of(FOREST):
        prompt = next((tree.prompt for tree in FOREST.trees if tree.prompt and tree.start == row[0]), 1)
        positions += row[prompt - 1 : -1]
        targets += row[prompt:]
    assert len(set(positions)) < len(positions)

    def token_loss(logprobs, entropy, start, stop):
        return (logprobs.exp() * torch.arange(start, stop)).sum()

    def answer(model):
        request = HeadRequest(
            torch.tensor(positions), ids_1L()[0, targets], temperature=0.9, chunk_size=4,
            loss=token_loss if one_visit else None,
        )  # fmt: skip
        given = model(ids_1L(), head_request=request, **forward_arguments(FOREST, "cpu"))
        loss = given["loss"] if one_visit else token_loss(given["logprobs"], None, 0, len(positions))
        return loss, given["logprobs"].detach()

    def naive(model):
        found = []
        for row in rows_of(FOREST):
            prompt = next((tree.prompt for tree in FOREST.trees if tree.prompt and tree.start == row[0]), 1)
            ids = ids_1L()[:, row]
            logprobs = (model(ids).logits[0, prompt - 1 : -1] / 0.9).log_softmax(-1)
            found.append(logprobs.gather(-1, ids[0, prompt:, None])[:, 0])
        logprobs = torch.cat(found)
        return token_loss(logprobs, None, 0, len(positions)), logprobs.detach()

    model = tiny_model(NUM_IDS, dtype=torch.float64)
    other = copy.deepcopy(model)
    install_head(model)
    install_attention(model)
    (loss, logprobs, grads), (meant_loss, meant, meant_grads) = backward(model, answer), backward(other, naive)
    torch.testing.assert_close(loss, meant_loss, rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(logprobs, meant, rtol=1e-9, atol=1e-10)
    for name, grad in meant_grads.items():
        assert (grads[name] - grad).norm() <= IN_FP32_NORMS * grad.norm(), name


def test_a_step_runs_on_tensors_without_numbers():
    with FakeTensorMode(allow_non_fake_inputs=True):  # the forest's positions are real
        model = MODELS["Llama"]().train()
        install_attention(model)
        model.gradient_checkpointing_enable({"use_reentrant": False})
        loss, _ = together(model)
        loss.backward()
        assert all(p.grad.shape == p.shape for p in model.parameters())

"""Gradients added to `.grad` where they are formed, beside autograd's way: heads, embeddings, whole steps."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from torch import nn

from lowpeak.heads.lm_head import HeadRequest, install_head
from lowpeak.logprobs.chunked import chunked_logprobs, fused_loss
from lowpeak.logprobs.inplace_grad import allows_inplace_grad
from lowpeak.logprobs.reference import ChunkSettings
from lowpeak.parallel.base import Replicated
from tiny_models import tiny_model

NUM_IDS, PADDING = 37, 0


def token_loss(logprobs, entropy, start, stop):
    return (logprobs.exp() * torch.arange(start + 1, stop + 1)).sum() + (0 if entropy is None else entropy.sum())


def rows(seed, num_ids=NUM_IDS):
    """Two rows with padding at the end of the second, the positions that count, and their targets."""
    torch.manual_seed(seed)
    ids = torch.randint(2, num_ids, (2, 9))
    ids[1, 1] = PADDING  # seen by what is predicted after it
    ids[1, 6:] = PADDING
    positions = torch.tensor([2, 3, 4, 5, 6, 9, 10, 11, 12])
    return ids, positions, ids.flatten().roll(-1)[positions]


def run(model, data, promised, *, visits, temperature=0.9, scale=1.0, entropy=True):
    """Forward and backward of one micro-batch, its loss times `scale`."""
    ids, positions, targets = data
    request_fields = {"loss": token_loss} if visits else {}
    request = HeadRequest(
        positions,
        targets,
        temperature,
        4,
        entropy=entropy,
        entropy_grad=entropy,
        inplace_grad_scale=promised,
        **request_fields,
    )
    answer = model(input_ids=ids, head_request=request)
    loss = answer["loss"] if visits else token_loss(answer["logprobs"], answer.get("entropy"), 0, len(targets))
    (loss * scale).backward()
    return loss.detach()


def twins(**shape):
    model = install_head(tiny_model(NUM_IDS, dtype=torch.float64, **shape)).train()
    return model, copy.deepcopy(model)


def assert_same_gradients(ours, theirs, **tolerance):
    for (name, mine), (_, other) in zip(ours.named_parameters(), theirs.named_parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad, msg=lambda text, name=name: f"{name}: {text}", **tolerance)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("visits", [True, False], ids=["visited", "recomputed"])
@pytest.mark.parametrize("to_none", [True, False], ids=["set to none", "zeroed"])
def test_steps_of_several_micro_batches_train_as_by_autograd(tied, visits, to_none):
    ours, theirs = twins(tied=tied)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (ours, theirs)]
    for step in range(3):
        for model, optimizer, promised in zip((ours, theirs), optimizers, (1.0, None), strict=True):
            optimizer.zero_grad(set_to_none=to_none)
            for number in range(2):
                run(model, rows(2 * step + number), promised, visits=visits)
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        assert_same_gradients(ours, theirs, rtol=1e-12, atol=1e-14)
        for optimizer in optimizers:
            optimizer.step()
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-12, atol=1e-14)


def hooked(model):
    model.lm_head.weight.register_hook(lambda grad: 3 * grad)


def hooked_after(model):
    def triple(leaf):
        leaf.grad.mul_(3)

    model.lm_head.weight.register_post_accumulate_grad_hook(triple)


CHANGES = {
    "untied": lambda model: None,
    "checkpointing": lambda model: model.gradient_checkpointing_enable({"use_reentrant": False}),
    "a hook on the parameter": hooked,
    "a hook after it": hooked_after,
    "a frozen head": lambda model: model.lm_head.weight.requires_grad_(False),
    "embeddings of bounded norm": lambda model: setattr(model.model.embed_tokens, "max_norm", 0.5),
    "embeddings by frequency": lambda model: setattr(model.model.embed_tokens, "scale_grad_by_freq", True),
}


@pytest.mark.parametrize("visits", [True, False], ids=["visited", "recomputed"])
@pytest.mark.parametrize("change", CHANGES)
def test_whatever_acts_on_a_gradient_on_its_way_still_does(change, visits):
    """Two micro-batches of a promised scale other than one; padding ids get no gradient, as embeddings have none."""
    ours, theirs = twins(tied=False)
    for model in (ours, theirs):
        CHANGES[change](model)
    for number in range(2):
        run(ours, rows(number), 0.25, visits=visits, scale=0.25)
        run(theirs, rows(number), None, visits=visits, scale=0.25)
    assert_same_gradients(ours, theirs, rtol=1e-12, atol=1e-14)
    assert allows_inplace_grad(ours.lm_head.weight) is (
        change not in ("a hook on the parameter", "a hook after it", "a frozen head")
    )
    assert (ours.lm_head.weight.grad is None) is (change == "a frozen head")
    table = ours.model.embed_tokens
    assert table.padding_idx == PADDING
    assert not table.weight.grad[PADDING].any()
    assert table.weight.grad.any()


@pytest.mark.parametrize("visits", [True, False], ids=["visited", "recomputed"])
@pytest.mark.parametrize(
    ("hidden_dtype", "weight_dtype"),
    [
        (torch.float64, torch.float64),
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.bfloat16),
    ],
    ids=str,
)
def test_a_head_with_a_bias_sums_two_micro_batches_as_by_autograd(visits, hidden_dtype, weight_dtype):
    torch.manual_seed(0)
    hidden = torch.randn(11, 6).to(hidden_dtype).requires_grad_()
    weight, bias = torch.randn(NUM_IDS, 6).to(weight_dtype), torch.randn(NUM_IDS).to(weight_dtype)
    targets, found = torch.randint(NUM_IDS, (11,)), []
    for promised in (1.0, None):
        leaves = [x.detach().clone().requires_grad_() for x in (hidden, weight, bias)]
        settings = ChunkSettings(4, 0.9, inplace_grad_scale=promised)
        for _ in range(2):
            if visits:
                loss = fused_loss(*leaves, targets, token_loss, settings)[0]
            else:
                loss = token_loss(*chunked_logprobs(*leaves, targets, settings)[:2], 0, 11)
            loss.backward()
        found.append([x.grad for x in leaves])
    for mine, other, leaf in zip(*found, (hidden, weight, bias), strict=True):
        assert mine.dtype == leaf.dtype
        torch.testing.assert_close(mine, other)


def test_no_second_matrix_of_the_heads_size_is_made_once_a_gradient_stands():
    model, _ = twins()
    run(model, rows(0), 1.0, visits=True)
    grad = model.lm_head.weight.grad
    before = grad.clone()
    run(model, rows(1), 1.0, visits=True)
    assert model.lm_head.weight.grad is grad
    assert not torch.equal(grad, before)


def test_a_broken_promise_fails():
    model, _ = twins()
    with pytest.raises(RuntimeError, match=r"\b1\.0\b"):
        run(model, rows(0), 1.0, visits=True, scale=0.5)


def test_without_gradients_none_is_added():
    model, _ = twins()
    ids, positions, targets = rows(0)
    with torch.no_grad():
        request = HeadRequest(positions, targets, 1.0, 4, loss=token_loss, inplace_grad_scale=1.0)
        model(input_ids=ids, head_request=request)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_one_device_promises_the_scale_that_accelerates_backward_applies():
    for accumulation in (1, 4):
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulation)
        strategy = Replicated(accelerator)
        leaf = torch.ones((), requires_grad=True)
        strategy.backward(leaf * 1.0, last=True)
        assert float(leaf.grad) == pytest.approx(strategy.inplace_grad_scale)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("visits", [True, False], ids=["visited", "recomputed"])
def test_saved_tensors_that_go_elsewhere_and_come_back_change_nothing(tied, visits):
    """As activation offload has it: what backward is given is a copy, whose `.grad` nobody reads."""
    ours, theirs = twins(tied=tied)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x.detach().clone(), lambda x: x):
        run(ours, rows(0), 1.0, visits=visits)
    run(theirs, rows(0), None, visits=visits)
    assert_same_gradients(ours, theirs, rtol=1e-12, atol=1e-14)


def accelerated(scaler=None):
    """What a strategy reads off an accelerator to promise a scale."""
    return SimpleNamespace(
        scaler=scaler, device=torch.device("cpu"), gradient_accumulation_steps=1, parallelism_config=None
    )


@pytest.mark.parametrize("scaler", [None, object()], ids=["", "scaler"])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_no_scale_is_promised_where_a_loss_scaler_must_see_gradients_on_their_way(scaler, num_ranks):
    strategy = Replicated(accelerated(scaler))
    strategy.ranks.world_size = num_ranks
    assert strategy.inplace_grad_scale == (float(num_ranks) if scaler is None else None)


def test_a_model_with_the_core_installed_compiles_whole():
    model = install_head(tiny_model(NUM_IDS))
    ids = rows(0)[0]
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(input_ids=ids).logits, model(input_ids=ids).logits)

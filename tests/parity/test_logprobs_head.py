"""The core inside real models' heads: values and all parameter gradients against the model's own full logits."""

from __future__ import annotations

import copy
import inspect

import pytest
import torch
from torch.distributed.fsdp import FSDPModule
from torch.nn.utils import parametrize
from transformers import (
    AutoModelForCausalLM,
    Cohere2Config,
    CohereConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GraniteConfig,
    Llama4TextConfig,
    LlamaConfig,
    OPTConfig,
    PhiConfig,
    Qwen3MoeConfig,
)

from lowpeak.errors import ModelError
from lowpeak.heads.lm_head import HeadRequest, install_head
from lowpeak.heads.self_check import verify_head
from rounding import assert_close_to_largest, assert_each_close_to_largest
from tiny_models import tiny_model

NUM_IDS = 37
SHAPE = {
    "vocab_size": NUM_IDS, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 24, "max_position_embeddings": 64,
    "initializer_range": 0.3, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1,
}  # fmt: skip
GEMMA = {**SHAPE, "head_dim": 4, "query_pre_attn_scalar": 4}
FAMILIES = {
    "llama": LlamaConfig(**SHAPE),
    "gemma2": Gemma2Config(**GEMMA, final_logit_softcapping=3.0),
    "gemma3": Gemma3TextConfig(**GEMMA, final_logit_softcapping=2.0),
    "cohere": CohereConfig(**SHAPE, logit_scale=0.3),
    "cohere2": Cohere2Config(**SHAPE, logit_scale=0.3),
    "granite": GraniteConfig(**SHAPE, logits_scaling=4.0),
    "phi, a head with a bias": PhiConfig(**SHAPE),
    "gpt2": GPT2Config(vocab_size=NUM_IDS, n_embd=16, n_layer=2, n_head=4, n_positions=64),
    "opt": OPTConfig(**{**SHAPE, "ffn_dim": 24, "word_embed_proj_dim": 16, "dropout": 0.0}),
    "llama4, whose prefix names no module": Llama4TextConfig(
        **SHAPE, head_dim=4, intermediate_size_mlp=24, num_local_experts=4
    ),
    "mixture of experts": Qwen3MoeConfig(
        **SHAPE, head_dim=4, moe_intermediate_size=8, num_experts=4, num_experts_per_tok=2
    ),
}


def make(family):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(FAMILIES[family]).eval()


def batch(num_ids=NUM_IDS):
    """Ids [3, 7], and the positions and targets of some of the tokens, prompt and padding left out."""
    torch.manual_seed(1)
    ids = torch.randint(2, num_ids, (3, 7))
    positions = torch.tensor([2, 3, 4, 9, 10, 11, 12, 17, 18])
    return ids, positions, ids.flatten()[positions + 1]


def token_loss(logprobs, entropy, start, stop):
    weights = torch.linspace(-1, 2, 9)[start:stop]
    return (weights * logprobs.exp()).sum() + (0 if entropy is None else 0.1 * (weights * entropy).sum())


def ask(ids_positions_targets, **options):
    _, positions, targets = ids_positions_targets
    return HeadRequest(positions, targets, temperature=0.8, chunk_size=4, **options)


def naive_answer(model, data, entropy=True):
    ids, positions, targets = data
    logits = model(input_ids=ids).logits.flatten(0, 1)[positions].float() / 0.8
    logprobs = torch.log_softmax(logits, -1)
    entropies = -(logprobs.exp() * logprobs).sum(-1)
    chosen = logprobs.gather(-1, targets[:, None])[:, 0]
    return chosen, entropies, token_loss(chosen, entropies if entropy else None, 0, 9)


def parameter_gradients(model, loss):
    model.zero_grad(set_to_none=True)
    loss.backward()
    return {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


def assert_same_gradients(found, expected):
    trained = {name for name, gradient in expected.items() if gradient is not None}
    assert {name for name, gradient in found.items() if gradient is not None} == trained
    assert_each_close_to_largest(*({name: each[name] for name in trained} for each in (found, expected)), 8e-6)


def check(model, data=None):
    """Values and all gradients, in one visit and recomputed, against the model's own logits; returns the latter's gradients."""
    data = data or batch()
    plain = copy.deepcopy(model)
    expected_logprobs, expected_entropy, loss = naive_answer(plain, data)
    expected = parameter_gradients(plain, loss)
    assert any(gradient is not None for gradient in expected.values())
    install_head(model)
    answer = model(input_ids=data[0], head_request=ask(data, entropy=True, entropy_grad=True))
    assert answer.keys() == {"logprobs", "entropy"}
    assert_close_to_largest(answer["logprobs"], expected_logprobs, 2e-6)
    assert_close_to_largest(answer["entropy"], expected_entropy, 2e-6)
    recomputed = token_loss(answer["logprobs"], answer["entropy"], 0, 9)
    assert_same_gradients(parameter_gradients(model, recomputed), expected)
    answer = model(input_ids=data[0], head_request=ask(data, entropy=True, entropy_grad=True, loss=token_loss))
    torch.testing.assert_close(answer["loss"], loss, rtol=0.0, atol=2e-6)
    assert not answer["logprobs"].requires_grad
    assert_same_gradients(parameter_gradients(model, answer["loss"]), expected)
    return expected


@pytest.mark.parametrize("family", FAMILIES)
def test_values_and_all_parameter_gradients_equal_those_of_full_logits(family):
    model, (ids, positions, targets) = make(family), batch()
    with torch.no_grad():
        likeliest = model(input_ids=ids).logits.flatten(0, 1)[positions].argmax(-1)
    check(model)
    assert verify_head(model) < 1e-5
    targets = torch.where(torch.arange(9) % 2 == 0, likeliest, targets)
    for options in ({}, {"loss": token_loss}):
        answer = model(input_ids=ids, head_request=ask((ids, positions, targets), top1=True, **options))
        assert torch.equal(answer["top1"], likeliest == targets)
        assert not answer["top1"].all()


def untied():
    return tiny_model(NUM_IDS, tied=False)


def frozen():
    model = untied()
    model.lm_head.requires_grad_(False)
    return model


def checkpointed():
    model = tiny_model(NUM_IDS).train()
    model.gradient_checkpointing_enable()
    return model


def parametrised():
    class Doubled(torch.nn.Module):
        def forward(self, weight):
            return 2.0 * weight

    model = untied()
    parametrize.register_parametrization(model.lm_head, "weight", Doubled())
    return model


def of_two_layers():
    class TwoLayers(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = torch.nn.Linear(32, 8), torch.nn.Linear(8, NUM_IDS)

        def forward(self, hidden):
            return self.second(torch.tanh(self.first(hidden)))

    model = untied()
    model.lm_head = TwoLayers()
    return model


@pytest.mark.parametrize("make_model", [untied, frozen, checkpointed, parametrised, of_two_layers])
def test_any_head_is_trained_as_it_is(make_model):
    model = make_model()
    expected = check(model)
    heads = [name for name in expected if name.startswith("lm_head.")]
    assert bool(heads) is not (make_model is checkpointed)  # whose embeddings are tied to it
    assert [expected[name] for name in heads] == [None] or make_model is not frozen
    assert verify_head(model) < 1e-5


class StrictBackbone(torch.nn.Module):
    """A backbone that takes what it needs and nothing more."""

    def __init__(self, inner):
        super().__init__()
        self.inner, self.embed_tokens = inner, inner.embed_tokens

    def forward(self, input_ids, attention_mask=None, use_cache=None):
        return self.inner(input_ids=input_ids, attention_mask=attention_mask, use_cache=use_cache)


def test_arguments_that_wrappers_pass_as_none_and_those_of_the_loss_do_not_reach_the_backbone():
    model, data = tiny_model(NUM_IDS), batch()
    model.model = StrictBackbone(model.model)
    install_head(model)
    answer = model(
        data[0], None, head_request=ask(data), labels=None, output_attentions=None, return_dict=True, logits_to_keep=1
    )
    expected = naive_answer(tiny_model(NUM_IDS), data)[0]
    assert_close_to_largest(answer["logprobs"], expected, 2e-6)


def test_only_the_chosen_positions_reach_the_product():
    model, data = install_head(tiny_model(NUM_IDS)), batch()
    hidden = torch.full((3, 7, 32), torch.nan)
    hidden.view(21, 32)[data[1]] = 0.5
    answer = model.lm_head(hidden, head_request=ask(data))
    assert torch.isfinite(answer["logprobs"]).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_without_a_request_logits_and_generation_are_what_they_were(dtype):
    ids, _, _ = batch()
    before, model = tiny_model(NUM_IDS, dtype=dtype), install_head(tiny_model(NUM_IDS, dtype=dtype))
    assert torch.equal(model(ids).logits, before(ids).logits)
    losses = [each(input_ids=ids, labels=ids).loss for each in (model, before)]
    assert torch.equal(*losses)
    gradients = [torch.autograd.grad(x, [*m.parameters()]) for x, m in zip(losses, (model, before), strict=True)]
    assert all(map(torch.equal, *gradients))
    options = {"max_new_tokens": 6, "do_sample": False}
    assert torch.equal(model.generate(ids, **options), before.generate(ids, **options))
    assert inspect.signature(model.forward) == inspect.signature(before.forward)
    assert model.state_dict().keys() == before.state_dict().keys()


def test_a_deep_copy_calls_its_own_modules():
    model, data = install_head(tiny_model(NUM_IDS)), batch()
    twin = copy.deepcopy(model)
    with torch.no_grad():
        before = model(input_ids=data[0], head_request=ask(data))["logprobs"]
        twin.model.embed_tokens.weight.mul_(1.5)
        torch.testing.assert_close(model(input_ids=data[0], head_request=ask(data))["logprobs"], before)
        twins = twin(input_ids=data[0], head_request=ask(data))["logprobs"]
    assert not torch.allclose(twins, before)
    assert verify_head(twin) < 1e-5
    loss = twin(input_ids=data[0], head_request=ask(data, loss=token_loss))["loss"]
    loss.backward()
    assert all(p.grad is None for p in model.parameters())
    assert all(p.grad is not None for p in twin.parameters())


def test_installing_again_keeps_what_others_wrapped_around_the_forward():
    model, seen = install_head(tiny_model(NUM_IDS)), []
    first = model.forward, model.lm_head.forward
    assert (install_head(model).forward, model.lm_head.forward) == first
    inner = model.forward

    def outer(**inputs):
        seen.append(1)
        return inner(**inputs)

    model.forward = outer
    install_head(model)
    assert verify_head(model) < 1e-5
    assert seen == [1, 1]


@pytest.mark.parametrize("autocast", [True, False])
def test_logits_without_gradients_have_the_log_probs_of_a_request(autocast):
    # of a bf16 head with logits around 20, where bf16 has steps of 0.125
    model, data = tiny_model(NUM_IDS, dtype=torch.float32 if autocast else torch.bfloat16), batch()
    model.lm_head.weight.data.mul_(20.0)
    install_head(model)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        logits = model(input_ids=data[0]).logits
        answer = model(input_ids=data[0], head_request=ask(data))
    assert logits.dtype == torch.float32
    assert logits.abs().max() > 10
    expected = torch.log_softmax(logits.flatten(0, 1)[data[1]] / 0.8, -1).gather(-1, data[2][:, None])[:, 0]
    torch.testing.assert_close(answer["logprobs"], expected, rtol=1e-6, atol=2e-5)


@pytest.mark.parametrize("autocast", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_head_cast_to_fp32_multiplies_in_fp32_with_and_without_a_request(autocast, dtype):
    model = tiny_model(NUM_IDS, dtype=dtype)
    install_head(model, cast_head_to_fp32=True)
    data = batch()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        hidden = model.model(data[0]).last_hidden_state
        logits = model(input_ids=data[0]).logits
        answer = model(input_ids=data[0], head_request=ask(data))
    exact = hidden.double() @ model.lm_head.weight.double().T
    assert logits.dtype == torch.float32
    assert_close_to_largest(logits.double(), exact, 2e-6)
    expected = torch.log_softmax(exact.flatten(0, 1)[data[1]] / 0.8, -1).gather(-1, data[2][:, None])[:, 0]
    assert_close_to_largest(answer["logprobs"].double(), expected, 2e-6)
    install_head(model)
    assert model(input_ids=data[0]).logits.dtype == dtype


def test_a_head_that_is_no_linear_layer_cannot_be_cast_to_fp32():
    model = tiny_model(NUM_IDS, tied=False)
    model.lm_head = torch.nn.Sequential(torch.nn.Linear(32, NUM_IDS))
    with pytest.raises(ModelError, match=r"Qwen2ForCausalLM.*torch\.nn\.modules\.container\.Sequential"):
        install_head(model, cast_head_to_fp32=True)


def test_a_head_that_is_a_class_of_fsdp2_counts_as_linear_and_its_hooks_run_once_a_pass():
    model = tiny_model(NUM_IDS, tied=False)
    model.lm_head.__class__ = type("FSDPLinear", (FSDPModule, torch.nn.Linear), {})
    outputs = []
    install_head(model)
    data = batch()
    model.lm_head.register_forward_hook(lambda module, args, output: outputs.append(output))
    answer = model(input_ids=data[0], head_request=ask(data, loss=token_loss))
    answer["loss"].backward()
    # Only the visit itself is this function; a head called as a module would have been checkpointed.
    assert "_FusedLoss" in type(answer["loss"].grad_fn).__name__
    assert [output["logprobs"] is answer["logprobs"] for output in outputs] == [True]

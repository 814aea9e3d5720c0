"""The start-up checks of kernels and of models, and the models that install_head refuses."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from transformers import BertConfig, BertLMHeadModel, Qwen2ForCausalLM, Qwen2Model, T5Config, T5ForConditionalGeneration

from lowpeak.errors import HeadMismatchError, ModelError
from lowpeak.heads.lm_head import install_head
from lowpeak.heads.self_check import matmul_eps, verify_head
from lowpeak.logprobs import kernels as kernel_choice
from lowpeak.logprobs import torch_kernels
from lowpeak.logprobs.kernels import kernel_mismatch
from tiny_models import tiny_model

CPU = torch.device("cpu")


def kernels(
    statistics=torch_kernels.softmax_statistics,
    gradient=torch_kernels.logits_gradient_,
    chosen=torch_kernels.target_logits,
    divergences=torch_kernels.divergences,
    divergence_gradient=torch_kernels.divergence_gradient_,
):
    return SimpleNamespace(
        target_logits=chosen,
        softmax_statistics=statistics,
        logits_gradient_=gradient,
        divergences=divergences,
        divergence_gradient_=divergence_gradient,
    )


def off_by_little(raw, *inputs):
    found = torch_kernels.logits_gradient_(raw, *inputs)
    found[0, 0] += 0.01 * found.abs().max()
    return found


def off_in_bf16(raw, *inputs):
    found = torch_kernels.logits_gradient_(raw, *inputs)
    narrow = inputs[-2]
    narrow[-1, -1] = found.abs().max()
    return found


def without_the_teachers_part(raw, *inputs):
    return torch_kernels.logits_gradient_(raw, *inputs[:-1])


def no_mixture(raw, bias, settings, *inputs):
    return torch_kernels.divergences(raw, bias, replace(settings, beta=float(settings.beta > 0)), *inputs)


def off_center(raw, bias, settings, teacher, statistics, by_divergence):
    statistics = statistics._replace(center_C=statistics.center_C * 1.01)
    return torch_kernels.divergence_gradient_(raw, bias, settings, teacher, statistics, by_divergence)


def no_numbers(raw, *inputs):
    return torch_kernels.logits_gradient_(raw, *inputs).mul_(float("nan"))


def forgets_the_cap(raw, bias, settings):
    return torch_kernels.softmax_statistics(
        raw, bias, settings if settings.scale.softcap is None else type(settings)(5, 0.7, entropy=True)
    )


def short_of_the_maximum(*inputs):
    return torch_kernels.target_logits(*inputs) * (1 - 1e-6)


def fails(raw, bias, settings):
    raise RuntimeError("no kernel image is available\nfor this device")


def test_the_same_passes_agree():
    assert kernel_mismatch(torch_kernels, CPU) is None


@pytest.mark.parametrize(
    "other",
    [
        {"gradient": off_by_little},
        {"gradient": off_in_bf16},
        {"gradient": no_numbers},
        {"statistics": forgets_the_cap},
        {"chosen": short_of_the_maximum},
        {"gradient": without_the_teachers_part},
        {"divergences": no_mixture},
        {"divergence_gradient": off_center},
    ],
    ids=lambda other: next(iter(other.values())).__name__,
)
def test_passes_that_compute_something_else_are_found(other):
    assert re.search(r"\b(\d\S*|nan) ", kernel_mismatch(kernels(**other), CPU))


def test_a_failure_is_a_reason():
    assert kernel_mismatch(kernels(fails), CPU) == "RuntimeError: no kernel image is available"


def test_a_check_that_ran_out_of_memory_is_made_again(monkeypatch):
    full = [True]

    def fail_once(raw, bias, settings):
        if full:
            full.pop()
            raise RuntimeError("Triton Error [CUDA]: out of memory")
        return torch_kernels.softmax_statistics(raw, bias, settings)

    compiled = kernels(fail_once)
    monkeypatch.setattr(kernel_choice, "find_spec", lambda name: name)
    monkeypatch.setitem(sys.modules, "lowpeak.logprobs.triton_kernels", compiled)
    try:
        with pytest.raises(RuntimeError, match="CUDA"):
            kernel_choice._cuda_kernels(CPU)
        assert kernel_choice._cuda_kernels(CPU) is compiled
    finally:
        kernel_choice._cuda_kernels.cache_clear()


class OtherQwen2(Qwen2ForCausalLM):
    """A model that changes its logits in a way that its config does not tell."""

    def change(self, logits):
        raise NotImplementedError

    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        self.change(output.logits)
        return output


class ScaledQwen2(OtherQwen2):
    def change(self, logits):
        logits.mul_(1.1)


class PaddedQwen2(OtherQwen2):
    def change(self, logits):
        logits[..., -3:] = -torch.inf  # the last ids never get any probability


class BrokenQwen2(OtherQwen2):
    def change(self, logits):
        logits.fill_(torch.nan)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", [ScaledQwen2, PaddedQwen2, BrokenQwen2])
def test_a_model_that_changes_its_logits_unsaid_is_refused_by_name_and_difference(kind, dtype):
    base = tiny_model(37, dtype=dtype)
    model = kind(base.config).to(dtype)
    model.load_state_dict(base.state_dict())
    with pytest.raises(HeadMismatchError, match=rf"{kind.__name__} .*\b(\d\S*|nan|inf), .*\b(\d\S*|nan|inf):"):
        verify_head(install_head(model))


def test_hidden_states_that_are_not_finite_blame_the_attention():
    model = install_head(tiny_model())
    model.model.norm.register_forward_hook(lambda module, inputs, output: output.fill_(torch.nan))
    with pytest.raises(ModelError, match=r"Qwen2ForCausalLM .*attn_implementation='sdpa'"):
        verify_head(model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_rounding_is_not_taken_for_a_mismatch(dtype):
    for seed in range(5):
        verify_head(install_head(tiny_model(211, seed, hidden=64, dtype=dtype)))


def test_each_module_keeps_the_mode_it_was_in_and_dropout_does_not_act():
    model = install_head(tiny_model()).train()
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    model.model.layers[0].eval()
    before = [module.training for module in model.modules()]
    assert verify_head(model) < 1e-5
    assert [module.training for module in model.modules()] == before


def t5():
    return T5ForConditionalGeneration(T5Config(vocab_size=11, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2))


@pytest.mark.parametrize("make", [lambda: Qwen2Model(tiny_model().config), lambda: torch.nn.Linear(2, 2), t5])
def test_what_is_no_causal_language_model_with_a_head_is_refused_by_name(make):
    model = make()
    with pytest.raises(ModelError, match=f"{type(model).__name__} "):
        install_head(model)


def test_a_head_behind_another_transform_is_found_out():
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=23,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        is_decoder=True,
        initializer_range=0.3,
    )
    with pytest.raises(HeadMismatchError, match="BertLMHeadModel"):
        verify_head(install_head(BertLMHeadModel(config)))


@pytest.fixture
def rough_products():
    """As transformers does for tf32=True: by the names after which torch's older question raises."""
    before = torch.backends.fp32_precision
    torch.backends.fp32_precision = "tf32"
    yield
    torch.backends.fp32_precision = before


def test_products_that_may_be_rougher_are_asked_for_by_their_newer_names(rough_products):
    assert verify_head(install_head(tiny_model())) < 1e-5
    assert matmul_eps(torch.float32, torch.device("cuda")) == 2.0**-10
    assert matmul_eps(torch.bfloat16, torch.device("cuda")) == 2.0**-7


def test_products_are_exact_unless_they_were_allowed_not_to_be():
    for device in ("cpu", "cuda"):
        assert matmul_eps(torch.float32, torch.device(device)) == torch.finfo(torch.float32).eps

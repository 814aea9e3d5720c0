"""The core of the tests with real weights: tokens, log-probs, a GRPO step, LoRA, save and resume."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig, PeftModel
from real_runs import assert_greedy_tokens, logprob_errors, make_real
from transformers import AutoModelForCausalLM, AutoTokenizer

from lowpeak.attention.install import install_attention
from lowpeak.attention.self_check import packing_mismatch
from small_runs import SAVED, column, same, weights


def test_greedy_tokens_equal_those_of_generate_on_each_prompt_alone(smollm2, tokenizer):
    ours = assert_greedy_tokens(smollm2, tokenizer, count=12, max_new_tokens=24)
    assert "Paris" in tokenizer.decode(ours[0])
    assert {ids[-1] for ids in ours if len(ids) < 24} == {tokenizer.convert_tokens_to_ids("<|im_end|>")}


def test_sampled_log_probs_are_those_of_a_full_forward(smollm2, tokenizer):
    assert logprob_errors(smollm2, tokenizer, torch.float32).max() < 1e-4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_sequences_agree_with_separate_ones_in_bf16(smollm2, dtype):
    """In bf16 rounding changes the state of single tokens by its size."""
    model = AutoModelForCausalLM.from_pretrained(smollm2, dtype=dtype)
    install_attention(model)
    with torch.autocast("cpu", torch.bfloat16):
        assert packing_mismatch(model, "cpu") is None


def test_a_grpo_step_saves_a_model_that_transformers_loads_and_resumes_to_the_same_bits(smollm2, tmp_path):
    whole = make_real("GRPO", tmp_path / "whole", smollm2, **SAVED)
    whole.train()
    assert all(value > 0 for value in column(whole, "grad_norm"))
    assert max(column(whole, "sampling/sampling_logp_difference/max")) < 1e-4
    resumed = make_real("GRPO", tmp_path / "resumed", smollm2)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-1"))
    assert same(weights(whole), weights(resumed))
    whole.save_model(str(tmp_path / "model"))
    loaded = dict(AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32).named_parameters())
    assert all(values.equal(weights(whole)[name]) for name, values in loaded.items())
    assert AutoTokenizer.from_pretrained(tmp_path / "model").chat_template


def test_lora_trains_the_adapter_alone(smollm2, tmp_path):
    lora = LoraConfig(r=8, target_modules=["q_proj", "v_proj"])
    run = make_real("GRPO", tmp_path, smollm2, peft_config=lora, learning_rate=1e-3, max_steps=1)
    before = weights(run)
    run.train()
    changed = {name for name, values in weights(run).items() if not values.equal(before[name])}
    assert changed
    assert all("lora_B" in name for name in changed)  # A's gradient is zero while B is
    run.save_model(str(tmp_path / "adapter"))
    loaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(smollm2), tmp_path / "adapter")
    saved = {name: values for name, values in weights(run).items() if "lora" in name}
    assert saved
    assert all(dict(loaded.named_parameters())[name].equal(values) for name, values in saved.items())

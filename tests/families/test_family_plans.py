"""Each family has a plan of the engine that will run, and a cache whose bytes are those that the loop allocates."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig
from plan_checks import PROMPT, cache_errors, check_plan, plan_family
from table import README, documented_rows, readme_table

from case_selection import mark_extended
from lowpeak import RewardConfig
from lowpeak.errors import ModelError
from lowpeak.memory import Kind
from lowpeak.models.lora import add_training_adapter
from lowpeak.plan.derived_configs import shard_config
from lowpeak.plan.hardware import GIB, Machine
from lowpeak.plan.output import summary
from lowpeak.plan.plan import make_plan
from lowpeak.plan.request import PlanRequest
from lowpeak.rollout.native.engine import unsupported_reason
from model_families import FAMILIES, is_known, make_config, make_family

KNOWN = [family for family in FAMILIES if is_known(family)]
PLANNED_IN_CI = ("Nemotron-H", "GLM-5", "LongCat-Flash")
MEASURED_IN_CI = ("DeepSeek-V3", "Gemma 3n", "gpt-oss", "Falcon-H1", "LFM2", "Qwen3.5", "LongCat-Flash")


def test_the_readme_lists_the_families_of_the_table():
    assert readme_table(documented_rows()) in README.read_text(encoding="utf-8"), "run python tests/families/table.py"


@pytest.mark.parametrize("family", mark_extended(KNOWN, PLANNED_IN_CI, "release"))
def test_a_plan_ends_or_is_refused_in_one_sentence(family):
    output = check_plan(family)
    assert output == "yes" or "reads values of tensors" in output
    assert documented_rows()[family].split(" | ")[6] == output, "run python tests/families/table.py"


@pytest.mark.parametrize("family", mark_extended(KNOWN, MEASURED_IN_CI, "release"))
def test_a_sequences_measured_bytes_are_those_of_the_loops_slots(family):
    model = make_family(family)
    if unsupported_reason(model) is not None:
        pytest.skip("it generates by generate()")
    for dtype in (torch.float32, torch.bfloat16):
        assert cache_errors(model.to(dtype)) == pytest.approx([0, 0], abs=0.02)


def test_generate_keeps_keys_of_each_sequence_with_its_prompt_within_the_budget():
    one = (PROMPT + 140) * plan_family("Bloom").inputs.sequence_bytes(1, torch.float32)
    for num_sequences, changes in ((8, {}), (3, {"kv_cache_bytes": 3 * one})):
        found = plan_family("Bloom", max_completion_length=140, **changes)
        # A layer's keys and values are copied when a token is added.
        planned = found.phases["rollout"].device[Kind.KV_CACHE]
        assert 0.99 * num_sequences * one <= planned <= 1.5 * num_sequences * one


@pytest.mark.extended
def test_a_reward_models_plan_balances_no_experts_and_needs_a_classifier():
    args, machine = RewardConfig("unused", use_cpu=True), Machine(1, 8 * GIB, device="cpu")
    assert make_plan(PlanRequest("reward", args, make_config("gpt-oss"), machine)).peak > 0
    with pytest.raises(ModelError, match="AutoModelForSequenceClassification for gemma3n_text"):
        make_plan(PlanRequest("reward", args, make_config("Gemma 3n"), machine))


def test_gemma_3n_has_its_layers_sizes_split():
    config = make_config("Gemma 3n")
    assert shard_config(config, 2).intermediate_size == [size // 2 for size in config.intermediate_size]


@pytest.mark.parametrize("family", mark_extended(KNOWN, ("Gemma 3n", "LongCat-Flash", "Trinity"), "release"))
def test_a_plan_in_4_bits_ends_or_is_refused_in_one_sentence(family):
    adapter = LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM")
    output = check_plan(family, quantized_bits=4, peft_config=adapter)
    assert ("packed weights" in output) == (family in ("Gemma 3n", "LongCat-Flash"))
    assert output == "yes" or "packed weights" in output or "reads values of tensors" in output


@pytest.mark.extended
def test_a_quantised_mixtures_experts_keep_their_bytes_and_products_do_not():
    adapter = LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM")
    whole, four = (plan_family("Qwen3-MoE", quantized_bits=bits, peft_config=adapter) for bits in (None, 4))
    experts = sum(p.nbytes for name, p in make_family("Qwen3-MoE").named_parameters() if ".experts." in name)
    assert four.counts.expert_bytes == whole.counts.expert_bytes == experts
    assert experts < four.counts.frozen_bytes < whole.counts.frozen_bytes
    assert any("are experts, which stay as they are" in line for line in summary(four, ()))
    assert not any("experts" in line for line in summary(whole, ()))


@pytest.mark.extended
def test_an_adapters_quantised_base_widens_norms_and_keeps_experts(caplog):
    model = make_family("Qwen3-MoE").bfloat16()
    expected = model.model.layers[0].mlp.experts.down_proj.detach().clone()
    model.is_quantized = True
    adapted = add_training_adapter(model, LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"))
    experts = adapted.base_model.model.model.layers[0].mlp.experts.down_proj
    assert torch.equal(experts, expected)
    assert experts.dtype == torch.bfloat16
    assert adapted.base_model.model.model.norm.weight.dtype == torch.float32
    assert "are experts, which bitsandbytes leaves as they are" in caplog.text

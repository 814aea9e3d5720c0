"""Families with recomputed layers, plain rows, other windows, few slots, a critic, adapted experts, and a config's dropout.

One family of a few classes runs with the other tests, the rest in `make test-families`.
"""

from __future__ import annotations

import pytest
import torch
from family_variants import (
    check_adapted_experts,
    check_critic,
    check_variant,
    has_classifier,
)
from table import documented_rows

from case_selection import mark_extended
from lowpeak.errors import ArgumentError
from lowpeak.heads.experts import load_balance_of
from lowpeak.models import disable_dropout, expert_parameters
from model_families import FAMILIES, is_known, make_config, make_family

DROPOUT = ("dropout", "pdrop", "layerdrop", "jitter_noise")


def skip_unknown(family):
    if not is_known(family):
        pytest.skip(f"this transformers has no {FAMILIES[family][0]}")


@pytest.mark.parametrize("family", mark_extended(list(FAMILIES), ["Qwen3-MoE", "Gemma 3", "Qwen3.5"], "release"))
def test_a_family_trains_with_recomputed_layers_a_window_of_two_balanced_experts_and_few_slots(tmp_path, family):
    skip_unknown(family)
    assert not check_variant(family, "recomputed", tmp_path).problems


@pytest.mark.parametrize("family", mark_extended(list(FAMILIES), ["gpt-oss"], "release"))
def test_a_family_trains_in_plain_rows_with_a_window_longer_than_the_text(tmp_path, family):
    skip_unknown(family)
    report = check_variant(family, "rows", tmp_path)
    assert report.layout in ("rows", "padded")
    assert not report.problems


@pytest.mark.parametrize("family", mark_extended(list(FAMILIES), ["Qwen3.5"], "release"))
def test_a_familys_critic_and_reward_model_have_the_numbers_of_plain_forwards(tmp_path, family):
    skip_unknown(family)
    if not has_classifier(family):
        pytest.skip("transformers has no classifier of this family")
    report = check_critic(family, tmp_path)
    assert not report.problems
    assert f"| {report.layout} |" in documented_rows()[family]


@pytest.mark.parametrize("family", mark_extended(list(FAMILIES), ["gpt-oss"], "release"))
def test_adapters_of_experts_train_are_saved_and_leave_the_base_as_it_is(tmp_path, family):
    skip_unknown(family)
    if not expert_parameters(make_family(family)):
        pytest.skip("no experts of three dimensions")
    assert not check_adapted_experts(family, tmp_path).problems


@pytest.mark.parametrize("family", mark_extended(list(FAMILIES), ["Falcon", "GPT-2", "StarCoder2"], "release"))
def test_dropout_of_a_familys_config_is_off_and_stays_in_the_config(family):
    skip_unknown(family)
    settings = make_config(family).get_text_config().to_dict()
    rates = {key: 0.5 for key, value in settings.items() if key.endswith(DROPOUT) and isinstance(value, float)}
    model, ids = make_family(family, **rates), torch.arange(24).view(2, 12) % 13
    with torch.no_grad():
        expected = model(input_ids=ids, use_cache=False).logits
        disable_dropout(model)
        assert torch.equal(model.train()(input_ids=ids, use_cache=False).logits, expected)
    assert rates.items() <= model.config.get_text_config().to_dict().items()


def test_a_family_without_router_logits_has_no_balance_to_weigh():
    with pytest.raises(ArgumentError, match=r"router_aux_loss_coef=0\.1.*Glm4MoeForCausalLM"):
        load_balance_of(make_family("GLM-4-MoE"), 0.1)

"""Scores inside a classifier's forward, and their start-up check."""

from __future__ import annotations

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import BertConfig, BertForSequenceClassification

from lowpeak.errors import HeadMismatchError, ModelError
from lowpeak.heads.lm_head import HeadRequest
from lowpeak.heads.score_head import install_score_head, verify_score_head
from preference_data import FirstToken, tiny_classifier
from tiny_models import tiny_model

IDS = torch.tensor([[3, 4, 5, 6, 7], [8, 9, 2, 0, 0]])
LASTS = torch.tensor([4, 7])  # of the flattened rows


def request(positions):
    return HeadRequest(positions, positions, temperature=1.0, chunk_size=4, values=True)


def scores_of(model, ids=IDS, positions=LASTS):
    return model(input_ids=ids, head_request=request(positions))["values"]


def test_without_a_request_nothing_changes_and_a_copy_answers_too():
    model = install_score_head(tiny_classifier())
    torch.testing.assert_close(model(input_ids=IDS).logits, tiny_classifier()(input_ids=IDS).logits)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.score.weight.mul_(2)
    torch.testing.assert_close(scores_of(twin), 2 * scores_of(model))


def test_a_head_of_its_own_precision_computes_in_fp32():
    model = tiny_classifier()
    low, high = (install_score_head(copy.deepcopy(model), cast_head_to_fp32=wide) for wide in (False, True))
    with torch.autocast("cpu", torch.bfloat16):
        rounded, exact = scores_of(low), scores_of(high)
    assert rounded.dtype == exact.dtype == torch.float32
    assert torch.equal(rounded, rounded.bfloat16().float())
    assert not torch.equal(exact, exact.bfloat16().float())


@pytest.mark.parametrize("wide", [False, True])
def test_a_trained_head_takes_the_states_of_a_frozen_half_precision_backbone(wide):
    config = LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["score"])
    model = get_peft_model(tiny_classifier(dtype=torch.bfloat16), config)
    head = model.get_base_model().score.modules_to_save["default"].float()
    install_score_head(model, cast_head_to_fp32=wide)
    scores_of(model).sum().backward()
    assert head.weight.grad.dtype == torch.float32
    assert verify_score_head(model) < 1e-4


def test_an_adapter_on_the_head_has_no_product_of_its_own_precision():
    model = get_peft_model(tiny_classifier(), LoraConfig(r=2, target_modules=["score"]))
    with torch.no_grad():
        model.get_base_model().score.lora_B["default"].weight.add_(1.0)
    install_score_head(model)
    torch.testing.assert_close(scores_of(model), model.eval()(input_ids=IDS).logits[:, 0])
    with pytest.raises(ModelError, match=r"^cast_lm_head_to_fp32 .*peft\.tuners\.lora"):
        install_score_head(model, cast_head_to_fp32=True)


@pytest.mark.parametrize("settings", [{"task_type": "SEQ_CLS"}, {"modules_to_save": ["score"]}])
def test_an_adapter_with_the_head_answers_as_it_does_without_a_request(settings):
    model = get_peft_model(tiny_classifier(), LoraConfig(r=2, target_modules=["q_proj"], **settings))
    install_score_head(model)
    with torch.no_grad():
        model.get_base_model().score.modules_to_save["default"].weight.add_(1.0)
    torch.testing.assert_close(scores_of(model), model.eval()(input_ids=IDS).logits[:, 0])
    assert verify_score_head(model) < 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("pad", [0, 12, None])
def test_a_causal_classifier_passes_the_check_whatever_pads_its_rows(dtype, pad):
    model = install_score_head(tiny_classifier(dtype=dtype, pad_token_id=pad)).train()
    assert verify_score_head(model) < 1e-4
    assert model.training


def test_a_classifier_that_reads_elsewhere_is_told():
    model = FirstToken(tiny_classifier().config)
    install_score_head(model)
    with pytest.raises(HeadMismatchError, match=r"^FirstToken .*\d"):
        verify_score_head(model)


def test_a_classifier_that_looks_ahead_is_told():
    model = tiny_classifier()
    for layer in model.model.layers:
        layer.self_attn.is_causal = False
    model.config._attn_implementation = "eager"  # with which a mask that lets everything through is what counts
    install_score_head(model)
    model.model.register_forward_pre_hook(see_everything, with_kwargs=True)
    with pytest.raises(HeadMismatchError, match=r"^Qwen2ForSequenceClassification .*causal.*\d"):
        verify_score_head(model)


def see_everything(module, args, kwargs):
    ids = kwargs["input_ids"] if "input_ids" in kwargs else args[0]
    return args, {**kwargs, "attention_mask": torch.zeros(1, 1, ids.shape[1], ids.shape[1])}


def test_a_model_without_a_score_head_of_one_number_is_told():
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    bert = BertForSequenceClassification(BertConfig(vocab_size=13, num_labels=1, **sizes))
    for model in (tiny_model(), bert, tiny_classifier(num_labels=2)):
        with pytest.raises(ModelError, match=r"`score`.*num_labels=1"):
            install_score_head(model)

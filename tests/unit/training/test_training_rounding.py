"""bf16 weights under an optimizer that the user chose: they stay bf16, and one warning states which updates are lost."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig

from lowpeak import SFTConfig, SFTTrainer
from small_runs import SAVED, make, same, saved, trained, weights
from tiny_models import tiny_model

pytestmark = pytest.mark.extended

BF16 = {"model_init_kwargs": {"dtype": "bfloat16"}}


@pytest.fixture
def model(tmp_path) -> str:
    return saved(tmp_path / "model", tiny_model(hidden=64))


def lost(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "rounds bf16 weights" in record.getMessage()]


@pytest.mark.parametrize(("kind", "optim"), [("GRPO", "adafactor"), ("SFT", "adamw_bnb_8bit"), ("GRPO", "sgd")])
def test_bf16_weights_train_with_one_warning_and_a_resumed_run_has_their_bits(tmp_path, caplog, model, kind, optim):
    settings = {**SAVED, **BF16, "optim": optim, "learning_rate": 1e-3}
    run = make(kind, tmp_path / "run", model, **settings)
    before = weights(run)
    run.train()
    assert {p.dtype for p in run.model.parameters()} == {torch.bfloat16}
    assert run.state.global_step == 2
    assert not same(weights(run), before)
    again = trained(kind, tmp_path / "run", model, **settings, resume=tmp_path / "run" / "checkpoint-1")
    assert same(weights(again), weights(run))
    (message, _) = lost(caplog)  # one of each run
    assert all(text in message for text in ("are lost at learning rate 0.001", "weight_bits=32"))
    assert "converted to fp32" not in caplog.text


def test_an_optimizer_class_keeps_them_too_and_its_rate_is_the_one_warned_of(tmp_path, caplog, model):
    passed = {"optimizer_cls_and_kwargs": (torch.optim.SGD, {"lr": 0.000123})}
    run = trained("SFT", tmp_path / "run", model, **BF16, **passed)
    assert {p.dtype for p in run.model.parameters()} == {torch.bfloat16}
    assert run.run.storage is None
    (message,) = lost(caplog)
    assert "0.000123" in message


def test_an_adapter_is_fp32_and_not_warned_of(tmp_path, caplog, model):
    lora = LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"])
    run = trained("GRPO", tmp_path / "run", model, **BF16, optim="sgd", peft_config=lora)
    assert {p.dtype for p in run.model.parameters() if p.requires_grad} == {torch.float32}
    assert lost(caplog) == []


def test_deepspeed_keeps_its_master_weights(tmp_path):
    args = SFTConfig(output_dir=str(tmp_path), use_cpu=True, optim="adafactor", **BF16)
    assert SFTTrainer.resolve(args).model.trains_bf16
    args.deepspeed = {"zero_optimization": {"stage": 2}}
    assert not SFTTrainer.resolve(args).model.trains_bf16

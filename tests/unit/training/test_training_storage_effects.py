"""What the log, the dry run and the errors say of a storage format: roundings, arguments without effect, remedies."""

from __future__ import annotations

import logging

import pytest
import torch
from peft import LoraConfig

from lowpeak.errors import ArgumentError, ModelError, NonFiniteError
from preference_data import tiny_classifier
from small_runs import make, saved
from tiny_models import tiny_model

pytestmark = pytest.mark.extended

BF16 = {"model_init_kwargs": {"dtype": "bfloat16"}}
LORA = LoraConfig(target_modules=["q_proj"])


def stored(folder, dtype: torch.dtype = torch.float32) -> str:
    return saved(folder, tiny_model(hidden=64, dtype=dtype))


def lines(caplog: pytest.LogCaptureFixture, text: str) -> list[str]:
    return [record.getMessage() for record in caplog.records if text in record.getMessage()]


@pytest.mark.parametrize("by", ["name", "instance"])
@pytest.mark.parametrize("kind", ["GRPO", "Reward"])
def test_one_line_says_that_fp32_weights_were_rounded(tmp_path, caplog, kind, by):
    model = tiny_classifier() if kind == "Reward" else tiny_model()
    with caplog.at_level(logging.INFO):
        make(kind, tmp_path / "run", saved(tmp_path / "model", model) if by == "name" else model, weight_bits=32)
    (message,) = lines(caplog, "rounded to bf16")
    assert "start at 0" in message
    assert ("the fp32 weights of" if by == "name" else "weights in float32") in message


def test_weights_that_are_bf16_already_are_not_rounded(tmp_path, caplog):
    with caplog.at_level(logging.INFO):
        make("GRPO", tmp_path / "run", stored(tmp_path / "model", torch.bfloat16), weight_bits=32)
    assert lines(caplog, "rounded to bf16") == []


def test_weights_that_are_converted_to_fp32_are_named_with_their_dtype(tmp_path, caplog):
    for dtype in (torch.float64, torch.bfloat16):
        make("SFT", tmp_path, tiny_model(dtype=dtype))
    found = lines(caplog, "converted to fp32")
    assert [dtype in message for dtype, message in zip(("in float64", "in bfloat16"), found, strict=True)] == [
        True,
        True,
    ]


@pytest.mark.parametrize("kind", ["GRPO", "Reward"])
def test_weight_bits_leave_the_base_of_an_adapter_in_the_checkpoints_dtype(tmp_path, kind):
    model = tiny_classifier() if kind == "Reward" else tiny_model(hidden=64)
    folder = saved(tmp_path / "model", model)
    for arguments, dtype in ({}, torch.float32), (BF16, torch.bfloat16):
        run = make(kind, tmp_path / "run", folder, weight_bits=32, peft_config=LORA, **arguments)
        base = [p for name, p in run.model.named_parameters() if "q_proj.base_layer.weight" in name]
        assert {p.dtype for p in base} == {dtype}


def test_8_bit_states_of_no_matrix_are_named_with_the_reason(tmp_path, caplog):
    make("GRPO", tmp_path, tiny_model(), state_bits=8)
    assert len(lines(caplog, "state_bits=8 (no trained matrix has 4,096 values")) == 1
    with pytest.raises(ArgumentError, match="state_bits=8"):
        make("GRPO", tmp_path, tiny_model(), state_bits=8, strict_arguments=True)
    make("GRPO", tmp_path, tiny_model(hidden=64), state_bits=8, strict_arguments=True)


def test_bf16_false_beside_bf16_weights_is_named(tmp_path, caplog):
    make("SFT", tmp_path, tiny_model(hidden=64), weight_bits=32, strict_arguments=True)
    make("SFT", tmp_path, tiny_model(hidden=64), bf16=False, strict_arguments=True)
    make("SFT", tmp_path, tiny_model(hidden=64), weight_bits=32, bf16=False)
    assert len(lines(caplog, "bf16=False (all weights are bf16")) == 1
    with pytest.raises(ArgumentError, match="bf16=False"):
        make("SFT", tmp_path, tiny_model(hidden=64), weight_bits=32, bf16=False, strict_arguments=True)


def test_a_model_that_is_frozen_in_part_can_be_loaded_in_bf16(tmp_path):
    def partly(dtype):
        model = tiny_model(hidden=64, dtype=dtype)
        model.model.layers[0].requires_grad_(False)
        return model

    with pytest.raises(ModelError, match=r"bf16.* bf16=True.* bf16 .*'bfloat16'"):
        make("SFT", tmp_path, partly(torch.float32), weight_bits=32)
    make("SFT", tmp_path, partly(torch.bfloat16), weight_bits=32)


@pytest.mark.parametrize(("arguments", "remedy"), [({"weight_bits": 32}, "fp32 weights"), ({}, "bf16=False")])
def test_the_remedy_for_numbers_that_are_not_finite_fits_the_weights(tmp_path, arguments, remedy):
    run = make("SFT", tmp_path, tiny_model(hidden=64), **arguments, max_steps=1)
    with torch.no_grad():
        next(run.model.parameters()).fill_(float("nan"))
    with pytest.raises(NonFiniteError, match=remedy):
        run.train()


@pytest.mark.parametrize("kind", ["GRPO", "SFT", "Reward"])
def test_the_dry_run_has_the_formats_sentence(tmp_path, kind):
    sizes = {"model": tiny_classifier() if kind == "Reward" else tiny_model()}
    assert "8.06 bytes per parameter" in make(kind, tmp_path, **sizes, weight_bits=32).dry_run()["model"]["storage"]
    sizes = {"model": tiny_classifier() if kind == "Reward" else tiny_model()}
    plain = make(kind, tmp_path, **sizes).dry_run()["model"]["storage"]
    assert plain == "weights in float32, optimizer states as optim stores them"


@pytest.mark.parametrize("arguments", [{"fp16": True}, {"torch_compile": True}])
def test_supervised_training_names_no_ratios_and_no_engine(tmp_path, caplog, arguments):
    try:
        make("SFT", tmp_path, **arguments)
    except ArgumentError as error:
        caplog.handler.emit(logging.makeLogRecord({"msg": str(error)}))
    (message,) = lines(caplog, next(iter(arguments)))
    assert "log-ratio" not in message
    assert "engine" not in message

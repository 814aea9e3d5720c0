"""What a user is told of a teacher that does not fit the policy."""

from __future__ import annotations

import logging

import pytest
import torch
from peft import LoraConfig

import lowpeak
from lowpeak.algorithms import make_distillation
from lowpeak.arguments import DistillationSettings
from lowpeak.errors import ArgumentError, DataError
from small_runs import SAVED, SGD, TOKENIZER, column, make, ones, rows, same, saved, trained, weights
from tiny_models import char_tokenizer, tiny_model


def rows_with_context():
    return rows().add_column("privileged_context", ["12"] * len(rows()))


def test_a_teacher_is_named_by_a_folder_and_loaded_as_its_arguments_say(tmp_path):
    folder = saved(tmp_path / "teacher", tiny_model(seed=1))
    run = make(
        *("Distillation", tmp_path / "run"),
        teacher_model=None,
        teacher_model_name_or_path=folder,
        teacher_model_init_kwargs={"dtype": "bfloat16"},
    )
    assert {str(p.dtype) for p in run.teacher_model.parameters()} == {"torch.bfloat16"}
    run.train()


def test_a_base_that_teaches_is_loaded_as_the_policy_was(tmp_path):
    run = make(
        *("Distillation", tmp_path / "run", saved(tmp_path / "policy", tiny_model()), rows_with_context()),
        **{"teacher_model": None, "teacher_model_kind": "base"},
        model_init_kwargs={"rms_norm_eps": 0.1},
    )
    assert run.teacher_model.config.rms_norm_eps == run.model.config.rms_norm_eps == 0.1


def test_a_teacher_with_another_tokenizer_is_refused_with_the_first_id_that_differs(tmp_path):
    other = char_tokenizer("1023456789=")
    folder = saved(tmp_path / "teacher", tiny_model(seed=1), other)
    with pytest.raises(ArgumentError, match=r"id 2 .*'1'.*'0'.* 2 of 13"):
        make("Distillation", tmp_path, teacher_model=folder)


def test_a_teacher_with_more_rows_and_tokens_shares_the_policys_ids(tmp_path):
    folder = saved(tmp_path / "teacher", tiny_model(20, seed=1), char_tokenizer("0123456789=abc"))
    run = make("Distillation", tmp_path, teacher_model=folder)
    assert run.run.reference.num_ids == len(TOKENIZER)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"teacher_model": None}, "there is no teacher"),
        ({"teacher_model": (same_model := tiny_model()), "model": same_model}, "the model itself"),
        ({"teacher_model_name_or_path": "a"}, "both name a teacher"),
        ({"teacher_model_init_kwargs": {"dtype": "bfloat16"}}, "by name or path"),
        ({"ref_model": tiny_model()}, "pass teacher_model"),
        ({"beta": 1.5}, r"beta=1\.5.*\[0, 1\]"),
        ({"teacher_model_kind": "live"}, "teacher_model_kind='live' conflicts"),
        ({"teacher_model": None, "teacher_model_kind": "ema", "peft_config": LoraConfig(r=2)}, "'live' or 'base'"),
        ({"teacher_model": None, "teacher_model_kind": "ema", "offload_frozen_models": True}, "'ema' conflicts"),
        ({"teacher_prompt_template": "{prompt}"}, "with {prompt} and {privileged_context}"),
        ({"distillation_mode": "sampled_token", "beta": 0.5}, "reverse KL"),
        ({"distillation_weight": 0.5}, "pass reward_funcs"),
        ({"lmbda": 0.5, "num_generations": 2}, "num_generations=1"),
    ],
)
def test_a_missing_or_doubled_teacher_is_refused_in_one_sentence(tmp_path, changes, words):
    with pytest.raises(ArgumentError, match=words):
        make("Distillation", tmp_path, **changes)


@pytest.mark.parametrize("share", ["most", "little"])
def test_probability_of_ids_that_the_policy_lacks_is_named(tmp_path, caplog, share):
    teacher = tiny_model(20, seed=1, tied=False)
    with torch.no_grad():
        teacher.lm_head.weight[13:] = 0.0 if share == "most" else teacher.lm_head.weight[:7] * 0.0
        if share == "little":
            teacher.lm_head.bias = torch.nn.Parameter(torch.tensor([0.0] * 13 + [-50.0] * 7))
    with caplog.at_level(logging.WARNING):
        trained("Distillation", tmp_path, teacher_model=teacher)
    assert ("from 13 on" in caplog.text) == (share == "most")


def test_a_divergence_of_another_trainer_is_refused_and_idle_arguments_of_rewards_are_named(tmp_path, caplog):
    class Mine(lowpeak.GRPOTrainer):
        @staticmethod
        def make_algorithm(args, settings):
            return make_distillation(DistillationSettings(1.0))

    args = lowpeak.GRPOConfig(str(tmp_path), use_cpu=True, report_to="none")
    with pytest.raises(ArgumentError, match=r"'distillation'.*GRPOConfig.*DistillationTrainer"):
        Mine(tiny_model(), ones, args, rows(), processing_class=TOKENIZER)
    with caplog.at_level(logging.WARNING):
        make("Distillation", tmp_path, reward_timeout=5.0, success_threshold=0.5)
    assert "reward_timeout=5.0" in caplog.text
    assert "success_threshold=0.5" in caplog.text
    assert "tokenizer cannot be loaded" in caplog.text


def test_unequal_end_tokens_and_a_flat_divergence_are_named(tmp_path, caplog):
    teacher = tiny_model(seed=1)
    teacher.generation_config.eos_token_id = teacher.config.eos_token_id = 2
    with caplog.at_level(logging.WARNING):
        make("Distillation", tmp_path, teacher_model=teacher, beta=0.95)
    assert "grow without end" in caplog.text
    assert "beta=0.95" in caplog.text


@pytest.mark.parametrize("kind", [None, "live", "ema"])
def test_a_resumed_run_has_the_same_bits(tmp_path, kind):
    own = {"teacher_model": None, "teacher_model_kind": kind} if kind else {}
    changes = {**SAVED, **own, "data": rows_with_context(), "num_iterations": 2, "max_steps": 3}
    whole = trained("Distillation", tmp_path, **changes)
    again = trained("Distillation", tmp_path, resume=tmp_path / "checkpoint-1", **changes)
    assert same(weights(whole), weights(again))


@pytest.mark.parametrize(
    ("row", "changes"),
    [
        ({"input_ids": [2, 3], "privileged_context": "1"}, {}),
        ({"prompt": "1=", "privileged_context": 5}, {}),
        ({"prompt": "1="}, {"teacher_model": None, "teacher_model_kind": "live"}),
        ({"prompt": "1="}, {"teacher_model": None, "teacher_model_kind": "base"}),
        ({"prompt": "1="}, {"lmbda": 0.5}),
        ({"input_ids": [2, 3], "completion": "1"}, {"lmbda": 0.5}),
    ],
)
def test_a_row_without_what_a_teacher_needs_is_refused(tmp_path, row, changes):
    column = "completion" if "lmbda" in changes else "privileged_context"
    with pytest.raises(DataError, match=rf"row 0.*{column}"):
        make("Distillation", tmp_path, data=[row], max_steps=1, **changes)


def test_a_teacher_in_4_bits_trains_as_its_widened_weights_do(tmp_path):
    folder = saved(tmp_path / "teacher", tiny_model(seed=1, hidden=64, tied=False))
    packing = {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}
    packed = trained("Distillation", tmp_path / "4", teacher_model=folder, teacher_model_init_kwargs=packing, **SGD)
    wide = trained("Distillation", tmp_path / "32", teacher_model=packed.teacher_model.dequantize().float(), **SGD)
    assert column(packed, "loss") == pytest.approx(column(wide, "loss"), rel=1e-4)

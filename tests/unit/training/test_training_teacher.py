"""What a user is told of a teacher that does not fit the policy."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from peft import LoraConfig

import lowpeak
from lowpeak.algorithms import make_distillation
from lowpeak.arguments import DistillationSettings
from lowpeak.errors import ArgumentError, DataError
from lowpeak.records import Branch
from lowpeak.training.rollout import pack_for_teacher
from small_runs import SAVED, SGD, TOKENIZER, column, make, ones, rows, same, saved, trained, weights
from tiny_models import char_tokenizer, tiny_model


def rows_with_context():
    return rows().add_column("privileged_context", ["12"] * len(rows()))


@pytest.mark.parametrize("as_path", [False, True])
def test_a_teacher_is_named_by_a_folder_and_loaded_as_its_arguments_say(tmp_path, as_path):
    folder = saved(tmp_path / "teacher", tiny_model(seed=1))
    run = make(
        *("Distillation", tmp_path / "run"),
        teacher_model=Path(folder) if as_path else None,
        teacher_model_name_or_path=None if as_path else folder,
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
        ({"teacher_model": 3}, "teacher_model must be a name"),
        ({"beta": 1.5}, r"beta=1\.5.*\[0, 1\]"),
        ({"teacher_model_kind": "live"}, "teacher_model_kind='live' conflicts"),
        ({"teacher_model": None, "teacher_model_kind": "ema", "peft_config": LoraConfig(r=2)}, "'live' or 'base'"),
        ({"teacher_model": None, "teacher_model_kind": "ema", "offload_frozen_models": True}, "'ema' conflicts"),
        ({"teacher_prompt_template": "{prompt}"}, "with {prompt} and {privileged_context}"),
        ({"distillation_mode": "sampled_token", "beta": 0.5}, "reverse KL"),
        ({"distillation_weight": 0.5}, "pass reward_funcs"),
        ({"lmbda": 0.5, "num_generations": 2}, "num_generations=1"),
        ({"use_successful_as_teacher": True, "reward_funcs": ones}, "num_generations"),
    ],
)
def test_a_missing_or_doubled_teacher_is_refused_in_one_sentence(tmp_path, changes, words):
    with pytest.raises(ArgumentError, match=words):
        make("Distillation", tmp_path, **changes)


@pytest.mark.parametrize(("name", "role"), [("Distillation", "teacher_model"), ("GRPO", "ref_model")])
def test_an_id_that_the_policy_writes_beyond_its_tokenizers_is_named_if_the_other_model_does_not_embed_it(
    tmp_path, name, role
):
    other, changes = tiny_model(seed=1), {} if name == "Distillation" else {"beta": 0.1}
    with pytest.raises(ArgumentError, match=r"1\d, .*13 ids.*resize_token_embeddings"):
        trained(name, tmp_path / "fewer", tiny_model(20), **{role: other}, **changes)
    other.resize_token_embeddings(20)
    trained(name, tmp_path / "as many", tiny_model(20), **{role: other}, **changes)


@pytest.mark.parametrize(("kind", "context"), [("ema", True), ("base", True), (None, False), (None, True)])
def test_only_what_has_no_effect_is_named_of_a_teachers_tokenizer_and_template(tmp_path, caplog, kind, context):
    data = rows_with_context() if context else rows()
    own = {"teacher_model": None, "teacher_model_kind": kind} if kind else {}
    with caplog.at_level(logging.WARNING):
        make("Distillation", tmp_path, data=data, teacher_prompt_template="{privileged_context}{prompt}", **own)
    assert ("tokenizer cannot be loaded" in caplog.text) == (kind is None)
    assert ("teacher_prompt_template" in caplog.text) == (not context)


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


@pytest.mark.parametrize(("changes", "named"), [({}, True), ({"lmbda": 0.5}, False), ({"eval_on_start": True}, False)])
def test_arguments_of_sampling_are_named_if_nothing_is_generated(tmp_path, caplog, changes, named):
    data = rows().add_column("completion", ["12"] * len(rows()))
    with caplog.at_level(logging.WARNING):
        run = make(*("Distillation", tmp_path), data=data, eval_dataset=data, top_p=0.9, **{"lmbda": 0.0, **changes})
    assert ("top_p=0.9 (lmbda=0 takes all completions" in caplog.text) == named
    assert run.top_p == 0.9


def test_a_dry_run_says_who_teaches(tmp_path):
    own = {"teacher_model": None, "teacher_model_kind": "live"}
    live = make("Distillation", tmp_path, data=rows_with_context(), **own)
    assert live.dry_run()["model"]["reference"] == "the policy itself"
    base = make("Distillation", tmp_path, teacher_model=None, peft_config=LoraConfig(r=2))
    assert base.dry_run()["model"]["reference"] == "the policy with its adapters off"


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


def test_a_teacher_reads_a_successful_completion_of_the_same_prompt(tmp_path):
    data = rows().map(lambda row, i: {"privileged_context": "7" if i == 3 else None}, with_indices=True)
    rewarded = {"reward_funcs": ones, "num_generations": 4, "num_iterations": 2, "per_device_train_batch_size": 16}
    own = {
        "teacher_model": None,
        "teacher_model_kind": "live",
        "teacher_prompt_template": "{prompt}{privileged_context}",
    }
    changes = {**SAVED, **rewarded, **own, "data": data, "use_successful_as_teacher": True, "shuffle_dataset": False}
    run = trained("Distillation", tmp_path, max_steps=4, **changes)
    group = list(run.rollout.records)[:4]
    texts = [TOKENIZER.decode(record.completion.ids, skip_special_tokens=True) for record in group]
    assert 0 < sum("1" in text for text in texts) < 4
    prompts = [TOKENIZER.decode(record.teacher_prompt_ids or record.prompt_ids) for record in group]
    following = [
        next(("" if k == i else texts[k] for k in [*range(i + 1, 4), *range(i)] if "1" in texts[k]), "")
        for i in range(4)
    ]
    own_prompt = TOKENIZER.decode(group[0].prompt_ids)
    assert prompts == [own_prompt + text for text in following]
    again = trained("Distillation", tmp_path, max_steps=4, resume=tmp_path / "checkpoint-3", **changes)
    assert same(weights(run), weights(again))


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


def test_a_teacher_in_4_bits_trains_as_its_widened_weights_do(tmp_path, monkeypatch):
    # With it bitsandbytes multiplies in bf16, and repacks weights that then dequantize to others.
    monkeypatch.setattr("bitsandbytes.nn.modules.has_avx512bf16", lambda: False)
    folder = saved(tmp_path / "teacher", tiny_model(seed=1, hidden=64, tied=False))
    packing = {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}
    packed = trained("Distillation", tmp_path / "4", teacher_model=folder, teacher_model_init_kwargs=packing, **SGD)
    wide = trained("Distillation", tmp_path / "32", teacher_model=packed.teacher_model.dequantize().float(), **SGD)
    assert column(packed, "loss") == pytest.approx(column(wide, "loss"), rel=1e-4)


def test_branches_have_no_place_after_another_prompt_of_the_teacher(tmp_path):
    run = make("Distillation", tmp_path)
    record = run.collector.collect(0, 0, None).records[0]
    record = replace(record, completion=replace(record.completion, branches=(Branch(1, 0),)))
    assert len(pack_for_teacher(run.run, (), [replace(record, teacher_prompt_ids=record.prompt_ids)])) == 1
    with pytest.raises(ArgumentError, match="max_branches=1"):
        pack_for_teacher(run.run, (), [replace(record, teacher_prompt_ids=(5, *record.prompt_ids))])

"""TRL's constructors: each argument at TRL's place, and each acts or is refused in one sentence that names it."""

from __future__ import annotations

import inspect

import numpy as np
import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, PrefixTuningConfig, PromptEncoderConfig, PromptTuningConfig, get_peft_model
from transformers import AutoConfig, AutoTokenizer, BitsAndBytesConfig, GenerationConfig

from lowpeak import (
    GRPOConfig,
    GRPOTrainer,
    OnlineDPOConfig,
    OnlineDPOTrainer,
    PPOConfig,
    PPOTrainer,
    RewardConfig,
    RewardTrainer,
    RLOOConfig,
    RLOOTrainer,
    SFTConfig,
    SFTTrainer,
)
from lowpeak.errors import ArgumentError, DataError
from lowpeak.training.step import run_step
from preferences import tiny_classifier
from tiny import char_tokenizer, tiny_model

TOKENIZER = char_tokenizer()
QUANTIZED = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.float32)
PROMPTS = Dataset.from_list([{"prompt": f"{i % 10}="} for i in range(8)])
PAIRS = Dataset.from_list(
    [{"prompt": f"{i % 10}=", "chosen": str(i % 10) * (1 + i % 3), "rejected": str((i + 3) % 10)} for i in range(8)]
)
TEXTS = Dataset.from_list([{"text": f"{i}={i}"} for i in range(10)])
SMALL = {
    "per_device_train_batch_size": 4,
    "max_steps": 1,
    "learning_rate": 1e-2,
    "save_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
    "use_cpu": True,
    "micro_batch_tokens": 64,
}
# TRL 1.16's constructors, by position.
_LOADED = ["processing_class", "reward_processing_classes", "callbacks", "optimizers", "quantization_config"]
_EVALUATED = ["callbacks", "optimizers", "optimizer_cls_and_kwargs", "preprocess_logits_for_metrics"]
_OFFLINE = ["model", "args", "data_collator", "train_dataset", "eval_dataset", "processing_class"]
_ONLINE = ["model", "reward_funcs", "args", "train_dataset", "eval_dataset", *_LOADED, "peft_config"]
POSITIONS = {
    GRPOTrainer: [*_ONLINE, "tools", "rollout_func", "environment_factory"],
    RLOOTrainer: _ONLINE,
    OnlineDPOTrainer: [
        *["model", "ref_model", "reward_funcs", "args", "data_collator", "train_dataset", "eval_dataset"],
        *["processing_class", "reward_processing_classes", "peft_config", "compute_metrics", "callbacks", "optimizers"],
        "preprocess_logits_for_metrics",
    ],
    SFTTrainer: [
        *[*_OFFLINE, "compute_loss_func", "compute_metrics", *_EVALUATED],
        *["quantization_config", "peft_config", "formatting_func"],
    ],
    RewardTrainer: [*_OFFLINE, "compute_metrics", *_EVALUATED, "quantization_config", "peft_config"],
}
CONFIGS = {
    GRPOTrainer: GRPOConfig,
    RLOOTrainer: RLOOConfig,
    PPOTrainer: PPOConfig,
    OnlineDPOTrainer: OnlineDPOConfig,
    SFTTrainer: SFTConfig,
    RewardTrainer: RewardConfig,
}
ONLINE = [GRPOTrainer, RLOOTrainer, PPOTrainer, OnlineDPOTrainer]


def ones(completions, **columns):
    return [float(text.count("1")) for text in completions]


def made(trainer, tmp_path, model=None, data=None, args=None, **parts):
    """A trainer on a tiny model, with a data set that fits it."""
    if trainer in ONLINE:
        parts = {"reward_funcs": ones, **parts}
        args = {"num_generations": 2, "max_completion_length": 4, **(args or {})}
    defaults = {RewardTrainer: (tiny_classifier, PAIRS), SFTTrainer: (tiny_model, TEXTS)}
    make_model, own_data = defaults.get(trainer, (tiny_model, PROMPTS))
    return trainer(
        model=model or make_model(),
        args=CONFIGS[trainer](output_dir=str(tmp_path), **{**SMALL, **(args or {})}),
        train_dataset=data or own_data,
        processing_class=TOKENIZER,
        **parts,
    )


@pytest.mark.parametrize("trainer", POSITIONS)
def test_arguments_stand_where_trl_has_them(trainer):
    parameters = list(inspect.signature(trainer).parameters.values())
    by_position = [each.name for each in parameters if each.kind is each.POSITIONAL_OR_KEYWORD]
    assert by_position[: len(POSITIONS[trainer])] == POSITIONS[trainer]


REFUSED = [
    *[(trainer, name) for trainer in ONLINE for name in ("tools", "environment_factory")],
    *[(trainer, "data_collator") for trainer in (PPOTrainer, OnlineDPOTrainer, SFTTrainer, RewardTrainer)],
    (OnlineDPOTrainer, "compute_metrics"),
    (OnlineDPOTrainer, "preprocess_logits_for_metrics"),
    (SFTTrainer, "compute_loss_func"),
    (RewardTrainer, "preprocess_logits_for_metrics"),
]


@pytest.mark.parametrize(("trainer", "name"), REFUSED)
def test_what_cannot_act_is_refused_by_name_before_anything_is_loaded(tmp_path, trainer, name):
    with pytest.raises(ArgumentError, match=rf"^{name} .*: .+; .+\.$"):
        made(trainer, tmp_path, model="nowhere", **{name: lambda *given: None})
    made(trainer, tmp_path, **{name: None})


@pytest.mark.parametrize("trainer", CONFIGS)
def test_an_argument_that_nobody_knows_is_pythons_own_error(tmp_path, trainer):
    with pytest.raises(TypeError, match=r"'refmodel'"):
        made(trainer, tmp_path, refmodel=None)


# quantization_config


@pytest.mark.parametrize("trainer", [GRPOTrainer, PPOTrainer, SFTTrainer, RewardTrainer])
def test_a_quantization_config_loads_a_4_bit_base(tmp_path, trainer):
    model = tiny_classifier(hidden=64) if trainer is RewardTrainer else tiny_model(hidden=64)
    model.save_pretrained(tmp_path / "base")
    lora = LoraConfig(r=2, target_modules=["q_proj"], task_type="SEQ_CLS" if trainer is RewardTrainer else "CAUSAL_LM")
    run = made(trainer, tmp_path / "run", str(tmp_path / "base"), quantization_config=QUANTIZED, peft_config=lora)
    run.train()
    assert run.model.get_base_model().is_quantized


@pytest.mark.parametrize("trainer", [GRPOTrainer, SFTTrainer, RewardTrainer])
def test_a_quantization_config_without_effect_or_given_twice_is_refused(tmp_path, trainer):
    with pytest.raises(ArgumentError, match=r"quantization_config"):
        made(trainer, tmp_path, quantization_config=QUANTIZED)
    twice = {"model_init_kwargs": {"quantization_config": QUANTIZED}}
    with pytest.raises(ArgumentError, match=r"quantization_config .* model_init_kwargs"):
        made(trainer, tmp_path, "nowhere", args=twice, quantization_config=QUANTIZED)


def test_the_users_arguments_do_not_get_the_quantization_config(tmp_path):
    tiny_model(hidden=64).save_pretrained(tmp_path / "base")
    args = SFTConfig(output_dir=str(tmp_path / "run"), **SMALL)
    lora = LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    SFTTrainer(
        str(tmp_path / "base"),
        args,
        train_dataset=TEXTS,
        processing_class=TOKENIZER,
        quantization_config=QUANTIZED,
        peft_config=lora,
    )
    assert args.model_init_kwargs is None


# adapters of virtual tokens


@pytest.mark.parametrize("config", [PromptTuningConfig, PromptEncoderConfig, PrefixTuningConfig])
@pytest.mark.parametrize("trainer", CONFIGS)
def test_virtual_tokens_are_refused_before_anything_is_loaded(tmp_path, trainer, config):
    kind = "SEQ_CLS" if trainer is RewardTrainer else "CAUSAL_LM"
    with pytest.raises(ArgumentError, match=rf"{config.__name__} .*use LoraConfig"):
        made(trainer, tmp_path, model="nowhere", peft_config=config(task_type=kind, num_virtual_tokens=2))


@pytest.mark.parametrize("trainer", [GRPOTrainer, SFTTrainer])
def test_a_model_with_virtual_tokens_is_refused(tmp_path, trainer):
    model = get_peft_model(tiny_model(), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2))
    with pytest.raises(ArgumentError, match=r"PromptTuningConfig"):
        made(trainer, tmp_path, model=model)


# supervised training


def test_a_formatting_func_that_gives_no_text_is_named(tmp_path):
    with pytest.raises(DataError, match=r"row 0: formatting_func"):
        made(SFTTrainer, tmp_path, data=Dataset.from_list([{"a": "1"}]), formatting_func=lambda row: [row["a"]]).train()


def test_a_formatting_func_makes_the_text_that_is_trained_on(tmp_path):
    rows = [{"question": str(i), "answer": str(i)} for i in range(10)]

    def form(row):
        return f"{row['question']}={row['answer']}"

    runs = [
        made(SFTTrainer, tmp_path / "a", eval_dataset=TEXTS),
        made(SFTTrainer, tmp_path / "b", data=Dataset.from_list(rows), formatting_func=form),
    ]
    for run in runs:
        run.train()
    for plain, formed in zip(runs[0].model.parameters(), runs[1].model.parameters(), strict=True):
        assert plain.equal(formed)
    assert runs[0].evaluate()["eval_loss"] == runs[1].evaluate(Dataset.from_list(rows))["eval_loss"]


@pytest.mark.parametrize("trainer", [SFTTrainer, RewardTrainer])
def test_an_optimizer_class_with_its_keywords_is_used(tmp_path, trainer):
    run = made(trainer, tmp_path, optimizer_cls_and_kwargs=(torch.optim.SGD, {"lr": 0.25, "momentum": 0.5}))
    run.train()
    optimizer = getattr(run.optimizer, "optimizer", run.optimizer)
    assert isinstance(optimizer, torch.optim.SGD)
    assert optimizer.param_groups[0]["momentum"] == 0.5


def test_supervised_training_has_trls_losses(tmp_path):
    """Each token's loss, and for dft the same times the token's probability, which has no gradient."""
    for loss_type in ("nll", "dft"):
        model = tiny_model()
        ids = torch.tensor([[*TOKENIZER(row["text"]).input_ids, TOKENIZER.eos_token_id] for row in TEXTS])
        logits = model(ids).logits[:, :-1].double()
        logprobs = logits.log_softmax(-1).gather(-1, ids[:, 1:, None])
        weights = logprobs.detach().exp() if loss_type == "dft" else 1.0
        loss = -(weights * logprobs).mean()
        expected = torch.autograd.grad(loss, model.lm_head.weight)[0]
        run = made(SFTTrainer, tmp_path, model, args={"loss_type": loss_type, "per_device_train_batch_size": 10})
        work = run.next_step()
        found, _ = run_step(
            run.model, work.micro_batches, run.run.algorithm, run.run.core, run.run.strategy, run.coefficients()
        )
        assert float(found) == pytest.approx(float(loss.detach()), rel=1e-5)
        torch.testing.assert_close(run.model.lm_head.weight.grad, expected, rtol=0, atol=1e-6)
    with pytest.raises(ArgumentError, match=r"loss_type='chunked' .* 'nll', 'dft'"):
        made(SFTTrainer, tmp_path, args={"loss_type": "chunked"})


# metrics of a user's own


def test_a_reward_models_metrics_are_of_chosen_and_rejected_scores(tmp_path):
    seen = []

    def metrics(evaluation):
        seen.append(evaluation)
        return {"order": float((evaluation.predictions.argmax(-1) == evaluation.label_ids).mean()), "eval_pairs": 8}

    run = made(RewardTrainer, tmp_path, eval_dataset=PAIRS, compute_metrics=metrics)
    found = run.evaluate()
    with torch.no_grad():
        expected = [
            [run.model(torch.tensor([TOKENIZER(row["prompt"] + row[side]).input_ids])).logits.item() for side in SIDES]
            for row in PAIRS
        ]
    np.testing.assert_allclose(seen[0].predictions, expected, rtol=0, atol=1e-5)
    assert seen[0].label_ids.tolist() == [0] * 8
    assert found["eval_order"] == found["eval_accuracy"]
    assert found["eval_pairs"] == 8


SIDES = ("chosen", "rejected")


def test_supervised_metrics_are_of_logits_that_were_made_small_a_row_at_a_time(tmp_path):
    seen, shapes = [], []

    def likeliest(logits, labels):
        shapes.append((tuple(logits.shape), tuple(labels.shape)))
        return logits.argmax(-1)

    def metrics(evaluation):
        seen.append(evaluation)
        predictions, labels = evaluation.predictions[:, :-1], evaluation.label_ids[:, 1:]
        counted = labels != -100
        return {"right": float((predictions == labels)[counted].mean())}

    rows = [{"prompt": f"{i}=", "completion": str(i) * (1 + i % 3)} for i in range(10)]
    run = made(
        SFTTrainer,
        tmp_path,
        data=Dataset.from_list(rows),
        compute_metrics=metrics,
        preprocess_logits_for_metrics=likeliest,
    )
    found = run.evaluate(Dataset.from_list(rows[:4]))
    assert shapes[0] == ((1, 4, 13), (1, 4))
    labels = [[-100, -100, *TOKENIZER(row["completion"]).input_ids, TOKENIZER.eos_token_id] for row in rows[:4]]
    longest = max(map(len, labels))
    assert seen[0].label_ids.tolist() == [each + [-100] * (longest - len(each)) for each in labels]
    with torch.no_grad():
        for row, predictions in zip(rows, seen[0].predictions, strict=False):
            ids = [*TOKENIZER(row["prompt"] + row["completion"]).input_ids, TOKENIZER.eos_token_id]
            expected = run.model(torch.tensor([ids])).logits.argmax(-1)[0].tolist()
            assert predictions.tolist() == expected + [-100] * (longest - len(ids))
    assert 0 <= found["eval_right"] <= 1


def test_supervised_metrics_need_logits_that_are_made_small(tmp_path):
    with pytest.raises(ArgumentError, match=r"compute_metrics needs preprocess_logits_for_metrics: .*logits\.argmax"):
        made(SFTTrainer, tmp_path, compute_metrics=len)
    with pytest.raises(ArgumentError, match=r"predict\(\) needs preprocess_logits_for_metrics: .*logits\.argmax"):
        made(SFTTrainer, tmp_path).predict(TEXTS)


def test_predictions_are_what_metrics_are_of(tmp_path):
    seen = []
    for trainer, data, more in (
        (RewardTrainer, PAIRS, {}),
        (SFTTrainer, TEXTS, {"preprocess_logits_for_metrics": lambda logits, labels: logits.argmax(-1)}),
    ):
        plain = made(trainer, tmp_path, **more).predict(data)
        made(trainer, tmp_path, compute_metrics=lambda found: seen.append(found) or {}, **more).evaluate(data)
        np.testing.assert_array_equal(plain.predictions, seen[-1].predictions)
        np.testing.assert_array_equal(plain.label_ids, seen[-1].label_ids)
        assert plain.metrics["test_loss"] > 0


@pytest.mark.parametrize("trainer", CONFIGS)
def test_what_reports_arguments_has_an_evaluations_batch_size(tmp_path, trainer):
    config = CONFIGS[trainer]
    assert config(output_dir=str(tmp_path), use_cpu=True).to_sanitized_dict()["eval_batch_size"] == 8
    given = config(output_dir=str(tmp_path), use_cpu=True, per_device_eval_batch_size=3)
    assert given.eval_batch_size == 3


# the tokenizer that is trained with


def chatting(tmp_path, trainer=SFTTrainer, **args):
    tokenizer = char_tokenizer(chat=True)
    rows = {
        SFTTrainer: [{"messages": [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}]}] * 4,
        RewardTrainer: [{"chosen": "12", "rejected": "3"}] * 4,
    }[trainer]
    model = tiny_classifier(len(tokenizer)) if trainer is RewardTrainer else tiny_model(len(tokenizer))
    config = CONFIGS[trainer](output_dir=str(tmp_path / "run"), **SMALL, **args)
    run = trainer(model, config, train_dataset=Dataset.from_list(rows), processing_class=tokenizer)
    return run, tokenizer


@pytest.mark.parametrize("trainer", [SFTTrainer, RewardTrainer])
def test_special_tokens_can_be_named(tmp_path, trainer):
    run, given = chatting(tmp_path, trainer, eos_token="<user>", pad_token="<system>")
    assert (given.eos_token, given.pad_token) == ("<eos>", "<pad>")
    run.save_model(str(tmp_path / "saved"))
    saved, config = AutoTokenizer.from_pretrained(tmp_path / "saved"), AutoConfig.from_pretrained(tmp_path / "saved")
    assert (saved.eos_token, saved.pad_token) == ("<user>", "<system>")
    assert (config.eos_token_id, config.pad_token_id) == (saved.eos_token_id, saved.pad_token_id)
    if trainer is SFTTrainer:  # what ended a completion before does so still
        ends = GenerationConfig.from_pretrained(tmp_path / "saved").eos_token_id
        assert ends == [saved.eos_token_id, given.eos_token_id]


def test_plain_text_ends_with_the_end_of_sequence_token_that_was_named(tmp_path):
    tokenizer = char_tokenizer()
    run = made(SFTTrainer, tmp_path, args={"eos_token": "9"})
    (record,) = run.cursor.take(1)
    assert record.completion.ids[-1] == tokenizer.convert_tokens_to_ids("9")


def test_a_chat_template_comes_from_a_file(tmp_path):
    (tmp_path / "own.jinja").write_text("{% for m in messages %}{{ m['content'] }}={% endfor %}")
    run, given = chatting(tmp_path, chat_template_path=str(tmp_path / "own.jinja"))
    (record,) = run.cursor.take(1)
    ids = [*record.prompt_ids, *record.completion.ids.tolist()]
    assert given.decode(ids) == "1=2="
    assert given.chat_template != run.processing_class.chat_template


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ({"eos_token": "<none>"}, "eos_token='<none>' is not in the tokenizer's vocabulary"),
        ({"pad_token": "<none>"}, "pad_token='<none>' is not in the tokenizer's vocabulary"),
        ({"chat_template_path": "someone/model"}, "chat_template_path='someone/model' must be a .jinja or .j2 file"),
    ],
)
def test_what_the_tokenizer_cannot_have_is_refused(tmp_path, args, words):
    with pytest.raises(ArgumentError, match=words):
        chatting(tmp_path, **args)

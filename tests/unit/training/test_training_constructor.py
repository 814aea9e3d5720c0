"""TRL's constructors: each argument at TRL's place, and each acts or is refused in one sentence that names it."""

from __future__ import annotations

import inspect
import json
import re
from functools import partial

import numpy as np
import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, PrefixTuningConfig, PromptEncoderConfig, PromptTuningConfig, get_peft_model
from transformers import AutoConfig, AutoTokenizer, BitsAndBytesConfig, GenerationConfig, Trainer

import lowpeak
from lowpeak.errors import ArgumentError, DataError, ModelError
from lowpeak.training.step import run_step
from preference_data import tiny_classifier
from small_runs import KINDS, ONLINE_KINDS, TOKENIZER, make, ones, pair_rows, supervised_rows, trained
from tiny_models import char_tokenizer, tiny_model

QUANTIZED = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.float32)
PAIRS = pair_rows()
TEXTS = Dataset.from_list([{"text": f"{i}={i}"} for i in range(10)])
ONLINE, OFFLINE = ONLINE_KINDS, KINDS[len(ONLINE_KINDS) :]
# TRL 1.16's constructors, by position.
_LOADED = ["processing_class", "reward_processing_classes", "callbacks", "optimizers", "quantization_config"]
_EVALUATED = ["callbacks", "optimizers", "optimizer_cls_and_kwargs", "preprocess_logits_for_metrics"]
_OFFLINE = ["model", "args", "data_collator", "train_dataset", "eval_dataset", "processing_class"]
_PREFERENCES = [
    *["model", "ref_model", *_OFFLINE[1:], "compute_metrics", "callbacks", "optimizers", "quantization_config"],
    "peft_config",
]
_ONLINE = ["model", "reward_funcs", "args", "train_dataset", "eval_dataset", *_LOADED, "peft_config"]
POSITIONS = {
    "GRPO": [*_ONLINE, "tools", "rollout_func", "environment_factory"],
    "RLOO": _ONLINE,
    "Distillation": [
        *["model", "teacher_model", "args", "train_dataset", "eval_dataset", "processing_class", "callbacks"],
        *["optimizers", "quantization_config", "peft_config", "tools"],
    ],
    "OnlineDPO": [
        *["model", "ref_model", "reward_funcs", "args", "data_collator", "train_dataset", "eval_dataset"],
        *["processing_class", "reward_processing_classes", "peft_config", "compute_metrics", "callbacks", "optimizers"],
        "preprocess_logits_for_metrics",
    ],
    "SFT": [
        *[*_OFFLINE, "compute_loss_func", "compute_metrics", *_EVALUATED],
        *["quantization_config", "peft_config", "formatting_func"],
    ],
    "Reward": [*_OFFLINE, "compute_metrics", *_EVALUATED, "quantization_config", "peft_config"],
    "DPO": _PREFERENCES,
    "KTO": _PREFERENCES,
}
sft = partial(make, "SFT", data=TEXTS, max_steps=1)


def trainer_class(kind):
    return getattr(lowpeak, f"{kind}Trainer")


def task_of(kind):
    return "SEQ_CLS" if kind == "Reward" else "CAUSAL_LM"


@pytest.mark.parametrize("kind", KINDS)
def test_arguments_stand_where_trl_has_them_and_no_unknown_one_is_taken(kind):
    parameters = list(inspect.signature(trainer_class(kind)).parameters.values())
    by_position = [each.name for each in parameters if each.kind is each.POSITIONAL_OR_KEYWORD]
    expected = POSITIONS.get(kind, [])  # TRL has no PPOTrainer any more
    assert by_position[: len(expected)] == expected
    with pytest.raises(TypeError, match="'refmodel'"):
        trainer_class(kind)(tiny_model(), **({"reward_funcs": ones} if kind in ONLINE else {}), refmodel=None)


REFUSED = [
    *[(kind, "data_collator") for kind in ("PPO", "OnlineDPO", "SFT", "Reward", "DPO", "KTO")],
    ("OnlineDPO", "compute_metrics"),
    ("OnlineDPO", "preprocess_logits_for_metrics"),
    ("SFT", "compute_loss_func"),
    ("Reward", "preprocess_logits_for_metrics"),
]


@pytest.mark.parametrize(("kind", "name"), REFUSED)
def test_what_cannot_act_is_refused_by_name_before_anything_is_loaded(tmp_path, kind, name):
    with pytest.raises(ArgumentError, match=rf"^{name} .*: .+; .+\.$"):
        make(kind, tmp_path, "nowhere", **{name: lambda *given: None})
    make(kind, tmp_path, **{name: None})


OF_ONLINE = ("rollout_func", "reward_processing_classes", "ref_model", "reward_funcs")
NO_REFERENCE = ("PPO", "Distillation")
OF_OFFLINE = ("compute_metrics", "optimizer_cls_and_kwargs")


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [
        *[(kind, name, 3) for kind in ONLINE for name in OF_ONLINE if name != "ref_model" or kind not in NO_REFERENCE],
        *[(kind, name, 3) for kind in OFFLINE for name in OF_OFFLINE],
        *[
            (kind, name, 3)
            for kind in KINDS
            for name in ("data", "eval_dataset", "tokenizer", "callbacks", "optimizers")
        ],
        *[("SFT", name, 3) for name in ("formatting_func", "preprocess_logits_for_metrics")],
        *[("PPO", "value_model", 3), ("GRPO", "callbacks", [3]), ("SFT", "optimizers", (None,))],
        *[
            (kind, "optimizers", wrong)
            for kind in ("GRPO", "SFT")
            for wrong in ((torch.optim.SGD, None), (None, "cosine"))
        ],
    ],
)
def test_a_value_of_another_kind_is_refused_in_a_sentence_that_names_the_argument(tmp_path, kind, name, value):
    shown = {"data": "train_dataset", "tokenizer": "processing_class"}.get(name, name)
    with pytest.raises((ArgumentError, DataError, ModelError), match=rf"{shown} .*{re.escape(repr(value))}"):
        make(kind, tmp_path, **{name: value})


@pytest.mark.parametrize("kind", ["GRPO", "PPO", "SFT", "Reward"])
def test_an_optimizer_of_other_parameters_is_refused(tmp_path, kind):
    other = torch.optim.SGD(tiny_model().parameters())
    with pytest.raises(ArgumentError, match=r"optimizers .*parameters.*model"):
        make(kind, tmp_path, optimizers=(other, None))


# quantization_config


GIVEN = {"quantization_config": QUANTIZED}


@pytest.mark.parametrize(
    ("kind", "given"),
    [*((kind, GIVEN) for kind in ("GRPO", "PPO", "SFT", "Reward")), ("GRPO", {"model_init_kwargs": GIVEN})],
)
def test_a_quantization_config_loads_a_4_bit_base(tmp_path, kind, given):
    model = tiny_classifier() if kind == "Reward" else tiny_model(hidden=64)
    model.save_pretrained(tmp_path / "base")
    lora = LoraConfig(r=2, target_modules=["q_proj"], task_type=task_of(kind))
    run = make(kind, tmp_path / "run", str(tmp_path / "base"), **given, peft_config=lora)
    assert run.model.get_base_model().is_quantized


def test_the_users_arguments_do_not_get_the_quantization_config(tmp_path):
    tiny_model(hidden=64).save_pretrained(tmp_path / "base")
    args = lowpeak.SFTConfig(output_dir=str(tmp_path / "run"), use_cpu=True, report_to="none")
    parts = {"train_dataset": TEXTS, "processing_class": TOKENIZER, "quantization_config": QUANTIZED}
    lora = LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    lowpeak.SFTTrainer(str(tmp_path / "base"), args, **parts, peft_config=lora)
    assert args.model_init_kwargs is None


@pytest.mark.parametrize("kind", ["GRPO", "SFT", "Reward"])
def test_a_quantization_config_without_effect_or_given_twice_is_refused(tmp_path, kind):
    with pytest.raises(ArgumentError, match=r"quantization_config"):
        make(kind, tmp_path, quantization_config=QUANTIZED)
    with pytest.raises(ArgumentError, match=r"quantization_config .* model_init_kwargs"):
        make(kind, tmp_path, "nowhere", **GIVEN, model_init_kwargs=GIVEN)


# adapters of virtual tokens


@pytest.mark.parametrize("kind", KINDS)
def test_virtual_tokens_are_refused_before_anything_is_loaded(tmp_path, kind):
    for config in (PromptTuningConfig, PromptEncoderConfig, PrefixTuningConfig):
        with pytest.raises(ArgumentError, match=rf"{config.__name__} .*LoraConfig"):
            make(kind, tmp_path, "nowhere", peft_config=config(task_type=task_of(kind), num_virtual_tokens=2))
    if kind in ("GRPO", "SFT"):
        model = get_peft_model(tiny_model(), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2))
        with pytest.raises(ArgumentError, match="PromptTuningConfig"):
            make(kind, tmp_path, model)


# supervised training


def test_a_formatting_func_that_gives_no_text_is_named(tmp_path):
    with pytest.raises(DataError, match=r"row 0: formatting_func"):
        sft(tmp_path, data=Dataset.from_list([{"a": "1"}]), formatting_func=lambda row: [row["a"]]).train()


def test_a_formatting_func_makes_the_text_that_is_trained_on(tmp_path):
    rows = Dataset.from_list([{"question": str(i), "answer": str(i)} for i in range(10)])
    plain = sft(tmp_path / "a", eval_dataset=TEXTS)
    formed = sft(tmp_path / "b", data=rows, formatting_func=lambda row: f"{row['question']}={row['answer']}")
    pairs = zip(plain.cursor.take(10), formed.cursor.take(10), strict=True)
    assert all(one.completion.ids.equal(other.completion.ids) for one, other in pairs)
    assert plain.evaluate()["eval_loss"] == formed.evaluate(rows)["eval_loss"]


@pytest.mark.parametrize("kind", OFFLINE)
def test_an_optimizer_class_with_its_keywords_is_used_and_the_state_is_saved_as_in_a_script(tmp_path, kind):
    given = {"optimizer_cls_and_kwargs": (torch.optim.SGD, {"lr": 0.25, "momentum": 0.5})}
    run = trained(kind, tmp_path, max_steps=1, **given)
    run.save_state()
    assert json.loads((tmp_path / "trainer_state.json").read_text())["global_step"] == 1
    optimizer = getattr(run.optimizer, "optimizer", run.optimizer)
    assert isinstance(optimizer, torch.optim.SGD)
    assert optimizer.param_groups[0]["momentum"] == 0.5


@pytest.mark.parametrize("loss_type", ["nll", "dft"])
def test_supervised_training_has_trls_losses(tmp_path, loss_type):
    """Each token's loss, and for dft the same times the token's probability, which has no gradient."""
    model = tiny_model()
    ids = torch.tensor([[*TOKENIZER(row["text"]).input_ids, TOKENIZER.eos_token_id] for row in TEXTS])
    logprobs = model(ids).logits[:, :-1].double().log_softmax(-1).gather(-1, ids[:, 1:, None])
    loss = -((logprobs.detach().exp() if loss_type == "dft" else 1.0) * logprobs).mean()
    expected = torch.autograd.grad(loss, model.lm_head.weight)[0]
    run = sft(tmp_path, model, loss_type=loss_type, per_device_train_batch_size=10)
    batches, parts = run.next_step().micro_batches, run.run
    found, _ = run_step(run.model, batches, parts.algorithm, parts.logprob_settings, parts.strategy, run.coefficients())
    assert float(found) == pytest.approx(float(loss.detach()), rel=1e-5)
    torch.testing.assert_close(run.model.lm_head.weight.grad, expected, rtol=0, atol=1e-6)


def test_a_loss_that_supervised_training_has_not_is_refused(tmp_path):
    with pytest.raises(ArgumentError, match=r"loss_type='chunked' .* 'nll', 'dft'"):
        sft(tmp_path, loss_type="chunked")


# metrics of a user's own


def test_a_reward_models_metrics_are_of_chosen_and_rejected_scores(tmp_path):
    seen = []

    def metrics(evaluation):
        seen.append(evaluation)
        return {"order": float((evaluation.predictions.argmax(-1) == evaluation.label_ids).mean()), "eval_pairs": 8}

    run = make("Reward", tmp_path, eval_dataset=PAIRS, compute_metrics=metrics)
    found = run.evaluate()

    def score(text):
        return run.model(torch.tensor([TOKENIZER(text).input_ids])).logits.item()

    with torch.no_grad():
        expected = [[score(row["prompt"] + row[side]) for side in ("chosen", "rejected")] for row in PAIRS]
    np.testing.assert_allclose(seen[0].predictions, expected, rtol=0, atol=1e-5)
    assert seen[0].label_ids.tolist() == [0] * 8
    assert found["eval_order"] == found["eval_accuracy"]
    assert found["eval_pairs"] == 8
    predicted = make("Reward", tmp_path).predict(PAIRS)
    np.testing.assert_array_equal(predicted.predictions, seen[0].predictions)
    np.testing.assert_array_equal(predicted.label_ids, seen[0].label_ids)
    assert predicted.metrics["test_loss"] > 0


def likeliest(logits, labels):
    return logits.argmax(-1)


def test_supervised_metrics_are_of_logits_that_were_made_small_a_row_at_a_time(tmp_path):
    seen, shapes = [], []

    def smaller(logits, labels):
        shapes.append((tuple(logits.shape), tuple(labels.shape)))
        return likeliest(logits, labels)

    def metrics(evaluation):
        seen.append(evaluation)
        predictions, labels = evaluation.predictions[:, :-1], evaluation.label_ids[:, 1:]
        return {"right": float((predictions == labels)[labels != -100].mean())}

    rows = supervised_rows(4)
    run = make("SFT", tmp_path, compute_metrics=metrics, preprocess_logits_for_metrics=smaller)
    found = run.evaluate(rows)
    assert shapes[0] == ((1, 4, 13), (1, 4))
    labels = [[-100, -100, *TOKENIZER(row["completion"]).input_ids, TOKENIZER.eos_token_id] for row in rows]
    longest = max(map(len, labels))
    assert seen[0].label_ids.tolist() == [each + [-100] * (longest - len(each)) for each in labels]
    for row, predictions in zip(rows, seen[0].predictions, strict=True):
        ids = [*TOKENIZER(row["prompt"] + row["completion"]).input_ids, TOKENIZER.eos_token_id]
        expected = run.model(torch.tensor([ids])).logits.argmax(-1)[0].tolist()
        assert predictions.tolist() == expected + [-100] * (longest - len(ids))
    assert 0 <= found["eval_right"] <= 1
    predicted = make("SFT", tmp_path, preprocess_logits_for_metrics=likeliest).predict(rows)
    np.testing.assert_array_equal(predicted.predictions, seen[0].predictions)
    np.testing.assert_array_equal(predicted.label_ids, seen[0].label_ids)
    assert predicted.metrics["test_loss"] > 0


def test_supervised_metrics_need_logits_that_are_made_small(tmp_path):
    with pytest.raises(ArgumentError, match=r"compute_metrics .*preprocess_logits_for_metrics: .*logits\.argmax"):
        sft(tmp_path, compute_metrics=len)
    with pytest.raises(ArgumentError, match=r"predict\(\) .*preprocess_logits_for_metrics: .*logits\.argmax"):
        sft(tmp_path).predict(TEXTS)


# the tokenizer that is trained with


def chatting(tmp_path, kind="SFT", **args):
    tokenizer = char_tokenizer(chat=True)
    rows = {
        "SFT": [{"messages": [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}]}] * 4,
        "KTO": [{"prompt": "1", "completion": "2", "label": True}] * 4,
    }.get(kind, [{"chosen": "12", "rejected": "3"}] * 4)
    model = (tiny_classifier if kind == "Reward" else tiny_model)(len(tokenizer))
    return make(kind, tmp_path / "run", model, Dataset.from_list(rows), tokenizer, **args), tokenizer


@pytest.mark.parametrize("kind", OFFLINE)
def test_special_tokens_can_be_named(tmp_path, kind):
    run, given = chatting(tmp_path, kind, eos_token="<user>", pad_token="<system>")
    assert (given.eos_token, given.pad_token) == ("<eos>", "<pad>")
    run.save_model(str(tmp_path / "saved"))
    saved, config = AutoTokenizer.from_pretrained(tmp_path / "saved"), AutoConfig.from_pretrained(tmp_path / "saved")
    assert (saved.eos_token, saved.pad_token) == ("<user>", "<system>")
    assert (config.eos_token_id, config.pad_token_id) == (saved.eos_token_id, saved.pad_token_id)
    if kind == "SFT":  # what ended a completion before does so still
        ends = GenerationConfig.from_pretrained(tmp_path / "saved").eos_token_id
        assert ends == [saved.eos_token_id, given.eos_token_id]


def test_plain_text_ends_with_the_end_of_sequence_token_that_was_named(tmp_path):
    (record,) = sft(tmp_path, eos_token="9", tokenizer=char_tokenizer()).cursor.take(1)
    assert record.completion.ids[-1] == TOKENIZER.convert_tokens_to_ids("9")


def test_a_chat_template_comes_from_a_file(tmp_path):
    (tmp_path / "own.jinja").write_text("{% for m in messages %}{{ m['content'] }}={% endfor %}")
    run, given = chatting(tmp_path, chat_template_path=str(tmp_path / "own.jinja"))
    (record,) = run.cursor.take(1)
    assert given.decode([*record.prompt_ids, *record.completion.ids.tolist()]) == "1=2="
    assert given.chat_template != run.processing_class.chat_template


def saved_chat(folder, added=()):
    """A folder of another model with a chat template, tokens of its own and another end of a sequence."""
    source = char_tokenizer(chat=True)
    source.add_tokens([*added])
    source.chat_template = "{% for m in messages %}{{ m['content'] }}<eot>{% endfor %}"
    source.eos_token = "<eot>" if added else "<user>"
    source.save_pretrained(folder)
    return str(folder)


def test_a_chat_template_comes_from_a_model_with_its_tokens_and_its_end(tmp_path):
    run, given = chatting(tmp_path, chat_template_path=saved_chat(tmp_path / "other", ["<eot>"]))
    (record,) = run.cursor.take(1)
    new = len(given)
    one, two = given.convert_tokens_to_ids(["1", "2"])
    assert [*record.prompt_ids, *record.completion.ids.tolist()] == [one, new, two, new]
    assert run.model.get_input_embeddings().num_embeddings == len(run.processing_class) == new + 1
    assert (run.processing_class.eos_token_id, run.model.config.eos_token_id) == (new, new)
    assert run.model.generation_config.eos_token_id == [new, given.eos_token_id]
    assert run.train().global_step == 2


def test_tokens_of_a_models_chat_template_are_not_left_untrained_under_an_adapter(tmp_path):
    lora = LoraConfig(r=2, target_modules=["q_proj"])
    with pytest.raises(ArgumentError, match=r"^chat_template_path=.* adapter"):
        chatting(tmp_path, peft_config=lora, chat_template_path=saved_chat(tmp_path / "other", ["<eot>"]))
    run, _ = chatting(tmp_path, peft_config=lora, chat_template_path=saved_chat(tmp_path / "same"))
    assert run.processing_class.eos_token == "<user>"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("eos_token", "<none>"), ("pad_token", "<none>")),
        *(("chat_template_path", "someone/model"), ("chat_template_path", "none.jinja")),
    ],
)
def test_what_the_tokenizer_cannot_have_is_refused(tmp_path, name, value):
    with pytest.raises(ArgumentError, match=f"^{name}='{value}'"):
        chatting(tmp_path, **{name: value})


@pytest.mark.parametrize("kind", KINDS)
def test_public_methods_of_transformers_trainer_take_its_arguments(kind):
    ours = getattr(lowpeak, f"{kind}Trainer")
    names = {name for name in dir(Trainer) if not name.startswith("_")} - {"create_model_card"}  # TRL's arguments
    for name in names:
        own, theirs = getattr(ours, name), getattr(Trainer, name)
        if own is theirs or not inspect.isfunction(own):
            continue
        parameters = inspect.signature(own).parameters.values()
        required = {
            each.name for each in parameters if each.default is each.empty and each.kind is each.POSITIONAL_OR_KEYWORD
        }
        assert required <= inspect.signature(theirs).parameters.keys(), name

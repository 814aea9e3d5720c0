"""What a TRL user reads or changes on a trainer: attributes, arguments, prepared datasets, throughput, tags."""

from __future__ import annotations

import json

import pytest
from datasets import Dataset
from peft import LoraConfig
from transformers import TrainerCallback, TrainingArguments

import lowpeak
from lowpeak.errors import ArgumentError
from preference_data import tiny_classifier
from small_runs import DATA, KINDS, ONLINE_KINDS, TOKENIZER, make, ones, pair_rows, rows, supervised_rows
from tiny_models import char_tokenizer, tiny_model

ONLINE = ONLINE_KINDS


# attributes


@pytest.mark.parametrize("kind", ONLINE)
def test_an_online_trainer_has_its_rewards_and_its_reference_as_trls_has(tmp_path, kind):
    scorer, tokenizers = tiny_classifier(), [None, TOKENIZER]
    parts = {"reward_funcs": [ones, scorer], "reward_processing_classes": tokenizers}
    run = make(kind, tmp_path, **parts, reward_weights=[1.0, 0.5], beta=0.1)
    assert run.reward_funcs == [ones, scorer]
    assert run.reward_func_names == ["ones", "Qwen2ForSequenceClassification"]
    assert run.reward_processing_classes == tokenizers
    assert list(run.reward_weights) == [1.0, 0.5]
    assert run.ref_model is run.run.reference.model
    assert (run.processing_class, run.rollout_func) == (TOKENIZER, None)
    assert (run.max_completion_length, run.temperature, run.num_iterations) == (5, 1.0, run.args.num_iterations)


def test_a_trainer_without_a_kl_or_with_an_adapter_has_no_reference_model(tmp_path):
    assert make("GRPO", tmp_path).ref_model is None
    lora = LoraConfig(r=2, target_modules=["q_proj"])
    assert make("GRPO", tmp_path, beta=0.1, peft_config=lora).ref_model is None


def test_an_argument_that_changes_during_the_run_has_its_present_value(tmp_path):
    seen = []

    class Read(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            seen.append((run.beta, run.loss_type))

    sizes = {"per_device_train_batch_size": 64, "max_steps": -1, "num_train_epochs": 2}
    run = make("OnlineDPO", tmp_path, beta=[0.5, 0.25], callbacks=[Read()], **sizes)
    run.train()
    assert seen == [(0.5, "sigmoid"), (0.25, "sigmoid")]


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        *(("GRPO", name) for name in ("temperature", "beta", "ref_model", "reward_funcs")),
        *((kind, name) for kind in ("GRPO", "SFT") for name in ("max_length", "train_dataset", "shuffle_dataset")),
    ],
)
def test_an_attribute_whose_change_would_have_no_effect_cannot_be_set(tmp_path, kind, name):
    run = make(kind, tmp_path)
    if (kind, name) == ("GRPO", "max_length"):  # no argument of GRPO's
        run.max_length = 3
        return
    with pytest.raises(ArgumentError, match=f"^{name} .*{kind}Trainer"):
        setattr(run, name, None)


def test_an_attribute_that_no_trainer_has_raises(tmp_path):
    with pytest.raises(AttributeError, match=r"'GRPOTrainer' .*'nothing'"):
        _ = make("GRPO", tmp_path).nothing


@pytest.mark.parametrize(("kind", "name"), [("GRPO", "grpo"), ("SFT", "sft"), ("Reward", "reward")])
def test_a_model_has_the_tags_of_lowpeak_and_of_its_algorithm(tmp_path, kind, name):
    assert make(kind, tmp_path).model.model_tags == ["lowpeak", name]


# arguments


def own(kind, args):
    """A trainer with exactly these arguments."""
    model = tiny_classifier() if kind == "Reward" else tiny_model()
    model.config.max_position_embeddings = 1024  # a default of max_completion_length fits
    rewards = {"teacher_model": tiny_model(seed=1)} if kind == "Distillation" else {}
    rewards |= {"reward_funcs": ones} if kind in ONLINE else {}
    data = DATA.get(kind, rows)()
    return getattr(lowpeak, f"{kind}Trainer")(
        model=model, args=args, train_dataset=data, processing_class=TOKENIZER, **rewards
    )


QUIET = {"use_cpu": True, "report_to": "none", "save_strategy": "no", "disable_tqdm": True}


@pytest.mark.parametrize("kind", ["GRPO", "SFT"])
def test_a_length_that_is_changed_before_train_acts_and_a_second_trainer_takes_it_too(tmp_path, kind):
    args = make(kind, tmp_path, max_steps=4).user_args
    first = own(kind, args)
    args.max_steps = 2
    assert first.train().global_step == 2
    first.args.max_steps = 3
    assert first.train().global_step == 3
    assert args.max_steps == 2
    assert own(kind, args).train().global_step == 2


def test_epochs_that_are_asked_for_later_act_and_are_named_beside_max_steps(tmp_path, caplog):
    args = make("SFT", tmp_path, max_steps=2, num_train_epochs=1).user_args
    run = own("SFT", args)
    args.num_train_epochs = 5
    run.train()
    assert "num_train_epochs=5" in caplog.records[-1].message
    args.max_steps = -1
    assert run.train().global_step == 5


@pytest.mark.parametrize(("kind", "name", "value"), [("GRPO", "temperature", 0.5), ("SFT", "learning_rate", 1.0)])
def test_an_argument_that_is_changed_too_late_raises(tmp_path, kind, name, value):
    for place in ("user_args", "args"):
        run = make(kind, tmp_path)
        setattr(getattr(run, place), name, value)
        for use in (run.train, lambda run=run: run.evaluate(DATA.get(kind, rows)())):
            with pytest.raises(ArgumentError, match=f"{name}={value}.*{kind}Trainer.*{name}="):
                use()


def test_a_changed_length_is_checked(tmp_path):
    run = make("SFT", tmp_path)
    run.args.max_steps = 0
    with pytest.raises(ArgumentError, match=r"max_steps=0 .*1"):
        run.train()


@pytest.mark.parametrize("kind", KINDS)
def test_plain_training_arguments_become_the_trainers_config(tmp_path, kind):
    args = TrainingArguments(output_dir=str(tmp_path), max_steps=1, learning_rate=0.5, **QUIET)
    run = own(kind, args)
    assert type(run.user_args) is getattr(lowpeak, f"{kind}Config")
    assert (run.user_args.learning_rate, run.user_args.num_train_epochs) == (0.5, args.num_train_epochs)
    assert run.user_args.checkpoints_activations == bool(args.gradient_checkpointing)
    assert run.train().global_step == 1


def test_arguments_that_only_another_class_has_are_not_lost(tmp_path):
    class Extended(TrainingArguments):
        pass

    with pytest.raises(ArgumentError, match=r"Extended; .*lowpeak\.SFTConfig"):
        own("SFT", Extended(output_dir=str(tmp_path), **QUIET))


# throughput


@pytest.mark.parametrize(
    ("kind", "length", "num_steps", "num_rows"),
    [
        ("SFT", {"max_steps": -1, "num_train_epochs": 3}, 6, 8),
        ("SFT", {"max_steps": 3}, 3, 8),
        ("Reward", {"max_steps": -1, "num_train_epochs": 2}, 4, 8),
        ("GRPO", {"max_steps": -1, "num_train_epochs": 1}, 8, 16),
        ("GRPO", {"max_steps": 2}, 2, 16),
        ("GRPO", {"max_steps": 4, "num_iterations": 2}, 4, 16),
    ],
    ids=str,
)
def test_throughput_counts_the_rows_of_the_steps(tmp_path, kind, length, num_steps, num_rows):
    sizes = {"per_device_train_batch_size": 4 if kind == "GRPO" else 2, "gradient_accumulation_steps": 2}
    run = make(kind, tmp_path, **sizes, **length)
    assert run.num_examples(run.get_train_dataloader()) == num_rows
    output = run.train()
    assert output.global_step == num_steps
    ratio = output.metrics["train_samples_per_second"] / output.metrics["train_steps_per_second"]
    assert ratio == pytest.approx(8 if kind == "GRPO" else 4, rel=0.01)
    assert output.metrics["epoch"] == run.state.log_history[-1]["epoch"] == run.state.epoch


def test_a_stream_has_the_rows_of_all_steps_and_another_dataloader_its_own(tmp_path):
    run = make("SFT", tmp_path, data=supervised_rows().to_iterable_dataset(), eval_dataset=supervised_rows(3))
    assert run.num_examples(run.get_train_dataloader()) == 16
    assert run.num_examples(run.get_eval_dataloader()) == 3


# datasets


def test_rows_of_supervised_training_show_ids_and_labels(tmp_path):
    data = supervised_rows(4)
    run = make("SFT", tmp_path, data=data, eval_dataset={"a": data}, max_length=4)
    row = run.train_dataset[2]
    ids = [*TOKENIZER("2=222").input_ids, TOKENIZER.eos_token_id]
    assert row == {**data[2], "input_ids": ids[:4], "labels": [-100, -100, *ids[2:4]]}
    assert run.train_dataset.column_names == ["prompt", "completion", "input_ids", "labels"]
    assert list(run.eval_dataset["a"]["labels"])[2] == row["labels"]
    assert [len(ids) for ids in run.train_dataset.shuffle(seed=1)[:2]["input_ids"]] == [4, 4]
    assert data.column_names == ["prompt", "completion"]


def test_rows_of_reward_training_show_the_ids_of_both_answers(tmp_path):
    data = pair_rows(4).shuffle(seed=1)
    run = make("Reward", tmp_path, data=data)
    for row, given in zip(run.train_dataset, data, strict=True):
        ids = {f"{side}_ids": TOKENIZER(given["prompt"] + given[side]).input_ids for side in ("chosen", "rejected")}
        assert row == {**given, **ids}


def test_streams_lists_and_transformed_datasets_stay_as_they_are(tmp_path):
    stream, own = supervised_rows().to_iterable_dataset(), supervised_rows(2).with_transform(lambda batch: batch)
    run = make("SFT", tmp_path, data=stream, eval_dataset={"list": list(own), "own": own})
    assert run.train_dataset is stream
    assert run.eval_dataset == {"list": list(own), "own": own}


@pytest.mark.parametrize("kind", ["SFT", "Reward"])
def test_the_rows_that_are_shown_measure_as_those_that_were_passed(tmp_path, kind):
    completion_only = {"completion_only_loss": True} if kind == "SFT" else {}
    for data in (DATA[kind](), DATA[kind]().shuffle(seed=1)):
        run = make(kind, tmp_path, eval_dataset=data, **completion_only)
        found = {run.evaluate(each)["eval_loss"] for each in (None, run.eval_dataset, data)}
        assert len(found) == 1
        run.evaluate(run.eval_dataset.select([1, 3]))


@pytest.mark.parametrize("pack", [list, json.dumps], ids=["list", "text"])
@pytest.mark.parametrize("kind", ["SFT", "Reward"])
def test_tools_of_a_row_reach_the_template_without_keys_that_only_other_rows_have(tmp_path, kind, pack):
    tokenizer = char_tokenizer('0123456789=ab{}": ', chat=True)
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}={{ tools[0].ab | tojson }}"
    ask = [{"role": "user", "content": "1"}]
    answers = {
        name: [*ask, {"role": "assistant", "content": text}] for name, text in (("chosen", "2"), ("rejected", "3"))
    }
    columns = answers if kind == "Reward" else {"messages": answers["chosen"]}
    schemas = ({"a": 1}, {"b": 2})
    data = Dataset.from_list([{**columns, "tools": pack([{"ab": schema}])} for schema in schemas])
    model = (tiny_classifier if kind == "Reward" else tiny_model)(len(tokenizer))
    run = make(kind, tmp_path, model, data, tokenizer)
    shown = [tokenizer.decode(row["chosen_ids" if kind == "Reward" else "input_ids"]) for row in run.train_dataset]
    assert shown == ['12={"a": 1}', '12={"b": 2}']

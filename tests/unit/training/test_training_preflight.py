"""Data and adapters that cannot be used are told before any weights are read: here the model's folder has none."""

from __future__ import annotations

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig

import lowpeak
from child_processes import free_port
from lowpeak.cli.commands import main
from lowpeak.errors import ArgumentError, DataError, EngineError, MissingPackageError, ModelError, RewardError
from lowpeak.models.sharded_loading import allow_missing_weights
from lowpeak.rewards.builtin import get_cosine_scaled_reward
from lowpeak.setup.optimization import check_optimizer
from lowpeak.setup.preflight import check_adapter
from small_runs import KINDS, TOKENIZER, make, saved
from tiny_models import tiny_model

ROWS = {"prompt": ["1="] * 8, "completion": ["1"] * 8, "chosen": ["1"] * 8, "rejected": ["2"] * 8}
TABLE, WRONG = Dataset.from_dict(ROWS), Dataset.from_dict({"question": ["1="] * 8})
EACH = pytest.mark.parametrize("trainer", KINDS)


@pytest.fixture
def folder(tmp_path):
    """A folder with a model's config and tokenizer, without weights."""
    saved(tmp_path / "model", tiny_model())
    (tmp_path / "model" / "model.safetensors").unlink()
    return tmp_path


def build(trainer, folder, data=TABLE, eval_data=None, **changes):
    return make(trainer, folder / "run", str(folder / "model"), data, False, eval_dataset=eval_data, **changes)


@EACH
def test_a_model_without_weights_is_told_where_all_else_is_right(folder, trainer):
    with pytest.raises(ModelError, match=r"'.*model'.*model\.safetensors"):
        build(trainer, folder, eval_data=TABLE, peft_config=LoraConfig(task_type=None), eval_strategy="steps")


def test_a_dry_run_without_weights_has_a_reference(folder):
    with allow_missing_weights():
        trainer = build("GRPO", folder, beta=0.1)
    assert trainer.dry_run()["model"]["reference"] == "Qwen2ForCausalLM"


@EACH
def test_wrong_columns_are_told_first(folder, trainer):
    for data, eval_data, names in (
        (WRONG, None, r"^row 0 .*'question'.*rename"),
        (TABLE, WRONG, r"^eval_dataset: row 0 .*'question'.*rename"),
        (TABLE, {"easy": TABLE, "hard": WRONG}, r"^eval_dataset\['hard'\]: row 0 .*'question'.*rename"),
        (None, None, "train_dataset"),
    ):
        with pytest.raises(DataError, match=names):
            build(trainer, folder, data, eval_data)


def graded(completions, grade, **columns):
    return [0.0] * len(completions)


def graded_by_default(completions, grade=None):
    return [0.0] * len(completions)


GRADED = TABLE.add_column("grade", [1] * 8)


@pytest.mark.parametrize("trainer", ["GRPO", "RLOO", "PPO", "OnlineDPO"])
def test_a_column_that_a_reward_needs_is_told_first(folder, trainer):
    for reward, data, eval_data, names in (
        (graded, TABLE, None, r"^row 0: Reward 'graded' .*grade.*completion"),
        (graded, GRADED, TABLE, "^eval_dataset: row 0: Reward 'graded'"),
        (graded, GRADED, {"hard": TABLE}, r"^eval_dataset\['hard'\]: row 0: Reward 'graded'"),
        ("exact_match", TABLE, None, "^row 0: Reward 'exact_match' .*'answer' or 'solution'"),
    ):
        with pytest.raises(RewardError, match=names):
            build(trainer, folder, data, eval_data, reward_funcs=reward)
    for rest in ({"reward_funcs": graded_by_default}, {"reward_funcs": graded, "rollout_func": lambda *_: {}}):
        with pytest.raises(ModelError):
            build(trainer, folder, **rest)


def test_a_package_that_a_reward_or_a_tracker_needs_is_told_first(folder, monkeypatch):
    monkeypatch.setattr("lowpeak.errors.is_installed", lambda package: package != "math_verify")
    monkeypatch.setattr("lowpeak.setup.preflight.get_available_reporting_integrations", list)
    solved = TABLE.add_column("solution", ["1"] * 8)
    for reward in ("accuracy_reward", "reasoning_accuracy_reward", get_cosine_scaled_reward(8)):
        with pytest.raises(MissingPackageError, match="math-verify"):
            build("GRPO", folder, solved, reward_funcs=reward)
    for trainer in ("GRPO", "SFT"):
        with pytest.raises(MissingPackageError, match=r"report_to='wandb' .*pip install wandb"):
            build(trainer, folder, report_to=["wandb"])


def test_a_server_that_does_not_answer_is_told_first_but_a_dry_run_needs_none(folder):
    url = f"http://127.0.0.1:{free_port()}"
    server = {"use_vllm": True, "vllm_mode": "server", "vllm_server_base_url": url, "vllm_server_timeout": 0.1}
    with pytest.raises(EngineError, match=f"no vLLM was ready at {url}"):
        build("GRPO", folder, **server)
    with allow_missing_weights():
        build("GRPO", folder, **server)


@EACH
def test_a_tokenizer_under_its_former_name_is_told_the_new_one(tmp_path, trainer):
    args = getattr(lowpeak, f"{trainer}Config")(output_dir=str(tmp_path), use_cpu=True)
    rewards = {} if trainer in ("SFT", "Reward") else {"reward_funcs": graded}
    with pytest.raises(ArgumentError, match=r"tokenizer .*processing_class"):
        getattr(lowpeak, f"{trainer}Trainer")("nowhere", args=args, tokenizer=TOKENIZER, **rewards)


@EACH
@pytest.mark.parametrize("changes", [{"eval_strategy": "steps"}, {"eval_on_start": True}])
def test_an_evaluation_without_data_is_told_first(folder, trainer, changes):
    with pytest.raises(ArgumentError, match=rf"{next(iter(changes))}=.*eval_dataset"):
        build(trainer, folder, **changes)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"lr_scheduler_kwargs": {"foo": 1}}, r"lr_scheduler_type='linear', lr_scheduler_kwargs={'foo': 1}"),
        ({"lr_scheduler_type": "cosine_with_min_lr"}, "lr_scheduler_type='cosine_with_min_lr'"),
        ({"optim": "sgd", "optim_args": "a"}, "optim_args='a'"),
        ({"optim": "sgd", "optim_args": "momentum=fast"}, "optim_args='momentum=fast'"),
        ({"optim": "sgd", "optim_args": "momentum=0.9,momentun=0.9"}, "optim_args .*momentun=0.9.*'sgd'"),
        ({"optim": "sgd", "optim_args": "momentum=-1"}, "optim_args='momentum=-1'"),
        ({"gradient_checkpointing_kwargs": {"foo": 1}}, r"_checkpointing_kwargs=.*foo.*use_reentrant"),
        ({"report_to": "foo"}, r"report_to=\['foo'\]"),
        ({"report_to": {}}, "report_to"),
        ({"optim": "galore_adamw"}, "optim='galore_adamw'"),
        ({"optim": "lomo"}, "optim='lomo'"),
        ({"optim": "galore_adamw_layerwise", "optim_target_modules": "all-linear"}, "optim='galore_adamw_layerwise'"),
    ],
    ids=str,
)
def test_an_optimizer_a_schedule_or_a_tracker_that_cannot_be_made_is_told_first(folder, changes, words):
    for trainer in ("GRPO", "SFT"):
        with pytest.raises(ArgumentError, match=words):
            build(trainer, folder, **changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"optim": "sgd", "optim_args": "momentum=0, nesterov=false"},
        {"optim": "rmsprop", "optim_args": "alpha=0.9,centered=true"},
        {"optim_args": "momentum=0.9"},  # named as without effect
        {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr": 0.0}},
        {"lr_scheduler_type": "constant", "lr_scheduler_kwargs": {"foo": 1}},
    ],
    ids=str,
)
def test_an_optimizer_and_a_schedule_that_can_be_made_are_not_refused(folder, changes):
    with pytest.raises(ModelError):
        build("SFT", folder, **changes)


@pytest.mark.parametrize(
    ("trainer", "data", "changes", "names"),
    [
        ("GRPO", TABLE, {"eval_on_start": True}, "loss"),
        ("SFT", {"easy": TABLE}, {"eval_steps": 1}, "easy_loss"),
    ],
)
def test_a_metric_that_no_evaluation_has_is_named_with_those_that_it_has(tmp_path, trainer, data, changes, names):
    changes = {"eval_strategy": "steps", "eval_steps": 2, **changes, "metric_for_best_model": "foo"}
    run = make(trainer, tmp_path, data=TABLE, eval_dataset=data, **changes)
    with pytest.raises(ArgumentError, match=rf"metric_for_best_model='foo'.*\b{names}\b"):
        run.train()
    assert run.evaluate()


@pytest.mark.parametrize(
    ("trainer", "changes", "words"),
    [
        *((kind, {"target_modules": ["nope"]}, "'nope'") for kind in KINDS),
        ("GRPO", {"layers_to_transform": [9]}, "Target modules"),
        *(("SFT", {"r": value}, f"r={value}") for value in (0, -1)),
        *((kind, {"task_type": "SEQ_CLS"}, "task_type='SEQ_CLS'.*CAUSAL_LM") for kind in ("GRPO", "SFT")),
        *(("PPO", {"lora_alpha": 0}, "lora_alpha=0"), ("Reward", {"lora_dropout": 1.5}, "lora_dropout=1.5")),
    ],
)
def test_an_adapter_that_does_not_fit_is_told_first(folder, trainer, changes, words):
    with pytest.raises(ArgumentError, match=rf"peft_config .*{words}"):
        build(trainer, folder, peft_config=LoraConfig(**changes))


def test_an_adapter_that_does_not_fit_an_instance_is_one_sentence(tmp_path):
    with pytest.raises(ArgumentError, match=r"peft_config .*\(Target modules"):
        make("SFT", tmp_path, peft_config=LoraConfig(target_modules=["nope"]))


def test_looking_whether_an_adapter_and_an_optimizer_fit_draws_no_random_number(folder):
    from transformers import AutoModelForCausalLM

    args, before = lowpeak.SFTConfig(output_dir=str(folder), use_cpu=True), torch.get_rng_state()
    check_adapter(LoraConfig(target_modules="all-linear"), str(folder / "model"), AutoModelForCausalLM, args)
    check_optimizer(args, (None, None))
    assert torch.equal(torch.get_rng_state(), before)


def test_the_command_says_first_that_there_is_nothing_to_resume_from(folder, capsys):
    TABLE.to_json(folder / "rows.jsonl")
    words = ["sft", "--model", f"{folder}/model", "--dataset", f"{folder}/rows.jsonl", "--output_dir", f"{folder}/out"]
    for given, named in (("true", "checkpoint-N"), (f"{folder}/no", f"{folder}/no")):
        assert main([*words, "--use_cpu", "--resume_from_checkpoint", given, "--dry-run"]) == 2
        assert named in capsys.readouterr().err
        assert main([*words, "--use_cpu", "--resume_from_checkpoint", given]) == 2
        assert named in capsys.readouterr().err

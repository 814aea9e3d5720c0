"""Names of TRL's former PPO script: each acts, from Python, the command line and a file, or is an error with a remedy."""

from __future__ import annotations

import pytest
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from lowpeak import PPOConfig, PPOTrainer
from lowpeak.cli.train import parse_job
from lowpeak.errors import ArgumentError
from lowpeak.heads import SeparateCritic, causal_lm, critic_of
from preference_data import tiny_classifier
from small_runs import TOKENIZER, make, ones, rows, saved
from tiny_models import tiny_model

SIZES = {"per_device_train_batch_size": 4, "num_mini_batches": 2, "num_ppo_epochs": 3}
RUN = {**SIZES, "max_completion_length": 4, "use_cpu": True, "report_to": "none", "save_strategy": "no"}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return saved(folder / "sft", tiny_model()), saved(folder / "reward", tiny_classifier())


def test_total_episodes_are_completions_and_set_the_steps(tmp_path):
    # 20 episodes take three rollouts of 8, each of 2 steps in 3 passes.
    args = PPOConfig(output_dir=str(tmp_path), total_episodes=20, **RUN)
    assert (args.max_steps, args.alias_of["max_steps"]) == (18, "total_episodes")
    with pytest.raises(ArgumentError, match=r"total_episodes=20 .*max_steps=5"):
        PPOConfig(output_dir=str(tmp_path), total_episodes=20, max_steps=5, **RUN)
    with pytest.raises(ArgumentError, match="total_episodes=0"):
        PPOConfig(output_dir=str(tmp_path), total_episodes=0, **RUN)


def test_the_former_script_runs_with_its_import_changed(tmp_path, models):
    sft, reward = models
    args = PPOConfig(
        output_dir=str(tmp_path),
        sft_model_path=sft,
        reward_model_path=reward,
        total_episodes=8,
        dataset_num_proc=1,
        **RUN,
    )
    data = rows().map(lambda row: row, num_proc=args.dataset_num_proc)
    trainer = PPOTrainer(
        args=args,
        processing_class=TOKENIZER,
        model=AutoModelForCausalLM.from_pretrained(args.sft_model_path),
        ref_model=AutoModelForCausalLM.from_pretrained(args.sft_model_path),
        reward_model=AutoModelForSequenceClassification.from_pretrained(args.reward_model_path, num_labels=1),
        value_model=AutoModelForSequenceClassification.from_pretrained(args.reward_model_path, num_labels=1),
        train_dataset=data,
    )
    assert isinstance(critic_of(causal_lm(trainer.model)), SeparateCritic)
    trainer.train()
    assert trainer.state.global_step == 6


def test_paths_load_the_models_that_are_not_passed_and_contradict_others(tmp_path, models):
    sft, reward = models
    args = PPOConfig(output_dir=str(tmp_path), sft_model_path=sft, reward_model_path=reward, max_steps=1, **RUN)
    named = PPOTrainer(args=args, processing_class=TOKENIZER, train_dataset=rows())
    assert named.model.config._name_or_path == sft
    assert len(named.collector.panel.names) == 1
    for name, parts in (("sft_model_path", {"model": tiny_model()}), ("reward_model_path", {"reward_funcs": ones})):
        with pytest.raises(ArgumentError, match=f"{name}="):
            PPOTrainer(args=args, processing_class=TOKENIZER, train_dataset=rows(), **parts)
    with pytest.raises(ArgumentError, match="reward_model_path="):
        make("OnlineDPO", tmp_path, reward_model_path="another")


def test_a_value_model_is_the_critic(tmp_path):
    assert isinstance(critic_of(causal_lm(make("PPO", tmp_path, value_model=tiny_classifier()).model)), SeparateCritic)


@pytest.mark.parametrize("kind", ["ppo", "online-dpo"])
def test_the_command_line_and_a_file_take_the_same_names(tmp_path, kind):
    paths = {"sft_model_path": "policy", "reward_model_path": "judge"}
    words = [word for name, path in paths.items() for word in (f"--{name}", path)]
    (tmp_path / "run.yaml").write_text("".join(f"{name}: {path}\n" for name, path in paths.items()))
    for given in (words, ["--config", f"{tmp_path}/run.yaml"]):
        job = parse_job(kind, [*given, "--dataset", "d"])
        assert (job.model.model, job.rewards.reward_model_name_or_path) == ("policy", "judge")

"""Rollout functions in the forms of TRL's examples run as they are: only what they import has another name.

An environment's reward beside one call of the engine, and the model's own `generate`.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from datasets import Dataset

from fake_vllm import engine_over, scripted
from lowpeak import GRPOTrainer, generate_rollout_completions
from lowpeak.arguments.vllm import ColocateSettings, ServerSettings, VllmSettings
from lowpeak.errors import ArgumentError, EngineError
from lowpeak.rollout.function import FunctionEngine
from lowpeak.setup.engines import check_function
from small_runs import column, make
from tiny_models import char_tokenizer, tiny_model

TOKENIZER = char_tokenizer(chat=True)
TEXTS = [{"prompt": f"{i}{i + 1}="} for i in range(8)]
CHATS = [{"prompt": [{"role": "user", "content": row["prompt"]}]} for row in TEXTS]


def trainer_of(tmp_path, rollout_func, reward_funcs, data=TEXTS, **changes):
    settings = {"max_completion_length": 8, "reward_funcs": reward_funcs, "rollout_func": rollout_func, **changes}
    return make("GRPO", tmp_path, tiny_model(16), Dataset.from_list(data), TOKENIZER, **settings)


class Echo:
    """An environment that rewards what is long."""

    def step(self, message: str) -> float:
        return len(message) / 8


def echo(prompts: list[str], trainer: GRPOTrainer) -> dict[str, list]:
    outputs = generate_rollout_completions(trainer, prompts)
    env_rewards = []
    for out in outputs:
        text = trainer.processing_class.decode(out["completion_ids"], skip_special_tokens=True)
        env_rewards.append(Echo().step(text))
    return {
        "prompt_ids": [out["prompt_ids"] for out in outputs],
        "completion_ids": [out["completion_ids"] for out in outputs],
        "logprobs": [out["logprobs"] for out in outputs],
        "env_reward": env_rewards,
    }


def reward_from_env(completions, **kwargs):
    rewards = kwargs.get("env_reward", [])
    return [float(reward) for reward in rewards] if rewards else [0.0] * len(completions)


def test_an_environment_rewards_what_the_engine_wrote(tmp_path):
    run, again = (trainer_of(tmp_path / name, echo, reward_from_env, CHATS, max_steps=1) for name in "ab")
    run.train()
    again.train()
    rows = run.rollout.rows
    texts = [row["completion"][0]["content"] for row in rows]
    assert [row["reward"] for row in rows] == pytest.approx([len(text) / 8 for text in texts])
    assert len({text for text, row in zip(texts, rows, strict=True) if row["group"] == 0}) > 1
    assert max(column(run, "sampling/sampling_logp_difference/max")) < 1e-4
    assert again.rollout.rows == rows


def test_the_engine_is_asked_as_the_run_or_the_function_says(tmp_path):
    seen = []

    def rollout_func(prompts, trainer):
        for overrides in ({"max_tokens": 3, "top_k": -1, "n": 1}, {"temperature": 0.0}, {"stop": list("01234")}):
            seen.append(generate_rollout_completions(trainer, prompts, generation_overrides=overrides))
        seen.append(generate_rollout_completions(trainer, []))
        return echo(prompts, trainer)

    trainer_of(tmp_path, rollout_func, reward_from_env, max_steps=1).train()
    short, greedy, stopped, nothing = seen
    assert max(len(out["completion_ids"]) for out in short) == 3
    assert len({tuple(out["completion_ids"]) for out in greedy[:4]}) == 1
    assert all(len(out["text"]) < 8 or not set(out["text"][:-1]) & set("01234") for out in stopped)
    assert nothing == []


@pytest.mark.extended
def test_what_the_engine_cannot_be_asked_is_told(tmp_path):
    def rollout_func(prompts, trainer):
        for options, names in (
            ({"generation_overrides": {"guided": 1}}, "generation_overrides .*guided.* max_tokens, temperature"),
            ({"generation_overrides": {"n": 2}}, "generation_overrides .*n=2"),
            ({"as_chat": True}, "as_chat=True"),
        ):
            with pytest.raises(ArgumentError, match=names):
                generate_rollout_completions(trainer, prompts, **options)
        return echo(prompts, trainer)

    run = trainer_of(tmp_path, rollout_func, reward_from_env, max_steps=1)
    run.train()
    plain = trainer_of(tmp_path / "plain", None, lambda completions, **columns: [0.0] * len(completions))
    for trainer in (run, plain):
        with pytest.raises(EngineError, match="rollout_func"):
            generate_rollout_completions(trainer, ["1="])


def by_transformers(prompts: list[str], trainer: GRPOTrainer) -> dict[str, list]:
    """The model's own generation, with what a script finds in TRL's trainer."""
    tokenizer, model, device = trainer.processing_class, trainer.model, trainer.accelerator.device
    was_training = model.training
    model.eval()
    prompt_ids, completion_ids, logprobs = [], [], []
    for prompt in prompts:
        ids = tokenizer(prompt, return_tensors="pt").to(device)
        with torch.no_grad():
            out = model.generate(
                input_ids=ids["input_ids"],
                attention_mask=ids["attention_mask"],
                max_new_tokens=trainer.max_completion_length,
                do_sample=True,
                temperature=trainer.temperature,
                top_p=trainer.args.top_p,
                output_logits=True,
                return_dict_in_generate=True,
            )
        written = out.sequences[0, ids["input_ids"].shape[1] :]
        scores = torch.stack(out.logits, dim=1)[0].log_softmax(-1)
        prompt_ids.append(ids["input_ids"][0].tolist())
        completion_ids.append(written.tolist())
        logprobs.append([[float(scores[i, token])] for i, token in enumerate(written)])
    if was_training:
        model.train()
    return {"prompt_ids": prompt_ids, "completion_ids": completion_ids, "logprobs": logprobs}


@pytest.mark.extended
def test_the_models_own_generate_writes_the_completions(tmp_path):
    run = trainer_of(tmp_path, by_transformers, lambda completions, **columns: [float(len(c)) for c in completions])
    run.train()
    assert run.state.global_step == 2
    assert max(column(run, "sampling/sampling_logp_difference/max")) < 1e-4


def test_a_function_may_ask_vllm_which_has_the_policys_weights(tmp_path):
    arguments = {"use_vllm": True, "vllm_mode": "server", "max_completion_length": 3, "num_generations": 4}
    modes = []

    def asking(prompts, trainer):
        modes.append([module.training for module in trainer.model.modules()])
        return echo(prompts, trainer)

    run = trainer_of(tmp_path, asking, reward_from_env, **arguments)
    assert isinstance(run.collector.engine, FunctionEngine)
    vllm = scripted()
    run.collector.engine = replace(run.collector.engine, engine=engine_over(vllm))
    run.collector.engine.close()
    run.train()
    # The flag of the model alone is on, as TRL's functions read it.
    assert all(mode == [True] + [False] * (len(mode) - 1) for mode in modes)
    assert vllm.policy_version == 1
    requests = [request for wave in vllm.waves for request in wave]
    assert len(requests) == 16
    assert len({request.params["seed"] for request in requests}) == 16


def test_the_ranks_of_one_vllm_cannot_ask_it_apart():
    check_function(VllmSettings(ServerSettings(("http://a:1",))))
    with pytest.raises(ArgumentError, match=r"vllm_tensor_parallel_size=2 .*rollout_func"):
        check_function(VllmSettings(ColocateSettings(tensor_parallel_size=2)))

"""Rollout functions in the forms of TRL's examples run as they are: only what they import has another name.

An environment's reward beside one call of the engine; a game of several turns; the model's own `generate`; and a service
that is asked by the number of a row.
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
    assert [row["reward"] for row in rows] == pytest.approx([len(row["completion"]) / 8 for row in rows])
    assert len({row["completion"] for row in rows if row["group"] == 0}) > 1
    assert max(column(run, "sampling/sampling_logp_difference/max")) < 1e-4
    assert again.rollout.rows == rows


def test_the_engine_is_asked_as_the_run_or_the_function_says(tmp_path):
    seen = []

    def rollout_func(prompts, trainer):
        for asked in ({"max_tokens": 3, "top_k": -1, "n": 1}, {"temperature": 0.0}, {"stop": list("01234")}):
            seen.append(generate_rollout_completions(trainer, prompts, generation_overrides=asked))
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


class Game:
    """Guess a digit in two turns; the environment answers each guess with a digit of its own."""

    def reset(self):
        self.turns, self.hits = 0, 0
        return "0"

    def step(self, guess: str):
        self.turns += 1
        self.hits += guess[:1] in tuple("2468")
        return str(self.turns), self.hits / 2, self.turns == 2


def play(trainer: GRPOTrainer, env: Game, tokenizer, prompt: str) -> dict[str, list]:
    """One episode: the turns are one completion, in which the environment's tokens are masked."""
    prompt_ids, completion_ids, logprobs, env_mask = [], [], [], []
    observation, done, reward = env.reset(), False, 0.0
    messages = [{"role": "user", "content": prompt}]
    while not done:
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        out = generate_rollout_completions(trainer, [text], generation_overrides={"max_tokens": 2})[0]
        prompt_ids = prompt_ids or list(out["prompt_ids"])
        completion_ids += out["completion_ids"]
        logprobs += out["logprobs"]
        env_mask += [1] * len(out["completion_ids"])
        guess = out.get("text") or tokenizer.decode(out["completion_ids"], skip_special_tokens=True)
        observation, reward, done = env.step(guess)
        seen = tokenizer(observation)["input_ids"]
        completion_ids += seen
        logprobs += [0.0] * len(seen)
        env_mask += [0] * len(seen)
        messages += [{"role": "assistant", "content": guess}, {"role": "tool", "content": observation}]
    return {
        "prompt_ids": prompt_ids,
        "completion_ids": completion_ids,
        "logprobs": logprobs,
        "env_mask": env_mask,
        "correct_reward": reward,
    }


def game(prompts: list[str], trainer: GRPOTrainer) -> dict[str, list]:
    episodes = [play(trainer, Game(), trainer.processing_class, prompt) for prompt in prompts]
    return {name: [episode[name] for episode in episodes] for name in episodes[0]}


def reward_correct(completions: list[str], **kwargs) -> list[float]:
    rewards = kwargs.get("correct_reward") if kwargs else None
    return [0.0 for _ in completions] if rewards is None else [float(r) for r in rewards]


def test_a_game_of_several_turns_is_one_completion_with_masked_answers(tmp_path):
    run = trainer_of(tmp_path, game, reward_correct)
    run.train()
    assert run.state.global_step == 2
    for record in run.rollout.records:
        ids, mask = record.completion.ids.tolist(), record.completion.loss_mask.tolist()
        assert [token for token, own in zip(ids, mask, strict=True) if not own] == TOKENIZER("12")["input_ids"]
    assert {row["reward"] for row in run.rollout.rows} <= {0.0, 0.5, 1.0}
    assert run.evaluate(Dataset.from_list(TEXTS[:2]))["eval_reward"] <= 1.0


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


@pytest.mark.extended
def test_a_service_is_asked_by_the_number_of_a_row_of_the_data_set_that_is_used(tmp_path):
    train = [{"prompt": str(i), "task": f"train {i}"} for i in range(4)]
    held_out = [{"prompt": str(i), "task": f"held out {i}"} for i in range(2)]
    seen = []

    def rollout_func(prompts, trainer):
        is_eval = not trainer.model.training
        size = trainer.num_generations_eval if is_eval else trainer.num_generations
        data = trainer.eval_dataset if is_eval and trainer.eval_dataset is not None else trainer.train_dataset
        tasks = [data[int(prompt)]["task"] for prompt in prompts]
        assert tasks == [task for task in tasks[::size] for _ in range(size)]
        seen.append(sorted(set(tasks)))
        trainer.log({"turns": 1.0})
        return {
            "prompt_ids": [[5, 6] for _ in prompts],
            "completion_ids": [[5 + i % 4, 1] for i, _ in enumerate(prompts)],
            "logprobs": None,
            "env_reward": [float(i % 4) for i, _ in enumerate(prompts)],
            "mode": "eval" if is_eval else "train",
        }

    run = trainer_of(
        tmp_path, rollout_func, reward_from_env, train, eval_dataset=Dataset.from_list(held_out), num_generations_eval=2,
        eval_strategy="steps", eval_steps=1, max_steps=1,
    )  # fmt: skip
    run.train()
    assert all(task.startswith("train") for task in seen[0])
    assert seen[1:] == [["held out 0", "held out 1"]] * 2
    assert column(run, "turns") == [1.0] * 3


def test_a_function_may_ask_vllm_which_has_the_policys_weights(tmp_path):
    told = {"use_vllm": True, "vllm_mode": "server", "max_completion_length": 3, "num_generations": 4}
    modes = []

    def asking(prompts, trainer):
        modes.append([module.training for module in trainer.model.modules()])
        return echo(prompts, trainer)

    run = trainer_of(tmp_path, asking, reward_from_env, **told)
    assert isinstance(run.collector.engine, FunctionEngine)
    vllm = scripted()
    run.collector.engine = replace(run.collector.engine, engine=engine_over(vllm))
    run.collector.engine.close()
    run.train()
    # The flag of the model alone is on, as TRL's functions read it.
    assert all(mode == [True] + [False] * (len(mode) - 1) for mode in modes)
    assert vllm.policy_version == 1
    asked = [request for wave in vllm.waves for request in wave]
    assert len(asked) == 16
    assert len({request.params["seed"] for request in asked}) == 16


def test_the_ranks_of_one_vllm_cannot_ask_it_apart():
    check_function(VllmSettings(ServerSettings(("http://a:1",))))
    with pytest.raises(ArgumentError, match=r"vllm_tensor_parallel_size=2 .*rollout_func"):
        check_function(VllmSettings(ColocateSettings(tensor_parallel_size=2)))

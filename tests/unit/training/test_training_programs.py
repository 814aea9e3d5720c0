"""Runs whose conversations are driven by programs: the tokens are those of the same conversations with tools, or with texts."""

from __future__ import annotations

import gymnasium
import pytest
import torch

from agent_programs import ChatProgram, agent
from lowpeak import GymnasiumEnvironment
from lowpeak.errors import LowpeakError
from overlap_runs import Sampler, run_ahead
from scripted_turns import add, calling_model, questions
from small_runs import OutOfMemory, StopAfter, column, journal, kept_records, make, same, weights

SETTINGS = {"max_completion_length": 40, "adam_epsilon": 1e-3}


def num_messages(completions, **columns):
    return [float(len(messages)) for messages in completions]


def train(folder, hook=None, **changes):
    """A run of two steps, and the token ids and rewards of its completions."""
    model, tokenizer = calling_model()
    if hook is not None:
        model.model.layers[1].mlp.register_forward_pre_hook(hook)
    run = make("GRPO", folder, model, questions(), tokenizer, **{**SETTINGS, "reward_funcs": [num_messages], **changes})
    records = kept_records(run)
    run.train()
    return run, [[(each.completion.ids.tolist(), each.reward) for each in rollout] for rollout in records]


@pytest.fixture(scope="module")
def with_tools(tmp_path_factory):
    return train(tmp_path_factory.mktemp("tools"), tools=[add])


def test_a_chat_program_trains_on_the_conversations_of_the_same_tools(tmp_path, with_tools):
    run, rollouts = train(tmp_path, environment_factory=ChatProgram)
    assert rollouts == with_tools[1]
    assert any(reward > 1 for _, reward in rollouts[0]), "some completions call the tool"
    torch.testing.assert_close(weights(run), weights(with_tools[0]), rtol=1e-5, atol=1e-6)
    assert min(column(run, "programs/turns")) > 1.0


class Echo:
    """An environment of texts that answers with the number of characters, at most twice."""

    def reset(self, **row):
        self.count = 0

    def respond(self, text):
        self.count += 1
        return str(len(text) % 10) if self.count <= 2 else None


class EchoSpace(gymnasium.Env):
    """The same by Gymnasium."""

    observation_space = gymnasium.spaces.Text(1, min_length=0)
    action_space = gymnasium.spaces.Text(4096, min_length=0, charset="".join(map(chr, range(1, 0x3000))))

    def reset(self, *, seed=None, options=None):
        self.echo = Echo()
        self.echo.reset()
        return "", {}

    def step(self, action):
        answer = self.echo.respond(action)
        return answer or "", 0.0, answer is None, False, {}


async def echo_by_chat(client, row):
    messages, echo = list(row["prompt"]), Echo()
    echo.reset()
    while True:
        messages.append(await client.chat(messages))
        answer = echo.respond(messages[-1]["content"] or "")
        if answer is None:
            return
        messages.append({"role": "user", "content": answer})


def test_texts_by_respond_by_gymnasium_and_by_chat_are_the_same_conversations(tmp_path):
    factories = {"respond": Echo, "gymnasium": lambda: GymnasiumEnvironment(EchoSpace()), "chat": agent(echo_by_chat)}
    ids = {}
    for name, factory in factories.items():
        rollouts = train(tmp_path / name, environment_factory=factory, max_steps=1)[1]
        ids[name] = [tokens for tokens, _ in rollouts[0]]
    assert ids["respond"] == ids["gymnasium"] == ids["chat"]
    assert max(map(len, ids["chat"])) > 8


def test_programs_go_on_after_memory_ran_out_and_none_starts_again(tmp_path, with_tools):
    ChatProgram.num_started = 0
    hook = OutOfMemory(20, 21, 22, 23)
    _, rollouts = train(tmp_path, hook, environment_factory=ChatProgram, kv_cache_bytes=1 << 17)
    assert (tmp_path / "journal/events.jsonl").exists()
    assert rollouts == with_tools[1]
    assert ChatProgram.num_started == 16


def test_a_resumed_run_ahead_answers_programs_with_the_recorded_turns(tmp_path):
    def ahead(folder, resume=None, **changes):
        model, tokenizer = calling_model()
        parts = {"model": model, "tokenizer": tokenizer, "data": questions(), "environment_factory": ChatProgram}
        settings = {**SETTINGS, "reward_funcs": [num_messages], "save_strategy": "steps", "save_steps": 1, **changes}
        run = run_ahead(folder, [Sampler(model=model)], 1, **parts, **settings)
        run.train(resume_from_checkpoint=resume)
        return run

    calm = ahead(tmp_path / "calm")
    ahead(tmp_path / "stopped", callbacks=[StopAfter(2)])
    resumed = ahead(tmp_path / "stopped", resume=True)
    assert same(weights(calm), weights(resumed))
    completions = [
        [(row["rollout"], row["group"], row["completion"]) for row in journal(folder, "rollouts")]
        for folder in (tmp_path / "calm", tmp_path / "stopped")
    ]
    assert completions[0] == completions[1]


class Listed(ChatProgram):
    """A program with rows that are no dataset."""

    dataset = ({"prompt": "x"},)


@pytest.mark.parametrize(
    ("word", "changes"),
    [
        ("full_determinism", {"full_determinism": True}),  # bits would depend on the program's speed
        ("turn_credit", {"turn_credit": "turn", "max_branches": 2}),
        ("from_list", {"environment_factory": Listed, "data": None, "max_steps": 1}),
    ],
)
def test_programs_are_refused_where_they_cannot_act(tmp_path, word, changes):
    data = changes.pop("data", questions())
    model, tokenizer = calling_model()
    settings = {**SETTINGS, "reward_funcs": [num_messages], "environment_factory": ChatProgram, **changes}
    with pytest.raises(LowpeakError, match=word):
        make("GRPO", tmp_path, model, data, tokenizer, **settings)


async def compacts(client, row):
    """Two turns, a summary in their place with two others, and a subagent with a prompt of its own."""
    prompt = [3, *(8 + len(row["answer"]) for _ in range(4)), 4]
    first = await client.turn(prompt, max_tokens=6)
    await client.turn([*prompt, *first, 9], max_tokens=6)
    summary = await client.turn([*prompt, 10, 11], max_tokens=6)
    await client.turn([*prompt, 10, 11, *summary, 12], max_tokens=6)
    other = await client.turn([3, 13, 14, 4], max_tokens=6)
    return float(sum(other) % 7)


def test_a_run_trains_on_the_branches_of_its_conversations_in_each_layout(tmp_path):
    runs = {}
    for layout, padding_free in (("packed", True), ("padded", False)):
        settings = {"environment_factory": agent(compacts), "reward_funcs": [], "max_branches": 3}
        runs[layout] = train(tmp_path / layout, padding_free=padding_free, **settings)
    assert runs["packed"][1] == runs["padded"][1]
    torch.testing.assert_close(weights(runs["packed"][0]), weights(runs["padded"][0]), rtol=1e-5, atol=1e-6)
    run = runs["packed"][0]
    assert column(run, "programs/branches") == [3.0, 3.0]
    assert column(run, "programs/turns") == [5.0, 5.0]
    assert column(run, "grad_norm")[0] > 0

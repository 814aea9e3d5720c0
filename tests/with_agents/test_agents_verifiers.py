"""Environments of verifiers, with their servers of tools, that a tiny model plays and trains on."""

from __future__ import annotations

import gc
import os
import re
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
import verifiers.v1 as vf
from datasets import Dataset

from lowpeak.environments import load_environment
from lowpeak.environments.verifiers import verifiers_factory
from lowpeak.errors import ArgumentError
from scripted_turns import ScriptedTurns, add, call, calling_model, questions
from small_runs import column, journal, make, steps
from tiny_models import tiny_model, tool_tokenizer

ROOT = Path(__file__).parents[2]
AGENTS = ROOT / "examples" / "agents"
LENGTHS = {"max_completion_length": 120, "max_tool_calling_iterations": 4}


@pytest.fixture(autouse=True)
def taskset(monkeypatch):
    """The module of the example, which this process finds as those next to a script."""
    monkeypatch.setenv("PYTHONPATH", os.environ.get("PYTHONPATH", ""))
    monkeypatch.syspath_prepend(str(AGENTS))
    import sums_taskset

    yield sums_taskset
    del sys.modules["sums_taskset"]


def watched(factory):
    """The episodes of a factory, which are added as they end."""
    env, episodes = factory._episodes._env, []
    run_episode = env.run_episode

    async def keep(*arguments):
        episodes.append(await run_episode(*arguments))
        return episodes[-1]

    env.run_episode = keep
    return episodes


def play(folder, factory, script=None, data=None, **changes):
    """A run on these episodes, by a tiny model that calls `add` in most turns, or with written turns."""
    model, tokenizer = calling_model()
    parts = {"reward_funcs": [], "environment_factory": factory, **LENGTHS, **changes}
    run = make("GRPO", folder, model, data, tokenizer, **parts)
    if script:
        run.collector.engine.engine = ScriptedTurns(tokenizer, script)
    run.train()
    return run


def test_episodes_have_the_tokens_of_the_same_tools(tmp_path):
    factory, ids, texts = load_environment("verifiers:sums_taskset"), {}, {}
    for name, parts in {"episodes": {"environment_factory": factory}, "tools": {"tools": [add]}}.items():
        ids[name], texts[name] = [], []

        def keep(completion_ids, completions, found=(ids[name], texts[name]), **columns):
            found[0].extend(completion_ids)
            found[1].extend(map(str, completions))
            return [float(len(each)) for each in completion_ids]

        model, tokenizer = calling_model()
        settings = {"reward_funcs": [keep], "max_steps": 1, "per_device_train_batch_size": 64, **LENGTHS, **parts}
        make("GRPO", tmp_path / name, model, factory.dataset, tokenizer, **settings).train()
    # A call of an unknown tool, or with wrong arguments, is answered in other words by verifiers.
    same = [i for i, text in enumerate(texts["tools"]) if "rror" not in text]
    assert [ids["episodes"][i] for i in same] == [ids["tools"][i] for i in same]
    assert len(same) > 4
    assert any("'tool'" in texts["tools"][i] for i in same), "some call the tool"


def test_two_steps_train_on_episodes_whose_traces_have_the_records_tokens(tmp_path, taskset, monkeypatch):
    @vf.reward(weight=0.5)
    async def length(self, trace) -> float:
        return float(len(trace.branches[0].token_ids))

    monkeypatch.setattr(taskset.SumTask, "length", length, raising=False)
    records, factory = [], load_environment("verifiers:sums_taskset")
    episodes = watched(factory)

    def keep(completion_ids, **columns):
        records.extend(completion_ids)
        return [None] * len(completion_ids)

    run = play(tmp_path, factory, reward_funcs=[keep])
    traces = [episode.traces[0] for episode in episodes]
    assert [len(trace.branches) for trace in traces] == [1] * 16
    assert len({trace.num_turns for trace in traces}) > 1
    completions = [
        list(branch.token_ids[branch.sampled_mask.index(True) :]) for branch in (t.branches[0] for t in traces)
    ]
    assert sorted(completions) == sorted(records)
    rows = journal(tmp_path, "rollouts")
    assert sorted(row["reward"] for row in rows) == sorted(trace.reward for trace in traces)
    assert all(norm > 0 for norm in column(run, "grad_norm"))
    assert len(steps(run)) == 2
    results = [each.content for trace in traces for each in trace.branches[0].messages if each.role == "tool"]
    assert any(result.isdigit() for result in results)
    assert any("error" in result for result in results)  # of `increase`, which this environment does not have
    del run
    wait_until_ended()


def wait_until_ended():
    """Wait until no server of tools is left, and no thread but those of the loop of all episodes."""
    end = time.monotonic() + 30
    while True:
        gc.collect()
        threads = {
            each.name for each in threading.enumerate() if not re.match("MainThread|asyncio_|Thread-", each.name)
        }
        children = psutil.Process().children(recursive=True)
        if (threads, children) == ({"lowpeak-reward-loop"}, []):
            return
        assert time.monotonic() < end, (threads, children)
        time.sleep(0.1)


def test_results_of_one_turn_are_appended_to_the_tokens_of_its_calls(tmp_path):
    script = [[call("add", a=2, b=3) + call("add", a=50, b=10) + "<eos>", "60<eos>"]] * 4
    factory = verifiers_factory("sums_taskset", taskset={"size": 2})
    episodes = watched(factory)
    play(tmp_path, factory, script, max_steps=1, per_device_train_batch_size=4)
    (messages, *_) = [episode.traces[0].branches[0].messages for episode in episodes]
    assert [message.role for message in messages] == ["user", "assistant", "tool", "tool", "assistant"]
    assert [message.content for message in messages[2:]] == ["5", "60", "60"]
    assert {len(episode.traces[0].branches) for episode in episodes} == {1}


def test_an_episode_that_fails_before_its_first_request_leaves_its_completion_without_a_reward(
    tmp_path, taskset, monkeypatch
):
    async def setup(self, trace, runtime):
        if self.data.idx % 2:
            raise OSError("no disk")

    monkeypatch.setattr(taskset.SumTask, "setup", setup)
    factory = verifiers_factory("sums_taskset", taskset={"size": 2})
    run = play(tmp_path, factory, [["20<eos>"]] * 4, max_steps=1)
    rows = journal(tmp_path, "rollouts")
    assert sorted([row["reward"] is None for row in rows]) == [False] * 4 + [True] * 4
    assert column(run, "environments/failures") == [4.0]
    del run
    wait_until_ended()


def test_a_long_prompt_has_as_much_room_for_turns_as_a_short_one(tmp_path, taskset, monkeypatch):
    def load(self):
        for prompt in ("1", "1", "1" * 150, "1" * 150):
            yield taskset.SumTask(taskset.Sum(prompt=prompt, answer="1"), self.config.task)

    monkeypatch.setattr(taskset.Sums, "load", load)
    factory = load_environment("verifiers:sums_taskset")
    play(tmp_path, factory, [["1<eos>"]] * 4, shuffle_dataset=False, max_completion_length=20)
    assert [row["reward"] for row in journal(tmp_path, "rollouts")] == [1.0] * 16


def test_rows_of_a_dataset_are_tasks_by_their_prompts(tmp_path):
    data = Dataset.from_list([{"prompt": [{"role": "user", "content": "10+80"}]}] * 4)
    run = play(tmp_path, load_environment("verifiers:sums_taskset"), [["90<eos>"], ["9<eos>"]] * 2, data, max_steps=1)
    assert sorted(row["reward"] for row in journal(tmp_path, "rollouts")) == [0.0] * 4 + [1.0] * 4
    run = play(
        tmp_path / "other", load_environment("verifiers:sums_taskset"), [["1<eos>"]] * 4, questions(), max_steps=1
    )
    assert column(run, "environments/failures") == [8.0]  # tasks have no such prompts


@pytest.mark.parametrize(
    ("name", "config", "message"),
    [
        ("no_such_taskset", {}, "'no_such_taskset'.*ModuleNotFoundError.*PYTHONPATH"),
        ("sums_taskset", {"taskset": {"size": 0}}, "verifiers:sums_taskset.*tasks:"),
        ("sums_taskset", {"id": "agentic_judge"}, "'sums_taskset'.*solver, judge"),
    ],
)
def test_an_environment_that_cannot_be_played_is_told(name, config, message):
    with pytest.raises(ArgumentError, match=message):
        verifiers_factory(name, **config)


def test_the_loop_with_openais_client_trains(tmp_path, monkeypatch):
    script = [[call("add", a=10, b=80) + "<eos>", "90<eos>"], ["<tool_call>{}</tool_call>x<eos>"]] * 2
    factory = load_environment(str(AGENTS / "openai_loop.py:Calculator"))
    data = factory.dataset.select([0] * 8)
    run = play(tmp_path, factory, script, data, max_steps=1, max_completion_length=200)
    assert sorted(row["reward"] for row in journal(tmp_path, "rollouts")) == [0.0] * 4 + [1.0] * 4
    assert "environments/failures" not in run.state.log_history[0]


def test_the_code_of_the_page_runs():
    page, names = (ROOT / "docs" / "agents.md").read_text(encoding="utf-8"), {}
    for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
        if "GRPOTrainer" not in block:
            exec(block, names)
    assert len(names["factory"].dataset) == 500
    assert names["Agent"]().get_reward() == 1.0


def test_the_example_of_reasoning_gym_trains(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    page = (ROOT / "docs" / "agents.md").read_text(encoding="utf-8")
    (block,) = [each for each in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "reasoning_gym" in each]
    tokenizer = tool_tokenizer()
    written = block.replace('"Qwen/Qwen3-0.6B"', "model").replace('output_dir="out"', 'output_dir="out", **settings')
    settings = {"max_steps": 1, "max_completion_length": 8, "use_cpu": True, "report_to": "none"}
    model = tiny_model(len(tokenizer), context=512)
    exec(written.replace("train_dataset=", "processing_class=tokenizer, train_dataset="), locals_ := {**locals()})
    locals_["trainer"].train()
    assert 0 <= locals_["trainer"].state.log_history[0]["reward"] <= 1

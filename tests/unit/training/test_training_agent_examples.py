"""The programs of docs/agents.md train unchanged; the one with verifiers is in tests/with_agents."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import httpx2
import pytest

from lowpeak.environments import load_environment
from scripted_turns import ScriptedTurns, call
from small_runs import journal, make
from tiny_models import tiny_model, tool_tokenizer

AGENTS = Path(__file__).parents[3] / "examples" / "agents"
TOKENIZER = tool_tokenizer()


class AsyncOpenAI(httpx2.AsyncClient):
    """What the example uses of OpenAI's client, whose package is in the environment of tests/with_agents alone."""

    def __init__(self, base_url, api_key, timeout):
        super().__init__(base_url=base_url, headers={"Authorization": f"Bearer {api_key}"}, timeout=timeout)
        self.chat = SimpleNamespace(completions=self)

    async def create(self, **body):
        return Model((await self.post("chat/completions", json=body)).raise_for_status().json())


class Model:
    """A JSON object with attributes, and None for those that it lacks."""

    def __init__(self, content):
        self._content = content

    def __getattr__(self, name):
        value = self._content.get(name)
        if isinstance(value, list):
            return [Model(each) for each in value]
        return Model(value) if isinstance(value, dict) else value

    def model_dump(self, exclude_none):
        return {name: value for name, value in self._content.items() if value is not None}


def play(folder, example, script, **changes):
    factory = load_environment(str(AGENTS / example))
    data, model = factory.dataset.select([0] * 8), tiny_model(len(TOKENIZER), context=1024)
    parts = {"reward_funcs": [], "environment_factory": factory, **changes}
    run = make("GRPO", folder, model, data, TOKENIZER, max_steps=1, **{"max_completion_length": 400, **parts})
    run.collector.engine.engine = ScriptedTurns(TOKENIZER, script)
    run.train()
    assert "environments/failures" not in run.state.log_history[0]
    return sorted(row["reward"] for row in journal(folder, "rollouts"))


def test_a_loop_with_openais_client(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "openai", module := ModuleType("openai"))
    module.AsyncOpenAI = AsyncOpenAI
    script = [
        [call("add", a=10, b=80) + "<eos>", "90<eos>"],
        [call("add", a=10) + "<eos>", "9<eos>"],
        ["<tool_call>{}</tool_call><eos>"],
        [call("add", a=10, b=80) + "<eos>", call("add", a=90, b=0) + "<eos>", "90<eos>"],
    ]
    assert play(tmp_path, "openai_loop.py:Calculator", script) == [0.0] * 4 + [1.0] * 4


@pytest.mark.parametrize(("length", "right"), [(400, 6), (44, 4)])
def test_a_graph_of_nodes(tmp_path, length, right):
    script = [
        ["0<eos>", "Yes<eos>"],
        ["7<eos>", "Yes<eos>"],
        ["1<eos>", "No<eos>", "0<eos>"],
        ["0<eos>", "No<eos>", "0<eos>"],
    ]
    rewards = play(tmp_path, "graph.py:CheckedAnswer", script, max_completion_length=length)
    assert rewards.count(1.0) == right

"""A real OpenEnv server in a process of its own: conversations, their rewards, and a run that trains on them."""

from __future__ import annotations

import asyncio
import random
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from lowpeak.environments import load_environment
from lowpeak.errors import ArgumentError
from scripted_turns import ScriptedTurns, calling_model, questions
from small_runs import journal, make
from tiny_models import tiny_model, tool_tokenizer

TOKENIZER = tool_tokenizer()


@pytest.fixture(scope="module")
def url():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = subprocess.Popen([sys.executable, str(Path(__file__).with_name("sums_server.py")), str(port)])
    address, end = f"http://127.0.0.1:{port}", time.monotonic() + 60
    while time.monotonic() < end:
        try:
            urllib.request.urlopen(f"{address}/schema", timeout=1).close()
            break
        except OSError:
            assert server.poll() is None
            time.sleep(0.1)
    yield address
    server.terminate()
    server.wait(30)


def test_a_conversation_is_a_session_of_the_server(url):
    async def converse():
        environment = load_environment(f"openenv:{url}")()
        opened = await environment.reset(seed=3, answer="a column of the row", prompt=[])
        answers = [(await environment.respond("1"), await environment.get_turn_reward())]
        right = str(sum(map(int, opened.split("+"))))
        answers.append((await environment.respond(right), await environment.get_turn_reward()))
        again = await environment.reset(seed=3)
        await environment.close()
        return opened == again, answers

    assert asyncio.run(converse()) == (True, [("no", 0.0), (None, 1.0)])


def test_a_run_trains_on_conversations_with_a_server(url, tmp_path):
    script = [["1<eos>", "2<eos>", "3<eos>"]] * 4
    parts = {"reward_funcs": [], "environment_factory": load_environment(f"openenv:{url}")}
    model = tiny_model(len(TOKENIZER), context=512)
    run = make("GRPO", tmp_path, model, questions(), TOKENIZER, max_completion_length=200, max_steps=1, **parts)
    run.collector.engine.engine = ScriptedTurns(TOKENIZER, script)
    run.train()
    rows = journal(tmp_path, "rollouts")
    assert [[message["role"] for message in row["completion"]] for row in rows] == [
        ["assistant", "user"] * 2 + ["assistant"]
    ] * 8
    assert [row["reward"] for row in rows] == [0.0] * 8
    assert all("+" in row["prompt"][-1]["content"] for row in rows)


class Sums:
    """The server's environment in this process."""

    def reset(self, seed, **row):
        draw = random.Random(seed)
        self.numbers, self.count = (draw.randint(10, 49), draw.randint(10, 49)), 0
        return "\n{}+{}".format(*self.numbers) if row["prompt"][-1]["content"] else "{}+{}".format(*self.numbers)

    def respond(self, text):
        self.count += 1
        return None if text == str(sum(self.numbers)) or self.count == 3 else "no"


def test_conversations_have_the_tokens_of_the_same_environment_in_this_process(url, tmp_path):
    ids = {}
    for name, factory in {"server": load_environment(f"openenv:{url}"), "class": Sums}.items():
        ids[name] = []

        def keep(completion_ids, found=ids[name], **columns):
            found += completion_ids
            return [float(len(each)) for each in completion_ids]

        parts = {"reward_funcs": [keep], "environment_factory": factory, "max_completion_length": 60, "max_steps": 1}
        make("GRPO", tmp_path / name, *calling_model_parts(), **parts).train()
    assert ids["server"] == ids["class"]
    assert len(ids["class"]) == 8
    assert max(map(len, ids["class"])) > 5


def calling_model_parts():
    model, tokenizer = calling_model()
    return model, questions(), tokenizer


def test_a_server_that_does_not_answer_is_told_by_its_address():
    with pytest.raises(ArgumentError, match=r"openenv:http://127\.0\.0\.1:9"):
        load_environment("openenv:http://127.0.0.1:9")

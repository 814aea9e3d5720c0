"""Examples with tools: what they train on, on a tiny model with written turns, and the numbers of TRL on such turns."""

from __future__ import annotations

import json

import pytest
from benchmarks.harness import tool_side
from benchmarks.harness.task import load_example

from scripted_turns import ScriptedTurns
from small_runs import journal

calculator = load_example("calculator")

# What TRL 1.16 logs in the first step on the transcripts of benchmarks.tools --kind same, with the same weights.
OF_TRL = {
    "tools/call_frequency": 1.0,
    "tools/failure_frequency": 0.25,
    "completions/mean_length": 34.125,
    "completions/max_length": 100.0,
    "completions/mean_terminated_length": 24.7142849,
    "completions/clipped_ratio": 0.125,
    "reward": 2.875,
    "reward_std": 1.3102163,
    "num_tokens": 674.0,
}


@pytest.fixture
def start(tmp_path):
    tool_side.warm_start(tmp_path / "start", seed=0, steps=1, num_terms=2)
    return tmp_path / "start"


def test_a_conversation_with_the_search_tool_is_rewarded_for_the_answer(tmp_path, start):
    search = load_example("search_files")
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "colours.txt").write_text("The sky is blue.\nThe grass is green.\n")
    (tmp_path / "files" / "animals.md").write_text("A cat has four legs.\n")
    rows = [{"question": f"{i}: what colour is the grass?", "answer": "green"} for i in range(8)]
    (tmp_path / "questions.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    paths = {"model": start, "folder": tmp_path / "files", "questions": tmp_path / "questions.jsonl"}
    settings = {**paths, "output_dir": tmp_path / "out", "max_steps": 2, "max_completion_length": 300}
    trainer = search.make_trainer([text for name, value in settings.items() for text in (f"--{name}", str(value))])
    opens, closes = calculator.CALL_TOKENS
    found = [f'{opens}[search(query="grass")]{closes}<eos>', "It is Green.<eos>"]
    elsewhere = [f'{opens}[read(name="../secret.txt")]{closes}<eos>', "red<eos>"]
    trainer.collector.engine.engine = ScriptedTurns(trainer.processing_class, [found, elsewhere] * 4)
    trainer.train()
    logged = trainer.state.log_history[-1]
    assert logged["tools/call_frequency"] == 1.0
    assert logged["tools/failure_frequency"] == 0.5
    assert [row["reward"] for row in journal(tmp_path / "out", "rollouts")] == [1.0, 0.0] * 32
    assert search.make_tools(tmp_path / "files")[0]("grass legs").splitlines() == [
        "animals.md: A cat has four legs.",
        "colours.txt: The grass is green.",
    ]


def test_the_calculators_conversations_have_trls_numbers(tmp_path, start):
    request = {"library": "lowpeak", "start": str(start), "folder": str(tmp_path / "out"), "steps": 1, "num_prompts": 2}
    found = tool_side.run_side(tool_side.ToolRequest(**request, canned=True, max_completion_length=100))
    assert {name: found["logs"][0][name] for name in OF_TRL} == pytest.approx(OF_TRL)
    # The masks show the policy's tokens: a call of 23 with its answer, two calls in a turn, no call, and so on.
    assert [sum(mask) for mask in found["masks"]] == [23, 37, 2, 25, 18, 40, 28, 100] * 2


def test_demonstrations_call_the_tool_and_are_often_wrong():
    rows = calculator.make_demonstrations(2000, 0)["messages"]
    early = rows[: int((1 - calculator.GUESSING_SHARE) * 2000)]
    calls = [messages for messages in early if messages[1]["tool_calls"]]
    assert 0.75 < len(calls) / len(early) < 0.85
    right = [messages[-1]["content"] == calculator.answer_to(messages[0]["content"]) for messages in rows]
    assert 0.15 < sum(right) / len(rows) < 0.4
    assert not any(calculator.is_held_out(messages[0]["content"]) for messages in rows)

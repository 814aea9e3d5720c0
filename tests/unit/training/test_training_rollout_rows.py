"""A run's journal keeps each completion whole: text, rewards, extras, columns and turns, in the files of its own run."""

from __future__ import annotations

import copy
import json

import pandas
import polars
import torch
from datasets import Dataset

from lowpeak.records import Branch, Completion, Conversation, Record, Turn
from lowpeak.rewards.panel import RewardedCompletions
from lowpeak.training.completion_tables import print_completions
from lowpeak.training.journal_rows import completion_rows
from small_runs import SAVED, TOKENIZER, journal, make, ones, rows, trained
from tiny_models import char_tokenizer, tiny_model

TAKEN = ("completion", "step", "prompt", "reward", "group", "rollout", "format")


def named(name):
    """A reward whose name, and whose extra's name, the journal's own columns have, too."""

    def reward(completions, log_extra, **columns):
        log_extra(name, ["extra"] * len(completions))
        return [float(len(text)) for text in completions]

    reward.__name__ = name
    return reward


def test_no_name_of_a_reward_or_an_extra_replaces_text_or_step(tmp_path):
    run = trained("GRPO", tmp_path, reward_funcs=[named(name) for name in TAKEN], max_steps=2)
    found = journal(tmp_path, "rollouts")
    assert [row["step"] for row in found] == [1] * 8 + [2] * 8
    assert [(row["rollout"], row["group"]) for row in found] == [
        (r, g) for r in (0, 1) for g in (0, 1) for _ in range(4)
    ]
    texts = [TOKENIZER.decode(each.completion.ids, skip_special_tokens=True) for each in run.rollout.records]
    for row, text in zip(found[8:], texts, strict=True):
        assert row["completion"] == text
        assert row["prompt"].endswith("=")
        assert row["reward"] == len(TAKEN) * len(text)
        assert row["rewards"] == dict.fromkeys(TAKEN, float(len(text)))
        assert row["extra"] == dict.fromkeys(TAKEN, "extra")
    path = tmp_path / "journal" / "rollouts.jsonl"
    assert len(pandas.read_json(path, lines=True)) == len(polars.read_ndjson(path, infer_schema_length=None)) == 16


def test_a_second_training_of_a_trainer_begins_new_files_next_to_its_checkpoints(tmp_path):
    run = make("GRPO", tmp_path, max_steps=2, **SAVED)
    run.train()
    first = journal(tmp_path, "rollouts")
    run.train()
    assert [row["step"] for row in journal(tmp_path)] == [1, 2]
    assert journal(tmp_path / "earlier-1", "rollouts") == first
    assert (tmp_path / "earlier-1" / "checkpoint-2").is_dir()
    run.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert [row["step"] for row in journal(tmp_path)] == [1, 2]
    assert not (tmp_path / "earlier-2" / "journal").exists()


def right(completions, answer, **others):
    return [float(text == value) for text, value in zip(completions, answer, strict=True)]


def test_columns_that_a_reward_names_are_kept_and_long_values_are_cut(tmp_path):
    data = rows(4).to_list()
    data = Dataset.from_list([{**row, "cases": [row["answer"] * 999], "more": "m"} for row in data])
    trained(
        "GRPO", tmp_path, data=data, reward_funcs=[right, lambda completions, cases: ones(completions)], max_steps=1
    )
    for row in journal(tmp_path, "rollouts"):
        answer = row["prompt"][0]
        assert row["columns"] == {"answer": answer, "cases": f"{json.dumps([answer * 999])[:1000]}..."}


def test_a_conversation_is_its_prompts_messages_and_the_completions(tmp_path):
    def content(completions, **columns):
        return [float(len(message["content"])) for (message,) in completions]

    chats = Dataset.from_list([{"prompt": [{"role": "user", "content": f"{i}="}]} for i in range(4)])
    trained("GRPO", tmp_path, tiny_model(16), chats, char_tokenizer(chat=True), reward_funcs=content, max_steps=1)
    for row in journal(tmp_path, "rollouts"):
        (user,), (assistant,) = row["prompt"], row["completion"]
        assert (user["role"], assistant["role"]) == ("user", "assistant")
        assert row["reward"] == len(assistant["content"])


def test_a_conversation_is_printed_as_its_turns_calls_and_results_within_the_terminals_width(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    calls = [{"type": "function", "function": {"name": "add", "arguments": {"a": 1, "to": "é"}}}, {"name": "look"}]
    messages = [
        {"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": calls},
        {"role": "tool", "name": "add", "content": "first\nsecond"},
        {"role": "tool", "name": "look", "content": "x" * 500},
        {"role": "user", "content": "go on"},
        {"role": "assistant", "content": "done"},
    ]
    print_completions(
        [{"prompt": "p", "completion": messages, "rewards": {}, "reward": 1.0, "advantage": 0.0, "group": 0}], step=1
    )
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    cells = [line.split("│")[2][1:].rstrip() for line in lines if line.startswith("│")]
    assert cells[:5] == [
        "assistant: <think>hm</think>",
        '  add(a=1, to="é")',
        "  look()",
        "  add -> first",
        "    second",
    ]
    assert cells[-2:] == ["user: go on", "assistant: done"]
    assert "".join(cells).count("x") == 500
    # A call without a result, too.
    print_completions([{"prompt": "p", "completion": messages[:1], "rewards": {}, "reward": 1.0, "advantage": 0.0}], 1)
    assert "look()" in capsys.readouterr().out


def row_of(mask, policy_versions=None):
    """The journal's row of a completion that weights of version 7 generated unless it has versions of its own."""
    size = len(mask)
    ids, logprobs = torch.ones(size, dtype=torch.int32), torch.zeros(size)
    completion = Completion(
        ids, logprobs, torch.tensor(mask, dtype=torch.bool), "stop", policy_versions=policy_versions
    )
    record = Record(0, (1,), completion, (), 0.0)
    rewarded = RewardedCompletions((record,), {}, {}, {}, ("p",), ("c",))
    (row,) = completion_rows(rewarded, [copy.copy(record)], (), 7)
    return row


def test_each_turn_has_its_policy_version_and_number_of_tokens():
    versions = torch.tensor([3, 3, 0, 0, 4, 4, 4], dtype=torch.int32)
    turns = row_of([1, 1, 0, 0, 1, 1, 1], versions)["turns"]
    assert turns == [
        {"policy_version": 3, "first_token": 0, "num_tokens": 2},
        {"policy_version": 4, "first_token": 4, "num_tokens": 3},
    ]
    several = row_of([1, 1, 0, 1])
    assert [turn["policy_version"] for turn in several["turns"]] == [7, 7]
    assert (several["policy_version"], several["num_tokens"]) == (7, 3)
    for mask in ([1, 1], []):
        row = row_of(mask)
        assert "turns" not in row
        assert (row["policy_version"], row["num_tokens"]) == (7, len(mask))


def test_turns_that_begin_branches_say_what_they_follow():
    # A prompt of 4 tokens. Turn 0, a reply, turn 1; from the reply's first token another reply and turn 2; from the prompt
    # turn 3, which adjoins turn 2; from within turn 3 the rest of turn 4.
    mask = torch.tensor([1, 1, 0, 0, 1, 0, 1, 1, 1, 1, 1], dtype=torch.bool)
    branches = (Branch(5, 4 + 2), Branch(7, 3), Branch(10, 4 + 7))
    turns = tuple(Turn(last) for last in (1, 4, 6, 9, 10))
    completion = Completion(
        torch.ones(11, dtype=torch.int32),
        torch.zeros(11),
        mask,
        "stop",
        conversation=Conversation((), turns),
        branches=branches,
    )
    record = Record(0, (1, 1, 1, 1), completion, (), 0.0)
    (row,) = completion_rows(RewardedCompletions((record,), {}, {}, {}, ("p",), ("c",)), [record], (), 7)
    assert [(turn["first_token"], turn["num_tokens"], turn.get("follows")) for turn in row["turns"]] == [
        (0, 2, None),
        (4, 1, None),
        (6, 1, 0),
        (7, 3, -1),
        (10, 1, 3),
    ]


def test_a_turn_that_another_branch_has_as_context_takes_no_other_turns_place():
    # Turn 0; from the prompt context that turn 1 sampled, too, and turn 2.
    turns = (Turn(0, None, 0.5, 0), Turn(1, None, 0.25, 2), Turn(3, None, 0.125, 4))
    completion = Completion(
        torch.ones(4, dtype=torch.int32),
        torch.zeros(4),
        torch.tensor([1, 0, 0, 1], dtype=torch.bool),
        "stop",
        conversation=Conversation((), turns),
        branches=(Branch(1, 0),),
    )
    record = Record(0, (1,), completion, (), 0.0)
    (row,) = completion_rows(RewardedCompletions((record,), {}, {}, {}, ("p",), ("c",)), [record], (), 7)
    assert [(turn["first_token"], turn["seconds"], turn["message"]) for turn in row["turns"]] == [
        (0, 0.5, 0),
        (3, 0.125, 4),
    ]

"""The data of a report: each number is the journal's, samples are even and named, and no text becomes markup."""

from __future__ import annotations

import itertools
import json
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from case_selection import mark_extended
from journals import MARKUP, conversation, data_of, online_run, token_row
from lowpeak.cli.commands import main
from lowpeak.errors import ArgumentError
from lowpeak.journal import FORMAT, Journal
from lowpeak.report.page import write_report
from small_runs import spread, trained

SAVED = Path(__file__).parents[2] / "stored" / "saved"  # runs of former versions


def titles(figures):
    return [figure["layout"]["title"]["text"] for figure in figures]


def traces(data, kind, title):
    (figure,) = (each for each in data[kind] if each["layout"]["title"]["text"] == title)
    return {trace["name"]: trace for trace in figure["data"]}


def test_curves_have_the_numbers_of_the_journal(tmp_path):
    data = data_of(write_report([online_run(tmp_path / "run")]))
    expected = ["Reward", "KL", "Entropy", "Completion length", "Learning rate"]
    assert titles(data["curves"]) == expected
    assert titles(data["others"]) == ["odd metric"]
    reward = traces(data, "curves", "Reward")["reward"]
    assert reward["x"] == [1, 2, 3, 4]
    assert reward["y"] == [0.1, 0.2, 0.3, 0.4]


def test_what_a_run_took_stands_beside_what_was_quoted_for_its_steps(tmp_path):
    journal = Journal(tmp_path / "run" / "journal")
    for step in (1, 2):
        journal.write_step(step, {"step_time": 900.0})
    quote = {"gpu": "h100", "steps": 4, "price_per_hour": 20.0, "hours": [0.8, 2.0], "dollars": [16.0, 40.0]}
    (tmp_path / "run" / "quote.json").write_text(json.dumps(quote))
    (run,) = data_of(write_report([tmp_path / "run"]))["runs"]
    assert run["summary"].endswith("Its steps took 0.5 h, $10.00; quoted on h100 were 0.4 to 1 h, $8.00 to $20.00.")


def test_the_head_has_what_was_trained_how_and_with_which_result(tmp_path):
    runs = []
    for name, rate in (("one", 1e-6), ("two", 5e-6)):
        folder = online_run(tmp_path / name, 20)
        journal = Journal(folder / "journal")
        journal.resume_at(20)
        facts = {
            "algorithm": "GRPO",
            "model": "a/b",
            "data": "c/d",
            "rows": 7473,
            "rewards": ["right", "short"],
            "device": "H200",
            "devices": 8,
        }
        journal.write_run(0, {**facts, "device_memory": 141 << 30, "arguments": {"learning_rate": rate, "beta": 0.1}})
        journal.write_evaluation(10, {"eval_accuracy": 0.25, "eval_runtime": 3.0})
        journal.write_evaluation(20, {"eval_accuracy": 0.53333333})
        runs.append(folder)
    data = data_of(write_report(runs, tmp_path / "both.html"))
    head = {name: values for name, *values in data["header"]}
    expected = {
        "algorithm": "GRPO",
        "model": "a/b",
        "data": "c/d, 7,473 rows",
        "rewards": "right, short",
        "hardware": "8 x H200, 141 GiB each",
    }
    expected |= {
        "rewards": "right, short",
        "steps": "20",
        "time of steps": "80 s",
        "reward": "0.55 \u2192 1.55 (means of the first and last 10 steps)",
    }
    expected |= {"eval_accuracy": "0.25 \u2192 0.5333"}
    assert {name: head[name] for name in expected} == {name: [value] * 2 for name, value in expected.items()}
    assert head.keys() - expected.keys() == {"last start"}
    assert data["arguments"] == [["learning_rate", "1e-06", "5e-06"], ["beta", "0.1", "0.1"]]


def test_curves_can_stand_over_tokens_and_hours(tmp_path):
    journal = Journal(tmp_path / "run" / "journal")
    for step in (1, 2):
        journal.write_step(step, {"reward": 1.0, "num_tokens": step * 100.0, "step_time": 1800.0})
    data = data_of(write_report([tmp_path / "run"]))
    assert data["runs"][0]["axes"] == {"step": [1, 2], "tokens": [100.0, 200.0], "hours": [0.5, 1.0]}
    assert traces(data, "curves", "Reward")["reward"]["meta"] == 0
    assert titles(data["others"]) == ["num_tokens"]


def test_the_page_of_a_watched_run_follows_it_and_the_last_one_stays(tmp_path, capsys, monkeypatch):
    run, waits = online_run(tmp_path / "run"), []

    def wait(seconds):
        waits.append(data_of(run / "report.html")["reload_seconds"])
        if len(waits) == 2:
            Journal(run / "journal").write_step(5, {"reward": 0.5})
        if len(waits) == 4:
            raise KeyboardInterrupt

    monkeypatch.setattr("lowpeak.report.page.time.sleep", wait)
    assert main(["report", str(run), "--watch", "7"]) == 0
    assert waits == [7.0] * 4
    assert capsys.readouterr().out.count("report.html") == 3  # at first, after a new step, and at the end
    assert data_of(run / "report.html")["reload_seconds"] == 0
    assert [path.name for path in run.glob(".report*")] == []
    assert main(["report", str(run), "--watch", "0"]) == 2


def test_several_runs_stand_in_one_figure_by_their_names(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    runs = [online_run(tmp_path / "one"), online_run(tmp_path / "two", 2)]
    assert write_report(runs).resolve() == tmp_path / "report.html"
    data = data_of(tmp_path / "report.html")
    shown = traces(data, "curves", "Reward")
    assert {name: trace["x"] for name, trace in shown.items()} == {"one": [1, 2, 3, 4], "two": [1, 2]}
    assert len({trace["line"]["color"] for trace in shown.values()}) == 2


def test_runs_whose_folders_have_the_same_name_are_told_apart(tmp_path):
    folders = [online_run(tmp_path / "a" / "run"), online_run(tmp_path / "b" / "run")]
    data = data_of(write_report(folders, tmp_path / "both.html"))
    assert [run["name"] for run in data["runs"]] == ["a/run", "b/run"]


def test_phases_have_time_memory_plan_and_limit(tmp_path):
    journal = Journal(tmp_path / "run" / "journal")
    for step, seconds in ((1, 1.0), (2, 2.0)):
        memory = {"peak_memory/train": 3.0 * 2**30, "planned_memory/train": 2.0 * 2**30, "memory_limit": 4.0 * 2**30}
        journal.write_step(step, {"time/train": seconds, "time/save": 1.0, "step_time": seconds + 1, **memory})
    data = data_of(write_report([tmp_path / "run"]))
    assert data["runs"][0]["phases"][0] == ["train", "1.5 s", "60.0%", "3.00 GiB", "2.00 GiB", "75.0%"]
    assert data["runs"][0]["phases"][1] == ["save", "1 s", "40.0%", "", "", ""]
    seconds = traces(data, "phases", "run: seconds of a step")
    assert {name: trace["y"] for name, trace in seconds.items()} == {"train": [1.0, 2.0], "whole step": [2.0, 3.0]}
    memory = traces(data, "phases", "run: peak memory in GiB")
    assert {name: trace["y"] for name, trace in memory.items()} == {
        "train": [3.0, 3.0],
        "train, planned": [2.0, 2.0],
        "limit": [4.0, 4.0],
    }


def test_evaluations_are_curves_at_their_steps(tmp_path):
    folder = online_run(tmp_path / "run")
    journal = Journal(folder / "journal")
    journal.resume_at(4)
    journal.write_evaluation(2, {"eval_accuracy": 0.25})
    journal.write_evaluation(4, {"eval_accuracy": 0.5})
    accuracy = traces(data_of(write_report([folder])), "curves", "Accuracy")["eval_accuracy"]
    assert (accuracy["x"], accuracy["y"]) == ([2, 4], [0.25, 0.5])


def test_events_are_listed_and_marked_in_the_curves(tmp_path):
    folder = online_run(tmp_path / "run")
    journal = Journal(folder / "journal")
    journal.resume_at(2)
    journal.write_event(2, "resumed", restarts=1)
    journal.write_event(3, "engine lost", error=MARKUP)
    data = data_of(write_report([folder]))
    resumed, lost = data["runs"][0]["events"]
    assert (resumed["step"], resumed["event"], resumed["details"]) == (2, "resumed", "restarts 1")
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC", resumed["time"])
    assert lost["details"] == f"error {MARKUP}"
    assert [shape["x0"] for shape in data["curves"][0]["layout"]["shapes"]] == [2, 3]


def test_completions_have_their_prompt_rewards_and_token_values(tmp_path):
    run = data_of(write_report([online_run(tmp_path / "run")]))["runs"][0]
    assert len(run["completions"]) == 16
    row = run["completions"][4]
    assert run["prompts"][row["prompt"]] == "prompt 2"
    assert (row["completion"], row["reward"], row["advantage"], row["length"]) == ("text 4", 4.0, -4.0, 3)
    assert (row["group"], row["rewards"]) == ("1/0", {"my_reward": 4.0})
    assert row["facts"] == [["policy version", "1"], ["answer", "4"]]
    expected = token_row(0, ["te", "xt ", "4"])
    assert row["tokens"] == {name: expected[name] for name in expected if name != "row"}
    assert [i for i, each in enumerate(run["completions"]) if "tokens" in each] == [0, 4, 8, 12]


def test_messages_are_shown_by_role_and_content(tmp_path):
    prompt = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]
    run = data_of(write_report([online_run(tmp_path / "run", prompt=prompt)]))["runs"][0]
    assert run["prompts"] == ["user: hi\nassistant: yes"]


def test_a_conversation_is_shown_by_turns_with_the_tokens_of_each(tmp_path):
    run = data_of(write_report([online_run(tmp_path / "run", **conversation("3"))]))["runs"][0]
    row = run["completions"][0]
    assert row["completion"] == [
        {
            "text": "assistant: let me see\n  add(a=1, b=2)",
            "replies": ["add -> 3"],
            "facts": [["tokens", "1"], ["reward", "0.5"], ["seconds of the reply", "0.25"]],
            "start": 0,
            "length": 1,
        },
        {"text": "assistant: so 3", "replies": [], "facts": [["tokens", "1"]], "start": 2, "length": 1},
    ]
    assert "turns" not in dict(row["facts"])
    first, second = conversation("3")["turns"]
    branched = conversation("3") | {"turns": [first, second | {"follows": -1}]}
    row = data_of(write_report([online_run(tmp_path / "branches", **branched)]))["runs"][0]["completions"][0]
    first_turn, branch = row["completion"]
    assert (first_turn["replies"], first_turn["facts"]) == ([], [["tokens", "1"], ["reward", "0.5"]])
    assert branch["facts"] == [["turn", "2"], ["branch from", "the prompt"], ["tokens", "1"]]
    assert branch["context"] == ["add -> 3"], "what a branch begins with is no reply to the turn before it"
    # Ranges of tokens that are not those of the messages' turns.
    changed = conversation("3") | {"turns": conversation("3")["turns"][:1]}
    row = data_of(write_report([online_run(tmp_path / "other", **changed)]))["runs"][0]["completions"][0]
    assert row["completion"] == "assistant: let me see\n  add(a=1, b=2)\n  add -> 3\nassistant: so 3"
    assert "turns" in dict(row["facts"])


def test_messages_that_a_program_wrote_as_the_assistants_are_no_turns(tmp_path):
    says = ["one", "edited", "two"]
    messages = [{"role": "assistant", "content": text} for text in says]
    turns = [{"policy_version": 0, "first_token": i, "num_tokens": 1, "message": 2 * i} for i in (0, 1)]
    turns[1]["follows"] = -1
    (run,) = data_of(write_report([online_run(tmp_path / "run", completion=messages, turns=turns)]))["runs"]
    shown = run["completions"][0]["completion"]
    assert [(each["text"], each.get("context")) for each in shown] == [
        ("assistant: one", None),
        ("assistant: two", ["assistant: edited"]),
    ]
    # Not in order, or not in the text.
    for i, wrong in enumerate(([2, 0], [0, 3], [0, 0])):
        changed = [turn | {"message": at} for turn, at in zip(turns, wrong, strict=True)]
        path = online_run(tmp_path / f"{i}", completion=messages, turns=changed)
        assert data_of(write_report([path]))["runs"][0]["completions"][0]["completion"].count("assistant: ") == 3


def test_a_reward_an_extra_and_a_column_of_any_name_are_shown_besides_the_text(tmp_path):
    named = {"rewards": {"completion": 8.0, "step": 0.5}, "extra": {"reward": "R"}, "columns": {"completion": "c"}}
    turns = [{"policy_version": 3, "num_tokens": 1}, {"policy_version": 4, "num_tokens": 2}]
    run = data_of(write_report([online_run(tmp_path / "run", turns=turns, **named)]))["runs"][0]
    row = run["completions"][4]
    assert (row["completion"], row["step"], row["reward"]) == ("text 4", 2, 4.0)
    assert row["rewards"] == named["rewards"]
    assert row["facts"][1:] == [["turns", json.dumps(turns)], ["reward", "R"], ["completion", "c"]]


def test_a_run_that_began_in_format_1_and_was_resumed_is_shown_whole(tmp_path):
    journal = tmp_path / "run" / "journal"
    shutil.copytree(SAVED / "grpo" / "run" / "journal", journal)
    before = len((journal / "rollouts.jsonl").read_text().splitlines())
    resumed = Journal(journal)
    resumed.resume_at(99)
    row = {"rollout": 9, "group": 0, "prompt": "new", "completion": "text", "rewards": {"spread": 0.5}, "reward": 0.5}
    resumed.write_rollout(100, [row])
    completions = data_of(write_report([tmp_path / "run"]))["runs"][0]["completions"]
    assert len(completions) == before + 1
    for row, group in ((completions[0], "0"), (completions[-1], "9/0")):
        assert row["group"] == group
        rewards = {**dict(row["facts"]), **row["rewards"]}
        assert float(rewards["spread"]) == pytest.approx(row["reward"], rel=1e-3)


def test_a_journal_of_a_newer_format_is_refused_in_one_sentence(tmp_path):
    folder = online_run(tmp_path / "run", format=FORMAT + 1)
    with pytest.raises(ArgumentError, match=rf" {FORMAT + 1}, .* {FORMAT}: "):
        write_report([folder])


def test_all_files_of_a_long_run_are_read(tmp_path, monkeypatch):
    monkeypatch.setattr("lowpeak.journal._FULL_FILE", 2_000)
    folder = online_run(tmp_path / "run", num_steps=25, per_step=10)
    assert len([*(folder / "journal").glob("rollouts.0*")]) > 10
    run = data_of(write_report([folder]))["runs"][0]
    assert [row["reward"] for row in run["completions"]] == [float(i) for i in range(250)]
    assert [row["step"] for row in run["completions"] if "tokens" in row] == [*range(1, 26)]


def limit(monkeypatch, **limits):
    """Lower limits of a page, so that a short run exceeds them."""
    for name, value in limits.items():
        monkeypatch.setattr(f"lowpeak.report.run_data.{name}", value)


def test_more_completions_than_a_page_may_have_are_whole_groups_sampled_evenly_and_the_page_says_so(
    tmp_path, monkeypatch
):
    limit(monkeypatch, MAX_COMPLETIONS=200, MAX_TOKEN_ROWS=15)
    folder = online_run(tmp_path / "run", num_steps=25, per_step=10)
    run = data_of(write_report([folder]))["runs"][0]
    rewards = [row["reward"] for row in run["completions"]]
    steps = [row["step"] for row in run["completions"]]
    valued = [row["step"] for row in run["completions"] if "tokens" in row]
    assert (len(rewards), len(valued)) == (200, 15)
    assert rewards == sorted(set(rewards))
    assert {steps.count(step) for step in steps} == {10}
    for found in (sorted({*steps}), valued):
        assert (found[0], found[-1]) == (1, 25)
        assert max(b - a for a, b in itertools.pairwise(found)) <= 3
    assert "200 of 250 completions, evenly sampled" in run["sampled"]
    assert "15 of 25, evenly sampled" in run["sampled"]


def test_groups_with_token_values_are_sampled_first(tmp_path, monkeypatch):
    limit(monkeypatch, MAX_COMPLETIONS=40)
    folder = online_run(tmp_path / "run", num_steps=25)
    journal = Journal(folder / "journal")
    journal.resume_at(25)
    for step in range(26, 76):
        journal.write_rollout(step, [{"rollout": step, "group": 0, "completion": "text"}] * 4)
    run = data_of(write_report([folder]))["runs"][0]
    assert max(row["step"] for row in run["completions"]) == 25


def test_long_texts_make_the_sample_smaller(tmp_path, monkeypatch):
    limit(monkeypatch, MAX_TEXT_LENGTH=90 << 10)
    folder = online_run(tmp_path / "run", num_steps=4, per_step=2, completion="x" * (20 << 10))
    run = data_of(write_report([folder]))["runs"][0]
    assert [row["step"] for row in run["completions"]] == [1, 1, 4, 4]
    assert "4 of 8 completions, evenly sampled" in run["sampled"]


def test_a_page_of_two_thousand_completions_has_at_most_ten_megabytes(tmp_path):
    tokens = token_row(0, ["word "] * 250)
    folder = online_run(tmp_path / "run", num_steps=250, per_step=8, completion="word " * 250)
    journal = Journal(folder / "journal")
    journal.resume_at(0)
    for step in range(1, 251):
        rows = [
            {"rollout": step, "group": 0, "prompt": "word " * 100, "completion": "word " * 250, "reward": 1 / 3}
        ] * 8
        journal.write_rollout(step, rows)
        journal.write_tokens(step, [tokens | {"logprobs": [-1 / 3 * each for each in range(250)]}])
        journal.write_step(step, {f"metric {i}": step / 3 for i in range(60)})
    page = write_report([folder])
    assert len(data_of(page)["runs"][0]["completions"]) == 2_000
    assert page.stat().st_size <= 10 * 10**6


def test_token_values_of_long_completions_are_of_fewer(tmp_path, monkeypatch):
    limit(monkeypatch, MAX_TOKENS=1_000)
    folder = online_run(tmp_path / "run")
    journal = Journal(folder / "journal")
    journal.resume_at(0)
    for step in range(1, 5):
        journal.write_rollout(step, [{"completion": "text"}])
        journal.write_tokens(step, [token_row(0, ["x"] * 400)])
    run = data_of(write_report([folder]))["runs"][0]
    assert [row["step"] for row in run["completions"] if "tokens" in row] == [1, 4]
    assert "2 of 4, evenly sampled" in run["sampled"]


def test_more_steps_than_a_curve_may_have_are_sampled_evenly_and_the_page_says_so(tmp_path, monkeypatch):
    limit(monkeypatch, MAX_STEPS=50)
    journal = Journal(tmp_path / "run" / "journal")
    for step in range(1, 101):
        journal.write_step(step, {"reward": 1.0})
    data = data_of(write_report([tmp_path / "run"]))
    steps = traces(data, "curves", "Reward")["reward"]["x"]
    assert (len(steps), steps[0], steps[-1]) == (50, 1, 100)
    assert "The curves have 50 of 100 steps, evenly sampled." in data["runs"][0]["summary"]


class Elements(HTMLParser):
    """Names of the elements that a browser would make."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.names: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.names.append(tag)


def test_texts_of_a_run_are_data_and_never_elements(tmp_path):
    plain = Elements(write_report([online_run(tmp_path / "plain")]).read_text())
    name = "<img src=x onerror=alert(3)>"
    folder = online_run(tmp_path / name, prompt=MARKUP, completion=MARKUP, finish_reason=MARKUP, extra={MARKUP: MARKUP})
    journal = Journal(folder / "journal")
    journal.resume_at(4)
    journal.write_tokens(1, [token_row(1, [MARKUP, "{{script}}", "]]>"])])
    journal.write_step(5, {MARKUP: 1.0, "time/<b>": 1.0})
    page = write_report([folder])
    assert Elements(page.read_text()).names == plain.names
    run = data_of(page)["runs"][0]
    assert run["name"] == name
    assert run["completions"][1]["tokens"]["pieces"][:2] == [MARKUP, "{{script}}"]
    assert [MARKUP, MARKUP] in run["completions"][0]["facts"]
    others = titles(data_of(page)["others"])
    assert not any("<" in title for title in others)


def test_lone_surrogates_and_numbers_that_json_has_not_do_not_break_the_page(tmp_path):
    folder = tmp_path / "run"
    (folder / "journal").mkdir(parents=True)
    steps = '{"step":1,"reward":NaN,"loss":Infinity,"entropy":1.0}\n'
    (folder / "journal" / "steps.jsonl").write_text(steps)
    rollouts = r'{"step":1,"prompt":"\ud800 \\","completion":"a\udc00","reward":NaN,"extra":[NaN]}' + "\n"
    (folder / "journal" / "rollouts.jsonl").write_text(rollouts)
    data = data_of(write_report([folder]))
    assert titles(data["curves"]) == ["Entropy"]
    assert data["runs"][0]["prompts"] == ["\ud800 \\"]
    (row,) = data["runs"][0]["completions"]
    assert (row["completion"], row["reward"]) == ("a\udc00", None)


@pytest.mark.parametrize(
    "end", ['{"step":9,"rew', '{"step":9}', "\0\0\n", '{"step":9,"reward":}\n', "{" * 100_000 + "\n"]
)
def test_incomplete_and_damaged_lines_are_left_out(tmp_path, end):
    folder = online_run(tmp_path / "run")
    for name in ("steps", "rollouts", "tokens"):
        with (folder / "journal" / f"{name}.jsonl").open("a") as file:
            file.write(end)
    data = data_of(write_report([folder]))
    assert traces(data, "curves", "Reward")["reward"]["x"] == [1, 2, 3, 4]
    assert len(data["runs"][0]["completions"]) == 16


def test_token_values_that_fit_no_completion_are_left_out(tmp_path):
    folder = online_run(tmp_path / "run")
    journal = Journal(folder / "journal")
    journal.resume_at(4)
    for changes in (
        {"row": 99}, {"row": [0]}, {"row": None}, {"logprobs": [1.0]}, {"entropy": None}, {"pieces": "abc"},
    ):  # fmt: skip
        journal.write_tokens(3, [token_row(1, ["a", "b"]) | changes])
    run = data_of(write_report([folder]))["runs"][0]
    assert sum("tokens" in row for row in run["completions"]) == 4


@pytest.mark.parametrize("kind", mark_extended(["GRPO", "PPO", "Reward"], ["GRPO", "Reward"]))
def test_runs_of_every_kind_have_a_report(tmp_path, kind):
    online = {"reward_funcs": spread} if kind != "Reward" else {}
    trained(kind, tmp_path / "run", **online)
    data = data_of(write_report([tmp_path / "run"]))
    head = {name: value for name, value in data["header"]}
    names = {"GRPO": "GRPO", "PPO": "PPO", "Reward": "reward modeling (Bradley-Terry)"}
    assert (head["algorithm"], head["data"], head["hardware"]) == (
        names[kind],
        "8 rows" if kind == "Reward" else "16 rows",
        "1 x CPU",
    )
    assert ["max_steps", "2"] in data["arguments"]
    expected = {"GRPO": "Reward", "PPO": "KL", "Reward": "Accuracy"}
    assert {expected[kind], "Learning rate", "Loss"} <= {*titles(data["curves"])}
    assert {"train", "optimizer"} <= {row[0] for row in data["runs"][0]["phases"]}
    completions = data["runs"][0]["completions"]
    num_rollouts = {"GRPO": 2, "PPO": 1, "Reward": 0}[kind]
    assert sum("tokens" in row for row in completions) == num_rollouts
    assert len(completions) == 8 * num_rollouts


@pytest.mark.parametrize(
    ("words", "match"),
    [
        (["{run}/none"], "/none "),
        (["{run}/journal"], r"journal has .*steps\.jsonl"),
        (["{run}", "--output", "{run}/no/report.html"], r"no/report\.html"),
        (["{run}", "--output", "{run}/journal/steps.jsonl"], r"steps\.jsonl .*\.html"),
        (["{run}", "--outp", "x.html"], "--outp"),
        ([], "RUN"),
    ],
)
def test_what_cannot_be_reported_is_one_sentence(tmp_path, capsys, words, match):
    run = online_run(tmp_path / "run")
    assert main(["report", *(word.format(run=run) for word in words)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("lowpeak: error: ")
    assert re.search(match, error)
    assert error.count("\n") == 1


def test_a_target_that_is_a_folder_is_an_error_and_the_command_names_its_file(tmp_path, capsys):
    run = online_run(tmp_path / "run")
    (run / "report.html").mkdir()
    with pytest.raises(ArgumentError, match=r"report\.html"):
        write_report([run])
    shutil.rmtree(run / "report.html")
    assert main(["report", str(run)]) == 0
    assert str(run / "report.html") in capsys.readouterr().out
    assert data_of(run / "report.html")["runs"][0]["name"] == "run"


def test_a_report_loads_no_heavy_package(tmp_path):
    online_run(tmp_path / "run")
    heavy = ("torch", "transformers", "datasets", "accelerate", "numpy", "pandas", "peft", "vllm")
    program = (
        f"from lowpeak.cli.commands import main; main(['report', {str(tmp_path / 'run')!r}])\n"
        f"import sys, json; print(json.dumps(sorted(set({heavy!r}) & set(sys.modules))))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    assert json.loads(done.stdout.splitlines()[-1]) == []

"""The manual's code: Python runs on a tiny model, YAML files and commands have arguments that exist."""

from __future__ import annotations

import contextlib
import io
import json
import re
import shlex
import shutil

import pytest
from datasets import Dataset
from transformers import AutoModelForSequenceClassification

from architecture.sources import ROOT
from lowpeak.cli.commands import COMMANDS, main
from lowpeak.cli.env import SELFTEST_OPTIONS
from lowpeak.cli.train import CLASS_PREFIXES, read_job, with_config
from preference_data import tiny_classifier
from tiny_models import tiny_model, tool_tokenizer

DOCS = ROOT / "docs"
# Pages whose Python runs from top to bottom, in one namespace.
RUN = [
    *("../README", "index", "lora", "resume", "trackers", "rewards", "evaluation", "reasoning", "metrics", "report"),
    *("notebooks", "tools", "supervised", "distillation", "preferences", "migrating", "algorithms"),
]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.glob("*.md"))]
PARSED = [name for name in COMMANDS if name not in ("serve", "vllm-serve", "preset")]


def blocks(page, language):
    """The page's blocks of a language; those of commands have none."""
    text = page.read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a tiny chat model, and a dataset by each name of the pages."""
    folder = tmp_path_factory.mktemp("docs")
    tokenizer = tool_tokenizer()
    tokenizer.save_pretrained(folder / "tiny")
    tiny_model(vocab_size=len(tokenizer)).save_pretrained(folder / "tiny")
    tokenizer.save_pretrained(folder / "classifier")
    tiny_classifier(vocab_size=len(tokenizer)).save_pretrained(folder / "classifier")
    (folder / "my_games.py").write_text(*blocks(DOCS / "tools.md", "py"))
    rows = [{"prompt": f"What is {i} + 1?", "answer": str(i + 1)} for i in range(32)]
    pairs = [{"prompt": row["prompt"], "chosen": row["answer"], "rejected": "0"} for row in rows]
    for name, written in {
        "train": rows,
        "prompts": rows,
        "pairs": pairs,
        "demonstrations": [{"prompt": row["prompt"], "completion": row["answer"]} for row in rows],
    }.items():
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, written)))
    return folder


def shrunk(code):
    """Return the code with a tiny model, two steps and short completions."""
    code = re.sub(r'"(Qwen/[\w.-]+|policy)"', '"tiny"', code)
    code = re.sub(r"\b(max_steps|eval_steps|save_steps)( ?= ?)\d+", r"\1\g<2>2", code)
    code = re.sub(r"max_completion_length=\d+", "max_completion_length=4", code)
    added = "use_cpu=True, disable_tqdm=True"
    given = {"max_steps": 2, **({} if "SFT" in code or "DPOConfig" in code else {"max_completion_length": 4})}
    for name, value in given.items():
        added += "" if name in code else f", {name}={value}"
    code = code.replace("runs/lora", "out/adapter")  # of a command
    return code.replace('output_dir="out"', f'output_dir="out", {added}')


@pytest.mark.parametrize("name", RUN)
def test_the_python_of_a_page_runs(folder, monkeypatch, name):
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)
    shutil.rmtree("out", ignore_errors=True)
    pages = ("index", name) if name in ("metrics", "report") else (name,)  # they read the journal of a run
    code = [shrunk(block) for page in pages for block in blocks(DOCS / f"{page}.md", "python")]
    assert len(code) >= len(pages)
    names = {"tokenizer": tool_tokenizer(), "data": Dataset.from_json("prompts.jsonl", cache_dir="cache")}
    for kind in ("reward_model", "value_model"):
        names[kind] = AutoModelForSequenceClassification.from_pretrained("classifier")
    for block in code:
        exec(compile(block, f"{name}.md", "exec"), names)


def options(command):
    """Return the names of a command's arguments, as its help lists them."""
    text = io.StringIO()
    with contextlib.redirect_stdout(text), contextlib.suppress(SystemExit):
        main([command, "--help"])
    return set(re.findall(r"--([\w-]+)", text.getvalue()))


def commands(page):
    """Yield the words of each `lowpeak COMMAND ...` in the page's blocks and between its backticks."""
    text = page.read_text(encoding="utf-8")
    shell = [line for block in blocks(page, "") for line in block.replace("\\\n", " ").splitlines()]
    inline = [" ".join(code.split()) for code in re.findall(r"(?<!`)`(lowpeak [^`]+)`(?!`)", text)]
    for line in [*shell, *inline]:
        for found in re.finditer(r"(?:^|[ ;])lowpeak ([a-z][\w-]*)( [^;|]*)?", line.strip()):
            with contextlib.suppress(ValueError):  # an apostrophe of prose behind the command
                yield found[1], shlex.split(found[2] or "", comments=True)


def test_the_commands_of_the_pages_have_arguments_that_exist():
    known = {command: options(command) | {"help"} for command in PARSED}
    known["env"] |= {option[2:] for option in SELFTEST_OPTIONS} | {"selftest"}
    known["plan"] |= set().union(*known.values())  # it takes those of the planned command
    named = [
        (page.name, command, word[2:].partition("=")[0].replace("-", "_"))
        for page in PAGES
        for command, words in commands(page)
        for word in words
        if command in known and re.match(r"--\w", word)
    ]
    assert len(named) > 100
    assert [each for each in named if each[2] not in known[each[1]]] == []


def test_the_training_commands_of_the_pages_are_parsed(tmp_path, monkeypatch):
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    (tmp_path / "plan").mkdir()
    for name in ("run.yaml", "plan/run.yaml"):
        (tmp_path / name).write_text("model: tiny\ndataset: prompts.jsonl\nreward: numeric_match\n")
    monkeypatch.chdir(tmp_path)
    jobs = [
        with_config(read_job(command, words, f"lowpeak {command}")[1])
        for page in PAGES
        for command, words in commands(page)
        if command in CLASS_PREFIXES and words and not {"...", "--help"} & {*words}
    ]
    assert len(jobs) > 20


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "yaml")], ids=lambda page: page.name)
def test_the_files_of_a_page_are_read(tmp_path, page):
    for block in blocks(page, "yaml"):
        (tmp_path / "run.yaml").write_text(block)
        _, job = read_job("grpo", ["--config", str(tmp_path / "run.yaml")], "lowpeak grpo")
        assert job.given

"""`lowpeak check`: an own algorithm or environment passes, and each mistake of its author is one line and exit status 1."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from examples import own_algorithm

from case_selection import mark_extended
from lowpeak.cli.commands import main
from tiny_models import tool_tokenizer

EXAMPLE = Path(own_algorithm.__file__)
CHECKS = ["trainer", "algorithm", "select", "advantages", "loss", "metrics", "training step"]


def checked(capsys, *words):
    """The exit status, and each printed check as (result, name, text)."""
    status = main(["check", *map(str, words)])
    printed = capsys.readouterr().out.splitlines()
    lines = [line.split(maxsplit=1) for line in printed if line.startswith(("ok ", "FAIL "))]  # DeepSpeed prints, too
    return status, [(result, *rest.split(": ", 1)) for result, rest in lines]


@pytest.mark.parametrize("arguments", [(), ("--beta", "0.1", "--num_generations", "2")])
def test_the_example_passes_every_check(capsys, arguments):
    status, results = checked(capsys, f"{EXAMPLE}:ReinforceTrainer", *arguments)
    assert (status, [(result, name) for result, name, _ in results]) == (0, [("ok", name) for name in CHECKS])


LOSS = "-tokens.advantages_T * logprobs_T"


@pytest.mark.parametrize(
    ("right", "wrong", "failed", "words"),
    [
        (LOSS, f"({LOSS}).sum()", "loss", ["loss function loss", "[]", "one number for each unit"]),
        (LOSS, f"({LOSS}).detach()", "loss", ["loss function loss", "gradient"]),
        (LOSS, f"{LOSS}.log()", "loss", ["not finite"]),
        (LOSS, "-advantages * logprobs_T", "loss", ["TypeError", ".py, line "]),
        (LOSS, f"{LOSS}.mean()", "loss", ["other tokens", "needs_full_sequence=True"]),
        ("value.nan_to_num(nan=0.0)", "value", "advantages", ["per_token[2] nan", "give it 0"]),
        ("for value in per_token)", "for value in per_token)[1:]", "advantages", [" 2 tensors in per_token", " 3 records"]),
        ('if metrics["reward"]', 'if metrics["rewards"]', "training step", ["KeyError: 'rewards'", ".py, line "]),
        ("select=lowpeak.select_all", "select=list", "select", ["list", "lowpeak.Selection"]),
        ("measure=lowpeak.measure_pass", "measure=lambda *_: 0.5", "metrics", ["float", "lowpeak.Metric"]),
        ("reduction=lowpeak.sequence_mean", "reduction=lambda *_: 0.0", "training step", ["gradient", "reduction"]),
        ("def next_state(decay: float", "def next_state(rate: float, decay: float", "training step", ["next_state() missing"]),
        ("loss=loss,", "", "algorithm", ["missing", "'loss'", ".py, line "]),
        ("loss=loss,", "loss=None,", "algorithm", ["loss=None", "values=None"]),
        ("def make_algorithm", "def make", "algorithm", ["make_algorithm(args, settings)"]),
        ("config_class: ClassVar", "configs: ClassVar", "trainer", ["config_class", "lowpeak.OnlineConfig"]),
        ("class ReinforceTrainer(lowpeak.OnlineTrainer)", "class ReinforceTrainer", "trainer", ["lowpeak.OnlineTrainer"]),
        ("class ReinforceTrainer", "class OtherTrainer", "class", ["'ReinforceTrainer'", "does not exist"]),
        ("import torch\n", "import torhc\n", "class", [": line ", "torhc"]),
    ],
)  # fmt: skip
def test_a_mistake_fails_one_check_with_a_sentence_that_names_it(tmp_path, capsys, right, wrong, failed, words):
    text, path = EXAMPLE.read_text(), tmp_path / "own.py"
    assert right in text
    path.write_text(text.replace(right, wrong, 1))
    status, results = checked(capsys, f"{path}:ReinforceTrainer")
    passed = CHECKS[: CHECKS.index(failed)] if failed in CHECKS else []
    assert status == 1
    assert [(result, name) for result, name, _ in results] == [*(("ok", name) for name in passed), ("FAIL", failed)]
    assert [word for word in words if word not in results[-1][2]] == []


@pytest.mark.parametrize("spec", ["nowhere.py:MyTrainer", "own.py", "nowhere.MyTrainer"])
def test_a_file_that_is_not_there_fails_the_first_check(capsys, spec):
    status, [(result, name, text)] = checked(capsys, spec)
    assert (status, result, name) == (1, "FAIL", "class")
    assert spec.split(":")[0].removesuffix(".MyTrainer") in text


def test_an_argument_that_the_config_does_not_have_is_no_fault_of_the_algorithm(capsys):
    assert main(["check", f"{EXAMPLE}:ReinforceTrainer", "--baseline_decays", "0.5"]) == 2
    assert "baseline_decay'?" in capsys.readouterr().err


def test_a_step_that_is_not_logged_and_a_call_of_exit_are_checked_too(tmp_path, capsys):
    assert checked(capsys, f"{EXAMPLE}:ReinforceTrainer", "--logging_strategy", "no")[0] == 0
    path = tmp_path / "own.py"
    path.write_text(
        EXAMPLE.read_text().replace("return lowpeak.Algorithm(", "raise SystemExit(0)\n        lowpeak.Algorithm(")
    )
    status, results = checked(capsys, f"{path}:ReinforceTrainer")
    assert (status, results[-1][:2]) == (1, ("FAIL", "algorithm"))


ENVIRONMENT = '''
import random, threading, time
KEPT = []
class Guess:
    def reset(self, seed, **row):
        self.number, self.tries = random.Random(seed).randint(1, 9), []
        return " Find my number."

    def guess(self, number: int) -> str:
        """Compare a number with mine.

        Args:
            number: Your guess.
        """
        self.tries.append(number)
        return "right" if number == self.number else "higher" if number < self.number else "lower"

    def get_reward(self) -> float:
        return (self.number in self.tries) - 0.1 * len(self.tries)

    def close(self):
        pass
'''
ENVIRONMENT_CHECKS = ["schema", "template", "conversations", "time", "tokens", "seeds", "leaks", "rewards", "training"]
SHORT = ("--seconds", "0.2", "--max_steps", "1")


@pytest.fixture
def world(tmp_path):
    path = tmp_path / "worlds.py"
    path.write_text(ENVIRONMENT)
    return path


def test_an_environment_passes_every_check_and_is_trained_on_its_calls(world, capsys):
    status, results = checked(capsys, f"{world}:Guess", "--seconds", "12", "--max_steps", "2")
    assert (status, [(result, name) for result, name, _ in results]) == (
        0,
        [("ok", name) for name in ENVIRONMENT_CHECKS],
    )
    text = {name: text for _, name, text in results}
    assert text["schema"] == "guess(number: int) -> str"
    assert "16 with 48 random calls" in text["conversations"]
    assert [each.split()[0] for each in text["time"].split("; ")] == [
        *("make_environment", "reset", "guess", "get_reward", "rewards")
    ]
    assert "in 48 turns" in text["tokens"]
    assert "other seeds give others" in text["seeds"]
    assert "of 8 groups have unequal ones" in text["rewards"]
    assert text["training"].startswith("2 steps of GRPO")


RESET = "    def reset(self, seed, **row):\n"
THREAD = "        threading.Thread(target=time.sleep, args=(99,), daemon=True).start()\n"
REWARD = "return (self.number in"


MISTAKES = [
    (RESET, f"    def __init__(self):\n        time.sleep(60)\n{RESET}", "schema", ["environment_factory did not return"]),
    (RESET, f"{RESET}        raise OSError('no display')\n", "conversations", ["Guess.reset", "no display", ", line 6"]),
    ("self.tries.append(number)", "time.sleep(60)", "conversations", ["guess", "no result within 0.5 seconds"]),
    (REWARD, "return {}[0] + (self.number in", "conversations", ["Guess.get_reward", "KeyError"]),
    (REWARD, "return 'high' or (self.number in", "conversations", ["'high'"]),
    ("random.Random(seed)", "random.Random()", "seeds", ["one seed", "draw from Random(seed)"]),
    ("(1, 9), []", "(1, 9), getattr(self, 'tries', [])", "seeds", ["next conversation", "in reset"]),
    (RESET, RESET + THREAD, "leaks", ["more threads", "end in reset"]),
    (RESET, f"{RESET}        KEPT.append(open(__file__))\n", "leaks", ["more open files"]),
    (RESET, f"{RESET}        KEPT.append(bytes(1 << 20))\n", "leaks", ["more bytes"]),
    ("pass", "raise OSError('gone')", "leaks", ["OSError: gone", ", line "]),
    (REWARD, "return 1.0 or (self.number in", "rewards", ["the same reward (1)"]),
    (REWARD, "return None and (self.number in", "rewards", ["None"]),
]  # fmt: skip


@pytest.mark.parametrize(("right", "wrong", "failed", "words"), mark_extended(MISTAKES, MISTAKES[1::4], "release"))
def test_a_mistake_in_an_environment_fails_its_check_with_a_sentence(world, capsys, right, wrong, failed, words):
    assert right in ENVIRONMENT
    world.write_text(ENVIRONMENT.replace(right, wrong, 1))
    timeout = "0.5" if "sleep(60)" in wrong else "30"
    status, results = checked(capsys, f"{world}:Guess", *SHORT, "--tool_timeout", timeout)
    failures = {name: text for result, name, text in results if result == "FAIL"}
    # A trainer closes environments, too.
    assert (status, [*failures]) == (1, [failed, "training"] if "gone" in wrong else [failed])
    assert [word for word in words if word not in failures[failed]] == []


TOOLS = '''
def add(a: int, b: int) -> int:
    """Add.

    Args:
        a: One.
        b: Two.
    """
    return a + b


def length(completions, **columns):
    return [len(str(messages)) % 7 for messages in completions]
'''


def test_tools_are_checked_with_a_dataset_a_reward_and_the_template_of_a_model(tmp_path, capsys):
    tools, data, tokenizer = tmp_path / "tools.py", tmp_path / "rows.jsonl", tool_tokenizer()
    tools.write_text(TOOLS)
    data.write_text('{"prompt": [{"role": "user", "content": "1+2"}]}\n' * 8)
    arguments = ("--tools", f"{tools}:add", "--reward", f"{tools}:length", "--dataset", data, "--model", tmp_path)
    tokenizer.save_pretrained(tmp_path)
    assert checked(capsys, *arguments, *SHORT)[0] == 0
    # This template writes into a result how many arguments the call had.
    number = "{{ messages[loop.index0 - 1].tool_calls[0].function.arguments | length }}"
    tokenizer.chat_template = tokenizer.chat_template.replace("<tool>", f"<tool>{number}", 1)
    tokenizer.save_pretrained(tmp_path)
    _, results = checked(capsys, *arguments, *SHORT)
    failed = [(name, "other ids" in text) for result, name, text in results if result == "FAIL"]
    assert failed == [("tokens", True)]


def test_a_check_needs_a_class_or_tools_and_time(capsys, world):
    for arguments, named in ((["--seconds", "1"], "--tools"), ([f"{world}:Guess", "--seconds", "0"], "--seconds is 0")):
        assert main(["check", *arguments]) == 2
        assert named in capsys.readouterr().err


TEXTS = """
class Guess:
    def reset(self, seed, **row):
        self.number, self.num_guesses = seed % 4, 0
        return f" Guess 0, 1, 2 or 3 near {seed % 3}"

    def respond(self, text):
        self.num_guesses += 1
        self.is_right = str(self.number) in text
        return None if self.is_right or self.num_guesses == 3 else f"not {text}"

    def get_turn_reward(self):
        return float(self.is_right)
"""


SPACE = """
from gymnasium.spaces import Text


class Digits(Guess):
    def reset(self, seed, **row):
        super().reset(seed)
        return " Guess one of four digits"

    action_space = Text(2, charset="0123")

    is_right = False

    def respond(self, text):
        return super().respond(text) if self.action_space.contains(text) else None


class Short(Guess):
    def respond(self, text):
        super().respond(text)
"""


def test_an_environment_of_texts_is_checked_by_random_texts_and_their_tokens(tmp_path, capsys):
    (tmp_path / "game.py").write_text(TEXTS + SPACE)
    for name, arguments in (("Guess", ("--seconds", 2)), ("Digits", SHORT)):
        status, results = checked(capsys, f"{tmp_path}/game.py:{name}", *arguments)
        texts = {name: text for _, name, text in results}
        assert (status, {result for result, _, _ in results}) == (0, {"ok"})
        assert int(texts["conversations"].split(" random texts")[0].split()[-1]) > 20
        assert int(texts["tokens"].split()[1]) > 0
    _, results = checked(capsys, f"{tmp_path}/game.py:Short", *SHORT)
    assert [(result, "action_space" in text) for result, name, text in results if name == "tokens"] == [("FAIL", True)]


@pytest.mark.extended
def test_a_program_is_checked_by_random_texts(capsys):
    status, results = checked(capsys, EXAMPLE.parent / "agents" / "graph.py:CheckedAnswer", "--seconds", 2)
    texts = {name: text for _, name, text in results}
    assert (status, {result for result, _, _ in results}) == (0, {"ok"})
    assert " run " in texts["time"]
    assert 1 <= float(re.search(r"([\d.]+) turns", texts["training"])[1]) <= 3

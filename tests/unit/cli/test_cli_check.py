"""`lowpeak check`: an own algorithm passes, and each mistake that its author can make is one line and exit status 1."""

from __future__ import annotations

from pathlib import Path

import pytest
from examples import own_algorithm

from lowpeak.cli.commands import main

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
        ("class ReinforceTrainer", "class OtherTrainer", "trainer", ["'ReinforceTrainer'", "does not exist"]),
        ("import torch\n", "import torhc\n", "trainer", [": line ", "torhc"]),
    ],
)  # fmt: skip
def test_a_mistake_fails_one_check_with_a_sentence_that_names_it(tmp_path, capsys, right, wrong, failed, words):
    text, path = EXAMPLE.read_text(), tmp_path / "own.py"
    assert right in text
    path.write_text(text.replace(right, wrong, 1))
    status, results = checked(capsys, f"{path}:ReinforceTrainer")
    passed = CHECKS[: CHECKS.index(failed)]
    assert status == 1
    assert [(result, name) for result, name, _ in results] == [*(("ok", name) for name in passed), ("FAIL", failed)]
    assert [word for word in words if word not in results[-1][2]] == []


@pytest.mark.parametrize("spec", ["nowhere.py:MyTrainer", "own.py", "nowhere.MyTrainer"])
def test_a_file_that_is_not_there_fails_the_first_check(capsys, spec):
    status, [(result, name, text)] = checked(capsys, spec)
    assert (status, result, name) == (1, "FAIL", "trainer")
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

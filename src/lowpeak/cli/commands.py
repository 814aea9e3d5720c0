"""The `lowpeak` command: dispatch to a command; an expected error becomes one sentence and exit status 2."""

from __future__ import annotations

import atexit
import gc
import logging
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import lowpeak
from lowpeak.arguments import CLASS_PREFIXES
from lowpeak.cli.launch import LAUNCHED
from lowpeak.cli.output import print_once
from lowpeak.errors import ArgumentError, LowpeakError, RankError

if TYPE_CHECKING:
    from lowpeak.cli.arguments import CheckArguments
    from lowpeak.selftest import Check

USAGE = """\
usage: lowpeak COMMAND [--config FILE.yaml] [--argument value ...]

Online RL post-training for LLMs that fits the memory you have.

commands:
  grpo       train a model with GRPO (and DAPO, Dr. GRPO, GSPO, CISPO, SAPO, LUSPO, VESPO)
  rloo       train a model with RLOO
  ppo        train a model and its critic with PPO
  online-dpo train a model with Online DPO, with rewards or a judge
  distillation train a model on a teacher's distributions at its own completions
  sft        train a model on demonstrations
  reward     train a reward model on preferences
  dpo        train a model on preferences with DPO (and IPO, APO, MPO, and others)
  kto        train a model on completions that are desirable or not, with KTO
  serve      start a vLLM server that accepts weight updates from a run
  vllm-serve the same, by TRL's name
  plan       print what a run will take on each device before it starts; --fit chooses settings that fit
  check      check what you wrote, on the CPU: `lowpeak check FILE.py:MyTrainer` an algorithm, with one step of a tiny model;
             `lowpeak check FILE.py:MyEnvironment` or --tools FILE.py:function an environment or tools, in random conversations
             and a minute of training
  report     write curves, events and completions of runs into an HTML page
  env        print versions and hardware for bug reports; --selftest tests vLLM, --selftest --gpu also the GPU kernels and runs
             (--quick: the first 3 minutes of a new card; --rows GROUPS; --format json for an issue);
             `lowpeak env CONFIG.yaml` checks this machine against a run's config;
             `lowpeak env MODEL` says how a model generates and trains, and the bytes of its cache
  preset     print a config for several devices, to edit or to pass to `accelerate launch`

options:
  --help     print this text; `lowpeak COMMAND --help` lists a command's arguments, and `--help-all` of training commands,
             plan and check also those without effect
  --version  print the version of lowpeak

A YAML file sets defaults and the command line overrides them:
  lowpeak grpo --config examples/grpo.yaml --learning_rate 1e-6 --dry-run

Several devices (docs/distributed.md); torchrun and accelerate launch work as well, with -m lowpeak:
  lowpeak grpo --config examples/grpo.yaml --accelerate_config fsdp2 --num_processes 8
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status.

    The status is 0; 1 if a test or a check failed; 2 after a user's error; 130 after Ctrl-C; with several ranks, the launcher's.
    With `LOWPEAK_TRACEBACK=1` in the environment, an error is raised with its traceback instead.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    # peft imports bitsandbytes, which warns of a kernel for inference in 4 bits on CPUs: no run uses it.
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
    if argv is None:
        # The process runs this command only: skip the garbage collection of half a million objects when it ends.
        atexit.register(gc.freeze)
    try:
        return dispatch(arguments)
    except LowpeakError as error:
        if os.environ.get("LOWPEAK_TRACEBACK", "0") not in ("", "0"):
            raise
        if not _is_reported_by_another_rank(error):
            print_once(f"lowpeak: error: {error}")
        return 2
    except KeyboardInterrupt as stop:
        saved = str(stop)
        not_saved = (
            "stopped without saving; --resume_from_checkpoint true resumes from the last checkpoint, if there is one"
        )
        print_once(f"lowpeak: {saved or not_saved}")
        # A launcher forwarded Ctrl-C to this rank, and returns 130 itself.
        return 0 if saved and LAUNCHED in os.environ else 130


def _is_reported_by_another_rank(error: LowpeakError) -> bool:
    """Return whether the error came from another rank of this host, which reports it itself."""
    if error.rank is None or isinstance(error, RankError) or "LOCAL_RANK" not in os.environ:
        return False
    first = int(os.environ["RANK"]) - int(os.environ["LOCAL_RANK"])
    return first <= error.rank < first + int(os.environ.get("LOCAL_WORLD_SIZE") or 1)


def dispatch(arguments: list[str]) -> int:
    """Run the command that the first argument names, with the other arguments."""
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(USAGE, end="")
        return 0
    if arguments[0] in ("-V", "--version"):
        print(lowpeak.__version__)
        return 0
    command, rest = arguments[0], arguments[1:]
    if command not in COMMANDS:
        raise ArgumentError(f"The command {command!r} does not exist; use one of {', '.join(COMMANDS)}.")
    return COMMANDS[command](rest)


def _train(kind: str, arguments: list[str]) -> int:
    from lowpeak.cli.train import run_training

    return run_training(kind, arguments)


def _serve(arguments: list[str]) -> int:
    from lowpeak.cli.serve import run_server

    return run_server(arguments)


def _env(arguments: list[str]) -> int:
    from lowpeak.cli.env import SELFTEST_OPTIONS, environment_report, print_model, run_selftest

    if "--selftest" in arguments:
        return run_selftest(arguments)
    if arguments and not arguments[0].startswith("-") and not arguments[0].endswith((".yaml", ".yml")):
        return print_model(arguments)
    words = " ".join(arguments).replace("=", " ")
    if words in ("", "--format text", "--format json"):
        print(environment_report(as_json=words.endswith("json")), end="")
        return 0
    option = next((word.split("=")[0] for word in arguments if word.split("=")[0] in SELFTEST_OPTIONS), None)
    if option is not None:
        raise ArgumentError(f"`lowpeak env {option}` needs --selftest: {option} {SELFTEST_OPTIONS[option]}.")
    from lowpeak.cli.check_machine import check_machine

    return check_machine(arguments if arguments[0].startswith("--") else ["--config", *arguments])


def _plan(arguments: list[str]) -> int:
    from lowpeak.cli.plan import run_plan

    return run_plan(arguments)


def _check(arguments: list[str]) -> int:
    from lowpeak.cli.parser import parse_arguments
    from lowpeak.environments import load_environment
    from lowpeak.selftest import Check, check_algorithm

    if arguments and not arguments[0].startswith("-"):
        spec, *rest = arguments
        try:
            found = load_environment(spec, "Class")
        except ArgumentError as error:
            return _print_checks([Check("class", False, str(error))])
        if isinstance(found, type) and not hasattr(found, "reset"):
            return _print_checks(check_algorithm(found, lambda kind: parse_arguments([kind], rest, "lowpeak check")))
        arguments = ["--environment", *arguments]
    return _print_checks(_environment_checks(arguments))


def _environment_checks(arguments: list[str]) -> Iterable[Check]:
    from lowpeak import GRPOConfig
    from lowpeak.cli.arguments import CheckArguments
    from lowpeak.cli.parser import parse_arguments, pop_arguments
    from lowpeak.selftest import EnvironmentCheck

    given = parse_arguments([CheckArguments, GRPOConfig], arguments, "lowpeak check")
    options: CheckArguments = pop_arguments(CheckArguments, given)
    if not (options.tools or options.environment):
        raise ArgumentError("`lowpeak check` needs FILE.py:CLASS or --tools FILE.py:function.")
    if not options.seconds > 0:
        raise ArgumentError(f"--seconds is {options.seconds:g}: the training of `lowpeak check` needs more than 0.")
    parts = {**options.load(), "reward_funcs": options.load_rewards()}
    dataset = _load_rows(options, GRPOConfig(**given))
    return EnvironmentCheck(parts, dataset, options.model, given, options.seconds).run()


def _load_rows(options: CheckArguments, config: Any) -> Any:
    """Return the dataset, or None without one; warn of arguments for evaluations."""
    from lowpeak.arguments import EffectReport
    from lowpeak.cli.dataset import load_datasets

    effects = EffectReport(config)
    for name in ("eval_dataset", "eval_split", "test_split_size"):
        if getattr(options, name) is not None:
            effects.add(f"--{name}", "a check does not evaluate")
    dataset = load_datasets(options, (), config, effects)[0]
    effects.report()
    return dataset


def _print_checks(checks: Iterable[Check]) -> int:
    status = 0
    for check in checks:
        print(check, flush=True)
        status |= not check.passed
    return status


def _report(arguments: list[str]) -> int:
    from pathlib import Path

    from lowpeak.cli.arguments import ErrorParser
    from lowpeak.report import has_journal, watch_report, write_report

    parser = ErrorParser(
        "lowpeak report",
        description="Write one HTML page with the curves, events and completions of runs.",
        allow_abbrev=False,
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="output_dir of a run; several are overlaid")
    parser.add_argument(
        "--output", type=Path, metavar="FILE", help="default: RUN/report.html, or ./report.html for several runs"
    )
    parser.add_argument(
        *("--watch",), type=float, nargs="?", const=30.0, metavar="SECONDS",
        help="write the page again whenever the runs have new steps, until Ctrl-C; the open page follows (default: 30 seconds)",
    )  # fmt: skip
    options = parser.parse_args(arguments)
    if options.watch is None:
        print(f"The report is in {write_report(options.runs, options.output)}.")
        return 0
    if options.watch <= 0:
        raise ArgumentError(f"--watch is {options.watch:g}: give a number of seconds above 0.")
    waiting = [str(run) for run in options.runs if not has_journal(run)]
    if waiting:
        print(f"Waiting for the first step of {', '.join(waiting)}.", flush=True)
    for path in watch_report(options.runs, options.output, options.watch):
        print(f"{time.strftime('%H:%M:%S')}  The report is in {path}.", flush=True)
    return 0


def _preset(arguments: list[str]) -> int:
    from lowpeak.cli.accelerate_config import PRESETS, preset_text

    if len(arguments) != 1 or arguments[0] not in PRESETS:
        raise ArgumentError(f"`lowpeak preset` takes one name of {', '.join(PRESETS)}.")
    print(preset_text(arguments[0]), end="")
    return 0


COMMANDS: dict[str, Callable[[list[str]], int]] = {
    **{kind: partial(_train, kind) for kind in CLASS_PREFIXES},
    "serve": _serve,
    "vllm-serve": _serve,  # TRL's name
    "plan": _plan,
    "check": _check,
    "report": _report,
    "env": _env,
    "preset": _preset,
}

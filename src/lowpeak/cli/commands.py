"""The `lowpeak` command: chooses a command, and turns an expected error into one sentence and exit status 2."""

from __future__ import annotations

import atexit
import gc
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial

import lowpeak
from lowpeak.cli.launch import MARK
from lowpeak.cli.output import tell
from lowpeak.errors import ArgumentError, LowpeakError, RankError

USAGE = """\
usage: lowpeak COMMAND [--config FILE.yaml] [--argument value ...]

Online RL post-training for LLMs that fits the memory you have.

commands:
  grpo       train a model with GRPO (and bnpo, dr_grpo, dapo, cispo, GSPO)
  rloo       train a model with RLOO
  ppo        train a model with PPO, and its critic
  online-dpo train a model with Online DPO, by rewards or by a judge
  sft        train a model on demonstrations
  reward     train a reward model on preferences
  serve      start a vLLM server that a run can send weights to
  env        print versions and hardware, for bug reports; with --selftest, try vLLM; with --gpu too, all that needs a GPU
  preset     print a config for several devices, to change or for `accelerate launch`

options:
  --help     this text; `lowpeak COMMAND --help` lists a command's arguments
  --version  the version of lowpeak

A YAML file sets defaults and the command line overrides them:
  lowpeak grpo --config examples/grpo.yaml --learning_rate 1e-6 --dry-run

Several devices (docs/distributed.md); torchrun and accelerate launch work as well, with -m lowpeak:
  lowpeak grpo --config examples/grpo.yaml --accelerate_config fsdp2 --num_processes 8
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status.

    It is 0; 1 if a self-test failed; 2 after a user's error; 130 after Ctrl-C; of several ranks, their launcher's.

    With `LOWPEAK_TRACEBACK=1` in the environment, an error is raised with its traceback instead.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if argv is None:
        # The process is ours: nothing searches its half a million objects for cycles once more when it ends.
        atexit.register(gc.freeze)
    try:
        return dispatch(arguments)
    except LowpeakError as error:
        if os.environ.get("LOWPEAK_TRACEBACK", "0") not in ("", "0"):
            raise
        if not _is_told_by_its_own(error):
            tell(f"lowpeak: error: {error}")
        return 2
    except KeyboardInterrupt as stop:
        saved = str(stop)
        at_once = "stopped at once; --resume_from_checkpoint true goes on from the last checkpoint, if there is one"
        tell(f"lowpeak: {saved or at_once}")
        return 0 if saved and MARK in os.environ else 130  # the launcher, which passed it on, gives the status


def _is_told_by_its_own(error: LowpeakError) -> bool:
    """Return whether this repeats the error of a living rank of the same host, which reports it."""
    if error.rank is None or isinstance(error, RankError) or "LOCAL_RANK" not in os.environ:
        return False
    first = int(os.environ["RANK"]) - int(os.environ["LOCAL_RANK"])
    return first <= error.rank < first + int(os.environ.get("LOCAL_WORLD_SIZE") or 1)


def dispatch(arguments: list[str]) -> int:
    """Hand the arguments after the command's name to that command."""
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
    from lowpeak.cli.train import run

    return run(kind, arguments)


def _serve(arguments: list[str]) -> int:
    from lowpeak.cli.serve import run

    return run(arguments)


def _env(arguments: list[str]) -> int:
    from lowpeak.cli.env import report

    others = [word for word in arguments if word not in ("--selftest", "--gpu")]
    if others:
        raise ArgumentError(f"`lowpeak env` takes --selftest and --gpu alone; leave {' '.join(others)} out.")
    if arguments == ["--gpu"]:
        raise ArgumentError("`lowpeak env --gpu` is the self-test of a GPU: add --selftest.")
    if not arguments:
        print(report(), end="")
        return 0
    from lowpeak.selftest import choose_rows, run_rows

    rows, device = choose_rows(gpu="--gpu" in arguments)
    print(report(), flush=True)
    return 0 if run_rows(rows, device) else 1


def _preset(arguments: list[str]) -> int:
    from lowpeak.cli.accelerate_config import ORDER, text_of

    if len(arguments) != 1 or arguments[0] not in ORDER:
        raise ArgumentError(f"`lowpeak preset` takes the name of one: {', '.join(ORDER)}.")
    print(text_of(arguments[0]), end="")
    return 0


COMMANDS: dict[str, Callable[[list[str]], int]] = {
    **{kind: partial(_train, kind) for kind in ("grpo", "rloo", "ppo", "online-dpo", "sft", "reward")},
    "serve": _serve,
    "env": _env,
    "preset": _preset,
}

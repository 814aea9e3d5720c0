"""Kill runs at random moments, start them again, and compare how they end: `random_kills.py [KILLS SEED [KIND...]]`.

A run trains, saves after each step and exports its model. It is killed by SIGKILL at a moment drawn from its whole length
(starting, resuming, training, saving, exporting), started again in the same way, and so on until it ends by itself. Its exported
weights and its journal must be those of the run that was left alone, and an export that exists at any time must be the whole one.
Started once more it must end well and change neither.

`quickstart` is the command of examples/grpo.yaml on the files of the tiny quickstart. It saves every fifth step, and SIGKILL and
SIGTERM alternate, so early that one run is killed about 20 times.

`tools` is a run with `full_determinism` whose policy calls a function and an environment. It is killed while the function runs,
after it has told a file so. Results that the journal has are not computed again.

`draws` is such a run without `full_determinism`, whose function never returns the same number twice, so that no two tries end in
the same bits. Each conversation of each rollout must be rewarded and trained on exactly once.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import operator
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
EXAMPLES = HERE.parents[1] / "examples"
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parent / "distributed"), str(EXAMPLES)]

import fault_runs  # noqa: E402
import quickstart  # noqa: E402
import setups  # noqa: E402

import agent_programs  # noqa: E402
import child_processes  # noqa: E402
import overlap_runs  # noqa: E402
import scripted_turns  # noqa: E402
import small_runs  # noqa: E402
from lowpeak.cli.commands import main as run_command  # noqa: E402
from lowpeak.journal import ROLLOUTS, TOOL_RESULTS, read_rows  # noqa: E402

SECONDS = 300.0  # until a run that is left alone has ended
SAVES = {"save_strategy": "steps", "save_steps": 1, "save_total_limit": 2, "max_steps": 6}
KL = {"num_iterations": 2, "beta": 0.04}


def build_on(strategy: str, folder: Path) -> Any:
    return setups.build("GRPO", folder, {**setups.prepare(strategy), **SAVES, **KL})


def build_ppo(folder: Path) -> Any:
    """PPO with a critic on a backbone of its own."""
    return setups.build("PPO", folder, {"use_cpu": True, "critic": "model", **SAVES, **KL})


def build_grpo(folder: Path) -> Any:
    """GRPO with dropout, noisy rewards and a reference that moves."""
    args = {**SAVES, **KL, "sync_ref_model": True, "ref_model_sync_steps": 2}
    return fault_runs.build(fault_runs.Case(args=args, dropout=0.1), folder)


def build_tools(folder: Path) -> Any:
    """GRPO with a slow function, an environment, and a fixed lag of turns."""
    return make_with_tools(folder, operator.add, [], {**KL, "full_determinism": True})


def make_with_tools(folder: Path, function: Callable[[int, int], int], rewards: list[Any], settings: Any) -> Any:
    """GRPO whose policy calls `function` as a tool that takes a while, and an environment."""
    calls = folder.parent / "calls"

    def add(a: int, b: int) -> int:
        """Add two numbers.

        Args:
            a: The first number.
            b: The second number.
        """
        calls.touch()
        time.sleep(0.02)
        return function(a, b)

    model, tokenizer = scripted_turns.calling_model()
    settings = {**SAVES, **settings, "max_completion_length": 40}
    tools = {"tools": [add], "environment_factory": scripted_turns.Score, "reward_funcs": rewards}
    return small_runs.make("GRPO", folder, model, scripted_turns.questions(), tokenizer, **settings, **tools)


def build_draws(folder: Path) -> Any:
    """GRPO whose function and reward return new numbers; it logs what is rewarded, and the rewards that each step trains on."""
    place = folder.parent

    def reward(completions: list[Any], **columns: Any) -> list[float]:
        return [float(append(place / "rewarded.jsonl", each)) for each in completions]

    trainer = make_with_tools(
        folder, lambda a, b: append(place / "results.jsonl", a + b), [reward], {"steps_per_generation": 2}
    )
    next_step = trainer.next_step

    def logged_step() -> Any:
        batches = next_step()
        rewards = [batches.records[i].rewards[0] for i in batches.indices]
        append(place / "trained.jsonl", {"step": trainer.state.global_step + 1, "rewards": rewards})
        return batches

    trainer.next_step = logged_step
    return trainer


def append(path: Path, row: Any) -> int:
    """Append a line in one write; return the file's size, which no other call for this file returns."""
    with path.open("ab", buffering=0) as file:
        file.write(json.dumps(row).encode() + b"\n")
        return file.tell()


def build_adapter(folder: Path) -> Any:
    return fault_runs.build(fault_runs.Case(args={**SAVES, **KL}, adapter="fresh", dropout=0.1), folder)


def build_ahead(staleness: int, folder: Path) -> Any:
    """GRPO on rollouts that are generated ahead, by servers whose delays differ in each try, with rollouts filled up."""
    samplers = [overlap_runs.Sampler(delays=time.time_ns() + i, most=0.02) for i in range(staleness)]
    settings = {**SAVES, "dynamic_sampling_rounds": 2, "reward_funcs": small_runs.digits}
    return overlap_runs.run_ahead(folder, samplers, staleness, **settings)


def build_talk(staleness: int, folder: Path) -> Any:
    """As `build_ahead`, with conversations whose rewards read environments; no function that returned runs again."""
    seed = time.time_ns()
    parts = overlap_runs.talk(seed)
    samplers = [overlap_runs.Sampler(delays=seed + i, most=0.02, model=parts["model"]) for i in range(staleness)]
    return overlap_runs.run_ahead(folder, samplers, staleness, **{**parts, **SAVES, "dynamic_sampling_rounds": 2})


def build_programs(staleness: int, folder: Path) -> Any:
    """As `build_ahead`, with conversations that programs drive: a restarted program gets its recorded turns."""
    model, tokenizer = scripted_turns.calling_model()
    samplers = [overlap_runs.Sampler(delays=time.time_ns() + i, most=0.02, model=model) for i in range(staleness)]
    parts = {"model": model, "tokenizer": tokenizer, "data": scripted_turns.questions(), "reward_funcs": []}
    settings = {**SAVES, **parts, "environment_factory": agent_programs.ChatCalculator, "max_completion_length": 40}
    return overlap_runs.run_ahead(folder, samplers, staleness, **settings)


@dataclass(frozen=True)
class Kind:
    """A kind of run: who builds its trainer, its share of the kills, on how many ranks; None builds the quickstart's command.

    A kill comes after at most `latest` of the run's length, by one of `signals` in turn; with `in_call` while a tool runs.
    Runs end in the same bits, unless `ends_alike` is False.
    """

    build: Callable[[Path], Any] | None
    share: float
    num_ranks: int = 1
    latest: float = 1.1
    signals: Sequence[int] = (signal.SIGKILL,)
    in_call: bool = False
    ends_alike: bool = True


KINDS = {
    "grpo": Kind(build_grpo, 0.35),
    "ppo": Kind(build_ppo, 0.2),
    "lora": Kind(build_adapter, 0.25),
    "fsdp2": Kind(partial(build_on, "fsdp2"), 0.1, 2),
    "zero3": Kind(partial(build_on, "zero3"), 0.1, 2),
    "tools": Kind(build_tools, 10 / 3, latest=0.9, signals=(signal.SIGKILL, signal.SIGTERM), in_call=True),
    "draws": Kind(
        build_draws, 10 / 3, latest=0.9, signals=(signal.SIGKILL, signal.SIGTERM), in_call=True, ends_alike=False
    ),
    "ahead": Kind(partial(build_ahead, 1), 0.2),
    "ahead2": Kind(partial(build_ahead, 2), 0.2),
    "talk": Kind(partial(build_talk, 1), 0.2),
    "talk2": Kind(partial(build_talk, 2), 0.2),
    "programs": Kind(partial(build_programs, 1), 0.2),
    "quickstart": Kind(None, 2 / 3, latest=0.2, signals=(signal.SIGKILL, signal.SIGTERM)),
}
STOPPED = 130  # the command's exit status after SIGTERM


def prepare_quickstart(folder: Path, steps: int = quickstart.TINY_TASKS["sort"].steps) -> None:
    """Make the quickstart's model and prompts, and the words of the command that trains on them."""
    files = folder / "files"
    quickstart.make_tiny_lesson(Namespace(algorithm="grpo", task=None, output_dir=str(files), seed=0, steps=steps))
    words = ["grpo", "--config", str(EXAMPLES / "grpo.yaml"), "--model", f"{files}/warm_start", "--use_cpu"]
    words += ["--dataset", f"{files}/prompts.jsonl", "--eval_dataset", f"{files}/held_out.jsonl"]
    words += ["--reward", f"{EXAMPLES}/noisy_sort.py:sorted_exactly", "--max_steps", str(steps), "--report_to", "none"]
    words += ["--save_steps", "5", "--save_total_limit", "2", "--resume_from_checkpoint", "auto"]
    (folder / "words.json").write_text(json.dumps(words))


def train_and_export(name: str, place: Path) -> None:
    """Go on from the last checkpoint, or start; export the model."""
    build = KINDS[name].build
    if build is None:
        sys.exit(run_command([*json.loads((place.parent / "words.json").read_text()), "--output_dir", f"{place}/run"]))
    trainer = build(place / "run")
    (place / f"built-{os.environ.get('RANK', '0')}").touch()
    try:
        trainer.train(resume_from_checkpoint="auto")
    except KeyboardInterrupt:
        sys.exit(STOPPED)
    trainer.save_model(str(place / "export"))


def start(name: str, place: Path) -> list[BaseProcess]:
    """The processes of one try, which write to one log."""
    num_ranks, arguments = KINDS[name].num_ranks, (name, place)
    if num_ranks == 1:
        return [child_processes.start(train_and_export, arguments, place / "log")]
    return child_processes.start_ranks(train_and_export, arguments, [place / "log"] * num_ranks)


def wait(processes: list[BaseProcess], seconds: float) -> bool:
    """Whether all have ended within so many seconds."""
    until = time.monotonic() + seconds
    for process in processes:
        process.join(max(0.0, until - time.monotonic()))
    return not any(process.is_alive() for process in processes)


def kill(processes: list[BaseProcess]) -> None:
    """Kill all that are left."""
    for process in processes:
        process.kill()
        process.join(10)


def kill_one(processes: list[BaseProcess], random_: random.Random, place: Path) -> bool:
    """Kill one rank alone: the other must end by itself. False if they had not met: then it waits for its launcher."""
    kill([random_.choice(processes)])
    met = all((place / f"built-{rank}").exists() for rank in range(len(processes)))
    assert not met or wait(processes, SECONDS), f"a rank does not end: {place}"
    return met


def reach_kill(kind: Kind, processes: list[BaseProcess], place: Path, seconds: float) -> bool:
    """Wait so long, and with `in_call` until a tool begins to run; return False if the run ends before."""
    if wait(processes, seconds):
        return False
    if not kind.in_call:
        return True
    (place / "calls").unlink(missing_ok=True)
    until = time.monotonic() + SECONDS
    while not (place / "calls").exists() and time.monotonic() < until:
        if not any(process.is_alive() for process in processes):
            return False
        time.sleep(0.001)
    return True


def check_results(kind: Kind, place: Path) -> None:
    """Assert that no call ran again whose result the journal had, and that each conversation counts once."""
    if not (place / "run" / "journal" / f"{TOOL_RESULTS}.jsonl").exists():
        assert not kind.in_call
        return
    keys = [row["key"] for row in read_rows(place / "run" / "journal", TOOL_RESULTS)]
    assert keys, f"no result is in the journal: {place}"
    assert len(keys) == len(set(keys)), f"a call ran twice: {place}"
    if not kind.ends_alike:
        check_conversations(place, place.parent / "alone")


def check_conversations(place: Path, alone: Path) -> None:
    """Assert that each rollout has the conversations of the run left alone, each rewarded and trained on once."""
    rows, expected = (list(read_rows(folder / "run" / "journal", ROLLOUTS)) for folder in (place, alone))
    assert [(row["step"], row["prompt"]) for row in rows] == [(row["step"], row["prompt"]) for row in expected], place
    rewards = [row["rewards"]["reward"] for row in rows]
    assert len(set(rewards)) == len(rewards), f"a conversation is in the journal twice: {place}"
    lines = (place / "rewarded.jsonl").read_bytes().splitlines(keepends=True)
    rewarded = dict(zip(itertools.accumulate(map(len, lines)), map(json.loads, lines), strict=True))
    assert all(rewarded[row["rewards"]["reward"]] == row["completion"] for row in rows), f"rewarded as another: {place}"
    # A step that was cut off by a kill is logged again.
    trained = {row["step"]: row["rewards"] for row in map(json.loads, (place / "trained.jsonl").open())}
    for step in {row["step"] for row in rows}:
        of_rollout = [row["rewards"]["reward"] for row in rows if row["step"] == step]
        assert sorted([*trained[step], *trained[step + 1]]) == sorted(of_rollout), f"not trained on once: {place}"
    replies = [message for row in rows for message in row["completion"] if message.get("name") == "add"]
    results = [message["content"] for message in replies]
    assert len(set(results)) == len(results), f"two calls have the result of one: {place}"


def ending(place: Path) -> dict[str, Any]:
    """Digests of the exported weights, and the journal's steps and completions."""
    run = place / "run"
    journal = [fault_runs.steps(run), fault_runs.rollouts(run)]
    return {"export": exported(place), "journal": json.loads(json.dumps(journal))}


def exported(place: Path) -> dict[str, str]:
    """Digests of the exported weights, which the command writes into the run's folder."""
    files = [*(place / "export").glob("*.safetensors"), *(place / "run").glob("*.safetensors")]
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def try_kind(name: str, num_kills: int, random_: random.Random, root: Path) -> None:
    """Kill runs of one kind so often; AssertionError if one ends in another way than the run that was left alone."""
    kind = KINDS[name]
    (root / name).mkdir(parents=True, exist_ok=True)
    if kind.build is None and not (root / name / "words.json").exists():
        prepare_quickstart(root / name)
    for place in (root / name / "warm", root / name / "alone"):  # the first one waits for the server of processes, too
        place.mkdir(parents=True)
        began = time.monotonic()
        processes = start(name, place)
        assert wait(processes, SECONDS), "the run that is left alone does not end"
        assert all(process.exitcode == 0 for process in processes), (place / "log").read_text()
        length, expected = time.monotonic() - began, ending(place)
    kills = runs = partial = 0
    while kills < num_kills:
        place = root / name / f"run-{runs}"
        place.mkdir()
        runs += 1
        while True:
            for mark in place.glob("built-*"):
                mark.unlink()
            processes = start(name, place)
            seconds = random_.uniform(0.0, kind.latest * length)
            if kills < num_kills and reach_kill(kind, processes, place, seconds):
                if len(processes) > 1 and random_.random() < 0.5:
                    partial += kill_one(processes, random_, place)
                if kind.signals[kills % len(kind.signals)] == signal.SIGTERM:
                    processes[0].terminate()
                    assert wait(processes, SECONDS), f"{name}: a run does not stop on SIGTERM: {place}"
                kill(processes)
                kills += 1
            else:
                assert wait(processes, SECONDS), f"{name}: a resumed run does not end: {place}"
            is_whole = exported(place) in ({}, expected["export"])
            assert is_whole or not kind.ends_alike, f"{name}: an export that is not whole: {place}"
            codes = [process.exitcode for process in processes]
            if codes == [0] * len(codes):
                break
            stopped = {-9, -15, STOPPED} if signal.SIGTERM in kind.signals else {-9}
            assert set(codes) - {0} <= {*stopped, 1}, f"{name}: ended with {codes}: {place / 'log'}"
            assert stopped & set(codes), f"{name}: failed without a kill: {(place / 'log').read_text()[-3000:]}"
        ended = ending(place)
        assert ended == expected or not kind.ends_alike, f"{name}: ended in another way: {place}"
        check_results(kind, place)
        again = start(name, place)
        assert wait(again, SECONDS), f"{name}: a finished run does not end: {place}"
        assert all(process.exitcode == 0 for process in again), f"{name}: a finished run fails: {place / 'log'}"
        assert ending(place) == ended, f"{name}: a finished run changes: {place}"
        shutil.rmtree(place)
    alone_text = f", {partial} of one rank of two" if partial else ""
    outcome = "ended as the run left alone" if kind.ends_alike else "has each conversation once"
    print(f"{name}: {kills} kills{alone_text} in {runs} runs of {length:.1f} s: each {outcome}", flush=True)


def main(num_kills: str = "300", seed: str = "0", *names: str) -> None:
    """Try all kinds, or the named ones; exit with an error at the first difference, and leave its folder."""
    root = Path(tempfile.mkdtemp(prefix="kills-"))
    for name in names or KINDS:
        try_kind(name, round(int(num_kills) * KINDS[name].share), random.Random(f"{seed} {name}"), root)
    shutil.rmtree(root)


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Memory runs out in one phase of a run, on one rank: the run goes on with smaller sizes, to the bits of a run that had them."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from setups import (
    TOLERANCE,
    assert_same_bits,
    build,
    error_of,
    forget,
    keep,
    note,
    noted,
    prepare,
    rank,
    result_of,
    tensor_parallel,
)
from test_distributed_combinations import answer
from transformers import TrainerCallback

from allocation_cap import CappedPhases
from case_selection import mark_extended, selected_cases
from child_processes import run_ranks, succeed_on_ranks
from fake_vllm import engine_over, scripted
from lowpeak.journal import read_rows
from lowpeak.memory.phases import Phase
from lowpeak.ranks import Ranks
from lowpeak.training.recovery import run_with_sizes
from lowpeak.vllm.engine import EngineSharing
from preference_data import tiny_classifier
from tiny_models import char_tokenizer, tiny_model

LARGE: dict[str, Any] = {"micro_batch_tokens": 512, "logprob_chunk_size": 64, "kv_cache_bytes": 1 << 20}
SMALL: dict[str, Any] = {"micro_batch_tokens": 8, "logprob_chunk_size": 16, "kv_cache_bytes": 1 << 14}
ROLLOUT: dict[str, Any] = {"max_completion_length": 24}
ALGORITHMS: dict[str, tuple[str, dict[str, Any]]] = {
    "GRPO, reused rollouts": ("GRPO", {**ROLLOUT, "num_iterations": 2, "beta": 0.1}),
    "RLOO": ("RLOO", {**ROLLOUT, "beta": 0.1}),
    "PPO": ("PPO", {**ROLLOUT, "num_iterations": 2}),
    "OnlineDPO": ("OnlineDPO", {"max_completion_length": 48}),
    "SFT": ("SFT", {}),
    "Reward": ("Reward", {}),
}
ONLINE = (Phase.ROLLOUT, Phase.SCORE, Phase.TRAIN)
STRATEGIES = {"single": 1, "ddp": 2, "fsdp2": 2, "zero3": 2}


@dataclass(frozen=True)
class Case:
    """A phase in which `victim` has half of what the large sizes take beyond the small ones."""

    strategy: str
    algorithm: str
    phase: Phase
    victim: int

    def __str__(self) -> str:
        algorithm = self.algorithm.partition(",")[0]
        return f"{self.strategy}-{algorithm}-{self.phase.value}-{self.victim}"


def cases_of(strategy: str) -> Iterator[Case]:
    for algorithm in ALGORITHMS:
        if algorithm == "OnlineDPO" and STRATEGIES[strategy] > 1:  # a rank has one pair a step, which is never split
            continue
        phases = (Phase.TRAIN,) if algorithm in ("SFT", "Reward") else ONLINE
        if strategy == "zero3":  # its passes cannot go on after an error
            phases = tuple(phase for phase in phases if phase is Phase.ROLLOUT)
        for phase in phases:
            for victim in range(STRATEGIES[strategy]):
                yield Case(strategy, algorithm, phase, victim)


CASES = [case for strategy in STRATEGIES for case in cases_of(strategy)]
CORE = {
    *("single-GRPO-train-0", "single-PPO-score-0", "single-OnlineDPO-rollout-0", "single-Reward-train-0"),
    *("ddp-GRPO-train-1", "ddp-GRPO-rollout-0", "ddp-SFT-train-0", "zero3-RLOO-rollout-1"),
    *(FIRST := {"fsdp2-GRPO-rollout-0", "fsdp2-GRPO-score-1", "fsdp2-GRPO-train-0"}),
}


def sizes_for(algorithm: str, sizes: Mapping[str, Any]) -> dict[str, Any]:
    left_out = {"SFT": ("kv_cache_bytes",), "Reward": ("kv_cache_bytes", "logprob_chunk_size")}.get(algorithm, ())
    return {name: value for name, value in sizes.items() if name in LARGE and name not in left_out}


class LowerAfter(TrainerCallback):
    """Lowers a run's sizes between two steps; `schedule` has the sizes by the number of steps done."""

    def __init__(self, trainer: Any, schedule: Mapping[int, Mapping[str, Any]]) -> None:
        self._trainer, self._schedule = trainer, schedule

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        lower = self._schedule.get(state.global_step)
        if lower:
            self._trainer.run = run_with_sizes(self._trainer, self._trainer.run.sizes.lower(**lower))


def run(
    strategy: str,
    algorithm: str,
    folder: Path,
    caps: dict[Phase, int] | None,
    schedule: Mapping[int, Mapping[str, Any]],
    max_steps: int = 2,
) -> Any:
    """What a run came to, the sizes that it lowered, by the number of steps done, and with `caps` what its phases took at most."""
    name, arguments = ALGORITHMS[algorithm]
    sizes = sizes_for(algorithm, {**LARGE, **schedule.get(0, {})})
    given = {**prepare(strategy), "max_steps": max_steps, **arguments, **sizes}
    model = tiny_classifier(len(char_tokenizer())) if algorithm == "Reward" else None
    trainer = build(name, folder, given, model)
    phases = None if caps is None else CappedPhases(trainer, caps)
    trainer.add_callback(LowerAfter(trainer, schedule))
    trainer.train()
    lowered: dict[int, dict[str, Any]] = {}
    for event in read_rows(folder / "journal", "events"):
        lowered.setdefault(event["step"], {}).update({name: event[name] for name in LARGE if name in event})
    result = {**result_of(trainer), "lowered": lowered, "highest": phases and phases.highest}
    forget()
    return result


def each_case(place: Path, out: Path, strategy: str, cases: list[Case]) -> None:
    for algorithm in {case.algorithm: case for case in cases}:
        large = run(strategy, algorithm, out / "large" / algorithm, {}, {})
        small = run(strategy, algorithm, out / "small" / algorithm, {}, {0: SMALL}, max_steps=1)
        same_sizes: dict[str, Any] = {}
        for case in cases:
            if case.algorithm != algorithm:
                continue
            phase = case.phase.value
            cap = (large["highest"][phase] + small["highest"][phase]) // 2
            caps = {case.phase: cap} if rank() == case.victim else None
            found = run(strategy, algorithm, out / str(case), caps, {})
            key = repr(found["lowered"])
            if key not in same_sizes:
                same = run(strategy, algorithm, out / "same" / str(case), None, found["lowered"])
                same_sizes[key] = same
            if rank() == 0:
                torch.save([found, same_sizes[key], large], out / f"{case}.pt")


@pytest.fixture(scope="module")
def runs(request, tmp_path_factory):
    out, selected = tmp_path_factory.mktemp("memory"), selected_cases(request, "case")

    @cache
    def run_all(strategy: str) -> None:
        cases = [case for case in selected if case.strategy == strategy]
        succeed_on_ranks(each_case, out / strategy, out, strategy, cases, world_size=STRATEGIES[strategy], seconds=900)

    def results_of(case: Case) -> Any:
        run_all(case.strategy)
        return torch.load(out / f"{case}.pt", weights_only=False)

    return results_of


@pytest.mark.parametrize(
    "case",
    [
        *mark_extended([case for case in CASES if str(case) in CORE], [case for case in CASES if str(case) in FIRST]),
        *(pytest.param(case, marks=pytest.mark.release) for case in CASES if str(case) not in CORE),
    ],
    ids=str,
)
def test_a_phase_that_runs_out_of_memory_runs_again_to_the_bits_of_a_run_with_the_smaller_sizes(runs, case):
    found, same, large = runs(case)
    possible = {"kv_cache_bytes"} if case.phase is Phase.ROLLOUT else {"micro_batch_tokens", "logprob_chunk_size"}
    lowered = {name for sizes in found["lowered"].values() for name in sizes}
    assert lowered
    assert lowered <= possible
    assert_same_bits(found["weights"], same["weights"])
    for name, values in large["weights"].items():
        torch.testing.assert_close(found["weights"][name], values, atol=TOLERANCE, rtol=0)


def slow_case(place: Path, out: Path) -> None:
    """Rank 1 fails at once, and rank 0 is busy for longer than a watchdog waits for ranks that have failed."""
    trainer = build("GRPO", out / "run", {**prepare("ddp"), "max_steps": 1, "micro_batch_tokens": 64})
    calls: list[int] = []

    def once(module: Any, args: Any) -> None:
        if module.training and not calls:
            calls.append(rank())
            if rank() == 1:
                raise torch.OutOfMemoryError("injected")
            time.sleep(7)  # it waits 5

    trainer.model.model.layers[0].register_forward_pre_hook(once)
    trainer.train()
    note(place, lowered=sorted(trainer.run.sizes.lowered), steps=trainer.state.global_step)


def test_the_other_ranks_have_the_time_that_their_passes_take(tmp_path):
    succeed_on_ranks(slow_case, tmp_path / "ranks", tmp_path)
    assert noted(tmp_path / "ranks", 0) == {"lowered": ["micro_batch_tokens"], "steps": 1}


def sync_case(place: Path, out: Path) -> None:
    """A push to a vLLM whose buckets do not fit on the last rank."""
    for name, cap in (("large", 1 << 60), ("capped", 60 << 20)):
        given = {"use_vllm": True, "vllm_mode": "server", "kv_cache_bytes": None, "max_steps": 2}
        trainer = build("GRPO", out / name, {**prepare("ddp"), **given})
        engine = engine_over(scripted(answer), sharing=EngineSharing(Ranks().subgroup(1)))
        limit = partial(lambda trainer: trainer.run.sizes.sync_bytes, trainer)
        trainer.collector.engine = replace(engine, bucket_limit=limit)
        CappedPhases(trainer, {Phase.SYNC: cap} if rank() == 1 else {})
        trainer.train()
        keep(trainer, [result_of(trainer)["weights"], sorted(trainer.run.sizes.lowered)], out / f"{name}.pt")
        forget()


@pytest.mark.extended
def test_buckets_of_weights_that_do_not_fit_are_sent_in_smaller_ones(tmp_path):
    succeed_on_ranks(sync_case, tmp_path / "ranks", tmp_path)
    (large, no), (capped, lowered) = (torch.load(tmp_path / f"{name}.pt") for name in ("large", "capped"))
    assert (no, lowered) == ([], ["sync_bytes"])
    assert_same_bits(capped, large)


def build_ending(out: Path, strategy: str) -> Any:
    name, arguments = ALGORITHMS["GRPO, reused rollouts"]
    given = {**arguments, **LARGE, "max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    if strategy == "tp":  # on two devices of one group
        return build(
            name, out / "run", {**tensor_parallel(2, 1), **given, "per_device_train_batch_size": 8}, str(out / "model")
        )
    return build(name, out / "run", {**prepare(strategy), **given})


def ending_case(place: Path, out: Path, strategy: str, victim: int, phase: str) -> None:
    """A run whose strategy cannot go on after an error in a pass."""
    trainer = build_ending(out, strategy)
    if rank() == victim:
        trainer.add_callback(CapAfter(2, CappedPhases(trainer, {}), Phase(phase)))
    note(place, error=error_of(trainer.train))


def resumed_case(place: Path, out: Path, strategy: str) -> None:
    """The same run, resumed without the cap."""
    trainer = build_ending(out, strategy)
    trainer.train(resume_from_checkpoint=True)
    note(place, lowered=trainer.run.sizes.as_dict().get("lowered"), steps=trainer.state.global_step)


class CapAfter(TrainerCallback):
    """Caps a phase from a step on, at what is always too little."""

    def __init__(self, step: int, phases: CappedPhases, phase: Phase) -> None:
        self._step, self._phases, self._phase = step, phases, phase

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self._step:
            self._phases.caps[self._phase] = 1000


ENDING = {"zero3": 2, "tp": 2, "hsdp": 4}
ENDING_CASES: list[Any] = mark_extended(
    [("zero3", Phase.TRAIN, 0), ("zero3", Phase.SCORE, 0), ("tp", Phase.SCORE, 1), ("hsdp", Phase.TRAIN, 2)],
    [("zero3", Phase.TRAIN, 0)],
)
OTHER_VICTIMS = [
    *(("zero3", phase, 1) for phase in (Phase.SCORE, Phase.TRAIN)),
    *(("tp", phase, 0) for phase in (Phase.SCORE, Phase.TRAIN)),
    ("tp", Phase.TRAIN, 1),
    *(("hsdp", Phase.TRAIN, victim) for victim in (0, 1, 3)),
    ("hsdp", Phase.SCORE, 3),
]
ENDING_CASES += [pytest.param(*case, marks=pytest.mark.release) for case in OTHER_VICTIMS]


@pytest.mark.parametrize(("strategy", "phase", "victim"), ENDING_CASES)
def test_where_a_pass_cannot_go_on_the_run_ends_and_is_resumed_with_smaller_sizes(tmp_path, strategy, phase, victim):
    tiny_model(len(char_tokenizer())).save_pretrained(tmp_path / "model")
    ranks: Any = {"world_size": ENDING[strategy]}
    # A hang would take until the limit of collectives, half an hour.
    run_ranks(ending_case, tmp_path / "first", tmp_path, strategy, victim, phase.value, seconds=120, **ranks)
    recorded = json.loads((tmp_path / "run/.lowpeak.sizes.json").read_text())
    assert (recorded["phase"], list(recorded["sizes"])) == (phase.value, ["micro_batch_tokens"])
    succeed_on_ranks(resumed_case, tmp_path / "again", tmp_path, strategy, **ranks)
    found = noted(tmp_path / "again", 0)
    assert (found["lowered"], found["steps"]) == (["micro_batch_tokens"], 4)
    assert [row["event"] for row in read_rows(tmp_path / "run/journal", "events")] == ["resumed", "out of memory"]


def last_case(place: Path, out: Path) -> None:
    """Nothing suffices for the second step of a rollout, on the last rank; then the run is resumed without the cap."""
    name, arguments = ALGORITHMS["GRPO, reused rollouts"]
    whole = run("ddp", "GRPO, reused rollouts", out / "whole", None, {}, max_steps=4)
    given = {**prepare("ddp"), **arguments, **LARGE, "max_steps": 4}
    trainer = build(name, out / "run", given)
    if rank() == 1:
        trainer.add_callback(CapAfter(3, CappedPhases(trainer, {}), Phase.TRAIN))
    error = error_of(trainer.train)
    forget()
    again = build(name, out / "run", given)
    again.train(resume_from_checkpoint=True)
    resumed = result_of(again)
    if rank() == 0:
        note(place, error=error, steps=sorted(resumed["steps"]))
        torch.save([resumed["weights"], whole["weights"]], place / "weights.pt")


def test_if_the_smallest_sizes_fail_the_step_is_saved_with_its_rollout_and_taken_again(tmp_path):
    succeed_on_ranks(last_case, tmp_path / "ranks", tmp_path)
    found = noted(tmp_path / "ranks", 0)
    assert re.match("MemoryExhaustedError: .*phase train.*smallest sizes.*weights.*gradients", found["error"])
    assert found["steps"] == [1, 2, 3, 4]
    resumed, whole = torch.load(tmp_path / "ranks/weights.pt")
    for name, values in whole.items():
        torch.testing.assert_close(resumed[name], values, atol=TOLERANCE, rtol=0)
    events = [row["event"] for row in read_rows(tmp_path / "run/journal", "events")]
    assert events.count("out of memory") >= 2

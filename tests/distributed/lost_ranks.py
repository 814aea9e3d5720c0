"""What ranks do in the tests of lost engines: each has a scripted vLLM of its own, or they share one's weights."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import torch
from fault_ranks import error_of, note, rank, weights
from setups import build, named_models, prepare

from lowpeak.ranks import Ranks
from lowpeak.rollout.vllm.engine import Callers, VllmEngine
from lowpeak.rollout.vllm.server import ServerVllm
from vllms import engine_over, said, scripted


def run_with(
    place: Path, name: str, judged: list[Any], dies_after: int | None, strategy: str = "ddp"
) -> tuple[Any, Any]:
    """A trainer whose engine is over a vLLM that dies after so many answers; a sharded one has a reward model, sharded too."""

    def reward(completion_ids: Any, **columns: Any) -> list[float]:
        judged.extend(tuple(ids) for ids in completion_ids)
        return [float(sum(ids) % 5) for ids in completion_ids]

    reward.__name__ = "reward"
    policy, judge = (None, None) if strategy == "ddp" else named_models(place / "named")
    rewards = [reward] if judge is None else [judge, reward]
    trainer = build(
        "GRPO", place / name, {**prepare(strategy), "max_completion_length": 3}, model=policy, rewards=rewards
    )
    vllm = scripted(said)
    trainer.maker.engine = engine_over(vllm, callers=Callers(Ranks().teams(1)))
    trainer.maker.engine.close()
    vllm.dies_after = dies_after
    return trainer, vllm


def lose_one(place: Path, strategy: str) -> None:
    """Rank 1's vLLM dies in the second of three rollouts."""
    found: dict[str, Any] = {}
    for name, dies_after in (("calm", None), ("shaken", 6 if rank() == 1 else None)):
        judged: list[Any] = []
        trainer, vllm = run_with(place, name, judged, dies_after, strategy)
        trainer.train()
        asked = [len(wave) for wave in vllm.waves]
        found[name] = {
            "judged": judged,
            "weights": weights(trainer),
            "loads": vllm.events.count("pause"),
            "asked": asked,
        }
    note(place, **found)


def lose_for_good(place: Path) -> None:
    """Rank 1's vLLM dies at every answer."""
    trainer, vllm = run_with(place, "run", [], None)

    def doomed(request: Any) -> Any:
        vllm.dies_after = 0
        return said(request)

    if rank() == 1:
        vllm._script = doomed
    note(place, error=error_of(trainer.train))


def stop_while_one_waits(place: Path) -> None:
    """Rank 1's vLLM dies in the second of three rollouts and is waited for where no server is; rank 1 alone is asked to stop."""
    trainer, vllm = run_with(place, "run", [], 6 if rank() == 1 else None)
    interrupts, began = trainer.run.interrupts, []

    def wait(seconds: float) -> None:
        if vllm.incarnation:
            began.append(time.monotonic())
            threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM)).start()
            ServerVllm("http://127.0.0.1:9", None, lambda: interrupts.stopping).wait(40.0)

    vllm.wait = wait
    text = error_of(trainer.train)
    note(place, error=text, seconds=time.monotonic() - began[0] if began else None)


def share_prompts(place: Path) -> None:
    """A team of two asks the same requests in the same order, and each keeps the answers to its own prompts."""
    from dataclasses import replace

    from accelerate import PartialState

    from vllms import SAMPLING, prompts

    PartialState(cpu=True)
    team = Ranks().teams(2)
    vllm = scripted(said)
    engine: VllmEngine = engine_over(vllm, callers=Callers(team), batch_size=4)
    own = prompts(2 - rank(), first=10 * rank())  # one rank has two prompts, the other one
    groups = engine.generate(own, replace(SAMPLING, num_generations=2))
    none = engine.generate(own if rank() == 0 else [], SAMPLING)
    alone = Ranks().teams(1)
    note(
        place,
        asked=[[request.prompt_ids for request in wave] for wave in vllm.waves],
        serials=[group.prompt.serial for group in groups],
        answers=[[one.ids.tolist() for one in group.completions] for group in groups],
        none=len(none),
        alone=[alone.rank, alone.world_size, alone.gather(rank()), alone.sum([1.0])],
        team=[team.rank, team.world_size, team.gather(rank())],
    )
    torch.distributed.barrier()

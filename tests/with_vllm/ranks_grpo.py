"""Three steps of GRPO with a colocated vLLM on each rank, or one over all of them: `ranks_grpo.py OUT CASE...`.

A case is a strategy, or a strategy and a tensor-parallel size (`ddp:2`); `ddp:2:long` is one of long completions in a small cache.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from setups import allow_meshes_on_cpu, forget, prepare

from lowpeak.vllm import colocated
from vllm_runs import grpo_arguments, grpo_trainer, steps_of, weights_of


@contextmanager
def recorded_capacities() -> Iterator[list[int]]:
    """Record how many sequences may run at once in each wave of this rank."""
    capacities: list[int] = []
    of_wave = colocated.wave_capacity

    def recording(*args: Any) -> int:
        capacities.append(of_wave(*args))
        return capacities[-1]

    colocated.wave_capacity = recording
    try:
        yield capacities
    finally:
        colocated.wave_capacity = of_wave


def main() -> None:
    """All cases, one after the other, in one process group."""
    out = Path(sys.argv[1])
    for case in sys.argv[2:]:
        strategy, *size = case.split(":")
        more = {"vllm_tensor_parallel_size": int(size[0])} if size else {}
        more |= {"max_completion_length": 300, "kv_cache_bytes": 1 << 19} if "long" in size else {}
        args = grpo_arguments(out / case, **prepare(strategy), **more)
        allow_meshes_on_cpu()
        trainer = grpo_trainer(args)
        with recorded_capacities() as capacities:
            trainer.train()
        weights = weights_of(trainer)
        of_ranks = trainer.run.strategy.ranks.gather(capacities)
        name = type(trainer.run.strategy).__name__
        if trainer.is_world_process_zero():
            found = {"weights": weights, "steps": steps_of(trainer), "strategy": name, "capacities": of_ranks}
            torch.save(found, out / f"{case}.pt")
        del trainer
        forget()


if __name__ == "__main__":
    main()

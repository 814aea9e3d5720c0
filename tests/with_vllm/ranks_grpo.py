"""Three steps of GRPO with a colocated vLLM on each rank, or one over all of them: `ranks_grpo.py OUT CASE...`.

A case is a strategy, or a strategy and a tensor-parallel size (`ddp:2`).
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from setups import allow_meshes_on_cpu, forget, prepare

from vllm_runs import grpo_arguments, grpo_trainer, steps_of, weights_of


def main() -> None:
    """All cases, one after the other, in one process group."""
    out = Path(sys.argv[1])
    for case in sys.argv[2:]:
        strategy, _, size = case.partition(":")
        more = {"vllm_tensor_parallel_size": int(size)} if size else {}
        args = grpo_arguments(out / case, **prepare(strategy), **more)
        allow_meshes_on_cpu()
        trainer = grpo_trainer(args)
        trainer.train()
        weights = weights_of(trainer)
        name = type(trainer.run.strategy).__name__
        if trainer.is_world_process_zero():
            torch.save({"weights": weights, "steps": steps_of(trainer), "strategy": name}, out / f"{case}.pt")
        del trainer
        forget()


if __name__ == "__main__":
    main()

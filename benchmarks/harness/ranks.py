"""Ranks of a benchmark: processes of their own under gloo, and each sharding engine made real on CPUs.

Run apart: `python -m benchmarks.harness.ranks MODULE REQUEST` calls `MODULE.main(request)` on every rank.
"""

from __future__ import annotations

import importlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from benchmarks.harness.process import ROOT, SideError, last_object, one_thread

# Without the threshold glibc keeps freed shards in its heaps, and every way looks alike.
_ENVIRONMENT = {"MALLOC_MMAP_THRESHOLD_": "65536", "DS_ACCELERATOR": "cpu", "MASTER_ADDR": "127.0.0.1"}


def run_ranks(module: str, request: dict[str, Any], world_size: int = 2, limit_s: float = 900) -> dict[str, Any]:
    """What `module.main(request)` prints last on rank 0."""
    outputs = _outputs("benchmarks.harness.ranks", [module, json.dumps(request)], world_size, limit_s)
    return last_object(outputs[0], module)


def run_all(module: str, arguments: Sequence[str], world_size: int = 2, limit_s: float = 600) -> list[dict[str, Any]]:
    """What each rank of `python -m module` prints last."""
    return [last_object(output, module) for output in _outputs(module, arguments, world_size, limit_s)]


def _outputs(module: str, arguments: Sequence[str], world_size: int, limit_s: float) -> list[str]:
    """All that each rank of `python -m module` prints; SideError with the ranks' words where one fails."""
    common = {
        **one_thread(os.environ),
        **_ENVIRONMENT,
        "MASTER_PORT": str(_free_port()),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
    }
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            cwd=ROOT,
            env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(world_size)
    ]
    try:
        outputs = [process.communicate(timeout=limit_s)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    if any(process.returncode for process in processes):
        raise SideError("\n".join([f"{module}: ranks ended with {[p.returncode for p in processes]}.", *outputs]))
    return outputs


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def prepare(strategy: str, model: nn.Module) -> tuple[Any, nn.Module, Any]:
    """The accelerator, the prepared model and lowpeak's strategy: `fsdp2`, `zero3` or `ddp`."""
    from accelerate import Accelerator, DeepSpeedPlugin, FullyShardedDataParallelPlugin, PartialState
    from accelerate.utils import DistributedType

    from lowpeak.parallel.detect import detect_strategy

    options: dict[str, Any] = {"cpu": True}
    if strategy == "fsdp2":
        state = PartialState(cpu=True)
        # On a CPU accelerate would train DDP without a word: its state is told that there are several devices.
        state._shared_state["distributed_type"], state._shared_state["device"] = (
            DistributedType.MULTI_GPU,
            torch.device("cpu"),
        )
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="transformer_based_wrap",
            reshard_after_forward=True,
            cpu_ram_efficient_loading=False,
        )
        options = {"fsdp_plugin": plugin}
    if strategy == "zero3":
        PartialState(cpu=True)
        options = {"deepspeed_plugin": DeepSpeedPlugin(hf_ds_config=zero3_config())}
    accelerator = Accelerator(**options)
    prepared, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-3))
    return accelerator, prepared, detect_strategy(accelerator)


def zero3_config() -> dict[str, Any]:
    """ZeRO-3 that gathers what it uses and nothing else."""
    return {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {
            "stage": 3,
            "stage3_max_reuse_distance": 0,
            "stage3_prefetch_bucket_size": 0,
            "stage3_param_persistence_threshold": 0,
        },
        "zero_allow_untested_optimizer": True,
    }


if __name__ == "__main__":
    importlib.import_module(sys.argv[1]).main(json.loads(sys.argv[2]))

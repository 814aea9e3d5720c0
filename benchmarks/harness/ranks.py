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
from typing import Any

import torch
from torch import nn

from benchmarks.harness.process import last_object, one_thread

# Without the threshold glibc keeps freed shards in its heaps, and every way looks alike.
_ENVIRONMENT = {"MALLOC_MMAP_THRESHOLD_": "65536", "DS_ACCELERATOR": "cpu", "MASTER_ADDR": "127.0.0.1"}


def run_ranks(module: str, request: dict[str, Any], world_size: int = 2, timeout: float = 900) -> dict[str, Any]:
    """What rank 0 of `module` answers to the request; RuntimeError with the ranks' words where one fails."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    common = {**one_thread(os.environ), **_ENVIRONMENT, "MASTER_PORT": port, "WORLD_SIZE": str(world_size)}
    command = [sys.executable, "-m", "benchmarks.harness.ranks", module, json.dumps(request)]
    processes = [
        subprocess.Popen(
            command,
            env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(world_size)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(world_size)
    ]
    try:
        outputs = [process.communicate(timeout=timeout)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    if any(process.returncode for process in processes):
        raise RuntimeError("\n".join(outputs))
    return last_object(outputs[0], module)


def prepare(strategy: str, model: nn.Module) -> tuple[Any, nn.Module, Any]:
    """The accelerator, the prepared model and lowpeak's strategy: `fsdp2`, `zero3` or `ddp`."""
    from accelerate import Accelerator, DeepSpeedPlugin, FullyShardedDataParallelPlugin, PartialState
    from accelerate.utils import DistributedType

    from lowpeak.strategies.detect import detect_strategy

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

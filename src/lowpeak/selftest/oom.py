"""Runs that run out of memory: another process takes the device's memory, and the run goes on with smaller sizes.

On a CPU a layer raises the error in place of the device, for inputs above a limit.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers.trainer_callback import TrainerCallback

from lowpeak.journal import EVENTS, read_rows
from lowpeak.selftest.models import make_model, mib
from lowpeak.selftest.runs import make_trainer
from lowpeak.selftest.table import Bench, require, row

_ROOM = 5 << 28  # bytes that the run has left
_CHILD_CONTEXT_BYTES = 5 << 27  # of the other process, besides its tensor
_BALLAST_SCRIPT = (
    "import sys, torch; t = torch.empty(int(sys.argv[2]), dtype=torch.uint8, device=sys.argv[1]); "
    "print(flush=True); input()"
)


class Ballast(TrainerCallback):
    """Memory of the device that another process holds from one moment of a run to another.

    `moments` are the names of the callback or "reward" at which it takes and frees the memory. On a CPU a layer fails for inputs of
    more than `most` rows ("rows") or tokens ("tokens").
    """

    def __init__(self, bench: Bench, room: int, moments: tuple[str, str]) -> None:
        self._bench, self._room, self._moments = bench, room, moments
        self._process: subprocess.Popen[bytes] | None = None
        self._was_taken = self.is_taken = False
        self.num_bytes = 0

    def fail_on_cpu(self, model: Any, unit: str, most: int) -> None:
        """Raise the error in the model's first layer while the memory is taken, on a CPU."""

        def check(module: nn.Module, args: Any) -> None:
            rows, tokens = args[0].shape[:2]
            if self.is_taken and (rows if unit == "rows" else rows * tokens) > most:
                raise torch.OutOfMemoryError(f"out of memory: {rows} x {tokens} tokens, and at most {most} {unit}")

        if not self._bench.on_gpu:
            model.model.layers[0].register_forward_pre_hook(check)

    def reach(self, moment: str) -> None:
        """Take the memory, once, or free it if this is the moment for it."""
        if moment == self._moments[0] and not self._was_taken:
            self._was_taken = self.is_taken = True
            if self._bench.on_gpu:
                self._take()
        elif moment == self._moments[1]:
            self.free()

    def _take(self) -> None:
        device = self._bench.device
        torch.cuda.empty_cache()
        free = torch.cuda.mem_get_info(device)[0]
        self.num_bytes = free - self._room - _CHILD_CONTEXT_BYTES
        require(self.num_bytes > 0, f"{device} has {mib(free)} free, less than the run is to have left")
        command = [sys.executable, "-c", _BALLAST_SCRIPT, str(device), str(self.num_bytes)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self._process.stdout is not None
        require(self._process.stdout.readline() == b"\n", f"no other process could take {mib(self.num_bytes)}")

    def free(self) -> None:
        """End the process that has the memory."""
        self.is_taken = False
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def reward(self, completion_ids: Sequence[Sequence[int]], **columns: Any) -> list[float]:
        """Return rewards that differ within a group; the moment "reward" is after generation."""
        self.reach("reward")
        return [float(sum(ids) % 5) for ids in completion_ids]

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.reach("begin")

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.reach("step")


@row("out of memory in training", seconds=180, quick=True)
def oom_training(bench: Bench) -> str:
    """Leave a run too little memory for its micro-batches, and read which sizes it lowered."""
    ballast = Ballast(bench, 2 * _ROOM, ("reward", "step"))
    model = make_model(*bench.pick((32_000, 512, 8, (8, 2)), (13, 32, 2, (4, 2))), context=1024)
    ballast.fail_on_cpu(model, "tokens", 128)
    sizes = {"micro_batch_tokens": 1 << 20, "kv_cache_bytes": 1 << 30}
    changes = {**sizes, "max_completion_length": bench.pick(512, 7)}
    return _check_recovery(bench, ballast, model, "train", per_device_train_batch_size=bench.pick(64, 32), **changes)


@row("out of memory in a rollout", seconds=180)
def oom_rollout(bench: Bench) -> str:
    """Leave a run too little memory for its KV cache, and read which sizes it lowered."""
    ballast = Ballast(bench, _ROOM, ("begin", "reward"))
    model = make_model(*bench.pick((32_000, 1024, 8, (16, 16)), (13, 32, 2, (4, 2))), context=1024)
    ballast.fail_on_cpu(model, "rows", 16)
    changes = {"kv_cache_bytes": 8 << 30, "max_completion_length": bench.pick(768, 7)}
    return _check_recovery(bench, ballast, model, "rollout", per_device_train_batch_size=bench.pick(128, 32), **changes)


@row("out of memory in vLLM's wake-up", "a GPU", "vLLM", seconds=300, in_default_run=False)
def oom_wake_up(bench: Bench) -> str:
    """Leave a sleeping vLLM too little memory for its KV cache, and read which sizes the run lowered."""
    ballast = Ballast(bench, 2 * _ROOM, ("step", "reward"))
    model = make_model(512, 256, 2, (4, 2), context=1024, tied=False)
    engine = {"use_vllm": True, "vllm_mode": "colocate", "vllm_enable_sleep_mode": True, "vllm_max_model_length": 1024}
    changes = {"vllm_engine_kwargs": {"enforce_eager": True}, "kv_cache_bytes": 8 << 30, "bf16": True}
    return _check_recovery(bench, ballast, model, "rollout", max_steps=2, **engine, **changes)


def _check_recovery(bench: Bench, ballast: Ballast, model: nn.Module, phase: str, **changes: Any) -> str:
    """Run with the ballast; return the sizes that the journal says were lowered in `phase`."""
    settings = {"max_steps": 1, "padding_free": False, **changes}
    trainer = make_trainer(bench, "oom", model, ballast.reward, callbacks=[ballast], **settings)
    try:
        trainer.train()
    finally:
        ballast.free()
    events = [each for each in read_rows(bench.folder / "oom" / "journal", EVENTS) if each["event"] == "out of memory"]
    phases = [each["phase"] for each in events]
    bench.record(ballast_bytes=ballast.num_bytes, phases=phases)
    require(
        phase in phases, f"phase {phase} did not run out of memory, in spite of a ballast of {mib(ballast.num_bytes)}"
    )
    lowered = {name: getattr(trainer.run.sizes, name) for name in sorted(trainer.run.sizes.lowered)}
    bench.record(lowered=lowered)
    require(bool(lowered), "no size was lowered")
    sizes = ", ".join(f"{name} {changes.get(name, '')} -> {value}" for name, value in lowered.items())
    return f"recovered, {len(events)} times: {sizes} (ballast {mib(ballast.num_bytes)})"

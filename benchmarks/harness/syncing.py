"""`benchmarks.engine_sync` for one model: a trainer's process, and vLLM first in it and then in one beside it."""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
import torch
from torch import nn

from benchmarks.harness.process import MemoryWatch, in_mb, resident_bytes
from benchmarks.harness.report import print_result
from benchmarks.harness.shapes import make_model
from lowpeak.config.vllm import ServerSettings, VllmSettings
from lowpeak.rollout.vllm.vllm import Facts
from lowpeak.rollout.vllm.weights.push import PushReport, push
from lowpeak.strategies.flat import ranges
from lowpeak.strategies.outgoing import outgoing

SHAPES: dict[str, dict[str, int]] = {
    "quick": {"hidden": 256, "layers": 4, "vocabulary": 4096},
    "mid": {"hidden": 512, "layers": 8, "vocabulary": 32_000},
    "large": {"hidden": 1024, "layers": 16, "vocabulary": 64_000},
}
BUCKETS_MIB = (8, 64, 256)
SLICE_BYTES = 8 << 20
os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "OMP_WAIT_POLICY": "PASSIVE",
}


def main() -> None:
    request = json.loads(sys.argv[1])
    dtype, repeats = getattr(torch, request["dtype"]), request["repeats"]
    torch.set_num_threads(1)
    model = make_model(**SHAPES[request["shape"]]).requires_grad_(False)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        ways: dict[str, Any] = {}
        with apart(folder, request["dtype"]) as vllm:  # first: the other engine changes this process
            ways |= pushes(model, vllm, dtype, repeats, ("tcp",), request["shape"])
            ways["request_a_tensor"] = measured(lambda: by_tensor(model, vllm, dtype), vllm.pid, repeats)
        with inside(folder, request["dtype"]) as vllm:
            ways |= pushes(model, vllm, dtype, repeats, ("process",), request["shape"])
            ways["trl_load_a_tensor"] = measured(lambda: as_trl(model, vllm, dtype), vllm.pid, repeats)
    sizes = [parameter.numel() * dtype.itemsize for parameter in model.parameters()]
    print_result(
        {"model_mib": in_mb(sum(sizes)), "largest_mib": in_mb(max(sizes)), "tensors": len(sizes), "ways": ways}
    )


def pushes(
    model: nn.Module, vllm: Any, dtype: torch.dtype, repeats: int, transports: tuple[str, ...], shape: str
) -> dict[str, Any]:
    """Each transport at each bucket size, and without proof at the default."""
    found = {}
    for transport in transports:
        for mib in BUCKETS_MIB[:1] if shape == "quick" else BUCKETS_MIB:
            for verify in (True, False) if mib == 64 else (True,):
                settings = VllmSettings(ServerSettings(()), bucket_bytes=mib << 20, transport=transport, verify=verify)  # type: ignore[arg-type]
                reports: list[PushReport] = []

                def way(settings: VllmSettings = settings, reports: list[PushReport] = reports) -> None:
                    slices = ranges(outgoing(model, lambda parameter: None, "merged"), SLICE_BYTES, dtype)
                    reports.append(push(slices, [vllm], settings, len(reports)))

                figures = measured(way, vllm.pid, repeats)
                share = statistics.median(report.proof_seconds / report.seconds for report in reports)
                name = f"{transport}_{mib}MiB" + ("" if verify else "_unproved")
                found[name] = figures | {"bucket_mib": mib, "proof_share": round(share, 3)}
    return found


def measured(way: Callable[[], object], engine: int, repeats: int) -> dict[str, Any]:
    """Medians of wall and of both sides' CPU seconds, the most memory of each above what it had; once unmeasured before that."""
    way()
    seconds, cpu_seconds, extra = [], [], {"trainer": 0, "engine": 0}
    for _ in range(repeats):
        gc.collect()
        sides = {"trainer": os.getpid(), "engine": engine}
        before = {name: resident_bytes(pid) or 0 for name, pid in sides.items()}
        watches = {name: MemoryWatch(partial(resident_bytes, pid)) for name, pid in sides.items()}
        with watches["trainer"], watches["engine"]:
            began, spent = time.perf_counter(), cpu_seconds_of(set(sides.values()))
            way()
            cpu_seconds.append(cpu_seconds_of(set(sides.values())) - spent)
            seconds.append(time.perf_counter() - began)
        extra = {name: max(extra[name], (watches[name].peak_bytes or 0) - before[name]) for name in sides}
    found = {"seconds": round(statistics.median(seconds), 3), "cpu_seconds": round(statistics.median(cpu_seconds), 3)}
    return found | {f"{name}_extra_mib": in_mb(num_bytes) for name, num_bytes in extra.items()}


def cpu_seconds_of(pids: Iterable[int]) -> float:
    """What these processes have computed so far."""
    times = [psutil.Process(pid).cpu_times() for pid in pids]
    return sum(each.user + each.system for each in times)


def as_trl(model: nn.Module, vllm: Inside, dtype: torch.dtype) -> None:
    """Each gathered parameter to the engine's `load_weights` as it comes: TRL 1.16's colocated mode."""
    engine = vllm.llm.llm_engine.model_executor.driver_worker.model_runner.model
    for name, parameter in model.named_parameters():
        engine.load_weights([(name, parameter.data.to(dtype))])


def by_tensor(model: nn.Module, vllm: Apart, dtype: torch.dtype) -> None:
    """Each parameter in a request of its own, through a file in shared memory."""
    folder = Path("/dev/shm")
    for name, parameter in model.named_parameters():
        path = folder / f"lowpeak-benchmark-{os.getpid()}"
        try:
            torch.save(parameter.data.to(dtype), path)
            vllm.call("load_file", {"name": name, "path": str(path)})
        finally:
            path.unlink(missing_ok=True)


class Inside:
    """vLLM in this process."""

    in_process = True

    def __init__(self, folder: str, dtype: str) -> None:
        from vllm import LLM

        import lowpeak.rollout.vllm.weights.extension  # noqa: F401 - before the model is loaded

        extension = "lowpeak.rollout.vllm.weights.extension.Extension"
        sizes = {"max_model_len": 128, "max_num_seqs": 4, "kv_cache_memory_bytes": 16 << 20}
        quiet = {"skip_tokenizer_init": True, "enforce_eager": True, "disable_log_stats": True}
        self.llm = LLM(folder, dtype=dtype, worker_extension_cls=extension, **sizes, **quiet)
        self.pid = os.getpid()
        self.workers = self

    def facts(self) -> Facts:
        """Of which only the number of workers is asked."""
        return Facts("", "", "", "", 128, 4, 1000, 1)

    def call(self, method: str, arguments: Mapping[str, Any], timeout: float | None = None) -> list[Any]:
        """What the worker's method answers."""
        return list(self.llm.collective_rpc(method, timeout, kwargs=dict(arguments)))


class Apart:
    """vLLM in a process beside this one, asked over a pipe."""

    in_process = False

    def __init__(self, pipe: Any, pid: int) -> None:
        self._pipe, self.pid = pipe, pid
        self.workers = self

    def facts(self) -> Facts:
        """Of which only the number of workers is asked."""
        return Facts("", "", "", "", 128, 4, 1000, 1)

    def call(self, method: str, arguments: Mapping[str, Any], timeout: float | None = None) -> list[Any]:
        """What the other process's worker answers."""
        self._pipe.send((method, dict(arguments)))
        answer: list[Any] = self._pipe.recv()
        return answer


@contextmanager
def inside(folder: str, dtype: str) -> Iterator[Inside]:
    vllm = Inside(folder, dtype)
    yield vllm
    vllm.llm.llm_engine.engine_core.shutdown()


@contextmanager
def apart(folder: str, dtype: str) -> Iterator[Apart]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=serve, args=(theirs, folder, dtype))
    process.start()
    theirs.close()
    try:
        yield Apart(ours, ours.recv())
    finally:
        ours.close()
        process.join(60)
        process.kill()


def serve(pipe: Any, folder: str, dtype: str) -> None:
    """Answer until the pipe is closed."""
    torch.set_num_threads(1)
    vllm = Inside(folder, dtype)
    engine = vllm.llm.llm_engine.model_executor.driver_worker.model_runner.model
    pipe.send(os.getpid())
    while True:
        try:
            method, arguments = pipe.recv()
        except EOFError:
            return
        if method == "load_file":
            engine.load_weights([(arguments["name"], torch.load(arguments["path"], mmap=True))])
            pipe.send([None])
        else:
            pipe.send(vllm.call(method, arguments))


if __name__ == "__main__":
    main()

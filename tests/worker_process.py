"""A fused model in a process of its own, called over a pipe, as a server's workers are; it may be told to die."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Mapping
from typing import Any

from fused_model import FusedModel, FusedWorker
from lowpeak.errors import LostEngineError
from lowpeak.vllm.protocol import EngineInfo, check_worker_answers


class RemoteVllm:
    """One worker in another process. With `dies_at` it is killed when it is asked for the so-manyth bucket."""

    def __init__(self, dies_at: int | None = None, sleeps_at: int | None = None) -> None:
        context = multiprocessing.get_context("fork")
        self._pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, dies_at, sleeps_at), daemon=True)
        self.process.start()
        theirs.close()
        self.transport = ""

    def call(self, method: str, arguments: Mapping[str, Any], timeout: float | None = None) -> list[Any]:
        self.transport = arguments.get("invitation", {}).get("transport", self.transport)
        try:
            self._pipe.send((method, dict(arguments)))
            if not self._pipe.poll(timeout):
                raise LostEngineError("the worker does not answer")
            return check_worker_answers([self._pipe.recv()])
        except (EOFError, OSError) as error:
            raise LostEngineError("the worker is gone") from error

    def info(self, wait_seconds: float | None = None) -> EngineInfo:
        return EngineInfo("", "fused", "", "float32", 128, 8, 1000)

    def weights(self) -> dict[str, Any]:
        return self.call("weights", {}, 30)[0]

    def kill(self) -> None:
        self.process.kill()
        self.process.join(10)


def _serve(pipe: Any, dies_at: int | None, sleeps_at: int | None) -> None:
    worker, buckets = FusedWorker(FusedModel()), 0
    while True:
        try:
            method, arguments = pipe.recv()
        except EOFError:
            return
        buckets += method == "lowpeak_receive"
        if method == "lowpeak_receive" and buckets == dies_at:
            os.kill(os.getpid(), signal.SIGKILL)
        if method == "lowpeak_receive" and buckets == sleeps_at:
            signal.pause()
        if method == "weights":
            pipe.send({name: parameter.data.numpy() for name, parameter in worker.model.named_parameters()})
        else:
            pipe.send(getattr(worker, method)(**arguments))

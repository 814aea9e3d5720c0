"""A vLLM in this process for benchmarks, without vLLM: it accepts every push, and a subclass answers waves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lowpeak.vllm.protocol import Answer, EngineInfo, Request, Vllm
from lowpeak.vllm.weight_sync.buckets import Piece

_INFO = EngineInfo("0.32.0", "scripted", "", "float32", 4096, 256, 1 << 20, in_process=True)


class ScriptedVllm(Vllm):
    """`load` receives the flat ranges of each push; answers are those of `complete`."""

    def __init__(self) -> None:
        self._version: int | None = None
        self._received: dict[str, list[Tensor]] = {}

    def complete(self, requests: Sequence[Request], timeout: float | None = None) -> list[Answer]:
        raise AssertionError("a subclass answers")

    def load(self, weights: Mapping[str, Tensor]) -> None:
        return

    def call(self, method: str, arguments: Mapping[str, Any], timeout: float) -> list[Any]:
        if method == "lowpeak_receive":
            for piece in map(Piece.from_json, arguments["pieces"]):
                self._received.setdefault(piece.name, []).append(piece.values_in(arguments["data"]).clone())
        if method == "lowpeak_commit":
            self._version = arguments["policy_version"]
            self.load({name: torch.cat(pieces) for name, pieces in self._received.items()})
            self._received = {}
        answers = {
            "lowpeak_identity": {"incarnation": "0", "policy_version": self._version, "base": 0, "adapter": None},
            "lowpeak_begin": {"known": []},
            "lowpeak_verify": {"lacking": {}},
            "lowpeak_commit": {"adapter": None},
        }
        return [answers.get(method, {})]

    def info(self, wait_seconds: float | None = None) -> EngineInfo:
        return _INFO

    def start(self, request: Request, timeout: float | None = None) -> Future[Answer]:
        raise AssertionError("the run has no conversations")

    def paused(self) -> AbstractContextManager[None]:
        return nullcontext()


def connect(trainer: Any, vllms: Sequence[ScriptedVllm]) -> None:
    """Give each of the trainer's engines one of these in place of its servers."""
    collectors = [trainer.collector] if trainer.pipeline is None else trainer.pipeline.collectors
    for vllm, collector in zip(vllms, collectors, strict=True):
        collector.engine = replace(collector.engine, connect=lambda vllm=vllm: (vllm,))

"""The fake vLLM: it says what a script says, remembers how it was used, and fails in the ways that real ones do."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from lowpeak.config.vllm import VllmSettings
from lowpeak.errors import EngineError, LostEngineError
from lowpeak.records import WeightSlice
from lowpeak.rollout.vllm.vllm import Adapter, Answer, Facts, Request, Vllm
from lowpeak.rollout.vllm.weights.report import PushReport

Script = Callable[[Request], Answer | Sequence[int]]

FACTS = Facts(
    version="0.32.0",
    model="scripted",
    fingerprint="",
    dtype="float32",
    max_model_len=128,
    max_num_seqs=256,
    kv_tokens=1 << 14,
    num_workers=1,
)


class ScriptedVllm:
    """One vLLM that needs no model: `script` says each request's tokens, or its whole answer.

    `waves` are the requests of each call that was answered or failed. To misbehave it is told: `dies_after` so many
    answers more it is lost, and there again with no weights; `answers_short` by so many; `seconds` are what an answer takes;
    `restart()` and `hold(version)` change what it holds behind the engine's back. `weights` are the pieces that came with
    the last `scripted_push`.
    """

    def __init__(self, script: Script, facts: Facts = FACTS) -> None:
        self._script = script
        self._facts = facts
        self.waves: list[tuple[Request, ...]] = []
        self.calls: list[tuple[str, Mapping[str, Any]]] = []
        self.events: list[str] = []
        self.dies_after: int | None = None
        self.answers_short = 0
        self.seconds = 0.0
        self.incarnation = 0
        self.policy_version: int | None = None
        self.weights: dict[str, list[Tensor]] = {}

    @property
    def workers(self) -> ScriptedVllm:
        """Itself: it is its own one worker."""
        return self

    @property
    def in_process(self) -> bool:
        """Yes."""
        return True

    def call(self, method: str, arguments: Mapping[str, Any], timeout: float | None = None) -> list[Any]:
        """Its identity when asked for it; anything else is noted in `calls`."""
        if method == "lowpeak_identity":
            return [{"incarnation": str(self.incarnation), "policy_version": self.policy_version}]
        self.calls.append((method, arguments))
        return [{}]

    def facts(self) -> Facts:
        """What it was made with."""
        return self._facts

    def complete(self, requests: Sequence[Request], timeout: float | None = None) -> list[Answer]:
        """What the script says; EngineError where vLLM would refuse, LostEngineError when it dies or is too slow."""
        self.waves.append(tuple(requests))
        answers: dict[int, Answer] = {}
        for i, request in enumerate(requests):
            if self.dies_after == 0:
                self.dies_after = None
                self.restart()
                raise _lost("The scripted vLLM died.", answers)
            if self.dies_after is not None:
                self.dies_after -= 1
            if timeout is not None and (i + 1) * self.seconds > timeout:
                raise _lost(f"The scripted vLLM did not answer within {timeout} s.", answers)
            time.sleep(self.seconds)
            answers[i] = self._answer(request)
        return list(answers.values())[: len(answers) - self.answers_short]

    def pause(self) -> None:
        """Noted."""
        self.events.append("pause")

    def resume(self) -> None:
        """Noted."""
        self.events.append("resume")

    def wait(self, seconds: float) -> None:
        """It is there at once."""
        self.events.append("wait")

    def sleep(self) -> None:
        """Noted; it forgets its weights."""
        self.events.append("sleep")
        self.policy_version = None

    def wake(self) -> None:
        """Noted."""
        self.events.append("wake")

    def close(self) -> None:
        """Noted."""
        self.events.append("close")

    def restart(self) -> None:
        """Be another process, which holds no weights."""
        self.incarnation += 1
        self.policy_version = None

    def hold(self, policy_version: int | None) -> None:
        """Say that it holds these weights."""
        self.policy_version = policy_version

    def _answer(self, request: Request) -> Answer:
        said = self._script(request)
        if isinstance(said, Answer):
            return said
        ids = tuple(said)[: request.params["max_tokens"]]
        ended = ids[-1] in request.params["stop_token_ids"]
        return Answer(ids, (0.0,) * len(ids), "stop" if ended else "length")


def scripted_push(
    slices: Iterable[WeightSlice],
    vllms: Sequence[Vllm],
    settings: VllmSettings,
    policy_version: int,
    *,
    adapter: Mapping[str, Any] | None = None,
) -> PushReport:
    """Gives the slices to scripted vLLMs, copied; an `adapter` in place of the former one, beside its base."""
    weights: dict[str, list[Tensor]] = {}
    for piece in slices:
        weights.setdefault(piece.name, []).append(piece.values.detach().clone())
    for vllm in vllms:
        assert isinstance(vllm, ScriptedVllm), "this push is for scripted vLLMs"
        vllm.weights = {**vllm.weights, **weights} if adapter is not None else weights
        vllm.hold(policy_version)
    number_of = Adapter("scripted", policy_version + 1, "")
    return PushReport(len(weights), adapters=tuple(number_of if adapter is not None else None for _ in vllms))


def scripted_prove(vllms: Sequence[Vllm]) -> None:
    """EngineError where a scripted vLLM holds no version."""
    if any(worker["policy_version"] is None for vllm in vllms for worker in vllm.workers.call("lowpeak_identity", {})):
        raise EngineError("The scripted vLLM holds other weights.")


def _lost(sentence: str, finished: Mapping[int, Answer]) -> LostEngineError:
    error = LostEngineError(sentence)
    error.finished = dict(finished)
    return error

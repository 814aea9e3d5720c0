"""Asking the workers of one or several engines: what a worker says is wrong becomes an error, whoever it was."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from lowpeak.errors import EngineError
from lowpeak.rollout.vllm.at_once import at_once
from lowpeak.rollout.vllm.vllm import Vllm


def ask(
    vllms: Sequence[Vllm], method: str, arguments: Sequence[Mapping[str, Any]], timeout: float | None
) -> list[list[dict[str, Any]]]:
    """What each worker of each engine answers, all engines at the same time; EngineError with the first complaint."""

    def one(vllm: Vllm, given: Mapping[str, Any]) -> list[dict[str, Any]]:
        return [_checked(answer) for answer in vllm.workers.call(method, given, timeout)]

    return at_once([partial(one, vllm, given) for vllm, given in zip(vllms, arguments, strict=True)])


def _checked(answer: dict[str, Any]) -> dict[str, Any]:
    if "error" in answer:
        raise EngineError(answer["error"])
    return answer

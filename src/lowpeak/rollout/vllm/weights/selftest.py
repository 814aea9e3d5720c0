"""Whether every transport of this machine brings weights into its engines: each is used once, and what it brought is proved."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch

from lowpeak.config.vllm import ServerSettings, Transport, VllmSettings
from lowpeak.errors import EngineError
from lowpeak.records import WeightSlice
from lowpeak.rollout.vllm.vllm import Vllm
from lowpeak.rollout.vllm.weights.proof import held_version, prove
from lowpeak.rollout.vllm.weights.push import push
from lowpeak.rollout.vllm.weights.report import PushReport
from lowpeak.rollout.vllm.weights.transports.choose import reaching

BUCKET_BYTES = 1 << 20


@dataclass(frozen=True)
class Tested:
    """One transport: what the push took, or why it failed."""

    transport: Transport
    report: PushReport | None = None
    error: str | None = None


def selftest(
    vllms: Sequence[Vllm],
    slices: Callable[[int], Iterable[WeightSlice]],
    device: torch.device,
    timeout: float = 60.0,
) -> list[Tested]:
    """Push `slices(version)` over each transport that reaches all workers, other values for each version, and prove them.

    `slices` gives all weights of the (small) model that the engines loaded, with values on `device`. A transport that fails
    is told and the next one tried.
    """
    settings = VllmSettings(ServerSettings(()), bucket_bytes=BUCKET_BYTES)
    return [
        _test(vllms, slices, replace(settings, transport=transport), version, timeout)
        for version, transport in enumerate(reaching(vllms, device, timeout), 1)
    ]


def _test(
    vllms: Sequence[Vllm],
    slices: Callable[[int], Iterable[WeightSlice]],
    settings: VllmSettings,
    version: int,
    timeout: float,
) -> Tested:
    try:
        report = push(slices(version), vllms, settings, version, timeout=timeout)
        prove(vllms, timeout)
        if held_version(vllms, timeout) != version:
            raise EngineError("The engines do not hold the version that was pushed.")
    except Exception as error:
        return Tested(settings.transport, error=f"{type(error).__name__}: {error}")
    return Tested(settings.transport, report)

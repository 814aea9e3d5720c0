"""Pushes of a policy's weights into the vLLMs of an engine: who needs which, and which adapters stay."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

from lowpeak.arguments import VllmSettings
from lowpeak.errors import LostEngineError
from lowpeak.records import Weights, WeightSlice
from lowpeak.vllm.protocol import Vllm, call_workers
from lowpeak.vllm.weight_sync import PushReport, TrainerGroup, leave_group, push_weights

_CALL_SECONDS = 60.0


@dataclass(eq=False)
class Pushes:
    """Sends weights to vLLMs, in the form that they need.

    adapter     the LoRA configuration of the policy's adapter; `unchanged` are tensors that training does not change
    bases       per vLLM, the identities of its workers' base weights after the last push of a base
    adapters    versions and numbers of the adapters that the vLLMs have
    """

    settings: VllmSettings
    adapter: Mapping[str, Any] | None
    unchanged: Collection[str]
    on_push: Callable[[PushReport], None] = lambda report: None
    bucket_limit: Callable[[], float] = lambda: math.inf
    bases: list[Any] = field(default_factory=list)
    adapters: list[tuple[int, int]] = field(default_factory=list)
    nccl_group: TrainerGroup = field(default_factory=TrainerGroup)

    def push(
        self,
        slices: Iterable[WeightSlice],
        vllms: Mapping[Vllm, bool],
        policy_version: int,
        weights: Weights,
        awaited: Collection[int | None],
    ) -> None:
        """Push to the vLLMs, each given with whether it is in this process; LostEngineError for an adapter without its base.

        A base goes to those that lack it. All that get other weights than an adapter pause, and resume, also after an error. An
        adapter touches neither running requests nor the adapters of `awaited` versions; the other ones are removed.
        """
        if weights == "adapter":
            if self._without_base(vllms):
                raise LostEngineError(
                    "vLLM was restarted, or another client loaded weights into it, since it got its base."
                )
            self.adapters = [each for each in self.adapters if each[0] in awaited]
            report = self._send(slices, vllms, policy_version, self.adapter)
            self.adapters += [(policy_version, each.number) for each in report.adapters[:1] if each is not None]
            return
        receivers = {vllm: vllms[vllm] for vllm in (vllms if weights == "merged" else self._without_base(vllms))}
        with ExitStack() as stack:
            for vllm in receivers:
                stack.enter_context(vllm.paused())
            if receivers:
                self._send(slices, receivers, policy_version, None)
        identities = call_workers(list(vllms), "lowpeak_identity", {}, _CALL_SECONDS)
        self.bases = base_names(identities) if weights == "base" else []

    def forget_bases(self) -> None:
        """Send the base again in the next push."""
        self.bases = []

    def leave(self, vllms: Sequence[Vllm]) -> None:
        """Disconnect from the vLLMs."""
        leave_group(vllms, self.nccl_group)
        self.bases, self.adapters = [], []

    def _send(
        self,
        slices: Iterable[WeightSlice],
        vllms: Mapping[Vllm, bool],
        policy_version: int,
        adapter: Mapping[str, Any] | None,
    ) -> PushReport:
        report = push_weights(
            slices,
            list(vllms),
            replace(self.settings, bucket_bytes=int(min(self.settings.bucket_bytes, self.bucket_limit()))),
            policy_version,
            unchanged=self.unchanged,
            adapter=adapter,
            in_use=[number for _, number in self.adapters],
            in_process=list(vllms.values()),
            nccl_group=self.nccl_group,
        )
        self.on_push(report)
        return report

    def _without_base(self, vllms: Iterable[Vllm]) -> list[Vllm]:
        names = base_names(call_workers(list(vllms), "lowpeak_identity", {}, _CALL_SECONDS))
        return [vllm for i, vllm in enumerate(vllms) if not self.bases or self.bases[i] != names[i]]


def base_names(identities: Sequence[Sequence[Mapping[str, Any]]]) -> list[Any]:
    """Return a name of each vLLM's base, which changes if it restarts or gets other weights than an adapter."""
    return [[(worker["incarnation"], worker["base"]) for worker in workers] for workers in identities]

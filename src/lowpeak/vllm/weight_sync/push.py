"""The policy's weights on their way into vLLM: slices fill buckets, buckets go to every worker; all is proved, or nothing holds."""

from __future__ import annotations

import itertools
import secrets
import time
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lowpeak.arguments import ServerSettings, VllmSettings
from lowpeak.errors import EngineError
from lowpeak.records import WeightSlice
from lowpeak.vllm.protocol import Adapter, Vllm, call_workers
from lowpeak.vllm.weight_sync.buckets import Bucket, ChecksumTable, fill_buckets, shorten_names
from lowpeak.vllm.weight_sync.transports import BucketSender, open_sender

TIMEOUT = 600.0  # seconds for one bucket, or for the proof of all
ABORT_SECONDS = 30.0  # for an engine to forget an update that failed


@dataclass(frozen=True)
class PushReport:
    """What an update took: bytes that were sent, seconds, and the proof's of them.

    `adapters` is, for each engine, what requests have to name to be answered with these weights (`Request.adapter`).
    """

    num_bytes: int = 0
    seconds: float = 0.0
    proof_seconds: float = 0.0
    adapters: tuple[Adapter | None, ...] = ()


def push_weights(
    slices: Iterable[WeightSlice],
    vllms: Sequence[Vllm],
    settings: VllmSettings,
    policy_version: int,
    *,
    unchanging: Collection[str] = (),
    adapter: Mapping[str, Any] | None = None,
    timeout: float = TIMEOUT,
) -> PushReport:
    """One whole update of every engine: when it returns, all hold these weights, proved, as `policy_version`.

    `slices` are taken to their end in any case, because other ranks wait for them. Errors come after that, and leave every engine
    without a version. Tensors that training does not change (`unchanging`) come
    once: an engine that holds them proves it against their checksums instead. Alive are one bucket here, and in a worker the bucket
    and the largest tensor. EngineError names what was wrong: tensors that vLLM does not take, that did not arrive as they were,
    or that are lacking; LostEngineError is a worker's end.
    """
    rest = iter(slices)
    began = time.perf_counter()
    try:
        first = next(rest, None)
        if first is None:
            raise EngineError("There are no weights to push.")
        with _Update(vllms, settings, adapter, first.values.device, timeout) as update:
            update.send(itertools.chain([first], rest), unchanging)
            update.verify()
            update.commit(policy_version)
    except BaseException as error:
        if isinstance(error, Exception):
            exhaust_slices(rest)
        raise
    return update.report(time.perf_counter() - began)


@dataclass
class _Update:
    """An update under way; leaving it by an error makes every engine that can still be reached forget its version."""

    vllms: Sequence[Vllm]
    settings: VllmSettings
    adapter: Mapping[str, Any] | None
    device: torch.device
    timeout: float

    def __post_init__(self) -> None:
        self._sums = ChecksumTable() if self.settings.verify else None
        self._counts: dict[str, int] = {}
        self._num_bytes = 0
        self._proof_seconds = 0.0
        self._sender: BucketSender | None = None
        self._adapters: tuple[Adapter | None, ...] = ()

    def __enter__(self) -> _Update:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if self._sender is not None:
            self._sender.close()
        if error is not None:
            for vllm in self.vllms:
                try:
                    vllm.call("lowpeak_abort", {}, min(self.timeout, ABORT_SECONDS))
                except Exception:  # it may be what failed; without a commit it holds no version anyway
                    continue

    def send(self, slices: Iterable[WeightSlice], unchanging: Collection[str]) -> None:
        """All slices, but the `unchanging` that every worker holds."""
        settings = self.settings
        port = settings.where.group_port if isinstance(settings.where, ServerSettings) else None
        sender = open_sender(settings.transport, self.vllms, settings.bucket_bytes, self.device, self.timeout, port)
        self._sender = sender
        held_back = self._begin(sender) & frozenset(unchanging)
        sender.joined()
        for bucket in fill_buckets(self._counted(slices), sender.buffer, self._sums, held_back):
            self._deliver(sender, bucket)

    def verify(self) -> None:
        """Every worker holds what was sent, and together they hold all of it."""
        began = time.perf_counter()
        sent = dict.fromkeys(self._counts, "") if self._sums is None else self._sums.read()
        arguments = {"sent": sent, "counts": self._counts}
        answers = call_workers(self.vllms, "lowpeak_verify", [arguments] * len(self.vllms), self.timeout)
        for vllm, each in zip(self.vllms, answers, strict=True):
            _check_complete([answer["lacking"] for answer in each], self._counts, shared=vllm.in_process)
        self._proof_seconds = time.perf_counter() - began

    def commit(self, policy_version: int) -> None:
        given = [{"policy_version": policy_version}] * len(self.vllms)
        answers = call_workers(self.vllms, "lowpeak_commit", given, self.timeout)
        named = [each[0]["adapter"] for each in answers]
        self._adapters = tuple(None if one is None else Adapter(**one) for one in named)

    def report(self, seconds: float) -> PushReport:
        proof = 0.0 if self._sums is None else self._proof_seconds + self._sums.seconds
        return PushReport(self._num_bytes, seconds, proof, self._adapters)

    def _begin(self, sender: BucketSender) -> frozenset[str]:
        """Open every worker's end; the names of tensors that all of them hold."""
        invitation = sender.invitation()
        # An adapter's number in vLLM: one that was not used before, and above those that its server counts from 1.
        number = (1 << 20) + secrets.randbelow(1 << 30)
        adapter = None if self.adapter is None else {"config": dict(self.adapter), "number": number}
        others = self.vllms[:-1]
        workers = call_workers(others, "lowpeak_identity", [{}] * len(others), self.timeout)
        first_ranks = itertools.accumulate((len(each) for each in workers), initial=1)
        arguments = [
            {
                "invitation": invitation | {"first_rank": rank},
                "summing": self._sums is not None,
                "adapter": adapter,
            }
            for rank in first_ranks
        ]
        answers = [
            answer for each in call_workers(self.vllms, "lowpeak_begin", arguments, self.timeout) for answer in each
        ]
        return frozenset.intersection(*(frozenset(answer["known"]) for answer in answers))

    def _counted(self, slices: Iterable[WeightSlice]) -> Iterator[WeightSlice]:
        for piece in slices:
            self._counts.setdefault(piece.name, torch.Size(piece.shape).numel())
            yield piece

    def _deliver(self, sender: BucketSender, bucket: Bucket) -> None:
        pieces = [piece.to_json() for piece in bucket.pieces]
        self._num_bytes += sum(piece.count * piece.dtype.itemsize for piece in bucket.pieces)

        def take(arguments: Mapping[str, Any]) -> None:
            call_workers(self.vllms, "lowpeak_take", [{"pieces": pieces, **arguments}] * len(self.vllms), self.timeout)

        sender.deliver(bucket, take)


def _check_complete(lacking: Sequence[Mapping[str, int]], counts: Mapping[str, int], shared: bool) -> None:
    """EngineError where a part of a tensor is in no worker; `lacking` are the elements placed where they are not all.

    An engine over the trainer's own ranks answers for one of its workers alone (`shared`): what another one holds is not known.
    """
    names = set().union(*lacking)
    placed = {name: sum(each.get(name, counts[name]) for each in lacking) for name in names}
    lost = sorted(name for name in names if placed[name] < counts[name])
    if lost and not shared:
        raise EngineError(
            f"vLLM took only a part of {shorten_names(lost)}: its model has other shapes, or does not have these tensors."
        )


def exhaust_slices(slices: Iterator[WeightSlice]) -> None:
    """Take the rest of the slices: other ranks wait for each."""
    deque(slices, maxlen=0)


def prove(vllms: Sequence[Vllm], timeout: float = TIMEOUT) -> None:
    """Each worker sums its parameters again; EngineError with the tensors' names where they changed, and no version then.

    A worker that was pushed to without proof (`verify=False`), or that holds no version, proves nothing: EngineError.
    """
    call_workers(vllms, "lowpeak_prove", [{}] * len(vllms), timeout)


def held_version(vllms: Sequence[Vllm], timeout: float = 60.0) -> int | None:
    """The policy version that every worker of every engine holds; None where one holds none, or they differ."""
    answers = [
        answer for each in call_workers(vllms, "lowpeak_identity", [{}] * len(vllms), timeout) for answer in each
    ]
    versions = {answer["policy_version"] for answer in answers}
    return versions.pop() if len(versions) == 1 else None

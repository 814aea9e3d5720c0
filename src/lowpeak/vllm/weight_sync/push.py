"""Trainer side of a weight update: send the slices in buckets to every worker and verify the result."""

from __future__ import annotations

import itertools
import secrets
import time
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from lowpeak.arguments import ServerSettings, Transport, VllmSettings
from lowpeak.errors import EngineError, LostEngineError, shorten_names
from lowpeak.records import WeightSlice
from lowpeak.vllm.protocol import Adapter, Vllm, call_concurrently, call_workers
from lowpeak.vllm.weight_sync.buckets import Bucket, BucketSender, ChecksumTable, ProcessSender, fill_buckets
from lowpeak.vllm.weight_sync.nccl import NcclSender, TrainerGroup, device_id
from lowpeak.vllm.weight_sync.tcp import TcpSender, host_addresses
from lowpeak.watchdog import network_id

TIMEOUT = 600.0  # seconds for one bucket, or for the verification
ABORT_SECONDS = 30.0  # for an engine to abort a failed update


@dataclass(frozen=True)
class PushReport:
    """Cost of an update: bytes sent, seconds, and the seconds of them for checksums and verification.

    `adapters` are, per engine, the adapter that requests name to use these weights (`Request.adapter`).
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
    unchanged: Collection[str] = (),
    adapter: Mapping[str, Any] | None = None,
    in_use: Collection[int] = (),
    timeout: float = TIMEOUT,
    in_process: Sequence[bool] = (),
    nccl_group: TrainerGroup | None = None,
) -> PushReport:
    """Update all engines; on return, all have these weights, verified, as `policy_version`.

    `slices` are always consumed, because other ranks wait for them; errors are raised afterwards and leave every engine without a
    version. Tensors that training does not change (`unchanged`) are sent once: an engine that has them verifies their checksums
    instead. Of earlier adapters those with numbers `in_use` stay. Memory holds one bucket here, and one bucket and the largest
    tensor in a worker. `in_process` are the engines' facts of this name (empty: the engines are asked). Updates over NCCL share
    `nccl_group` (None: a group of this update). Raise EngineError with the names of tensors that vLLM does not accept, that were
    damaged or that are missing; LostEngineError if a worker died, or has other weights where `unchanged` ones were not sent.
    """
    rest, in_process = iter(slices), in_process or [vllm.info().in_process for vllm in vllms]
    began, group = time.perf_counter(), nccl_group or TrainerGroup()
    try:
        first = next(rest, None)
        if first is None:
            raise EngineError("There are no weights to push.")
        if adapter is not None:
            # An unused number of an adapter in vLLM, above those that its server counts from 1.
            number = (1 << 20) + secrets.randbelow(1 << 30)
            adapter = {"config": dict(adapter), "number": number, "in_use": sorted(in_use)}
        with _Update(vllms, settings, adapter, first.values.device, timeout, in_process, group) as update:
            update.send(itertools.chain([first], rest), unchanged)
            update.verify()
            update.commit(policy_version)
    except BaseException as error:
        if isinstance(error, Exception):
            exhaust_slices(rest)
        raise
    finally:
        if nccl_group is None:
            leave_group(vllms, group)
    return update.report(time.perf_counter() - began)


@dataclass
class _Update:
    """Update in progress; leaving its block by an error aborts it on every engine that still answers."""

    vllms: Sequence[Vllm]
    settings: VllmSettings
    adapter: Mapping[str, Any] | None
    device: torch.device
    timeout: float
    in_process: Sequence[bool]
    nccl_group: TrainerGroup

    def __post_init__(self) -> None:
        self._sums = ChecksumTable() if self.settings.verify else None
        self._counts: dict[str, int] = {}
        self._skipped: frozenset[str] = frozenset()
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
            self.nccl_group.close()
            for vllm in self.vllms:
                try:
                    vllm.call("lowpeak_abort", {}, min(self.timeout, ABORT_SECONDS))
                except Exception:
                    # This engine may have caused the error; without a commit it has no version anyway.
                    continue

    def send(self, slices: Iterable[WeightSlice], unchanged: Collection[str]) -> None:
        """Send all slices, except the `unchanged` tensors that every worker has."""
        settings = self.settings
        port = settings.where.group_port if isinstance(settings.where, ServerSettings) else None
        transport = settings.transport
        if transport == "auto" and all(self.in_process):
            transport = "process"
        common = self.vllms, settings.bucket_bytes, self.device, self.timeout
        sender = open_sender(transport, *common, self.nccl_group, port)
        self._sender = sender
        self._skipped = self._begin(sender) & frozenset(unchanged)
        sender.wait_connected()
        for bucket in fill_buckets(self._counted(slices), sender.buffer, self._sums, self._skipped):
            self._deliver(sender, bucket)

    def verify(self) -> None:
        """Check that every worker has the tensors that were sent, and that together they have all.

        LostEngineError if tensors that were not sent may be those of another run: the next update sends them, too.
        """
        began = time.perf_counter()
        sent = dict.fromkeys(self._counts, "") if self._sums is None else self._sums.read()
        arguments = {"sent": sent, "counts": self._counts}
        try:
            answers = call_workers(self.vllms, "lowpeak_verify", arguments, self.timeout)
        except EngineError as error:
            if self._skipped and not isinstance(error, LostEngineError):
                raise LostEngineError(f"{error} An earlier run may have left them in this vLLM.") from error
            raise
        for is_shared, workers in zip(self.in_process, answers, strict=True):
            _check_complete([answer["lacking"] for answer in workers], self._counts, shared=is_shared)
        self._proof_seconds = time.perf_counter() - began

    def commit(self, policy_version: int) -> None:
        answers = call_workers(self.vllms, "lowpeak_commit", {"policy_version": policy_version}, self.timeout)
        adapters = [workers[0]["adapter"] for workers in answers]
        self._adapters = tuple(None if adapter is None else Adapter(**adapter) for adapter in adapters)

    def report(self, seconds: float) -> PushReport:
        proof = 0.0 if self._sums is None else self._proof_seconds + self._sums.seconds
        return PushReport(self._num_bytes, seconds, proof, self._adapters)

    def _begin(self, sender: BucketSender) -> frozenset[str]:
        """Open every worker's receiver; return the names of tensors that all workers have."""
        invitation = sender.invitation()
        others = self.vllms[:-1]
        workers = call_workers(others, "lowpeak_identity", {}, self.timeout)
        first_ranks = itertools.accumulate((len(each) for each in workers), initial=1)
        common = {"summing": self._sums is not None, "adapter": self.adapter}
        arguments = [{**common, "invitation": {**invitation, "first_rank": rank}} for rank in first_ranks]
        calls = [
            partial(vllm.call, "lowpeak_begin", each, self.timeout)
            for vllm, each in zip(self.vllms, arguments, strict=True)
        ]
        answers = itertools.chain.from_iterable(call_concurrently(calls))
        return frozenset.intersection(*(frozenset(answer["known"]) for answer in answers))

    def _counted(self, slices: Iterable[WeightSlice]) -> Iterator[WeightSlice]:
        for weight_slice in slices:
            self._counts.setdefault(weight_slice.name, torch.Size(weight_slice.shape).numel())
            yield weight_slice

    def _deliver(self, sender: BucketSender, bucket: Bucket) -> None:
        pieces = [piece.to_json() for piece in bucket.pieces]
        self._num_bytes += sum(piece.count * piece.dtype.itemsize for piece in bucket.pieces)

        def receive(arguments: Mapping[str, Any]) -> None:
            call_workers(self.vllms, "lowpeak_receive", {"pieces": pieces, **arguments}, self.timeout)

        sender.deliver(bucket, receive)


def _check_complete(lacking: Sequence[Mapping[str, int]], counts: Mapping[str, int], shared: bool) -> None:
    """Raise EngineError if part of a tensor is in no worker.

    `lacking` has, per worker, the element counts of its incomplete tensors. An engine over the trainer's ranks
    (`shared`) reports only one of its workers, so the others' elements are unknown.
    """
    names = set().union(*lacking)
    placed = {name: sum(each.get(name, counts[name]) for each in lacking) for name in names}
    lost = sorted(name for name in names if placed[name] < counts[name])
    if lost and not shared:
        raise EngineError(
            f"vLLM loaded only a part of {shorten_names(lost)}: its model has other shapes, or lacks these tensors."
        )


def exhaust_slices(slices: Iterator[WeightSlice]) -> None:
    """Consume the remaining slices, because other ranks wait for each of them."""
    deque(slices, maxlen=0)


def verify_unchanged(vllms: Sequence[Vllm], timeout: float = TIMEOUT) -> None:
    """Verify that all workers' weights are unchanged since the push.

    Raise EngineError with the names of changed tensors, whose worker then has no version; also if a worker has no
    version or was pushed to with `verify=False`.
    """
    call_workers(vllms, "lowpeak_verify_unchanged", {}, timeout)


def loaded_version(vllms: Sequence[Vllm], timeout: float = 60.0) -> int | None:
    """Return the policy version of all workers of all engines; None if one has none, or they differ."""
    engines = call_workers(vllms, "lowpeak_identity", {}, timeout)
    versions = {worker["policy_version"] for workers in engines for worker in workers}
    return versions.pop() if len(versions) == 1 else None


def open_sender(
    transport: Transport,
    vllms: Sequence[Vllm],
    bucket_bytes: int,
    device: torch.device,
    timeout: float,
    nccl_group: TrainerGroup,
    port: int | None = None,
) -> BucketSender:
    """Return the trainer's end of `transport`; raise EngineError if it cannot reach the workers.

    "auto" selects NCCL if trainer and workers have different GPUs, otherwise TCP.
    NCCL and TCP listen at `port` of this host (None: any free one).
    """
    if transport == "process":
        return ProcessSender(bucket_bytes, device=None)
    workers = _WorkerLocations.of(vllms, timeout)
    if transport == "tcp" or (transport == "auto" and not workers.on_other_gpus(device)):
        return TcpSender(bucket_bytes, loopback=workers.all_local, timeout=timeout, port=port)
    if device.type != "cuda" or "cpu" in workers.devices:
        raise EngineError("vllm_transport='nccl' needs GPUs, but the trainer or vLLM is on a CPU: use 'auto'.")
    nccl_group.invite(device, workers.trainer_address, workers.groups, port)
    return NcclSender(bucket_bytes, device, nccl_group, timeout)


def leave_group(vllms: Sequence[Vllm], nccl_group: TrainerGroup) -> None:
    """Close the NCCL group at both ends."""
    if nccl_group.is_open:
        for vllm in vllms:
            # A worker that is gone has no group.
            with suppress(EngineError):
                vllm.call("lowpeak_disconnect", {}, ABORT_SECONDS)
    nccl_group.close()


def available_transports(vllms: Sequence[Vllm], device: torch.device, timeout: float) -> list[Transport]:
    """Return every transport by which values on `device` can reach all workers."""
    transports: list[Transport] = ["process"] if all(vllm.info().in_process for vllm in vllms) else []
    transports.append("tcp")
    return [*transports, "nccl"] if _WorkerLocations.of(vllms, timeout).on_other_gpus(device) else transports


@dataclass(frozen=True)
class _WorkerLocations:
    """Locations of the workers: whether all are on this host, their devices, and each worker's NCCL group."""

    all_local: bool
    devices: frozenset[str]
    groups: tuple[str | None, ...]

    @staticmethod
    def of(vllms: Sequence[Vllm], timeout: float) -> _WorkerLocations:
        engines = call_workers(vllms, "lowpeak_location", {}, timeout)
        workers = [worker for engine in engines for worker in engine]
        network = network_id()
        all_local = all(worker["network"] == network for worker in workers)
        groups = tuple(worker["group"] for worker in workers)
        return _WorkerLocations(all_local, frozenset(worker["device"] for worker in workers), groups)

    @property
    def trainer_address(self) -> str:
        """Return the address under which the workers reach this host."""
        return "127.0.0.1" if self.all_local else host_addresses()[0]

    def on_other_gpus(self, device: torch.device) -> bool:
        """Return whether NCCL can reach the workers: it refuses two ranks on one device."""
        return device.type == "cuda" and "cpu" not in self.devices and device_id(device) not in self.devices

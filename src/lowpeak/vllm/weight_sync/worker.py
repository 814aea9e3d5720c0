"""Worker side of a weight update: the methods that lowpeak adds to vLLM's workers, and the receiver of the weights.

vLLM finds the methods by `worker_extension_cls="lowpeak.vllm.weight_sync.worker.Extension"`. Every worker imports this module
before it loads its model, and vLLM must keep the weights as they are loaded from then on (`disable_cpu_repacking`).

The receiver assembles tensors from pieces, loads them into the model and verifies them. Besides the model, memory holds the
bucket and the tensor that is being assembled; a tensor that is complete within a bucket is loaded from there.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor

from lowpeak.errors import EngineError, LowpeakError, is_installed, shorten_names
from lowpeak.records import TensorAssembler
from lowpeak.vllm.compatibility import disable_cpu_repacking, engine_fingerprint, read_engine_info, score_at_temperature
from lowpeak.vllm.weight_sync.buckets import BucketReceiver, Piece, ProcessReceiver
from lowpeak.vllm.weight_sync.lora import AdapterReceiver
from lowpeak.vllm.weight_sync.names import CheckpointNames
from lowpeak.vllm.weight_sync.nccl import NcclReceiver, WorkerGroup, device_id
from lowpeak.vllm.weight_sync.reload import ReloadedModules, modules_to_reload
from lowpeak.vllm.weight_sync.tcp import TcpReceiver
from lowpeak.vllm.weight_sync.verification import WriteMap, read_checksums
from lowpeak.watchdog import network_id

# Without vLLM, the worker is a test's.
if is_installed("vllm"):
    disable_cpu_repacking()


def reply_with_errors(method: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """Make a method return errors as `{"error": message}`.

    An exception may end vLLM's engine, and loses its class on the way to the trainer.
    """

    @wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        try:
            return method(self, *args, **kwargs)
        except LowpeakError as error:
            return {"error": str(error)}
        except Exception as error:
            return {"error": f"vLLM's worker failed in {method.__name__}: {type(error).__name__}: {error}"[:500]}

    return call


class Extension:
    """Methods that vLLM mixes into its worker class; each runs on all workers and returns JSON-compatible values."""

    @reply_with_errors
    def lowpeak_identity(self) -> dict[str, Any]:
        """Return the worker's incarnation, which changes with a restart, its policy version and its adapter.

        `base` changes with each update of the weights other than adapters.
        """
        state = _worker_state(self)
        version, base = state.receiver.policy_version, state.weights.num_updates
        adapter = state.receiver.adapter()
        return {"incarnation": state.incarnation, "policy_version": version, "base": base, "adapter": adapter}

    @reply_with_errors
    def lowpeak_engine_info(self) -> dict[str, Any]:
        config = self.vllm_config  # type: ignore[attr-defined]
        return asdict(replace(read_engine_info(config), fingerprint=engine_fingerprint(config.model_config)))

    @reply_with_errors
    def lowpeak_location(self) -> dict[str, Any]:
        """Return the worker's network and device, by names that all processes of its host share, and its NCCL group."""
        state = _worker_state(self)
        return {"network": network_id(), "device": device_id(state.device), "group": state.nccl_group.name}

    @reply_with_errors
    def lowpeak_begin(
        self, invitation: Mapping[str, Any], summing: bool, adapter: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """Begin an update, of an adapter if one is given, and drop the version.

        Returns the names of tensors that need not be sent again.
        """
        state = _worker_state(self)
        state.close_transport()
        if adapter is None:
            state.receiver = state.weights
            known = state.weights.begin(summing)
        elif state.weights.is_broken:
            raise EngineError("The last update of vLLM's base weights failed: push the base weights before an adapter.")
        else:
            state.receiver = state.adapters
            known = state.adapters.begin(adapter)
        state.transport = open_receiver(invitation, state.device, state.rank, state.nccl_group)
        return {"known": list(known)}

    @reply_with_errors
    def lowpeak_receive(self, pieces: Sequence[Mapping[str, Any]], **arguments: Any) -> dict[str, Any]:
        """Load a bucket's pieces."""
        state = _worker_state(self)
        try:
            if state.transport is None:
                raise EngineError("No weight update has begun in vLLM's worker.")
            state.receiver.receive([Piece.from_json(piece) for piece in pieces], state.transport.read(arguments))
            # The trainer may refill the bucket after this call.
            if state.device.type != "cpu":
                torch.accelerator.synchronize(state.device)
        except BaseException:
            state.close_transport()
            raise
        return {}

    @reply_with_errors
    def lowpeak_verify(self, sent: Mapping[str, str], counts: Mapping[str, int]) -> dict[str, Any]:
        """Verify the checksums of all tensors; return per tensor the elements in this worker if it lacks some."""
        state = _worker_state(self)
        state.close_transport()
        return {"lacking": state.receiver.verify(sent, counts)}

    @reply_with_errors
    def lowpeak_commit(self, policy_version: int) -> dict[str, Any]:
        """Set the version, after all workers verified the update; return the adapter that requests may name, if any."""
        receiver = _worker_state(self).receiver
        receiver.commit(policy_version)
        return {"adapter": receiver.adapter()}

    @reply_with_errors
    def lowpeak_abort(self) -> dict[str, Any]:
        """Abort the update, or drop the version of weights that were lost."""
        state = _worker_state(self)
        state.drop_transport()
        state.receiver.abort()
        return {}

    @reply_with_errors
    def lowpeak_disconnect(self) -> dict[str, Any]:
        """End the connection to the trainer; the weights stay."""
        _worker_state(self).drop_transport()
        return {}

    @reply_with_errors
    def lowpeak_verify_unchanged(self) -> dict[str, Any]:
        """Verify that weights, and an adapter's base, are unchanged; otherwise raise EngineError and drop the
        version.
        """
        state = _worker_state(self)
        if state.receiver is state.adapters and state.weights.policy_version is not None:
            try:
                state.weights.verify_unchanged()
            except EngineError:
                state.adapters.abort()
                raise
        state.receiver.verify_unchanged()
        return {}

    @reply_with_errors
    def lowpeak_score_at_temperature(self) -> dict[str, Any]:
        score_at_temperature(self.model_runner.sampler)  # type: ignore[attr-defined]
        return {}


def _worker_state(worker: Any) -> WorkerState:
    """Return the state of a worker whose model is loaded; it is created once and stored on the worker."""
    if not hasattr(worker, "_lowpeak_state"):
        model, config = worker.model_runner.get_model(), worker.vllm_config
        device, rank = next(model.parameters()).device, config.parallel_config.rank
        paths = {module: name for name, module in model.named_modules()}
        reloads = ReloadedModules(modules_to_reload(model, config), paths, config.model_config)
        weights = WeightReceiver(model, CheckpointNames(config.model_config.hf_config), reloads)
        incarnation = secrets.token_hex(8)
        adapters = AdapterReceiver(worker, incarnation)
        worker._lowpeak_state = WorkerState(weights, adapters, weights, device, rank, incarnation)
    state: WorkerState = worker._lowpeak_state
    return state


def open_receiver(invitation: Mapping[str, Any], device: torch.device, rank: int, group: WorkerGroup) -> BucketReceiver:
    """Return a worker's end for the trainer's invitation; `rank` is the worker's within its engine."""
    arguments = dict(invitation)
    transport, first_rank = arguments.pop("transport"), arguments.pop("first_rank")
    if transport == "nccl":
        num_bytes = arguments.pop("num_bytes")
        return NcclReceiver(group.join(**arguments, rank=first_rank + rank, device=device), num_bytes, device)
    group.close()
    return ProcessReceiver() if transport == "process" else TcpReceiver(**arguments)


@dataclass
class WorkerState:
    """State of one worker's weight updates; `rank` is its rank within its engine.

    `receiver` is that of the last update: `weights` for the model, or `adapters`.
    """

    weights: WeightReceiver
    adapters: AdapterReceiver
    receiver: WeightReceiver | AdapterReceiver
    device: torch.device
    rank: int
    incarnation: str
    transport: BucketReceiver | None = None
    nccl_group: WorkerGroup = field(default_factory=WorkerGroup)

    def close_transport(self) -> None:
        if self.transport is not None:
            self.transport.close()
            self.transport = None

    def drop_transport(self) -> None:
        """Close the transport and the NCCL group, which updates share otherwise."""
        self.close_transport()
        self.nccl_group.close()


@dataclass
class WeightReceiver:
    """Receiver of weight updates; `policy_version` is None from `begin` until `commit`.

    `known` are the tensors whose values it can verify without receiving them again.

        known = receiver.begin()
        for bucket in buckets:                                       # of all tensors but the known ones
            receiver.receive(bucket.pieces, bucket.data)
        receiver.verify(checksums, num_elements)                     # after an error in any of these: receiver.abort()
        receiver.commit(policy_version)
        receiver.verify_unchanged()                                  # later, before it generates
    """

    model: Any
    names: CheckpointNames
    reloads: ReloadedModules
    policy_version: int | None = None
    num_updates: int = 0
    known: tuple[str, ...] = ()
    _assembler: TensorAssembler = field(default_factory=TensorAssembler)
    _loaded: set[str] = field(default_factory=set)
    _kept: frozenset[str] = frozenset()
    _summing: bool = True
    _written: bool = False
    _reloaded: dict[str, int] = field(default_factory=dict)
    _reload_sums: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._write_map = WriteMap(self.model)

    @property
    def is_broken(self) -> bool:
        """Return true after a failed update: the model holds partly written weights."""
        return self._written and self.policy_version is None

    def begin(self, summing: bool = True) -> tuple[str, ...]:
        """Drop the version and return the tensors that need not be sent again.

        Without `summing` nothing can be verified.
        """
        known = self.known if self.policy_version is not None else ()
        self.policy_version, self.known = None, ()
        self.num_updates += 1
        self._kept, self._summing = frozenset(known), summing
        self._assembler.clear()
        self._loaded.clear()
        self.reloads.begin()
        self._reloaded = {}
        self._write_map.begin(summing, skipped=self.reloads.parameters())
        return known

    @torch.no_grad()
    def receive(self, pieces: Iterable[Piece], bucket: Tensor) -> None:
        """Load every tensor that these pieces complete; the bucket may be overwritten afterwards."""
        for piece in pieces:
            values = piece.values_in(bucket)
            if piece.is_complete:
                self._load(piece.name, values.view(piece.shape))
            else:
                self._assemble(piece, values)

    def verify(self, sent: Mapping[str, str], num_elements: Mapping[str, int]) -> dict[str, int]:
        """Raise EngineError with names unless the model holds exactly the tensors that were sent.

        Returns the number of loaded elements of each tensor of which this worker has fewer than `num_elements`: its
        engine's ranks share such tensors.
        """
        if self._assembler.incomplete:
            raise EngineError(f"These tensors are incomplete: {shorten_names(self._assembler.incomplete)}.")
        not_received = {*(sent.keys() - self._loaded - self._kept), *self.names.missing(sent)}
        if not_received:
            raise EngineError(f"These tensors were not received: {shorten_names(not_received)}.")
        missing = self.reloads.missing()
        self.reloads.finish()
        if self._summing:
            self._reload_sums = read_checksums(self.reloads.sums())
            if different := self._write_map.verify(sent):
                raise EngineError(f"vLLM's weights differ from the policy's: {shorten_names(different)}.")
        missing += self._write_map.missing(sent)
        if missing:
            raise EngineError(
                f"The update lacks values for these parameters of vLLM's model: {shorten_names(missing)}."
            )
        # A reloaded tensor is in no parameter in its original form, so only sending it again can verify it.
        self.known = tuple(n for n, regions in self._write_map.regions.items() if regions) if self._summing else ()
        placed = self._write_map.num_placed(sent) | self._reloaded
        return {name: placed[name] for name, count in num_elements.items() if placed[name] < count}

    def commit(self, policy_version: int) -> None:
        self.policy_version = policy_version

    def adapter(self) -> None:
        return

    def abort(self) -> None:
        """Abort the update: the weights have no version."""
        self.policy_version, self.known = None, ()
        self._assembler.clear()

    def verify_unchanged(self) -> None:
        """Raise EngineError with names, and drop the version, if weights changed since they were verified."""
        if self.policy_version is None:
            raise EngineError("vLLM has weights without a version.")
        sums = read_checksums(self.reloads.sums())
        changed = [name for name in sums if sums[name] != self._reload_sums.get(name)] + self._write_map.changed()
        if changed:
            self.abort()
            raise EngineError(f"vLLM's weights changed since they were verified: {shorten_names(changed)}.")

    def _load(self, name: str, tensor: Tensor) -> None:
        """Load one tensor, and record where vLLM wrote it; EngineError if vLLM does not accept one that it needs."""
        if name in self._loaded:
            raise EngineError(f"The tensor {name} was sent twice.")
        self._written = True
        # A layerwise reload keeps a reference to the tensor, but the bucket will be overwritten.
        source = tensor.clone() if self.reloads else tensor
        accepted, failed = self._try_candidates(name, source)
        if not accepted and not self.names.is_optional(name):
            shape = "x".join(map(str, tensor.shape))
            reason = (
                "it wrote the tensor nowhere"
                if failed is None
                else f"{type(failed).__name__}: {failed}".splitlines()[0][:300]
            )
            raise EngineError(
                f"vLLM's model does not accept the tensor {name} of shape {shape} ({reason})."
            ) from failed
        if not self._write_map.regions.get(name):
            self._reloaded[name] = source.numel()
        self._loaded.add(name)

    def _try_candidates(self, name: str, source: Tensor) -> tuple[bool, Exception | None]:
        """Load a tensor under the names that vLLM may know it by; return whether it accepted one, and the first error."""
        failed: Exception | None = None
        for weights in self.names.candidates(name, source):
            try:
                taken = self._write_map.load(name, source, partial(self.model.load_weights, weights))
            except Exception as error:
                failed = failed or error
                continue
            if self._write_map.regions[name] or self._is_reloaded(taken):
                return True, None
        return False, failed

    def _is_reloaded(self, taken: Any) -> bool:
        """Return whether a layerwise reload has taken a tensor; `taken` is the answer of `load_weights`."""
        # That of some models returns nothing.
        return bool(self.reloads) and (taken is None or bool(taken))

    def _assemble(self, piece: Piece, values: Tensor) -> None:
        self._assembler.device = values.device
        complete = self._assembler.add(piece.name, piece.shape, piece.start, values)
        if complete is not None:
            self._load(piece.name, complete)

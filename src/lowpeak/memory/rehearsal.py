"""Rehearsal of a step on fake tensors, to learn the peak memory of each phase.

The phases run with the real code. Fake tensors have shapes and dtypes and no memory, and a fake process group stands
for the other ranks, so a step of any model on any number of ranks can be rehearsed on one CPU.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lowpeak.algorithms import Algorithm
from lowpeak.arguments import ModelSettings, StorageFormat
from lowpeak.models import convert_trainable
from lowpeak.optim import CompactAdamW, HostMemory, TensorStep, copy_to_device
from lowpeak.parallel import (
    FakeStrategy,
    Strategy,
    clip_grad_norm,
    fake_process_group,
    make_mesh,
    place_optimizer,
    prepare_like_accelerate,
    trained_parameters,
    wrap_shape_propagation,
)
from lowpeak.records import MicroBatch
from lowpeak.training import LogprobSettings, run_step, score

_BLOCK = 512  # bytes; CUDA's caching allocator rounds sizes up to it
_FUSED_ADAMW = partial(torch.optim.AdamW, fused=True)  # transformers' default


@dataclass(frozen=True)
class PhasePeaks:
    """Peak bytes of tensors on one rank, in each phase. All include the model, `loaded` before any phase.

    `host` are bytes in host memory; a step copies `to_host` and `to_device` bytes there and back.
    """

    loaded: int
    score: int
    forward: int
    backward: int
    optimizer: int
    host: int = 0
    to_host: int = 0
    to_device: int = 0

    @property
    def train(self) -> int:
        return max(self.forward, self.backward)


def rehearse(
    make_model: Callable[[], nn.Module],
    micro_batches: Sequence[MicroBatch],
    algorithm: Algorithm,
    core: LogprobSettings,
    *,
    world_size: int = 1,
    compute: torch.dtype | None = None,
    make_optimizer: Callable[[Iterable[Tensor]], torch.optim.Optimizer] = _FUSED_ADAMW,
    storage: StorageFormat | None = None,
    max_grad_norm: float = 1.0,
) -> PhasePeaks:
    """Return the peak of each phase of a step on rank 0 of `world_size` (FSDP2 if above 1).

    `make_model` must return the model with its head installed; it is called under FakeTensorMode, where a model takes no
    memory. `micro_batches` are rank 0's, packed outside. `compute` is torch.bfloat16 for a run with `bf16=True`. With a `storage`
    format the model is converted to it, and its CompactAdamW is the optimizer. A first step, which creates the optimizer's
    states, does not count.

    Counted is every storage that an operation returns, in blocks of 512 bytes: weights, shards, gathered layers, activations,
    gradients, optimizer states. Not counted are temporaries inside an operation, fragmentation, the process with its libraries
    and communicators (a constant of a run), and a reference model. Kernels are those of CPU devices. Padded rows get an
    attention mask that transformers drops in a real forward, after it has read that nothing is packed: that adds some MB to a
    micro-batch. Differences between phases agree with two real ranks (tests/distributed).

    Raises ArgumentError in a process that is connected to other ranks, and torch's DataDependentOutputException if a phase
    reads a tensor's value.
    """
    with fake_process_group(world_size):
        mesh = make_mesh()
        with FakeTensorMode(allow_non_fake_inputs=True), StorageMeter() as meter, wrap_shape_propagation(meter.paused):
            model, host = make_model().train(), RehearsedHost(meter)
            if storage is not None:
                convert_trainable(model, ModelSettings(storage=storage))
            model = prepare_like_accelerate(model, mesh, compute)
            optimizer = (
                make_optimizer(model.parameters()) if storage is None else _compact_optimizer(model, storage, host)
            )
            loaded = meter.live_bytes
            strategy = cast(Strategy, FakeStrategy(meter.begin))

            def step() -> None:
                model.train()
                run_step(model, micro_batches, algorithm, core, strategy, algorithm.coefficients())
                meter.begin("optimizer")
                if storage is None:
                    nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm)
                else:
                    clip_grad_norm(model.parameters(), max_grad_norm, core.device)
                optimizer.step()
                optimizer.zero_grad()
                meter.begin(None)

            step()  # creates the optimizer's states
            meter.peaks.clear()
            meter.begin("score")
            score(model.eval(), micro_batches, core)
            host.to_host = host.to_device = 0
            step()
    return PhasePeaks(loaded, **meter.peaks, host=host.bytes, to_host=host.to_host, to_device=host.to_device)


class RehearsedHost(HostMemory):
    """Fake host memory: the meter counts the tensors of the device alone."""

    def __init__(self, meter: StorageMeter) -> None:
        super().__init__(torch.device("cpu"))
        self._meter = meter
        self.bytes = self.to_host = self.to_device = 0

    def empty(self, size: int, dtype: torch.dtype) -> Tensor:
        with self._meter.paused():
            buffer = torch.empty(size, dtype=dtype)
        self._meter.ignore(buffer.untyped_storage())
        self.bytes += buffer.nbytes
        return buffer

    def add(self, total: Tensor, values: Tensor, overwrite: bool = False) -> None:
        self.to_host += values.nbytes

    def add_rows(self, total_VD: Tensor, ids_N: Tensor, values_ND: Tensor) -> None:
        self.to_host += values_ND.nbytes

    def multiply(self, total: Tensor, factor: Tensor) -> Tensor | None:
        return factor

    def visit(self, step: TensorStep, update: Callable[[TensorStep], None], factor: Tensor | None) -> None:
        states = sum(values.nbytes for values in step.tensor.state.values())
        self.to_device += states + step.gradients.nbytes
        self.to_host += states
        first, *_ = step.tensor.chunks(self.piece)
        # As many pieces as are under way at a time.
        under_way = [copy_to_device(step.slice(*first), step.gradients.device) for _ in range(self.num_pieces)]
        update(under_way[0])


class RehearsedAdamW(CompactAdamW):
    """A CompactAdamW whose host memory is rehearsed."""

    rehearsed_host: RehearsedHost

    def host(self, parameter: nn.Parameter) -> HostMemory | None:
        return self.rehearsed_host if self.offload else None


def _compact_optimizer(model: nn.Module, storage: StorageFormat, host: RehearsedHost) -> CompactAdamW:
    bits: dict[str, Any] = {"weight_bits": storage.weight_bits, "state_bits": storage.state_bits}
    optimizer = RehearsedAdamW(model.parameters(), offload=storage.offload, **bits)
    optimizer.rehearsed_host = host
    with unset_fake_temporarily():  # DTensor computes positions of shards with tensors, and reads them
        place_optimizer(optimizer, trained_parameters(model), storage)
    return optimizer


class StorageMeter(TorchDispatchMode):
    """A dispatch mode that counts the bytes of living tensors, and the peak of each phase. Enter it inside FakeTensorMode.

    It counts the storages that operations return, each once however many views it has, in blocks of 512 bytes. Memory that an
    operation allocates and frees internally is not seen.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live_bytes = 0
        self.peaks: dict[str, int] = {}
        self._peak = 0
        self._is_replacing = False  # the current operation's result takes the place of one of its inputs
        self._paused = False
        self._phase: str | None = None
        self._sizes: dict[int, tuple[weakref.ref[Any], int]] = {}
        self._ignored: dict[int, weakref.ref[Any]] = {}

    def begin(self, phase: str | None) -> None:
        """Begin `phase` and end the current one; None begins no phase."""
        self._update_peak()
        if self._phase is not None:
            self.peaks[self._phase] = max(self._peak, self.peaks.get(self._phase, 0))
        self._phase, self._peak = phase, self.live_bytes

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Do not count the tensors that the block creates."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def __enter__(self) -> StorageMeter:
        # FSDP frees and reallocates its buffers by resizing their storages, which dispatches no operation.
        self._resize = torch.UntypedStorage.resize_
        torch.UntypedStorage.resize_ = _metered_resize(self._resize, self)  # type: ignore[method-assign]
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # An operation on a tensor subclass made of other tensors is dispatched again for these.
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented
        if self._paused:
            return func(*args, **(kwargs or {}))
        self._update_peak()
        # Autograd accumulates real gradients in place, and fake ones out of place: count that sum as in place.
        self._is_replacing = func is torch.ops.aten.add.Tensor and _accumulates_gradients()
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self.see(leaf.untyped_storage())
        return out

    def _update_peak(self) -> None:
        self._is_replacing = False
        self._peak = max(self._peak, self.live_bytes)

    def ignore(self, storage: torch.UntypedStorage) -> None:
        """Never count a storage: it is in other memory."""
        key = storage._cdata
        self._ignored[key] = weakref.ref(storage, lambda _: self._ignored.pop(key))

    def see(self, storage: torch.UntypedStorage) -> None:
        """Count a storage at its current size, until it is freed."""
        key, size = storage._cdata, -(-storage.nbytes() // _BLOCK) * _BLOCK
        if key in self._ignored:
            return
        known = self._sizes.get(key)
        if known is None:
            watch = weakref.ref(storage, lambda _: self._forget(key))
            self._sizes[key] = (watch, size)
            self._add(size)
        elif known[1] != size:
            self._sizes[key] = (known[0], size)
            self._add(size - known[1])

    def _forget(self, key: int) -> None:
        self._add(-self._sizes.pop(key)[1])

    def _add(self, num_bytes: int) -> None:
        self.live_bytes += num_bytes
        if not self._is_replacing:
            self._peak = max(self._peak, self.live_bytes)


def _accumulates_gradients() -> bool:
    """Return whether a backward runs: with gradients enabled it is a forward that checkpointing repeats inside it."""
    return torch._C._current_graph_task_id() != -1 and not torch.is_grad_enabled()


def _metered_resize(resize: Callable[..., Any], meter: StorageMeter) -> Callable[..., Any]:
    def resize_(storage: torch.UntypedStorage, size: int) -> Any:
        result = resize(storage, size)
        meter.see(storage)
        return result

    return resize_

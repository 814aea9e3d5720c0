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
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lowpeak.algorithms import Algorithm
from lowpeak.parallel import (
    FakeStrategy,
    Strategy,
    fake_process_group,
    make_mesh,
    prepare_like_accelerate,
    wrap_shape_propagation,
)
from lowpeak.records import MicroBatch
from lowpeak.training import LogprobSettings, run_step, score

_BLOCK = 512  # bytes; CUDA's caching allocator rounds sizes up to it
_FUSED_ADAMW = partial(torch.optim.AdamW, fused=True)  # transformers' default


@dataclass(frozen=True)
class PhasePeaks:
    """Peak bytes of tensors on one rank, in each phase. All include the model, `loaded` before any phase."""

    loaded: int
    score: int
    forward: int
    backward: int
    optimizer: int

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
    max_grad_norm: float = 1.0,
) -> PhasePeaks:
    """Return the peak of each phase of a step on rank 0 of `world_size` (FSDP2 if above 1).

    `make_model` must return the model with its head installed; it is called under FakeTensorMode, where a model takes no
    memory. `micro_batches` are rank 0's, packed outside. `compute` is torch.bfloat16 for a run with `bf16=True`. A first step,
    which creates the optimizer's states, does not count.

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
            model = prepare_like_accelerate(make_model().train(), mesh, compute)
            optimizer = make_optimizer(model.parameters())
            loaded = meter.live_bytes
            strategy = cast(Strategy, FakeStrategy(meter.begin))

            def step() -> None:
                model.train()
                run_step(model, micro_batches, algorithm, core, strategy, algorithm.coefficients())
                meter.begin("optimizer")
                nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm)
                optimizer.step()
                optimizer.zero_grad()
                meter.begin(None)

            step()  # creates the optimizer's states
            meter.peaks.clear()
            meter.begin("score")
            score(model.eval(), micro_batches, core)
            step()
    return PhasePeaks(loaded, **meter.peaks)


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

    def see(self, storage: torch.UntypedStorage) -> None:
        """Count a storage at its current size, until it is freed."""
        key, size = storage._cdata, -(-storage.nbytes() // _BLOCK) * _BLOCK
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

"""A rehearsal: the phases of a step run with their own code on fake tensors, and say what each would take."""

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
from lowpeak.parallel import Pretended, Strategy, layouts_apart, make_mesh, prepare, pretended_ranks
from lowpeak.records import MicroBatch
from lowpeak.training import Core, run_step, score

_BLOCK = 512  # what CUDA's caching allocator rounds up to
_FUSED_ADAMW = partial(torch.optim.AdamW, fused=True)  # transformers' default


@dataclass(frozen=True)
class Rehearsed:
    """Bytes of tensors on one rank: `loaded` before any phase, then the most alive in each; all contain the model's."""

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
    core: Core,
    *,
    world_size: int = 1,
    compute: torch.dtype | None = None,
    make_optimizer: Callable[[Iterable[Tensor]], torch.optim.Optimizer] = _FUSED_ADAMW,
    max_grad_norm: float = 1.0,
) -> Rehearsed:
    """Return the peak of each phase of a step on rank 0 of `world_size` (FSDP2; one rank is one device), with no weight anywhere.

    A first step makes the optimizer's states; then `score`, `run_step`, clipping and the optimizer count. They run under
    FakeTensorMode on the model that `make_model` gives, with its head installed (and made inside, where it takes no memory).
    `micro_batches` are this rank's, packed outside; `compute` is torch.bfloat16 where a run has `bf16=True`.

    Counted: every storage that an operation gives out, in blocks of 512 bytes: weights, shards and what is gathered of them,
    activations, gradients, the optimizer's states. Not counted: what an operation takes inside itself, an allocator's
    fragments, the process with its libraries and communicators (a constant of a run), and a reference model. Kernels are those
    of CPU devices. Padded rows get a mask that transformers leaves out of a real forward, once it has read that nothing is
    packed: some MB a micro-batch more than real. Differences between phases agree with two real ranks (tests/distributed).

    Raises ArgumentError in a process that is connected to other ranks, and torch's DataDependentOutputException where a
    phase reads a tensor's value.
    """
    with pretended_ranks(world_size):
        mesh = make_mesh()
        with FakeTensorMode(allow_non_fake_inputs=True), StorageMeter() as meter, layouts_apart(meter.paused):
            model = prepare(make_model().train(), mesh, compute)
            optimizer = make_optimizer(model.parameters())
            loaded = meter.live_bytes
            strategy = cast(Strategy, Pretended(meter.begin))

            def step() -> None:
                model.train()
                run_step(model, micro_batches, algorithm, core, strategy, algorithm.coefficients())
                meter.begin("optimizer")
                nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm)
                optimizer.step()
                optimizer.zero_grad()
                meter.begin(None)

            step()  # makes the optimizer's states
            meter.peaks.clear()
            meter.begin("score")
            score(model.eval(), micro_batches, core)
            step()
    return Rehearsed(loaded, **meter.peaks)


class StorageMeter(TorchDispatchMode):
    """While it is entered: the bytes of all storages that operations gave out and that still live, and the most of each phase.

    A storage is counted once, whatever views it has, in blocks of 512 bytes, at the size that it has now: FSDP shrinks its
    buffers to nothing and grows them again, which no operation shows, so `UntypedStorage.resize_` is followed. Autograd adds
    the gradients that meet at a parameter in place, but not those of fake tensors: there the sum counts when what it
    replaces is gone. What an operation allocates and frees inside itself is not seen. Enter it inside of a FakeTensorMode.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live_bytes = 0
        self.peaks: dict[str, int] = {}
        self._peak = 0
        self._replaces = False
        self._paused = False
        self._phase: str | None = None
        self._sizes: dict[int, tuple[weakref.ref[Any], int]] = {}

    def begin(self, phase: str | None) -> None:
        """Count what is alive from here on as `phase`'s, until the next begins; None is nobody's."""
        self._settle()
        if self._phase is not None:
            self.peaks[self._phase] = max(self._peak, self.peaks.get(self._phase, 0))
        self._phase, self._peak = phase, self.live_bytes

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave the block's tensors, which nobody holds, uncounted."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def __enter__(self) -> StorageMeter:
        self._resize = torch.UntypedStorage.resize_
        torch.UntypedStorage.resize_ = _followed(self._resize, self)  # type: ignore[method-assign]
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # An operation on tensors made of others comes again for those.
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented
        if self._paused:
            return func(*args, **(kwargs or {}))
        self._settle()
        self._replaces = func is torch.ops.aten.add.Tensor and _autograd_adds()
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self.see(leaf.untyped_storage())
        return out

    def _settle(self) -> None:
        self._replaces = False
        self._peak = max(self._peak, self.live_bytes)

    def see(self, storage: torch.UntypedStorage) -> None:
        """Count a storage at the size that it has now, until it dies."""
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
        if not self._replaces:
            self._peak = max(self._peak, self.live_bytes)


def _autograd_adds() -> bool:
    """Whether a backward without a graph of its own is under way: not the forwards that checkpointing repeats in it."""
    return torch._C._current_graph_task_id() != -1 and not torch.is_grad_enabled()


def _followed(resize: Callable[..., Any], meter: StorageMeter) -> Callable[..., Any]:
    def resize_(storage: torch.UntypedStorage, size: int) -> Any:
        result = resize(storage, size)
        meter.see(storage)
        return result

    return resize_

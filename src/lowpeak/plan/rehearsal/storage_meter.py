"""A meter of tensors' memory by phase and kind, for fake tensors and real ones."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lowpeak.memory import Kind

CUDA_BLOCK = 512  # bytes; CUDA's caching allocator rounds sizes up to it
# Moments of a phase have most bytes beside these kinds. In a deeper model another of them may be the phase's peak.
_LEFT_OUT: tuple[tuple[Kind, ...], ...] = ((Kind.ACTIVATIONS, Kind.LOGITS), (Kind.GRADIENTS, Kind.KV_CACHE))


class StorageMeter(TorchDispatchMode):
    """A dispatch mode that counts living tensors' bytes, and each phase's peak by kind. Enter it inside FakeTensorMode.

    It counts the storages that operations return, each once however many views it has, in blocks of `block` bytes. Memory that
    an operation allocates and frees internally is not seen, but for the bytes that `scratch(operation, args, kwargs)` returns. A
    storage has the kind that is current when it is first seen (`counting_as`), until `retag` changes it: at the latest in
    `before_snapshot`, which is called when a peak is recorded.

        with FakeTensorMode(), StorageMeter() as meter:
            meter.begin("load", Kind.WEIGHTS)
            model = make_model()
            meter.begin("score")                                     # ends "load"
            with meter.counting_as(Kind.LOGITS):
                model(ids)
            meter.begin(None)                                        # ends "score": meter.peaks has both
    """

    def __init__(self, block: int = CUDA_BLOCK, scratch: Callable[[Any, Any, Any], int] = lambda *_: 0) -> None:
        super().__init__()
        self._scratch = scratch
        self.live_bytes = 0
        self.live: Counter[Kind] = Counter()
        self.peaks: dict[str, Counter[Kind]] = {}
        self.moments: dict[str, list[Counter[Kind]]] = {}
        self._moments = [(0, Counter[Kind]()) for _ in _LEFT_OUT]
        self.before_snapshot: Callable[[], object] = lambda: None
        self._block = block
        self._peak, self._at_peak = 0, Counter[Kind]()
        self._is_replacing = False  # the current operation's result takes the place of one of its inputs
        self._paused = False
        self._phase: str | None = None
        self._kind = Kind.ACTIVATIONS
        self._sizes: dict[int, tuple[weakref.ref[Any], int, Kind]] = {}
        self._ignored: dict[int, weakref.ref[Any]] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and torch's guard against it takes time at each operation

    def begin(self, phase: str | None, kind: Kind = Kind.ACTIVATIONS) -> None:
        """Begin `phase` and end the current one; None begins no phase. New storages count as `kind`."""
        self._update_peak()
        if self._phase is not None:
            before = self.peaks.get(self._phase)
            if before is None or self._peak > before.total():
                self.peaks[self._phase] = self._at_peak
            self.moments.setdefault(self._phase, []).extend([self._at_peak, *(kinds for _, kinds in self._moments)])
        self._phase, self._kind = phase, kind
        self._peak, self._at_peak = self.live_bytes, self.live.copy()
        self._moments = [(0, Counter[Kind]()) for _ in _LEFT_OUT]

    @contextmanager
    def counting_as(self, kind: Kind) -> Iterator[None]:
        """Count the storages that the block creates as `kind`."""
        before, self._kind = self._kind, kind
        try:
            yield
        finally:
            self._kind = before

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Do not count the tensors that the block creates."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def retag(self, tensor: Tensor, kind: Kind) -> None:
        """Count the storage of a tensor as `kind` from now on."""
        key = tensor.untyped_storage()._cdata
        watch, size, old = self._sizes.get(key, (None, 0, kind))
        if watch is not None and old != kind:
            self._sizes[key] = (watch, size, kind)
            self.live[old] -= size
            self.live[kind] += size

    def ignore(self, storage: torch.UntypedStorage) -> None:
        """Never count a storage: it is in other memory."""
        key = storage._cdata
        self._ignored[key] = weakref.ref(storage, lambda _: self._ignored.pop(key))

    def see(self, storage: torch.UntypedStorage) -> None:
        """Count a storage at its current size, until it is freed."""
        key, size = storage._cdata, -(-storage.nbytes() // self._block) * self._block
        if key in self._ignored:
            return
        known = self._sizes.get(key)
        if known is None:
            watch = weakref.ref(storage, lambda _: self._forget(key))
            self._sizes[key] = (watch, size, self._kind)
            self._add(size, self._kind)
        elif known[1] != size:
            self._sizes[key] = (known[0], size, known[2])
            self._add(size - known[1], known[2])

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
        kwargs = kwargs or {}
        if self._paused:
            return func(*args, **kwargs)
        self._update_peak()
        # Autograd accumulates real gradients in place, and fake ones out of place: count that sum as in place.
        self._is_replacing = func is torch.ops.aten.add.Tensor and _accumulates_gradients()
        out = func(*args, **kwargs)
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self.see(leaf.untyped_storage())
        scratch = self._scratch(func, args, kwargs)
        if scratch:
            self._note_peak(scratch)
        return out

    def _update_peak(self) -> None:
        self._is_replacing = False
        self._note_peak()

    def _note_peak(self, scratch: int = 0) -> None:
        if self.live_bytes + scratch > self._peak:
            self.before_snapshot()
            self._peak, self._at_peak = self.live_bytes + scratch, self.live + Counter({Kind.BUCKETS: scratch})
        for number, kinds in enumerate(_LEFT_OUT):
            rest = self.live_bytes + scratch - sum(self.live[kind] for kind in kinds)
            if rest > self._moments[number][0]:
                self.before_snapshot()
                self._moments[number] = rest, self.live + Counter({Kind.BUCKETS: scratch})

    def _forget(self, key: int) -> None:
        _, size, kind = self._sizes.pop(key)
        self._add(-size, kind)

    def _add(self, num_bytes: int, kind: Kind) -> None:
        self.live_bytes += num_bytes
        self.live[kind] += num_bytes
        if not self._is_replacing:
            self._note_peak()


@contextmanager
def run_methods_inside(kind: type, contexts: Mapping[str, Callable[[], AbstractContextManager[Any]]]) -> Iterator[None]:
    """Run some methods of a class, by name, inside a context each while the block runs."""
    methods = {name: getattr(kind, name) for name in contexts}

    def in_context(name: str) -> Callable[..., Any]:
        def run(self: Any, *args: Any, **kwargs: Any) -> Any:
            with contexts[name]():
                return methods[name](self, *args, **kwargs)

        return run

    for name in methods:
        setattr(kind, name, in_context(name))
    try:
        yield
    finally:
        for name, method in methods.items():
            setattr(kind, name, method)


def _accumulates_gradients() -> bool:
    """Return whether a backward runs: with gradients enabled it is a forward that checkpointing repeats inside it."""
    return torch._C._current_graph_task_id() != -1 and not torch.is_grad_enabled()


def _metered_resize(resize: Callable[..., Any], meter: StorageMeter) -> Callable[..., Any]:
    def resize_(storage: torch.UntypedStorage, size: int) -> Any:
        result = resize(storage, size)
        meter.see(storage)
        return result

    return resize_

"""A second device without hardware: `twin:0`, whose memory is host memory that only its own operations may touch.

`register()` adds the device to this process, for good: call it in a process that is started for it. A tensor on `twin` is a plain
torch.Tensor of the dispatch key PrivateUse1 with a real storage, so views, tied weights, deep copies, pickling, autograd and
storages that are resized work as on an accelerator. Every operation is run by the CPU's kernel on the same memory, hence with the
CPU's numbers to the last bit.

What an accelerator refuses is refused, with a RuntimeError: an operation on tensors of two devices, and one on a storage that was
shrunk. `ledger` counts what makes a host wait for an accelerator, and the bytes that cross. It has no kernels, streams, allocator
or collectives to test.
"""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

NAME = "twin"

aten = torch.ops.aten
_CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
_HOST = torch.device("cpu")
_SET = aten.set_.source_Storage_storage_offset
# Indices may be on the host, as on CUDA.
_INDEXING = (aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default)
# The host waits for the values of their inputs, to learn the size of the result or the result itself.
_READING = (
    aten._local_scalar_dense.default, aten.equal.default, aten.nonzero.default, aten.masked_select.default,
    aten._unique2.default, aten.unique_consecutive.default, aten.unique_dim.default, aten.bincount.default,
    aten.repeat_interleave.Tensor,
)  # fmt: skip
# They change sizes and storages and touch no memory.
_RELABELLING = (
    aten.as_strided.default, aten.view.default, aten._reshape_alias.default, aten.unfold.default,
    _SET, aten.set_.source_Storage, aten.set_.source_Tensor,
)  # fmt: skip
# Pointwise operations that torch does not tag so.
_UNTAGGED = (aten.floor_divide.default, aten.floor_divide.out, aten.floor_divide_.Tensor)


class Ledger:
    """What has crossed between host and device, by the place that `place()` names when it happens.

    `reads` counts operations for which the host waits for the device, and `waits` copies to the device that the host waits for,
    as it does for those from memory that is not pinned; `lines` and `waits` name the innermost line outside torch.
    `downloaded` and `uploaded` are bytes.
    """

    def __init__(self) -> None:
        self.place: Callable[[], str] = lambda: ""
        self.clear()

    def clear(self) -> None:
        self.reads: Counter[str] = Counter()
        self.lines: Counter[str] = Counter()
        self.waits: Counter[str] = Counter()
        self.downloaded: Counter[str] = Counter()
        self.uploaded: Counter[str] = Counter()

    def note_read(self) -> None:
        self.reads[self.place()] += 1
        self.lines[f"{self.place()}: {_caller()}"] += 1


class _Memory:
    """The host storage behind a storage on the device; the device's allocated bytes are those of all that live."""

    allocated = peak = 0

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self.storage, self.num_bytes = storage, storage.nbytes()
        _Memory.allocated += self.num_bytes
        _Memory.peak = max(_Memory.peak, _Memory.allocated)

    def __del__(self) -> None:
        _Memory.allocated -= self.num_bytes


def _nothing(*args: Any, **kwargs: Any) -> None:
    """What is asked of a device that computes at once, caches nothing and draws its random numbers on the CPU."""


class _Stream(torch.Stream):
    """A stream in which everything is in order already."""

    wait_stream = wait_event = record_event = synchronize = _nothing

    def __new__(cls, device: Any = None) -> _Stream:
        return super().__new__(cls, device=torch.device(NAME, 0))


class TwinModule:
    """What `torch.get_device_module("twin")` gives: the functions that device modules have in common."""

    Stream = _Stream
    current_stream = staticmethod(_Stream)
    stream = staticmethod(nullcontext)
    set_device = manual_seed_all = synchronize = empty_cache = staticmethod(_nothing)
    is_available = is_initialized = staticmethod(lambda: True)
    device_count = staticmethod(lambda: 1)
    current_device = staticmethod(lambda: 0)
    _is_in_bad_fork = staticmethod(lambda: False)
    get_amp_supported_dtype = staticmethod(lambda: [torch.bfloat16])
    memory_allocated = memory_reserved = staticmethod(lambda device=None: _Memory.allocated)
    max_memory_allocated = max_memory_reserved = staticmethod(lambda device=None: _Memory.peak)
    mem_get_info = staticmethod(lambda device=None: ((1 << 33) - _Memory.allocated, 1 << 33))

    @staticmethod
    def reset_peak_memory_stats(device: Any = None) -> None:
        _Memory.peak = _Memory.allocated


ledger = Ledger()
refused_dtypes: set[torch.dtype] = set()  # as Apple's GPUs refuse float64
_library: list[torch.library.Library] = []  # registrations end with the object


def register() -> torch.device:
    """Add the device to this process and return it; once."""
    _setup_privateuseone_for_python_backend(NAME, backend_module=TwinModule())
    _library.append(torch.library.Library("aten", "IMPL"))
    kernels = {op: partial(_run, op) for op in _with_kernels_of_the_cpu()}
    kernels |= {op: partial(op.redispatch, _CPU) for op in _RELABELLING}
    kernels |= {
        aten.copy_.default: _copy,
        aten._to_copy.default: _to_copy,
        aten.record_stream.default: lambda tensor, stream: None,
    }
    for op, kernel in kernels.items():
        _library[0].impl(op, kernel, "PrivateUse1")
    for key in ("AutogradPrivateUse1", "PrivateUse1"):  # in inference mode there is no autograd
        _library[0].impl("scaled_dot_product_attention", _attend, key)
    _give_storages_methods()
    _keep_parameters()
    _mark_pinned()
    return torch.device(NAME, 0)


def _with_kernels_of_the_cpu() -> Iterator[Any]:
    """Every operation that the CPU has a kernel for: what it composes of others, so does the device, of the same ones."""
    for full in torch._C._dispatch_get_all_op_names():
        space, _, name = full.partition("::")
        if space == "aten" and torch._C._dispatch_has_kernel_for_dispatch_key(full, "CPU"):
            packet, _, overload = name.partition(".")
            yield getattr(getattr(aten, packet), overload or "default")


# tensors and their memory


def _is_ours(tensor: Tensor) -> bool:
    return tensor.device.type == NAME


def _memory(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    memory = getattr(storage, "memory", None)
    return memory.storage if memory is not None else torch.UntypedStorage(0)


def _attach(storage: torch.UntypedStorage, host: torch.UntypedStorage) -> None:
    """Let `storage` of ours be the memory of `host`."""
    device = torch.device(NAME, 0)
    storage._swap_data_ptr_(torch._C._construct_storage_from_data_pointer(host.data_ptr(), device, host.nbytes()))
    storage.memory = _Memory(host)  # type: ignore[attr-defined]


def _host(tensor: Tensor) -> Tensor:
    """The same numbers as a tensor of the host's, on the same memory; RuntimeError if that has been given back."""
    host = _memory(tensor.untyped_storage())
    size, stride, offset = tensor.size(), tensor.stride(), tensor.storage_offset()
    last = offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    if tensor.numel() and (last + 1) * tensor.element_size() > host.nbytes():
        raise RuntimeError(f"a tensor of shape {tuple(size)} needs more than the {host.nbytes()} bytes of its storage")
    return torch.empty(0, dtype=tensor.dtype).set_(host, offset, size, stride)


def _ours(host: Tensor, known: dict[int, torch.UntypedStorage]) -> Tensor:
    """A tensor of ours on the memory of `host`: a view where its storage is one of `known`, by the host storage's address."""
    if host.dtype in refused_dtypes:
        raise TypeError(f"the device does not support {host.dtype}")
    made = torch._C._acc.create_empty_tensor((0,), host.dtype)
    memory = host.untyped_storage()
    storage = known.get(memory._cdata)
    if storage is None:
        storage = made.untyped_storage()
        _attach(storage, memory)
    _SET.redispatch(_CPU, made, storage, host.storage_offset(), host.size(), host.stride())
    return made


def _follow(tensor: Tensor, host: Tensor) -> None:
    """Give `tensor` the sizes that an operation gave `host`, its tensor on the host."""
    storage, memory = tensor.untyped_storage(), host.untyped_storage()
    if storage.nbytes() != memory.nbytes():
        _attach(storage, memory)
    if tensor.size() != host.size() or tensor.stride() != host.stride():
        _SET.redispatch(_CPU, tensor, storage, host.storage_offset(), host.size(), host.stride())


# operations


def _run(op: Any, *args: Any, **kwargs: Any) -> Any:
    """The CPU's kernel on the tensors' memory."""
    args = _numbers_as_tensors(op, args)
    tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    _check_devices(op, args, kwargs)
    if op in _READING or (
        op in _INDEXING and any(_is_ours(t) and t.dtype == torch.bool for t in args[1] if t is not None)
    ):
        ledger.note_read()
    hosts = {id(x): (x, _host(x)) for x in tensors if _is_ours(x)}
    back = {id(host): ours for ours, host in hosts.values()}
    known = {host.untyped_storage()._cdata: ours.untyped_storage() for ours, host in hosts.values()}

    def to_host(x: Any) -> Any:
        if isinstance(x, Tensor):
            return hosts[id(x)][1] if id(x) in hosts else x
        return _HOST if isinstance(x, torch.device) else x

    def to_ours(x: Any) -> Any:
        return (back[id(x)] if id(x) in back else _ours(x, known)) if isinstance(x, Tensor) else x

    answer = op(*tree_map(to_host, args), **tree_map(to_host, kwargs))
    for ours, host in hosts.values():
        _follow(ours, host)
    return tree_map(to_ours, answer)


def _numbers_as_tensors(op: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Numbers for which an operation takes tensors (`remainder(x, 13)`), which arrive as numbers: in the result's dtype."""
    places = [i for i in _places_of_tensors(op) if i < len(args) and isinstance(args[i], int | float)]
    if not places:
        return args
    first = next(x for x in args if isinstance(x, Tensor))
    return tuple(torch.tensor(x, dtype=torch.result_type(first, x)) if i in places else x for i, x in enumerate(args))


@cache
def _places_of_tensors(op: Any) -> list[int]:
    return [i for i, argument in enumerate(op._schema.arguments) if str(argument.type) == "Tensor"]


def _check_devices(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """RuntimeError if a tensor is on the host: any but an index, or a number that a pointwise operation reads."""
    takes_numbers = torch.Tag.pointwise in op.tags or op in _INDEXING or op in _UNTAGGED
    named = dict(zip((argument.name for argument in op._schema.arguments), args, strict=False)) | kwargs
    if op in _INDEXING:
        del named["indices"]
    for name, value in named.items():
        whole = not takes_numbers or name in _written(op)
        for tensor in (x for x in tree_leaves(value) if isinstance(x, Tensor)):
            if not _is_ours(tensor) and (tensor.dim() or whole):
                raise RuntimeError(
                    f"Expected all tensors to be on the same device, but {op} got {name} of shape {tuple(tensor.shape)} on "
                    f"{tensor.device} beside others on {NAME}"
                )


@cache
def _written(op: Any) -> set[str]:
    return {argument.name for argument in op._schema.arguments if argument.alias_info and argument.alias_info.is_write}


def _copy(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    """Copy between any two devices, and count what crosses."""
    here, there = _is_ours(target), _is_ours(source)
    if here and not there:
        ledger.uploaded[ledger.place()] += source.numel() * source.element_size()
        if not non_blocking or not _is_pinned(source):
            ledger.waits[f"{ledger.place()}: {_caller()}"] += 1
    if there and not here:
        ledger.downloaded[ledger.place()] += source.numel() * source.element_size()
        if not non_blocking:
            ledger.note_read()
    (_host(target) if here else target).copy_(_host(source) if there else source)
    return target


def _to_copy(
    tensor: Tensor, *, device: Any = None, non_blocking: bool = False, pin_memory: Any = None, **changes: Any
) -> Tensor:
    """A copy on the device that is asked for, by default the tensor's."""
    ours = _is_ours(tensor)
    made = aten._to_copy.default(_host(tensor) if ours else tensor, **changes)
    if _is_pinned(tensor):
        _pinned(made)
    if not (ours if device is None else device.type == NAME):
        return _copy(torch.empty_like(made), _ours(made, {}), non_blocking)
    return _ours(made, {}) if ours else _copy(_ours(torch.empty_like(made), {}), made, non_blocking)


def _attend(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """The kernel that the CPU would take."""
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(~attn_mask, -float("inf"))
    flash = aten._scaled_dot_product_flash_attention_for_cpu
    return flash(query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale)[0]


def _give_storages_methods() -> None:
    """Resizing, which PrivateUse1 leaves to C++, and allocating."""
    storages = torch.UntypedStorage
    resize, resizable, clone, to = storages.resize_, storages.resizable, storages.clone, storages.to

    def resize_ours(self: torch.UntypedStorage, num_bytes: int) -> torch.UntypedStorage:
        if self.device.type != NAME:
            return resize(self, num_bytes)
        host = torch.UntypedStorage(num_bytes)
        if kept := min(num_bytes, self.nbytes()):
            _bytes(host)[:kept] = _bytes(_memory(self))[:kept]
        _attach(self, host)
        return self

    def clone_ours(self: torch.UntypedStorage) -> torch.UntypedStorage:
        if self.device.type != NAME:
            return clone(self)
        return _ours(_bytes(_memory(self)).clone(), {}).untyped_storage()

    def to_ours(self: torch.UntypedStorage, *, device: Any, non_blocking: bool = False) -> torch.UntypedStorage:
        if torch.device(device).type != NAME or self.device.type != "cpu":
            return to(self, device=device, non_blocking=non_blocking)
        return _bytes(self).to(device).untyped_storage()

    storages.resize_, storages.clone, storages.to = resize_ours, clone_ours, to_ours  # type: ignore[method-assign]
    storages.resizable = lambda self: self.device.type == NAME or resizable(self)  # type: ignore[method-assign]


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(storage)


def _keep_parameters() -> None:
    """Let a parameter that moves stay the object that it is, as between the CPU and CUDA: tied ones stay tied."""
    plain = torch.nn.Module._apply

    def apply(self: torch.nn.Module, *args: Any, **kwargs: Any) -> torch.nn.Module:
        before = torch.__future__.get_swap_module_params_on_conversion()
        torch.__future__.set_swap_module_params_on_conversion(True)
        try:
            return plain(self, *args, **kwargs)
        finally:
            torch.__future__.set_swap_module_params_on_conversion(before)

    torch.nn.Module._apply = apply  # type: ignore[method-assign]


def _mark_pinned() -> None:
    """Let memory that is asked to be pinned be the host's as it is, and known to be pinned."""
    plain = torch.empty

    def empty(*args: Any, pin_memory: bool = False, **kwargs: Any) -> Tensor:
        made = plain(*args, **kwargs)
        return _pinned(made) if pin_memory else made

    torch.empty = empty  # type: ignore[assignment]
    torch.Tensor.pin_memory = lambda self: _pinned(self.clone())  # type: ignore[assignment, method-assign]


def _pinned(tensor: Tensor) -> Tensor:
    tensor.untyped_storage().is_marked_pinned = True  # type: ignore[attr-defined]
    return tensor


def _is_pinned(tensor: Tensor) -> bool:
    return hasattr(tensor.untyped_storage(), "is_marked_pinned")


def _caller() -> str:
    """The innermost line outside torch and this file."""
    for frame in reversed(traceback.extract_stack()):
        if "/torch/" not in frame.filename and frame.filename != __file__:
            return f"{frame.filename.split('/src/')[-1].split('/site-packages/')[-1]}:{frame.lineno}"
    return "unknown"

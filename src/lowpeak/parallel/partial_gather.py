"""A sharded model that runs without gradients: as many layers whole as a budget allows, the others one at a time.

The parameters of a kept layer are gathered once, before the first forward. The other layers share the buffers of one,
which each fills as it is called. Embedding and head stay sharded (`vocabulary.py`) until the budget holds all layers
and them. The engine that trains is not asked: its hooks are off, and its parameters lie where they were.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lowpeak.memory import is_exhaustion
from lowpeak.models import own_modules, transformers_model
from lowpeak.parallel.flat_shard import FlatShard, Sharded
from lowpeak.parallel.lockstep import Match, Peers, matched, replace_forward
from lowpeak.parallel.sharded_vocab import ShardedRows, is_row_aligned
from lowpeak.ranks import Ranks

logger = logging.getLogger(__name__)

_ENGINES = ("torch.distributed.", "deepspeed.")
_HOOKS = ("_forward_pre_hooks", "_forward_hooks")  # torch's own registries: dicts that handles refer to

Buffers = dict[int, Tensor]  # by the parameter's id
PeersOf = Callable[[nn.Module], Peers | None]


@dataclass(frozen=True)
class Place:
    """Where a sharded parameter is: `module._parameters[name]`."""

    module: nn.Module
    name: str
    parameter: nn.Parameter
    shard: FlatShard


@dataclass(frozen=True)
class Parts:
    """The sharded parameters of a model: of each layer, of embedding and head, and the small rest."""

    layers: list[tuple[nn.Module, list[Place]]]
    vocabulary: list[Place]
    rest: list[Place]

    @property
    def is_cut(self) -> bool:
        return bool(self.vocabulary or self.rest or any(places for _, places in self.layers))


@dataclass(frozen=True)
class Kept:
    """What a budget keeps whole: so many layers, and embedding and head or not."""

    num_layers: int
    vocabulary: bool


class Gatherer:
    """Makes cut models ready to run; says in the log how many layers stay gathered, and what a forward took."""

    def __init__(
        self,
        ranks: Ranks,
        device: torch.device,
        allocate: Callable[..., Tensor] = torch.empty,
        peers: PeersOf = lambda model: None,
    ) -> None:
        self._ranks = ranks
        self._allocate = allocate
        self._peers = peers
        self._device = device
        self._said: Kept | None = None

    @contextmanager
    def gathered(
        self, model: nn.Module, sharded: Sharded, budget: int | None, whole_head: bool = False
    ) -> Iterator[nn.Module]:
        """`model` ready to run, with what `budget` bytes allow gathered (None: all); every rank enters and leaves it.

        `whole_head` gathers the head in any case: whoever asks it for log-probs needs its weight, not its product.
        Restores hooks, parameters, forwards, modes and checkpointing however it is left. Where not all is gathered, forwards
        hold collectives, and are matched among ranks; see `Match`.
        """
        parts, peers = find_parts(model, sharded), self._peers(transformers_model(model))
        with ExitStack() as stack:
            stack.enter_context(_generating(model))
            if parts.is_cut or peers is not None:
                stack.enter_context(_without_sharding_hooks(model))
                kept, buffers = _allocate(parts, _kept(parts, budget), self._ranks, self._allocate)
                whole = kept == Kept(len(parts.layers), True)
                match = Match(self._device, peers.group if whole and peers else None)
                _fill_all(stack, model, parts, kept, buffers, whole_head, match, peers or Peers())
                if not whole:
                    stack.enter_context(self._told(kept, parts, match))
                if peers is not None or not whole:
                    stack.enter_context(matched(transformers_model(model), match))
            yield model

    @contextmanager
    def _told(self, kept: Kept, parts: Parts, match: Match) -> Iterator[None]:
        start = time.perf_counter()
        yield
        if kept != self._said and match.num_forwards:
            self._said = kept
            streamed = sum(_nbytes(places) for _, places in parts.layers[kept.num_layers :])
            logger.info(
                "%d of %d layers stayed gathered: a forward took %.1f ms and gathered %.1f MB.",
                kept.num_layers,
                len(parts.layers),
                1e3 * (time.perf_counter() - start) / match.num_forwards,
                streamed / 1e6,
            )


def _fill_all(
    stack: ExitStack,
    model: nn.Module,
    parts: Parts,
    kept: Kept,
    buffers: list[Buffers],
    whole_head: bool,
    match: Match,
    peers: Peers,
) -> None:
    """Gather what is kept, and let the rest be gathered or stay cut as it is used: the steps of a forward, in their order."""
    _fill(stack, parts.rest, _buffers(parts.rest))
    for (_, places), own in zip(parts.layers[: kept.num_layers], buffers, strict=False):
        _fill(stack, places, own)
    head: Any = transformers_model(model).get_output_embeddings()
    heads = {id(place.parameter) for place in parts.vocabulary if place.module is head}
    whole = [p for p in parts.vocabulary if kept.vocabulary or (whole_head and id(p.parameter) in heads)]
    _fill(stack, whole, buffers[-1] if kept.vocabulary else _buffers(whole))
    cut = [
        (place, ShardedRows(place.shard, bool(getattr(place.module, "computes_in_fp32", False))))
        for place in parts.vocabulary
        if place not in whole
    ]
    for place, rows in cut:
        if place.module is not head:
            replace_forward(stack, place.module, match.step(rows.look_up, rows.idle_look_up))
    peers.meet(stack, match, transformers_model(model).get_input_embeddings())
    for layer, _ in parts.layers[: kept.num_layers]:
        peers.meet(stack, match, layer)
    _stream(stack, parts.layers[kept.num_layers :], match, peers)
    peers.meet(stack, match, head, is_head=True)
    bias: Any = getattr(head, "bias", None)
    for place, rows in cut:
        if place.module is head:
            multiply = partial(rows.multiply, bias=bias)
            replace_forward(stack, head, match.step(multiply, rows.idle_multiply))


def find_parts(model: nn.Module, sharded: Sharded) -> Parts:
    """Return a model's sharded parameters by what they are part of."""
    layers = [(layer, _places(layer, sharded)) for layer in layers_of(model)]
    in_layers = {id(place.parameter) for _, places in layers for place in places}
    others = [place for place in _places(model, sharded) if id(place.parameter) not in in_layers]
    inner = transformers_model(model)
    tables = {id(module) for module in (inner.get_input_embeddings(), inner.get_output_embeddings())}
    vocabulary = [p for p in others if id(p.module) in tables and _is_plain_table(p) and is_row_aligned(p.shard)]
    rest = [place for place in others if place not in vocabulary]
    return Parts(layers, vocabulary, rest)


def _is_plain_table(place: Place) -> bool:
    """Return whether the module does nothing with its weight but look rows up, or multiply (some scale what they look up).

    Not where tensor parallelism has cut it too: then transformers' own forward does more.
    """
    plain = (nn.Embedding.forward, nn.Linear.forward)
    return place.name == "weight" and type(place.module).forward in plain and place.shard.seen is None


def layers_of(model: nn.Module) -> list[nn.Module]:
    """Return the decoder layers: modules of the classes that transformers says not to split, else of the longest list."""
    inner = transformers_model(model)
    names = set(getattr(inner, "_no_split_modules", None) or ())
    modules = own_modules(inner)
    found = [module for module in modules if type(module).__name__.removeprefix("FSDP") in names]
    if found:
        return found
    lists = [module for module in modules if isinstance(module, nn.ModuleList)]
    return list(max(lists, key=len, default=[]))


def _places(module: nn.Module, sharded: Sharded) -> list[Place]:
    found = []
    for part in own_modules(module):
        for name, parameter in part._parameters.items():
            shard = None if parameter is None else sharded(parameter)
            if parameter is not None and shard is not None:
                found.append(Place(part, name, parameter, shard))
    return found


def _kept(parts: Parts, budget: int | None) -> Kept:
    """Return what fits into the budget beside the buffers of one layer and the small rest, which are always there."""
    if budget is None:
        return Kept(len(parts.layers), True)
    sizes = [_nbytes(places) for _, places in parts.layers]
    left = budget - max(sizes, default=0) - _nbytes(parts.rest)
    if left + max(sizes, default=0) >= sum(sizes) + _nbytes(parts.vocabulary):
        return Kept(len(sizes), True)
    number = 0
    while number < len(sizes) and left >= sizes[number]:
        left -= sizes[number]
        number += 1
    return Kept(number, False)


def _nbytes(places: Sequence[Place]) -> int:
    return sum({id(place.parameter): place.shard.nbytes for place in places}.values())


def _buffers(places: Sequence[Place], allocate: Callable[..., Tensor] = torch.empty) -> Buffers:
    """Return room for each parameter whole; a tied one has it once."""
    return {
        id(place.parameter): allocate(place.shard.padded, dtype=place.shard.dtype, device=place.shard.device)
        for place in places
    }


def _allocate(parts: Parts, kept: Kept, ranks: Ranks, allocate: Callable[..., Tensor]) -> tuple[Kept, list[Buffers]]:
    """Return buffers of what stays, of as much as there is room for on every rank: half as many layers after each failure."""
    while True:
        buffers: list[Buffers] = []
        failed: Exception | None = None
        try:
            for _, places in parts.layers[: kept.num_layers]:
                buffers.append(_buffers(places, allocate))
            if kept.vocabulary:
                buffers.append(_buffers(parts.vocabulary, allocate))
        except (MemoryError, RuntimeError) as error:
            if not is_exhaustion(error):
                raise
            failed = error
        if not ranks.max([float(failed is not None)])[0]:
            return kept, buffers
        buffers.clear()
        if kept == Kept(0, False):
            raise failed or MemoryError("another rank has no room for a layer's buffers")
        kept = Kept(kept.num_layers // 2, False)
        logger.warning(
            "Out of memory while gathering layers for generation: %d of them stay gathered.", kept.num_layers
        )


def _fill(stack: ExitStack, places: Sequence[Place], buffers: Buffers) -> None:
    _gather(places, buffers)
    for place in places:
        _put(stack, place, nn.Parameter(place.shard.view(buffers[id(place.parameter)]), requires_grad=False))


def _gather(places: Sequence[Place], buffers: Buffers) -> None:
    shards = {id(place.parameter): place.shard for place in places}
    for work in [shard.gather(buffers[key]) for key, shard in shards.items()]:
        work.wait()


def _put(stack: ExitStack, place: Place, parameter: nn.Parameter) -> None:
    place.module._parameters[place.name] = parameter
    stack.callback(place.module._parameters.__setitem__, place.name, place.parameter)


@contextmanager
def _generating(model: nn.Module) -> Iterator[None]:
    """Have eval mode and no activation checkpointing; each module's own mode and flag come back however the block is left."""
    before = [(module, module.training, getattr(module, "gradient_checkpointing", None)) for module in model.modules()]
    try:
        model.eval()
        for module, _, checkpointing in before:
            if checkpointing:
                module.gradient_checkpointing = False  # type: ignore[assignment]
        yield
    finally:
        for module, training, checkpointing in before:
            module.training = training
            if checkpointing:
                module.gradient_checkpointing = checkpointing


@contextmanager
def _without_sharding_hooks(model: nn.Module) -> Iterator[None]:
    """Forwards in the block gather nothing by themselves; the hooks come back in their order however it is left."""
    registries = [getattr(module, kind) for module in model.modules() for kind in _HOOKS]
    before = [(registry, list(registry.items())) for registry in registries if registry]
    try:
        for registry, hooks in before:
            for key, hook in hooks:
                if _is_of_sharding(hook):
                    del registry[key]
        yield
    finally:
        for registry, hooks in before:
            added = [(key, hook) for key, hook in registry.items() if key not in dict(hooks)]
            registry.clear()
            registry.update(hooks + added)


def _is_of_sharding(hook: Callable[..., Any]) -> bool:
    while hasattr(hook, "func"):  # functools.partial
        hook = hook.func
    return str(getattr(hook, "__module__", "")).startswith(_ENGINES)


def _stream(stack: ExitStack, layers: Sequence[tuple[nn.Module, list[Place]]], match: Match, peers: Peers) -> None:
    """Let layers share buffers, which each fills when it is called."""
    pool: dict[tuple[Any, ...], Tensor] = {}
    for layer, places in layers:
        buffers: Buffers = {}
        for index, place in enumerate(places):
            shard = place.shard
            key = (index, shard.padded, shard.dtype)
            if key not in pool:
                pool[key] = torch.empty(shard.padded, dtype=shard.dtype, device=shard.device)
            buffers[id(place.parameter)] = pool[key]
            _put(stack, place, nn.Parameter(shard.view(pool[key]), requires_grad=False))
        gather = partial(_gather, places, buffers)
        replace_forward(stack, layer, _after(match.step(gather, gather), layer.forward))
        peers.meet(stack, match, layer)


def _after(first: Callable[[], Any], forward: Callable[..., Any]) -> Callable[..., Any]:
    def both(*args: Any, **kwargs: Any) -> Any:
        first()
        return forward(*args, **kwargs)

    return both

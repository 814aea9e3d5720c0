"""Partial gathering: a sharded model runs without gradients, with as many layers gathered as a budget allows.

The parameters of a kept layer are gathered once, before the first forward. The other layers share the buffers of one layer, and
each gathers into them when it is called. Embedding and head stay sharded (`sharded_vocab.py`) unless the budget covers all layers
and both. The training engine (FSDP2, DeepSpeed) takes no part: its hooks are removed meanwhile, its shards only read.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lowpeak.heads import modules_without_critic, transformers_model
from lowpeak.memory import is_out_of_memory
from lowpeak.parallel.lockstep import Lockstep, TPCollectives, lockstep_forwards, override_forward
from lowpeak.parallel.parameters import FlatShard, ShardOf
from lowpeak.parallel.sharded_vocab import ShardedRows, is_row_aligned
from lowpeak.ranks import Ranks

logger = logging.getLogger(__name__)

_ENGINES = ("torch.distributed.", "deepspeed.")
_HOOKS = (
    "_forward_pre_hooks",
    "_forward_hooks",
)  # torch's registries, edited in place since the hooks' handles refer to them

Buffers = dict[int, Tensor]  # by the parameter's id
CollectivesOf = Callable[[nn.Module], TPCollectives | None]


@dataclass(frozen=True)
class ShardedParam:
    """A sharded parameter and its slot in the model, `module._parameters[name]`."""

    module: nn.Module
    name: str
    parameter: nn.Parameter
    shard: FlatShard


@dataclass(frozen=True)
class ShardedParts:
    """The sharded parameters of a model: of each layer, of embedding and head, and all others."""

    layers: list[tuple[nn.Module, list[ShardedParam]]]
    vocabulary: list[ShardedParam]
    rest: list[ShardedParam]

    @property
    def is_sharded(self) -> bool:
        return bool(self.vocabulary or self.rest or any(params for _, params in self.layers))


@dataclass(frozen=True)
class GatherPlan:
    """The number of layers to keep gathered, and whether to gather embedding and head too."""

    num_layers: int
    vocabulary: bool


class Gatherer:
    """A gatherer of sharded models for forwards; logs how many layers stay gathered, and the time of a forward."""

    def __init__(
        self,
        ranks: Ranks,
        device: torch.device,
        allocate: Callable[..., Tensor] = torch.empty,
        tp_collectives: CollectivesOf = lambda model: None,
    ) -> None:
        self._ranks = ranks
        self._allocate = allocate
        self._tp_collectives = tp_collectives
        self._device = device
        self._logged_plan: GatherPlan | None = None

    @contextmanager
    def gathered_model(
        self, model: nn.Module, shard_of: ShardOf, budget: int | None, gather_head: bool = False
    ) -> Iterator[nn.Module]:
        """Gather as many layers as `budget` bytes allow (None: all), and yield `model` ready for forwards.

        All ranks enter and leave together.
        `gather_head` gathers the head in any case: computing log-probs reads its weight, not only its product. Leaving the
        context restores hooks, parameters, forwards, modes and checkpointing, also after an error. Unless all is gathered,
        forwards contain collectives and run in lockstep; see `Lockstep`.
        """
        parts, tp_collectives = (
            find_sharded_parameters(model, shard_of),
            self._tp_collectives(transformers_model(model)),
        )
        with ExitStack() as stack:
            stack.enter_context(_eval_mode(model))
            if parts.is_sharded or tp_collectives is not None:
                stack.enter_context(_without_sharding_hooks(model))
                plan, buffers = _allocate(parts, _plan(parts, budget), self._ranks, self._allocate)
                all_gathered = plan == GatherPlan(len(parts.layers), True)
                lockstep = Lockstep(self._device, tp_collectives.group if all_gathered and tp_collectives else None)
                _install(stack, model, parts, plan, buffers, gather_head, lockstep, tp_collectives or TPCollectives())
                if not all_gathered:
                    stack.enter_context(self._log_timing(plan, parts, lockstep))
                if tp_collectives is not None or not all_gathered:
                    stack.enter_context(lockstep_forwards(transformers_model(model), lockstep))
            yield model

    @contextmanager
    def _log_timing(self, plan: GatherPlan, parts: ShardedParts, lockstep: Lockstep) -> Iterator[None]:
        start = time.perf_counter()
        yield
        if plan != self._logged_plan and lockstep.num_forwards:
            self._logged_plan = plan
            num_bytes = sum(_nbytes(params) for _, params in parts.layers[plan.num_layers :])
            logger.info(
                "%d of %d layers stayed gathered: a forward took %.1f ms and gathered %.1f MB.",
                plan.num_layers,
                len(parts.layers),
                1e3 * (time.perf_counter() - start) / lockstep.num_forwards,
                num_bytes / 1e6,
            )


def _install(
    stack: ExitStack,
    model: nn.Module,
    parts: ShardedParts,
    plan: GatherPlan,
    buffers: list[Buffers],
    gather_head: bool,
    lockstep: Lockstep,
    tp_collectives: TPCollectives,
) -> None:
    """Gather the layers that are kept; for the others, register a forward's collectives in the order in which they run."""
    _keep_gathered(stack, parts.rest, _buffers(parts.rest))
    for (_, params), layer_buffers in zip(parts.layers[: plan.num_layers], buffers, strict=False):
        _keep_gathered(stack, params, layer_buffers)
    head: Any = transformers_model(model).get_output_embeddings()
    if plan.vocabulary:
        gathered, table_buffers = parts.vocabulary, buffers[-1]
    else:
        gathered = _tables_of(head, parts.vocabulary) if gather_head else []
        table_buffers = _buffers(gathered)
    _keep_gathered(stack, gathered, table_buffers)
    row_sharded = [
        (param, ShardedRows(param.shard, bool(getattr(param.module, "computes_in_fp32", False))))
        for param in parts.vocabulary
        if param not in gathered
    ]
    for param, rows in row_sharded:
        if param.module is not head:
            override_forward(stack, param.module, lockstep.register(rows.look_up, rows.dummy_look_up))
    tp_collectives.register(stack, lockstep, transformers_model(model).get_input_embeddings())
    for layer, _ in parts.layers[: plan.num_layers]:
        tp_collectives.register(stack, lockstep, layer)
    _gather_on_call(stack, parts.layers[plan.num_layers :], lockstep, tp_collectives)
    tp_collectives.register(stack, lockstep, head, is_head=True)
    bias: Any = getattr(head, "bias", None)
    for param, rows in row_sharded:
        if param.module is head:
            multiply = partial(rows.multiply, bias=bias)
            override_forward(stack, head, lockstep.register(multiply, rows.dummy_multiply))


def _tables_of(head: nn.Module, vocabulary: list[ShardedParam]) -> list[ShardedParam]:
    """Return the head's tables, and embeddings that are tied to them."""
    heads = {id(param.parameter) for param in vocabulary if param.module is head}
    return [param for param in vocabulary if id(param.parameter) in heads]


def find_sharded_parameters(model: nn.Module, shard_of: ShardOf) -> ShardedParts:
    """Return a model's sharded parameters, grouped by layers, vocabulary and rest."""
    layers = [(layer, _sharded_params(layer, shard_of)) for layer in decoder_layers(model)]
    # Layers for images do not run, and stay sharded.
    in_layers = {id(parameter) for block in block_modules(model) for parameter in block.parameters()}
    others = [param for param in _sharded_params(model, shard_of) if id(param.parameter) not in in_layers]
    inner = transformers_model(model)
    tables = {id(module) for module in (inner.get_input_embeddings(), inner.get_output_embeddings())}
    vocabulary = [p for p in others if id(p.module) in tables and _is_plain_table(p) and is_row_aligned(p.shard)]
    rest = [param for param in others if param not in vocabulary]
    return ShardedParts(layers, vocabulary, rest)


def _is_plain_table(param: ShardedParam) -> bool:
    """Return whether the module's forward is a plain lookup or product; some embeddings scale their result."""
    # Under tensor parallelism transformers' forward does more, and the parameter is a DTensor (`to_param`).
    plain = (nn.Embedding.forward, nn.Linear.forward)
    return param.name == "weight" and type(param.module).forward in plain and param.shard.to_param is None


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """Return the layers of the text's decoder."""
    layers, get_decoder = block_modules(model), getattr(transformers_model(model), "get_decoder", None)
    in_text = {id(module) for module in get_decoder().modules()} if get_decoder is not None else set()
    return [layer for layer in layers if id(layer) in in_text] or layers


def block_modules(model: nn.Module) -> list[nn.Module]:
    """Return the layers of the model, those for images too; of a critic none."""
    inner = transformers_model(model)
    return _blocks(inner, modules_without_critic(inner))


def unit_classes(model: nn.Module) -> list[str]:
    """Return the class names of the layers of a model and its critic: `_no_split_modules` may name classes that it lacks."""
    inner = transformers_model(model)
    return sorted({type(layer).__name__ for layer in _blocks(inner, inner.modules())})


def _blocks(inner: Any, modules: Iterable[nn.Module]) -> list[nn.Module]:
    """Return the modules of the classes in `_no_split_modules`, else those of the longest ModuleList."""
    names, modules = set(getattr(inner, "_no_split_modules", None) or ()), list(modules)
    layers = [module for module in modules if type(module).__name__.removeprefix("FSDP") in names]
    if layers:
        # Of nested ones the inner: several layers may share what is around them (Zamba2's attention).
        ids = {id(layer) for layer in layers}
        return [layer for layer in layers if ids.isdisjoint(map(id, list(layer.modules())[1:]))]
    lists = [module for module in modules if isinstance(module, nn.ModuleList)]
    return list(max(lists, key=len, default=[]))


def _sharded_params(module: nn.Module, shard_of: ShardOf) -> list[ShardedParam]:
    params = []
    for part in modules_without_critic(module):
        for name, parameter in part._parameters.items():
            shard = None if parameter is None else shard_of(parameter)
            if parameter is not None and shard is not None:
                params.append(ShardedParam(part, name, parameter, shard))
    return params


def _plan(parts: ShardedParts, budget: int | None) -> GatherPlan:
    """Return the layers that fit into the budget; buffers for one layer and the rest are always allocated."""
    if budget is None:
        return GatherPlan(len(parts.layers), True)
    sizes = [_nbytes(params) for _, params in parts.layers]
    remaining = budget - max(sizes, default=0) - _nbytes(parts.rest)
    if remaining + max(sizes, default=0) >= sum(sizes) + _nbytes(parts.vocabulary):
        return GatherPlan(len(sizes), True)
    number = 0
    while number < len(sizes) and remaining >= sizes[number]:
        remaining -= sizes[number]
        number += 1
    return GatherPlan(number, False)


def _nbytes(params: Sequence[ShardedParam]) -> int:
    return sum({id(param.parameter): param.shard.nbytes for param in params}.values())


def _buffers(params: Sequence[ShardedParam], allocate: Callable[..., Tensor] = torch.empty) -> Buffers:
    """Allocate a buffer for each gathered parameter; a tied parameter has one."""
    return {
        id(param.parameter): allocate(param.shard.padded_numel, dtype=param.shard.dtype, device=param.shard.device)
        for param in params
    }


def _allocate(
    parts: ShardedParts, plan: GatherPlan, ranks: Ranks, allocate: Callable[..., Tensor]
) -> tuple[GatherPlan, list[Buffers]]:
    """Allocate the plan's buffers on every rank; halve the number of layers each time memory runs out on any rank."""
    while True:
        buffers: list[Buffers] = []
        failed: Exception | None = None
        try:
            for _, params in parts.layers[: plan.num_layers]:
                buffers.append(_buffers(params, allocate))
            if plan.vocabulary:
                buffers.append(_buffers(parts.vocabulary, allocate))
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            failed = error
        if not ranks.max([float(failed is not None)])[0]:
            return plan, buffers
        buffers.clear()
        if plan == GatherPlan(0, False):
            raise failed or MemoryError("another rank has no memory for one layer's buffers")
        plan = GatherPlan(plan.num_layers // 2, False)
        logger.warning(
            "Out of memory while gathering layers for generation: %d of them stay gathered.", plan.num_layers
        )


def _keep_gathered(stack: ExitStack, params: Sequence[ShardedParam], buffers: Buffers) -> None:
    _gather(params, buffers)
    for param in params:
        _set_parameter(stack, param, nn.Parameter(param.shard.view(buffers[id(param.parameter)]), requires_grad=False))


def _gather(params: Sequence[ShardedParam], buffers: Buffers) -> None:
    shards = {id(param.parameter): param.shard for param in params}
    for work in [shard.start_gather(buffers[key]) for key, shard in shards.items()]:
        work.wait()


def _set_parameter(stack: ExitStack, param: ShardedParam, parameter: nn.Parameter) -> None:
    param.module._parameters[param.name] = parameter
    stack.callback(param.module._parameters.__setitem__, param.name, param.parameter)


@contextmanager
def _eval_mode(model: nn.Module) -> Iterator[None]:
    """Set eval mode and disable activation checkpointing in the block; restore each module's mode and flag after it."""
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
    """Remove the training engine's hooks for the block, so that forwards gather nothing; restore them in their order."""
    registries = [getattr(module, kind) for module in model.modules() for kind in _HOOKS]
    before = [(registry, list(registry.items())) for registry in registries if registry]
    try:
        for registry, hooks in before:
            for key, hook in hooks:
                if _is_sharding_hook(hook):
                    del registry[key]
        yield
    finally:
        for registry, hooks in before:
            added = [(key, hook) for key, hook in registry.items() if key not in dict(hooks)]
            registry.clear()
            registry.update(hooks + added)


def _is_sharding_hook(hook: Callable[..., Any]) -> bool:
    while hasattr(hook, "func"):  # functools.partial
        hook = hook.func
    return str(getattr(hook, "__module__", "")).startswith(_ENGINES)


def _gather_on_call(
    stack: ExitStack,
    layers: Sequence[tuple[nn.Module, list[ShardedParam]]],
    lockstep: Lockstep,
    tp_collectives: TPCollectives,
) -> None:
    """Let layers share buffers, into which each layer gathers when it is called."""
    pool: dict[tuple[Any, ...], Tensor] = {}
    for layer, params in layers:
        buffers: Buffers = {}
        for index, param in enumerate(params):
            shard = param.shard
            key = (index, shard.padded_numel, shard.dtype)
            if key not in pool:
                pool[key] = torch.empty(shard.padded_numel, dtype=shard.dtype, device=shard.device)
            buffers[id(param.parameter)] = pool[key]
            _set_parameter(stack, param, nn.Parameter(shard.view(pool[key]), requires_grad=False))
        gather = partial(_gather, params, buffers)
        override_forward(stack, layer, _call_first(lockstep.register(gather, gather), layer.forward))
        tp_collectives.register(stack, lockstep, layer)


def _call_first(first: Callable[[], Any], forward: Callable[..., Any]) -> Callable[..., Any]:
    def both(*args: Any, **kwargs: Any) -> Any:
        first()
        return forward(*args, **kwargs)

    return both

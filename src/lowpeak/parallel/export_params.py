"""What leaves a model, and under which names: whole weights as their checkpoint names them, or a LoRA adapter alone.

An adapter on its way out is merged by the owner of the rows: it adds `scaling * B[a:b] @ A` to them before it sends them. A and
B are gathered for one layer at a time; neither the merged model nor a merged layer ever exists.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial, reduce
from typing import Any

import torch
from torch import Tensor, nn

from lowpeak.errors import ArgumentError
from lowpeak.models import is_critics, transformers_model
from lowpeak.parallel.flat_shard import Added, FlatShard, Outgoing, Sharded, whole
from lowpeak.records import Layout, Weights

_WRAPPERS = ("_checkpoint_wrapped_module.", "_fsdp_wrapped_module.", "_orig_mod.")
_PREFIX = "base_model.model."


def outgoing(model: nn.Module, sharded: Sharded, weights: Weights) -> Iterator[Outgoing]:
    """Yield the parameters that leave (see `Strategy.slices`), in the same order on every rank."""

    def shard_of(parameter: nn.Parameter) -> FlatShard:
        return sharded(parameter) or whole(parameter.detach())

    if weights == "adapter":
        for name, parameter in adapter_parameters(model).items():
            yield Outgoing(adapter_name(model, name), shard_of(parameter))
    elif not hasattr(model, "peft_config"):
        for name, parameter in policy_parameters(model):
            yield Outgoing(plain_name(name), shard_of(parameter))
    else:
        yield from _merged(model, shard_of, merges=weights == "merged")


def layout(model: nn.Module, sharded: Sharded, weights: Weights) -> Layout:
    """Return the layout of what leaves, in its order; nothing travels."""
    leaving = outgoing(model, sharded, weights)
    return {one.name: (tuple(one.shard.shape), one.shard.local.dtype) for one in leaving}


def unchanging(model: nn.Module) -> frozenset[str]:
    """Return the names, among those that leave `merged`, of what training leaves as it is: frozen, and without an adapter."""
    frozen = {plain_name(name) for name, parameter in policy_parameters(model) if not parameter.requires_grad}
    if not hasattr(model, "peft_config"):
        return frozenset(frozen)
    plain = (_base_name(name, active_adapters(model)) for name in frozen if not name.endswith(".base_layer.weight"))
    return frozenset(name for name in plain if name is not None)


def policy_parameters(model: nn.Module, *, remove_duplicate: bool = True) -> Iterator[tuple[str, nn.Parameter]]:
    """Return a model's parameters without its critic's, which stays where it is trained."""
    named = model.named_parameters(remove_duplicate=remove_duplicate)
    return ((name, parameter) for name, parameter in named if not is_critics(name))


def plain_name(name: str) -> str:
    """Return a parameter's name without what wrappers put into it."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def adapter_parameters(model: Any) -> dict[str, nn.Parameter]:
    """Return what training an adapter changes, by the names that the model has for it."""
    return {plain_name(name): p for name, p in policy_parameters(model) if p.requires_grad}


def adapter_name(model: Any, name: str) -> str:
    """Return the name that a parameter of an adapter has in peft's file: without the adapter's own."""
    for adapter in active_adapters(model):
        name = (
            name.replace(f".modules_to_save.{adapter}.", ".").replace(f".{adapter}.", ".").removesuffix(f".{adapter}")
        )
    return name


def adapter_state(model: Any, left: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return what left as `adapter`, by the names that the model has for it: by each where a parameter has several places."""
    leaving = {id(p): adapter_name(model, name) for name, p in adapter_parameters(model).items()}
    named = model.named_parameters(remove_duplicate=False)
    return {plain_name(name): left[leaving[id(p)]] for name, p in named if id(p) in leaving}


def parts_tied(model: Any, leaving: Collection[str]) -> bool:
    """Return whether what leaves `merged` has a head of its own, though the model's config ties it to the embedding."""
    base = transformers_model(model)
    head = base.get_output_embeddings()
    name = next((plain_name(name) for name, module in base.named_modules() if module is head), "")
    return bool(getattr(base.config.get_text_config(), "tie_word_embeddings", False)) and f"{name}.weight" in leaving


def active_adapters(model: Any) -> list[str]:
    """Return the names of a peft model's adapters that are in use."""
    return list(model.active_adapters)


def _merged(model: Any, shard_of: Callable[[nn.Parameter], FlatShard], merges: bool) -> Iterator[Outgoing]:
    """Yield the base's parameters; one that is tied leaves once for each thing that the adapter makes of it."""
    adapters = active_adapters(model)
    layers = dict(_weights_under_lora(model))
    left: set[tuple[int, int]] = set()
    for raw, parameter in policy_parameters(model, remove_duplicate=False):
        name = _base_name(plain_name(raw), adapters)
        layer = layers.get(raw)
        used = [] if layer is None or layer.merged or not merges else [a for a in adapters if a in layer.scaling]
        made = (id(parameter), id(layer) if used else 0)
        if name is None or made in left:
            continue
        left.add(made)
        shard = shard_of(parameter)
        if not used:
            yield Outgoing(name, shard)
        else:
            _check_mergeable(layer, used, name, shard.shape)
            yield Outgoing(name, shard, partial(_added, layer, used, shard_of, shard))


def _weights_under_lora(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the name of each weight that has LoRA on it, in its place, and the layer of peft's there."""
    for place, layer in model.named_modules():
        if hasattr(layer, "lora_A"):
            weight = layer.get_base_layer().weight
            yield from ((f"{place}.{name}", layer) for name, p in layer.named_parameters() if p is weight)


def _base_name(name: str, adapters: list[str]) -> str | None:
    """Return a parameter's name in the base model's checkpoint; None for one that does not leave."""
    name = name.removeprefix(_PREFIX)
    if ".original_module." in name or "lora_" in name:
        return None
    if ".modules_to_save." in name:
        before, _, after = name.partition(".modules_to_save.")
        adapter, _, rest = after.partition(".")
        return f"{before}.{rest}" if adapter in adapters else None
    return name.replace(".base_layer.", ".")


def _product(layer: Any, adapter: str, shard_of: Callable[[nn.Parameter], FlatShard], base: FlatShard) -> Added:
    """Return `scaling * B @ A` for the values [first, last) of the flat weight [rows, columns], whose rows alone are computed."""
    if adapter in layer.lora_A:
        left, right = layer.lora_B[adapter].weight, layer.lora_A[adapter].weight
        left_OR, right_RI = shard_of(left).gathered(), shard_of(right).gathered()
    else:  # an embedding's: its rows are tokens
        left, right = layer.lora_embedding_A[adapter], layer.lora_embedding_B[adapter]
        left_OR, right_RI = shard_of(left).gathered().T, shard_of(right).gathered().T
    if getattr(layer, "fan_in_fan_out", False):
        left_OR, right_RI = right_RI.T, left_OR.T
    half_on_cpu = left_OR.device.type == "cpu" and left_OR.dtype in (torch.bfloat16, torch.float16)
    if half_on_cpu:  # as peft does
        left_OR, right_RI = left_OR.float(), right_RI.float()
    columns, scaling, dtype = base.shape[1], layer.scaling[adapter], left.dtype

    def added(first: int, last: int) -> Tensor:
        top, bottom = first // columns, -(-last // columns)
        product = (left_OR[top:bottom] @ right_RI) * scaling
        return product.to(dtype).reshape(-1)[first - top * columns : last - top * columns]

    return added


def _added(layer: Any, adapters: list[str], shard_of: Callable[[nn.Parameter], FlatShard], base: FlatShard) -> Added:
    """Return what the adapters in use add to a weight; A and B are gathered now, and freed with what is returned."""
    parts = [_product(layer, adapter, shard_of, base) for adapter in adapters]
    return lambda first, last: reduce(torch.add, (part(first, last) for part in parts))


def _check_mergeable(layer: Any, adapters: list[str], name: str, shape: torch.Size) -> None:
    """Raise ArgumentError for adapters that are more than `W + scaling * B @ A`, of a weight whose whole `shape` is given."""
    variants = getattr(layer, "lora_variant", {})
    known = all(adapter in layer.lora_A or adapter in layer.lora_embedding_A for adapter in adapters)
    biased = any(getattr(layer, "lora_bias", {}).get(adapter) for adapter in adapters)
    if not known or biased or len(shape) != 2 or any(adapter in variants for adapter in adapters):
        raise ArgumentError(
            f"the adapter of {name} cannot be merged on its way out: only plain LoRA (W + scaling * B @ A) of linear layers and "
            "embeddings can; save the adapter alone, or train without DoRA and the like."
        )

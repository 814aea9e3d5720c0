"""The sizes that bound memory and the layout of sequences; `auto` follows from free memory and the model's shape.

They are checkpointed, so that a resumed run computes the same sums. Automatic sizes are rounded down to powers of two: free
memory varies a little from run to run, and different sizes would round sums differently."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from lowpeak.arguments import MemorySettings, StorageFormat
from lowpeak.attention import install_attention, packing_mismatch, packing_unsupported_reason, uninstall_attention
from lowpeak.batching import LayerCosts, Layout, TokenBudget
from lowpeak.errors import ArgumentError
from lowpeak.memory import room_in_budget
from lowpeak.parallel import DeviceFractions, is_sharded
from lowpeak.ranks import Ranks

_CHUNK_SHARE = 64
_ACTIVATION_SHARE = 4
_CACHE_SHARE = 4
# Korthikanti et al. 2022, eq. 2, without the attention scores: bytes per token and hidden unit, at 2 bytes a number.
_LAYER_FACTOR = 34


@dataclass(frozen=True)
class ModelShape:
    """The dimensions of a model that its memory depends on.

    `itemsize` is the bytes of an activation, `stream` those of the residual stream: under autocast that keeps the embeddings'
    wider dtype.
    """

    hidden: int
    layers: int
    intermediate: int
    vocab: int
    itemsize: int
    stream: int

    @classmethod
    def of(cls, config: Any, itemsize: int, stream: int | None = None) -> ModelShape:
        """Return the shape in a transformers config; of a multimodal model that of the text part."""
        text = config.get_text_config() if hasattr(config, "get_text_config") else config
        hidden = text.hidden_size
        intermediate = getattr(text, "intermediate_size", None) or 4 * hidden
        if not isinstance(intermediate, int):  # one per layer (Gemma 3n)
            intermediate = max(intermediate)
        return cls(hidden, text.num_hidden_layers, intermediate, text.vocab_size, itemsize, stream or itemsize)


def auto_chunk_tokens(shape: ModelShape, free_bytes: int) -> int:
    """Return the number of tokens whose fp32 logits take at most 1/64 of free memory: 16 to 1,024.

    Example: 256 with 16 GB and a vocabulary of 152,000. Together with the gradient of a head 1,024 wide that is below an eighth
    of all logits of 4,096 tokens with their gradients.
    """
    return _power_of_two(free_bytes // _CHUNK_SHARE // (4 * shape.vocab), 16, 1024)


def auto_micro_batch_tokens(shape: ModelShape, free_bytes: int, checkpointing: bool) -> int:
    """Return the number of tokens whose activations take at most 1/4 of free memory: 512 to 65,536.

    A layer keeps 34 bytes per token and hidden unit in half precision (more with a wide MLP). With activation checkpointing
    each layer keeps only its input, and one layer at a time keeps everything.
    """
    per_layer = shape.itemsize * (_LAYER_FACTOR // 2 * shape.hidden + 3 * shape.intermediate)
    layer_input = shape.stream * shape.hidden
    per_token = shape.layers * layer_input + per_layer if checkpointing else shape.layers * per_layer
    return _power_of_two(free_bytes // _ACTIVATION_SHARE // per_token, 512, 65536)


def auto_kv_cache_bytes(free_bytes: int) -> int:
    """Return the bytes of the engine's KV cache: 1/4 of free memory."""
    return _power_of_two(free_bytes // _CACHE_SHARE, 1 << 24, 1 << 46)


def _power_of_two(value: int, least: int, most: int) -> int:
    return min(most, max(least, 1 << max(0, value.bit_length() - 1)))


logger = logging.getLogger(__name__)

_WORDS: dict[Layout, str] = {
    "shared": "sequences are packed without padding, and a prompt is forwarded once for its completions if that pays",
    "rows": "sequences are packed without padding",
    "padded": "sequences are padded to the longest of a micro-batch",
}


@dataclass(frozen=True)
class LayoutChoice:
    """The layout of sequences in micro-batches, the reason for it, and the layouts that are possible.

    Policy, old and reference passes share it: in bf16 their ratios would differ from 1 by the layout alone.
    """

    layout: Layout
    why: str
    possible: tuple[Layout, ...]

    def __str__(self) -> str:
        return f"{_WORDS[self.layout]} ({self.why})"

    def resumed(self, saved: Layout) -> LayoutChoice:
        """Return the layout that the checkpoint's run had, if arguments and models still allow it.

        Logs a layout that differs from this choice, and warns if the saved one is no longer possible.
        """
        if saved == self.layout:
            return self
        if saved not in self.possible:
            logger.warning(
                "In the checkpoint's run %s; in this one not (%s), so numbers may differ in their last bits.",
                _WORDS[saved],
                self.why,
            )
            return self
        choice = LayoutChoice(saved, "as in the checkpoint's run", self.possible)
        logger.info("Layout: %s.", choice)
        return choice


def choose_layout(settings: MemorySettings, obstacle: str | None) -> LayoutChoice:
    """Return the layout of a run; `obstacle` is why a model's attention cannot run packed sequences.

    Raises ArgumentError if the arguments ask for packing and there is an obstacle.
    """
    if settings.padding_free is False:
        return LayoutChoice("padded", "padding_free=False", ("padded",))
    requested = [name for name in ("packing", "padding_free", "share_prompt") if getattr(settings, name)]
    if obstacle is not None:
        if requested:
            raise ArgumentError(f"{requested[0]}=True cannot act: {obstacle}; remove it.")
        return LayoutChoice("padded", obstacle, ("padded",))
    padded: tuple[Layout, ...] = () if requested else ("padded",)
    if settings.share_prompt:
        return LayoutChoice("shared", "share_prompt=True, whether it pays or not", ("shared",))
    if settings.share_prompt is False:
        return LayoutChoice("rows", "prompts are not shared", ("rows", *padded))
    return LayoutChoice("shared", "the model's attention can", ("shared", "rows", *padded))


def prepare_layout(
    settings: MemorySettings, models: Sequence[nn.Module], device: torch.device, ranks: Ranks
) -> LayoutChoice:
    """Choose the layout for these models, install its attention in them, and log the choice.

    All ranks get the same layout: an obstacle on one rank counts on all.
    """
    obstacle = None if settings.padding_free is False else _obstacle(models, device, ranks)
    choice = choose_layout(settings, obstacle)
    logger.log(logging.WARNING if obstacle else logging.INFO, "%s", f"Layout: {choice}.")
    return choice


def _obstacle(models: Sequence[nn.Module], device: torch.device, ranks: Ranks) -> str | None:
    """Return why a model cannot run packed sequences on some rank; None after all have run a few tokens so.

    With an obstacle, the models keep their own attention.
    """

    def first_reason(reason_of: Callable[[nn.Module], str | None]) -> str | None:
        # Check every model even after a failure: checks of sharded models run collectives, so all ranks must make
        # the same calls.
        reasons = ranks.call_on_all(lambda: next(filter(None, [reason_of(model) for model in models]), None))
        return next(filter(None, reasons), None)

    reason = first_reason(packing_unsupported_reason)
    if reason is not None:
        return reason
    for model in models:
        install_attention(model)
    reason = first_reason(lambda model: packing_mismatch(model, device, device_at_start(model, device)))
    if reason is not None:
        for model in models:
            uninstall_attention(model)
    return reason


def device_at_start(model: nn.Module, device: torch.device) -> torch.device:
    """Return where a model runs before training starts: `device`, or the host for a policy that FSDP2 will shard."""
    if is_sharded(model) or any(p.device.type == device.type for p in model.parameters()):
        return device
    return next(model.parameters()).device


def training_bytes(
    model: nn.Module, device: torch.device, shares: DeviceFractions, storage: StorageFormat | None = None
) -> int:
    """Return the bytes of `device` that training will allocate beyond the memory that is allocated now.

    These are a gradient of each trained parameter, AdamW's two states or those of the storage format, and the weights that are
    still on another device: FSDP2 and DeepSpeed move them when they prepare the model.
    """
    total = 0.0
    for parameter in model.parameters():
        share, size = _share_and_bytes(parameter, shares)
        if parameter.device.type != device.type:
            total += share.weights * size
        if parameter.requires_grad:
            count = size / parameter.element_size()
            total += (
                (share.gradients + 2 * share.states) * size
                if storage is None
                else count * storage.device_bytes(share.gradients, share.states)
            )
    return int(total)


def _share_and_bytes(parameter: nn.Parameter, shares: DeviceFractions) -> tuple[DeviceFractions, int]:
    """Return (fraction kept by this rank, bytes of the parameter); (1, local bytes) if already sharded."""
    local = getattr(parameter, "_local_tensor", None)
    if local is not None:
        return DeviceFractions(), local.numel() * local.element_size()
    return shares, getattr(parameter, "ds_numel", parameter.numel()) * parameter.element_size()


_NUMBERS = ("micro_batch_tokens", "logprob_chunk_size", "kv_cache_bytes")
_GATHER, _BUDGET = "gather_budget", "memory_budget"
SYNC_BYTES = 64 << 20


@dataclass(frozen=True)
class Sizes:
    """Tokens of a micro-batch and of a log-prob chunk, bytes of the engine's KV cache, and the layout.

    gather_budget           bytes that stay gathered, of a plan within a memory budget; None: set when a rollout starts
    sync_bytes              most bytes of a bucket of weights, and of a slice, on their way to an engine
    activation_offloading   saved activations are moved to the host because memory ran out
    lowered                 names of the sizes that an out-of-memory error has lowered
    memory_budget           bytes of an explicit budget that the sizes are planned for
    """

    micro_batch_tokens: int
    logprob_chunk_size: int
    kv_cache_bytes: int
    layout_choice: LayoutChoice
    gather_budget: int | None = None
    sync_bytes: int = SYNC_BYTES
    activation_offloading: bool = False
    lowered: frozenset[str] = frozenset()
    memory_budget: int | None = None

    def lower(self, **values: Any) -> Sizes:
        """Return these sizes with smaller values, named as lowered."""
        return replace(self, **values, lowered=self.lowered | values.keys())

    @classmethod
    def of(
        cls,
        memory: MemorySettings,
        policy: Any,
        device: torch.device,
        layout_choice: LayoutChoice,
        ranks: Ranks,
        *,
        bf16: bool,
        checkpointing: bool,
        shares: DeviceFractions,
        storage: StorageFormat | None = None,
        budget: int | None = None,
    ) -> Sizes:
        """Return explicit sizes as they are, and `auto` ones fitted to the memory that training leaves free.

        All ranks get the sizes of the rank with the least memory. `shares` is how the policy will be sharded, `budget` what the
        process may take of its device.
        """
        itemsize = 2 if bf16 else 4
        shape = ModelShape.of(
            policy.config, itemsize, max(itemsize, policy.get_input_embeddings().weight.element_size())
        )
        room = room_in_budget(device, budget) - training_bytes(policy, device, shares, storage)
        free = int(ranks.min([max(0, room)])[0])
        return cls.resolve(memory, shape, free, layout_choice, checkpointing)

    @classmethod
    def resolve(
        cls, memory: MemorySettings, shape: ModelShape, free: int, layout_choice: LayoutChoice, checkpointing: bool
    ) -> Sizes:
        """Return explicit sizes as they are, and `auto` ones fitted to `free` bytes."""
        return cls(
            memory.micro_batch_tokens or auto_micro_batch_tokens(shape, free, checkpointing),
            memory.logprob_chunk_size or auto_chunk_tokens(shape, free),
            memory.kv_cache_bytes or auto_kv_cache_bytes(free),
            layout_choice,
        )

    def as_dict(self) -> dict[str, Any]:
        """Return the values for checkpoints and reports; `lowered` ones are there only if there are any."""
        numbers: dict[str, Any] = {name: getattr(self, name) for name in _NUMBERS}
        if self.gather_budget is not None:
            numbers[_GATHER] = self.gather_budget
        if self.memory_budget is not None:
            numbers[_BUDGET] = self.memory_budget
        numbers["layout"] = self.layout_choice.layout
        if self.lowered:
            numbers |= {name: getattr(self, name) for name in self.lowered} | {"lowered": sorted(self.lowered)}
        return numbers

    def resumed(self, saved: Mapping[str, Any], memory: MemorySettings) -> Sizes:
        """Return these sizes, with `auto` and lowered ones and the layout as the checkpoint's run had them.

        Sizes that are planned for a smaller memory_budget than that run's are kept if they are smaller.
        """
        lowered = frozenset(saved.get("lowered", ()))
        names = (*_NUMBERS, _GATHER)
        numbers: dict[str, Any] = {
            name: int(saved[name]) for name in names if name in saved and getattr(memory, name) is None
        }
        numbers |= {name: min(saved[name], getattr(memory, name, None) or saved[name]) for name in lowered}
        if lowered:
            values = _shown({name: numbers[name] for name in sorted(lowered)})
            logger.info("The run continues with the sizes to which it went after running out of memory: %s.", values)
        smaller = self._planned_below(numbers, saved.get(_BUDGET))
        if smaller:
            logger.info("The run continues with the sizes of its smaller memory_budget: %s.", _shown(smaller))
        numbers |= smaller
        # A checkpoint without a layout is of a version that always padded.
        layout_choice = self.layout_choice.resumed(saved.get("layout", "padded"))
        return replace(self, **numbers, layout_choice=layout_choice, lowered=lowered)

    def _planned_below(self, numbers: Mapping[str, Any], saved_budget: int | None) -> dict[str, int]:
        """Return those of these sizes that are below `numbers`, if they are planned for a smaller budget."""
        if self.memory_budget is None or (saved_budget is not None and self.memory_budget >= saved_budget):
            return {}
        planned = {name: getattr(self, name) for name in (*_NUMBERS, _GATHER)}
        return {name: value for name, value in planned.items() if value is not None and value < numbers.get(name, 0)}

    def budget(self, memory: MemorySettings, pad_id: int, config: Any) -> TokenBudget:
        shape = ModelShape.of(config, 4)
        costs = None if memory.share_prompt else LayerCosts.of(shape.hidden, shape.intermediate)
        return TokenBudget(self.micro_batch_tokens, memory.pad_to_multiple_of, pad_id, self.layout_choice.layout, costs)

    def apply_to(self, budget: TokenBudget) -> TokenBudget:
        return replace(budget, max_tokens=self.micro_batch_tokens, layout=self.layout_choice.layout)


def _shown(sizes: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in sizes.items())

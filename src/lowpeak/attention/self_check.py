"""The start-up check: a small forest through the model against the same rows run one by one, and the kernel's gradient.

It is what finds a model whose layers look at more than their attention's answer (state, windows, positions), and a
device whose kernel does not do what its tests on another one promise.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from lowpeak.attention.install import attend_forest, forward_arguments
from lowpeak.attention.layout import ForestLayout
from lowpeak.attention.reference import forest_mask
from lowpeak.errors import ModelError
from lowpeak.logprobs import backbone_of, causal_lm, evaluated, rounding
from lowpeak.records import Forest, Tree

# Two completions behind a prompt, a sequence on its own, two completions behind another prompt; then padding.
_TREES = (Tree(0, 5, (4, 3)), Tree(12, 0, (6,)), Tree(18, 2, (1, 5)))
_LENGTH = 29


def forests_agree(model: nn.Module, device: torch.device | str, now_on: torch.device | None = None) -> str | None:
    """None where a forest gives the hidden states of plain rows; else a sentence that says what went wrong.

    `model` as it will be called, wrapped or not, with `install_attention` done; it runs in eval mode without gradients
    and is left as it was; on `now_on` where that is not yet the device it will be on. The kernel's gradient is checked on
    that device, on its own, in the model's dtype and its heads' width. What is tolerated is the
    rounding of hidden states in the dtype that the model computes in. Every rank of a sharded model calls it.
    """
    device = torch.device(device)
    causal = causal_lm(model)
    if causal.get_input_embeddings().weight.is_meta:  # this rank has no weights yet; one that has them looks
        return None
    try:
        with evaluated(model):
            largest, dtype = _largest_difference(model, causal, now_on or device)
        allowed = _rounding(rounding(dtype, now_on or device), causal.config.get_text_config().num_hidden_layers)
        if not largest <= allowed:
            return (
                f"{type(causal).__name__} gives other hidden states for several sequences in one row than for each on "
                f"its own: they differ by {largest:.2g} of their size, where rounding explains {allowed:.2g}"
            )
        if torch.is_autocast_enabled(device.type):
            dtype = torch.get_autocast_dtype(device.type)
        return kernel_differs(dtype, device, *_heads_of(causal.config.get_text_config()))
    except torch.OutOfMemoryError:
        raise
    except (ModelError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        return f"{type(causal).__name__} cannot run several sequences in one row: {reason}"


def _heads_of(config: Any) -> tuple[int, int]:
    """The width of a head, and how many query heads have a key head in common."""
    heads = config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    return width, heads // (getattr(config, "num_key_value_heads", None) or heads)


@dataclass
class _Watch:
    """The backbone's hidden states in the dtype it computes in, which wrappers may change on the way out."""

    hidden: Tensor
    dtype: torch.dtype


def _largest_difference(model: nn.Module, causal: Any, device: torch.device) -> tuple[float, torch.dtype]:
    """The largest distance between a token's two hidden states, relative to its size; and the dtype computed in."""
    num_ids = causal.config.get_text_config().vocab_size
    ids_1L = (torch.arange(_LENGTH, device=device) * 7919 + 3).remainder(num_ids)[None]
    forest = _forest()
    with _watched(causal) as watch:
        model(input_ids=ids_1L, **forward_arguments(forest, device))
        together = watch.hidden
        distances = []
        for row in _rows(forest):
            model(input_ids=ids_1L[:, row])
            alone = watch.hidden.float()
            size = alone.norm(dim=-1).clamp(min=torch.finfo(torch.float32).tiny)  # a pad's embedding may be zero
            distances.append(((together[:, row].float() - alone).norm(dim=-1) / size).amax())
    return float(torch.stack(distances).amax()), watch.dtype  # NaN where one is: it must not pass


@contextmanager
def _watched(causal: Any) -> Iterator[_Watch]:
    watch = _Watch(torch.empty(0), torch.float32)

    def look(module: nn.Module, args: Any, output: Any) -> None:
        watch.hidden = output[0]
        kind = watch.hidden.device.type
        watch.dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else watch.hidden.dtype

    # Some call the decoder inside their backbone; where both run the outer one ends last, with the same states.
    watched = {id(part): part for part in (backbone_of(causal), causal.get_decoder())}
    handles = [part.register_forward_hook(look) for part in watched.values()]
    try:
        yield watch
    finally:
        for handle in handles:
            handle.remove()


def _forest() -> Forest:
    positions = torch.zeros(1, _LENGTH, dtype=torch.int64)
    for tree in _TREES:
        start = tree.start
        for begin, tokens in ((0, tree.prompt), *((tree.prompt, tokens) for tokens in tree.completions)):
            positions[0, start : start + tokens] = torch.arange(begin, begin + tokens)
            start += tokens
    return Forest(_TREES, positions)


def _rows(forest: Forest) -> Iterator[list[int]]:
    """Where in the forest's row the tokens of each plain row are."""
    for tree in forest.trees:
        start = tree.start + tree.prompt
        for tokens in tree.completions:
            yield [*range(tree.start, tree.start + tree.prompt), *range(start, start + tokens)]
            start += tokens


def _rounding(eps: float, num_layers: int) -> float:
    """What rounding does to a token's hidden state, relative to its size.

    Measured on models of 2 to 32 layers with small and with large weights: at most a fifth of this in fp32, and 0.16 in
    bf16, where tokens that see what they should not are off by 0.6 to 1.6.
    """
    return min(0.25, 256 * eps * num_layers**0.5)


# Longer than two of FlexAttention's blocks, no multiple of them, and with padding at the end.
_KERNEL_LENGTH = 300
_KERNEL_TREES = (Tree(0, 70, (90, 40)), Tree(200, 0, (30,)), Tree(230, 3, (30, 27)))


def kernel_differs(dtype: torch.dtype, device: torch.device, width: int = 64, share: int = 2) -> str | None:
    """What is wrong with the kernel of a device in a dtype, as a sentence; None where it agrees with the definition.

    Two key heads of `width` numbers, each with `share` query heads, against `forest_mask` in float64.
    """
    forest = Forest(_KERNEL_TREES, torch.zeros(1, _KERNEL_LENGTH, dtype=torch.int64))
    query, key, value, grad = _random_heads(dtype, device, width, share)
    scale = width**-0.5
    seen_LL = forest_mask(forest, _KERNEL_LENGTH, device)
    real_L = seen_LL.any(1)
    grad = grad * real_L[:, None, None]
    layout = ForestLayout(forest, device)
    with torch.enable_grad():
        fast = [x.clone().requires_grad_() for x in (query, key, value)]
        out = attend_forest(fast[0], fast[1], fast[2], layout, scale)
        exact = [x.double().requires_grad_() for x in (query, key, value)]
        meant = scaled_dot_product_attention(
            exact[0], exact[1], exact[2], attn_mask=seen_LL | ~real_L[:, None], scale=scale, enable_gqa=True
        ).transpose(1, 2)
    found = [out.detach()[:, real_L], *torch.autograd.grad(out, fast, grad)]
    expected = [meant.detach()[:, real_L], *torch.autograd.grad(meant, exact, grad.double())]
    allowed = min(0.1, 32 * rounding(dtype, device))
    for name, a, b in zip(("values", "query", "key", "value"), found, expected, strict=True):
        off = float((a - b).norm() / b.norm())
        if not off <= allowed:
            what = name if name == "values" else f"gradient of the {name}"
            return (
                f"attention over several sequences in {dtype} on {device.type} is wrong: its {what} differs by {off:.2g} of "
                f"its size, where rounding explains {allowed:.2g}"
            )
    return None


def _random_heads(
    dtype: torch.dtype, device: torch.device, width: int, share: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    keys = (1, 2, _KERNEL_LENGTH, width)
    return (
        draw(1, 2 * share, _KERNEL_LENGTH, width),
        draw(*keys),
        draw(*keys),
        draw(1, _KERNEL_LENGTH, 2 * share, width),
    )

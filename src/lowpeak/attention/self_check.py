"""Start-up checks of packed sequences: a model's hidden states, and the device's attention kernel with its gradient.

The first detects models whose layers use more than their attention's output (states, windows, positions), the second
devices whose kernel differs from the one that the tests ran on. `forest_mask` defines what the fast paths compute."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lowpeak.attention.install import ForestAttention, HeadShape, attend_forest, forward_arguments
from lowpeak.attention.scores import ScoreModifiers
from lowpeak.attention.spans import FULL, Span
from lowpeak.batching import paths, prefixes
from lowpeak.errors import ModelError
from lowpeak.heads import backbone_of, causal_lm, eval_mode, matmul_eps
from lowpeak.memory import is_out_of_memory
from lowpeak.records import Forest


def forest_mask(forest: Forest, length: int, device: torch.device | str | None = None, span: Span = FULL) -> Tensor:
    """Return whether packed token i attends to token j: bool [L, L]; False in rows and columns of padding.

    As an additive mask, `zeros.masked_fill(~mask, -inf)`, it runs a forest through any attention, in O(L^2). Let padding
    attend to something then: softmax over nothing is NaN.
    """
    mask_LL = torch.zeros(length, length, dtype=torch.bool, device=device)
    for prefix, node in zip(prefixes(forest.nodes), forest.nodes, strict=True):
        keys = torch.tensor([*prefix, *node.tokens], device=device)
        mask_LL[node.start : node.tokens.stop, keys] = _near(node.length, node.depth, span, device)
    return mask_LL


def _near(tokens: int, prefix: int, span: Span, device: torch.device | str | None) -> Tensor:
    """Return which tokens of a sequence those after its `prefix` attend to: bool [tokens, prefix + tokens]."""
    j = torch.arange(prefix + tokens, device=device)
    i = j[prefix:, None]
    return (j <= i) & (j >= span.start(i))


# A prompt with two completions, a plain sequence, a prompt of which one completion forks; each probe has them with other tokens.
_SHAPE = ((-1, 5), (0, 4), (0, 3), (-1, 6), (-1, 2), (4, 1), (4, 2), (6, 1), (6, 2))
_PROBE_LENGTH = sum(length for _, length in _SHAPE)
_NUM_PROBES = 3
_LENGTH = _NUM_PROBES * _PROBE_LENGTH + 3  # with padding at the end


def packing_mismatch(model: nn.Module, device: torch.device | str, now_on: torch.device | None = None) -> str | None:
    """Return the mismatch of the model's hidden states, or of the device's kernel, for packed sequences; None if none.

    A small forest is compared with its sequences run by themselves, up to rounding in the dtype that the model computes in.
    Pass the model as it will be called (wrapped or not) after `install_attention`; it runs in eval mode without gradients,
    on `now_on` if it is not on `device` yet. The kernel is checked on `device`, in the model's dtype and head width. Every
    rank of a sharded model must call this.
    """
    device = torch.device(device)
    causal = causal_lm(model)
    # This rank has no weights yet; a rank that has them runs the check.
    if causal.get_input_embeddings().weight.is_meta:
        return None
    try:
        with eval_mode(model), short_spans(causal.config.get_text_config()):
            largest, dtype, heads = _largest_difference(model, causal, now_on or device)
        allowed = _allowed_difference(
            matmul_eps(dtype, now_on or device), causal.config.get_text_config().num_hidden_layers
        )
        if not largest <= allowed:
            return (
                f"{type(causal).__name__} computes other hidden states for packed sequences than for separate ones: they "
                f"differ by {largest:.2g} of their size, and rounding explains at most {allowed:.2g}"
            )
        if torch.is_autocast_enabled(device.type):
            dtype = torch.get_autocast_dtype(device.type)
        reasons = (attention_mismatch(dtype, device, each.width, each.share, each) for each in sorted(heads, key=repr))
        return next(filter(None, reasons), None)
    except (ModelError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        # Out of memory says nothing about packing, and padded rows would need more.
        if is_out_of_memory(error):
            raise
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        return f"{type(causal).__name__} cannot run packed sequences: {reason}"


@contextmanager
def short_spans(config: Any) -> Iterator[None]:
    """Make windows and chunks shorter than the check's sequences, so that a wrong mask shows; models read them at each call."""
    short = {"sliding_window": 3, "attention_chunk_size": 4}
    original = {name: getattr(config, name) for name in short if getattr(config, name, None) is not None}
    for name in original:
        setattr(config, name, short[name])
    try:
        yield
    finally:
        for name, size in original.items():
            setattr(config, name, size)


@dataclass
class _Capture:
    """The backbone's last hidden states, and the dtype it computes in, before wrappers cast its output."""

    hidden: Tensor
    dtype: torch.dtype


def _largest_difference(
    model: nn.Module, causal: Any, device: torch.device
) -> tuple[float, torch.dtype, set[HeadShape]]:
    """Return the largest relative distance of a token's two hidden states, the dtype computed in, and the layers' heads.

    Of each place in a probe it is that of the probe with the least. In a pretrained model rounding may decide whether a token's
    state becomes very large (Sun et al. 2024, arXiv 2402.17762) or which experts it gets, and in bf16 it does for single tokens;
    another architecture shows in each probe.
    """
    num_ids = causal.config.get_text_config().vocab_size
    ids_1L = (torch.arange(_LENGTH, device=device) * 7919 + 3).remainder(num_ids)[None]
    ids_PL = ids_1L[0, : _NUM_PROBES * _PROBE_LENGTH].view(_NUM_PROBES, _PROBE_LENGTH)
    with _capture_hidden(causal) as capture:
        seen = forward_arguments(_forest(), device)
        model(input_ids=ids_1L, **seen, use_cache=False)
        packed_PLH = capture.hidden[0, : ids_PL.numel()].float().view(*ids_PL.shape, -1)
        distances = []
        for indices in paths(Forest.of(_SHAPE).nodes):
            model(input_ids=ids_PL[:, indices], use_cache=False)
            separate = capture.hidden.float()
            # The embedding of a padding id may be zero.
            norm = separate.norm(dim=-1).clamp(min=torch.finfo(torch.float32).tiny)
            distances.append(((packed_PLH[:, indices] - separate).norm(dim=-1) / norm).amin(0))
    # amax and amin keep NaN, which must not pass.
    return float(torch.cat(distances).amax()), capture.dtype, seen["forest"].heads


@contextmanager
def _capture_hidden(causal: Any) -> Iterator[_Capture]:
    capture = _Capture(torch.empty(0), torch.float32)

    def store(module: nn.Module, args: Any, output: Any) -> None:
        capture.hidden = output[0]
        kind = capture.hidden.device.type
        capture.dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else capture.hidden.dtype

    # Some models call the decoder inside their backbone, past the backbone's forward. If both run, the outer one ends last,
    # with the same states.
    modules = {id(module): module for module in (backbone_of(causal), causal.get_decoder())}
    handles = [module.register_forward_hook(store) for module in modules.values()]
    try:
        yield capture
    finally:
        for handle in handles:
            handle.remove()


def _forest() -> Forest:
    """Return the trees of all probes, one probe after the other."""
    shape = [
        (parent + probe * len(_SHAPE) if parent >= 0 else -1, length)
        for probe in range(_NUM_PROBES)
        for parent, length in _SHAPE
    ]
    return Forest.of(shape, padding=_LENGTH - _NUM_PROBES * _PROBE_LENGTH)


def _allowed_difference(eps: float, num_layers: int) -> float:
    """Return the relative difference of hidden states that rounding may explain.

    Measured on models of 2 to 32 layers with small and with large weights: at most a fifth of this in fp32, and 0.16 in
    bf16, where tokens that attend to what they should not differ by 0.6 to 1.6.
    """
    return min(0.25, 256 * eps * num_layers**0.5)


# Longer than two of FlexAttention's blocks, no multiple of them, and with padding at the end.
_KERNEL_LENGTH = 300
_KERNEL_SHAPE = ((-1, 70), (0, 50), (1, 25), (1, 15), (0, 40), (-1, 30), (-1, 3), (6, 30), (6, 27))


def attention_mismatch(
    dtype: torch.dtype, device: torch.device, width: int = 64, share: int = 2, heads: HeadShape | None = None
) -> str | None:
    """Return how a device's attention differs from that with `forest_mask` in float64; None if only by rounding.

    Runs two key heads of `width` numbers, each with `share` query heads, forward and backward; with the span, cap and
    sinks of `heads`.
    """
    forest = Forest.of(_KERNEL_SHAPE, padding=_KERNEL_LENGTH - sum(length for _, length in _KERNEL_SHAPE))
    query, key, value, grad = _random_heads(dtype, device, width, share)
    scale = width**-0.5
    span, softcap = (heads.span, heads.softcap) if heads is not None else (FULL, None)
    sinks_H = query[0, :, 0, 0] if heads is not None and heads.has_sinks else None
    mask_LL = forest_mask(forest, _KERNEL_LENGTH, device, span)
    real_L = mask_LL.any(1)
    grad = grad * real_L[:, None, None]
    layout = ForestAttention(forest, device)
    with torch.enable_grad():
        fast = [x.clone().requires_grad_() for x in (query, key, value)]
        out = attend_forest(fast[0], fast[1], fast[2], layout, scale, span, ScoreModifiers(softcap, sinks_H))
        exact = [x.double().requires_grad_() for x in (query, key, value)]
        reference = dense_attention(exact, mask_LL | ~real_L[:, None], scale, softcap, sinks_H)
    results = [out.detach()[:, real_L], *torch.autograd.grad(out, fast, grad)]
    expected = [reference.detach()[:, real_L], *torch.autograd.grad(reference, exact, grad.double())]
    allowed = min(0.1, 32 * matmul_eps(dtype, device))
    for name, a, b in zip(("values", "query", "key", "value"), results, expected, strict=True):
        difference = float((a - b).norm() / b.norm())
        if not difference <= allowed:
            what = name if name == "values" else f"gradient of the {name}"
            return (
                f"attention over packed sequences in {dtype} on {device.type} is wrong: its {what} differs by "
                f"{difference:.2g} of its size, and rounding explains at most {allowed:.2g}"
            )
    return None


def dense_attention(
    heads: list[Tensor], mask_LL: Tensor, scale: float, softcap: float | None, sinks_H: Tensor | None
) -> Tensor:
    """Return attention [1, L, H, E] from all scores; a sink is one more score without a value."""
    query, key, value = heads
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    scores = scale * query @ key.transpose(-1, -2)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~mask_LL, -torch.inf)
    if sinks_H is not None:
        scores = torch.cat([scores, sinks_H.to(scores)[:, None, None].expand(*scores.shape[:3], 1)], -1)
    return (scores.softmax(-1)[..., : key.shape[2]] @ value).transpose(1, 2)


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

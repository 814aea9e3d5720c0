"""Whether attention over a forest does on a device what the definition says, values and gradients, on random heads."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from lowpeak.attention.definition import forest_mask
from lowpeak.attention.install import attend_forest
from lowpeak.attention.layout import ForestLayout
from lowpeak.logprobs.verify import rounding
from lowpeak.records import Forest, Tree

# Longer than two of FlexAttention's blocks, no multiple of them, and with padding at the end.
_LENGTH = 300
_TREES = (Tree(0, 70, (90, 40)), Tree(200, 0, (30,)), Tree(230, 3, (30, 27)))


def kernel_differs(dtype: torch.dtype, device: torch.device, width: int = 64, share: int = 2) -> str | None:
    """What is wrong with the kernel of a device in a dtype, as a sentence; None where it agrees with the definition.

    Two key heads of `width` numbers, each with `share` query heads, against `forest_mask` in float64.
    """
    forest = Forest(_TREES, torch.zeros(1, _LENGTH, dtype=torch.int64))
    query, key, value, grad = _heads(dtype, device, width, share)
    scale = width**-0.5
    seen_LL = forest_mask(forest, _LENGTH, device)
    real_L = seen_LL.any(1)
    grad = grad * real_L[:, None, None]
    layout = ForestLayout(forest, device)
    with torch.enable_grad():
        fast = [x.clone().requires_grad_() for x in (query, key, value)]
        out = attend_forest(fast[0], fast[1], fast[2], layout, scale)
        exact = [x.double().requires_grad_() for x in (query, key, value)]
        meant = _dense(exact[0], exact[1], exact[2], seen_LL | ~real_L[:, None], scale)
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


def _heads(dtype: torch.dtype, device: torch.device, width: int, share: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    keys = (1, 2, _LENGTH, width)
    return draw(1, 2 * share, _LENGTH, width), draw(*keys), draw(*keys), draw(1, _LENGTH, 2 * share, width)


def _dense(query: Tensor, key: Tensor, value: Tensor, mask_LL: Tensor, scale: float) -> Tensor:
    out = scaled_dot_product_attention(query, key, value, attn_mask=mask_LL, scale=scale, enable_gqa=True)
    return out.transpose(1, 2)

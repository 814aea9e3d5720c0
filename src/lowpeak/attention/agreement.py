"""Whether attention over a forest does on a device what the definition says, values and gradients, on random heads."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from lowpeak.attention.definition import forest_mask
from lowpeak.attention.install import attend_forest
from lowpeak.attention.layout import ForestLayout
from lowpeak.records import Forest, Tree

# Longer than two of FlexAttention's blocks, no multiple of them, and with padding at the end.
_LENGTH = 300
_TREES = (Tree(0, 70, (90, 40)), Tree(200, 0, (30,)), Tree(230, 3, (30, 27)))
_SCALE = 0.125


def kernel_differs(dtype: torch.dtype, device: torch.device) -> str | None:
    """What is wrong with the kernel of a device in a dtype, as a sentence; None where it agrees with the definition.

    Four query heads on two key heads of 64, against `forest_mask` in float64.
    """
    forest = Forest(_TREES, torch.zeros(1, _LENGTH, dtype=torch.int64))
    query, key, value, grad = _heads(dtype, device)
    seen_LL = forest_mask(forest, _LENGTH, device)
    real_L = seen_LL.any(1)
    grad = grad * real_L[:, None, None]
    layout = ForestLayout(forest, device)
    with torch.enable_grad():
        fast = [x.clone().requires_grad_() for x in (query, key, value)]
        out = attend_forest(fast[0], fast[1], fast[2], layout, _SCALE)
        exact = [x.double().requires_grad_() for x in (query, key, value)]
        meant = _dense(exact[0], exact[1], exact[2], seen_LL | ~real_L[:, None])
    found = [out.detach()[:, real_L], *torch.autograd.grad(out, fast, grad)]
    expected = [meant.detach()[:, real_L], *torch.autograd.grad(meant, exact, grad.double())]
    allowed = min(0.1, 32 * precision(dtype, device))
    for name, a, b in zip(("values", "query", "key", "value"), found, expected, strict=True):
        off = float((a - b).norm() / b.norm())
        if not off <= allowed:
            what = name if name == "values" else f"gradient of the {name}"
            return (
                f"attention over several sequences in {dtype} on {device.type} is wrong: its {what} differs by {off:.2g} of "
                f"its size, where rounding explains {allowed:.2g}"
            )
    return None


def precision(dtype: torch.dtype, device: torch.device) -> float:
    """The rounding of one product in a dtype on a device."""
    if dtype == torch.float32 and device.type == "cuda" and torch.get_float32_matmul_precision() != "highest":
        return 2.0**-10  # TF32
    return torch.finfo(dtype).eps


def _heads(dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    return draw(1, 4, _LENGTH, 64), draw(1, 2, _LENGTH, 64), draw(1, 2, _LENGTH, 64), draw(1, _LENGTH, 4, 64)


def _dense(query: Tensor, key: Tensor, value: Tensor, mask_LL: Tensor) -> Tensor:
    out = scaled_dot_product_attention(query, key, value, attn_mask=mask_LL, scale=_SCALE, enable_gqa=True)
    return out.transpose(1, 2)

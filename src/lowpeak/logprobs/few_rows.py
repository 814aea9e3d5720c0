"""The logits of a few rows, as generation asks for them: one read of a large head for all of them.

MKL, which multiplies fp32 matrices on most CPUs, reads a head that its caches do not hold once for every three rows or
so below 16. oneDNN, which torch carries too, reads it once. No public call of torch reaches oneDNN's fp32 product, so
it is its compiler's private operator, where there is one. One thread, a head of 151,936 x 512, milliseconds:

    rows                   2      4      8     15     16     32     64
    nn.functional.linear   25     51     81    138    61     74     81
    oneDNN                 31     36     39     48     46     54     80
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

_NUM_ROWS = range(3, 65)  # where oneDNN is the quicker of the two
_LARGE = 1 << 26  # bytes of a head that is read from memory each time


def linear(hidden: Tensor, weight_VD: Tensor, bias_V: Tensor | None) -> Tensor:
    """`nn.functional.linear(hidden, weight, bias)`: logits [..., V] of hidden states [..., D], the same to fp32's rounding.

    A few rows of fp32 without gradients before a large head on a CPU go through oneDNN.
    """
    if _is_quicker(hidden, weight_VD):
        return torch.ops.mkldnn._linear_pointwise(hidden, weight_VD, bias_V, "none", [], "")
    return nn.functional.linear(hidden, weight_VD, bias_V)


def _is_quicker(hidden: Tensor, weight_VD: Tensor) -> bool:
    """Whether oneDNN's product is the quicker one, and torch would compute just this one in fp32."""
    return (
        weight_VD.device.type == "cpu"
        and weight_VD.dtype == hidden.dtype == torch.float32
        and weight_VD.numel() * weight_VD.itemsize >= _LARGE
        and hidden.numel() // hidden.shape[-1] in _NUM_ROWS
        and not torch.is_grad_enabled()
        and not torch.is_autocast_enabled("cpu")
        and torch.backends.mkl.is_available()
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )

"""Modifiers of attention's scores besides scale and mask: a cap, or a sink per head.

Shapes: N sequences, H query heads, Q queries, K keys, E width of a head."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, eq=False)
class ScoreModifiers:
    """Attention with scores cap * tanh(scores / cap), and with a sink: a score per head without a value."""

    softcap: float | None = None
    sinks_H: Tensor | None = None

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float) -> Tensor:
        """Return attention [N, H, Q, E]; without a mask it is causal, and E is one width for all."""
        if self.softcap is not None:
            return _attend_capped(query, key, value, mask, scale, self.softcap)
        if self.sinks_H is None:
            return F.scaled_dot_product_attention(
                query, key, value, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=True
            )
        # The sink is a key of its own width: query [q, sink / scale], key [0, 1], value 0. Any kernel can do this.
        sinks = (self.sinks_H.to(query.dtype) / scale)[:, None, None].expand(*query.shape[:3], 1)
        query, key, value = torch.cat([query, sinks], -1), F.pad(key, (0, 1, 1, 0)), F.pad(value, (0, 1, 1, 0))
        key[:, :, 0, -1] = 1
        if mask is None:
            # With a query before the first, causal attention sees the sink from everywhere.
            out = ScoreModifiers().attend(F.pad(query, (0, 0, 1, 0)), key, value, None, scale)[:, :, 1:]
        else:
            out = ScoreModifiers().attend(query, key, value, F.pad(mask, (1, 0)), scale)
        return out[..., :-1]


PLAIN = ScoreModifiers()


def _attend_capped(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float, softcap: float
) -> Tensor:
    num_queries, num_keys = query.shape[2], key.shape[2]
    grouped = query.unflatten(1, (key.shape[1], -1))
    scores = softcap * torch.tanh(grouped @ key[:, :, None].transpose(-1, -2) * (scale / softcap))
    if mask is None:
        mask = torch.full((num_queries, num_keys), -torch.inf, dtype=query.dtype, device=query.device).triu_(1)
    else:
        mask = mask[:, :, None]
    return ((scores + mask).softmax(-1) @ value[:, :, None]).flatten(1, 2)

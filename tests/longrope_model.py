"""A small model whose rotations change beyond a length (longrope)."""

from __future__ import annotations

import torch
from transformers import Phi3Config, Phi3ForCausalLM

FIRST = 16  # tokens with the first rotations


def longrope_model(num_tokens: int = 13, *, head: int = 8, initializer_range: float = 0.02) -> Phi3ForCausalLM:
    """A Phi-3 of one layer; from `FIRST` tokens on other factors rotate."""
    torch.manual_seed(0)
    rope = {
        "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * (head // 2), "long_factor": [3.0] * (head // 2),
        "original_max_position_embeddings": FIRST, "factor": 8.0,
    }  # fmt: skip
    config = Phi3Config(
        vocab_size=num_tokens, hidden_size=4 * head, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=64, rope_parameters=rope, max_position_embeddings=128, original_max_position_embeddings=FIRST,
        initializer_range=initializer_range, pad_token_id=0, eos_token_id=1, bos_token_id=None,
    )  # fmt: skip
    return Phi3ForCausalLM(config).eval()

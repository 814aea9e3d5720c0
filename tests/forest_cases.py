"""Forests and small models of several families for the tests of attention."""

from __future__ import annotations

import torch
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    Gemma2Config,
    GPT2Config,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    Qwen3Config,
)

from lowpeak.records import Forest, Tree
from tiny_models import tiny_model

NUM_IDS = 37
SIZES = {
    "vocab_size": NUM_IDS, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64,
    "max_position_embeddings": 256, "initializer_range": 0.2, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None,
}  # fmt: skip
LATENT = {
    "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 12,
    "first_k_dense_replace": 2, "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2,
}  # fmt: skip


def forest_of(*trees: tuple[int, tuple[int, ...]], padding: int = 0) -> Forest:
    """The forest of (prompt, completions) one after another, with padding behind them."""
    made, positions, start = [], [], 0
    for prompt, completions in trees:
        made.append(Tree(start, prompt, completions))
        positions += range(prompt)
        for tokens in completions:
            positions += range(prompt, prompt + tokens)
        start = len(positions)
    return Forest(tuple(made), torch.tensor([positions + [0] * padding]))


def rows_of(forest: Forest) -> list[list[int]]:
    """Where in the forest's row the tokens of each sequence on its own are."""
    rows = []
    for tree in forest.trees:
        start = tree.start + tree.prompt
        for tokens in tree.completions:
            rows.append([*range(tree.start, tree.start + tree.prompt), *range(start, start + tokens)])
            start += tokens
    return rows


def length_of(forest: Forest) -> int:
    return forest.position_ids_1L.shape[1]


GPT2 = {
    "vocab_size": NUM_IDS, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256, "initializer_range": 0.2,
    "attn_pdrop": 0.0, "bos_token_id": 1, "eos_token_id": 1,
}  # fmt: skip
WINDOWED = {**SIZES, "num_key_value_heads": 2, "head_dim": 16, "sliding_window": 4}
CAPPED = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 6.0, "query_pre_attn_scalar": 16}
MODELS = {
    "Qwen2": lambda: tiny_model(NUM_IDS, context=256),
    "Llama": lambda: AutoModelForCausalLM.from_config(LlamaConfig(**SIZES, num_key_value_heads=4)),
    "Qwen3": lambda: AutoModelForCausalLM.from_config(Qwen3Config(**SIZES, num_key_value_heads=1, head_dim=16)),
    "GPT-2": lambda: AutoModelForCausalLM.from_config(GPT2Config(**GPT2)),
    "DeepSeek": lambda: AutoModelForCausalLM.from_config(DeepseekV3Config(**SIZES, num_key_value_heads=4, **LATENT)),
    "Mistral": lambda: AutoModelForCausalLM.from_config(MistralConfig(**WINDOWED)),
    "Gemma2": lambda: AutoModelForCausalLM.from_config(Gemma2Config(**WINDOWED, **CAPPED)),
    "GPT-OSS": lambda: AutoModelForCausalLM.from_config(
        GptOssConfig(**WINDOWED, num_local_experts=2, num_experts_per_tok=1)
    ),
}


# The families' own code of these rounds to fp32.
IN_FP32 = ("Gemma2", "GPT-OSS")


def cases_of(*dtypes: torch.dtype) -> list[tuple[str, torch.dtype]]:
    """Return the models in each dtype that their code computes in."""
    return [(name, dtype) for name in MODELS for dtype in dtypes if dtype != torch.float64 or name not in IN_FP32]


def model_of(name: str, dtype: torch.dtype = torch.float32):
    """A model of a family in eval mode."""
    torch.manual_seed(0)
    return MODELS[name]().to(dtype).eval()

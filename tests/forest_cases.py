"""Forests and small models of several families for the tests of attention."""

from __future__ import annotations

import random

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

from lowpeak.records import Branch, Forest, Record
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


def forest_of(*trees: tuple[int, tuple], padding: int = 0) -> Forest:
    """The forest of (prompt, completions) one after another, with padding behind them; a completion may be such a pair."""
    shape: list[tuple[int, int]] = []

    def add(tree: int | tuple[int, tuple], parent: int) -> None:
        length, followers = (tree, ()) if isinstance(tree, int) else tree
        if length:
            shape.append((parent, length))
            parent = len(shape) - 1
        for each in followers:
            add(each, parent)

    for tree in trees:
        add(tree, -1)
    return Forest.of(shape, padding)


def random_forest(seed: int, num_nodes: int, longest: int) -> Forest:
    """Tries of random shape: each node follows the last one, one of its ancestors, or none."""
    draw = random.Random(seed)
    shape: list[tuple[int, int]] = []
    open_nodes = [-1]
    for index in range(num_nodes):
        open_nodes = open_nodes[: draw.randint(1, len(open_nodes))]
        shape.append((open_nodes[-1], draw.randint(1, longest)))
        open_nodes.append(index)
    return Forest.of(shape, padding=draw.randint(0, 3))


def rows_of(forest: Forest) -> list[list[int]]:
    """Where in the forest's row the tokens of each sequence on its own are, by walking up from its last node."""
    nodes, rows = forest.nodes, []
    for index in range(len(nodes)):
        if all(node.parent != index for node in nodes):
            row: list[int] = []
            while index >= 0:
                row, index = [*nodes[index].tokens, *row], nodes[index].parent
            rows.append(row)
    return rows


def shared_of(forest: Forest) -> list[int]:
    """The lengths of the prompts that several completions share."""
    parents = {node.parent for node in forest.nodes}
    return [node.length for index, node in enumerate(forest.nodes) if node.parent < 0 and index in parents]


def draw_branches(prompt_length, length, generator):
    """Random forks of a completion, depth first: each follows a token of the sequence that is open, or none."""
    path, branches = list(range(prompt_length)), []
    for index in range(length):
        if torch.rand(1, generator=generator) < 0.3 and index < length - 1:
            path = path[: int(torch.randint(len(path) + 1, (1,), generator=generator))]
            branches.append(Branch(index, path[-1] if path else -1))
        path.append(prompt_length + index)
    return tuple(branches)


def tokens_before(record: Record, token: int) -> list[int]:
    """The tokens of prompt + completion that precede a token in its sequence, by walking back from it."""
    first = len(record.prompt_ids)
    starts = {first + branch.start: branch.after for branch in record.completion.branches}
    found: list[int] = []
    while (token := starts.get(token, token - 1)) >= 0:
        found.insert(0, token)
    return found


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

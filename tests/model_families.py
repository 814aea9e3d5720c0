"""Model families with the structure of their published checkpoints (experts, latent attention, biases, tied heads), made small."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

NUM_IDS = 13
IDS = {"vocab_size": NUM_IDS, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None}
SIZES: dict[str, Any] = {
    **IDS, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "initializer_range": 0.15,
}  # fmt: skip
LATENT = {
    "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 12,
    "num_key_value_heads": 4,
}  # fmt: skip
ROUTED = {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "n_group": 1, "topk_group": 1,
    "moe_intermediate_size": 16, "routed_scaling_factor": 1.5, "norm_topk_prob": True,
}  # fmt: skip
FOUR_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LOCAL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
YARN = {
    "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 8, "beta_fast": 32.0,
    "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 1e4, "partial_rotary_factor": 0.75, "original_max_position_embeddings": 128,
    "short_factor": [1.0, 1.1, 1.2], "long_factor": [2.0, 2.1, 2.2],
}  # fmt: skip
MROPE = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 1, 1]}
GRANITE = {"embedding_multiplier": 3.0, "logits_scaling": 2.0, "residual_multiplier": 0.5, "attention_multiplier": 0.2}
VISION = {
    "hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_heads": 2, "num_hidden_layers": 1,
    "depth": 1, "out_hidden_size": 32, "patch_size": 4, "image_size": 8, "head_dim": 8,
    "deepstack_visual_indexes": [0], "fullatt_block_indexes": [0],
}  # fmt: skip
WINDOWS = {"head_dim": 8, "sliding_window": 5}
CAPS = {"query_pre_attn_scalar": 8, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 6.0}
IMAGES = {"image_token_id": 12, "video_token_id": 11, "vision_start_token_id": 12, "vision_end_token_id": 12}

# Families that generate by the decode loop: model type, then the settings that differ from SIZES; None removes one of SIZES.
DECODE_LOOP: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "Qwen2-MoE": ("qwen2_moe", {**FOUR_EXPERTS, "shared_expert_intermediate_size": 16}),
    "Qwen3": ("qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
    "Qwen3-MoE": ("qwen3_moe", {**FOUR_EXPERTS, "head_dim": 16, "norm_topk_prob": True}),
    "Llama 3": ("llama", {"head_dim": 8, "rope_parameters": LLAMA3}),
    "Mistral": ("mistral", {"head_dim": 8, "sliding_window": None}),
    "Ministral 3": (
        "ministral3",
        {"head_dim": 8, "sliding_window": None, "rope_parameters": {**YARN, "llama_4_scaling_beta": 0.1}},
    ),
    "Mixtral": ("mixtral", {**LOCAL_EXPERTS, "sliding_window": None}),
    "Phi-4": ("phi3", {"sliding_window": None}),
    "Phi-4-mini": (
        "phi3",
        {
            "sliding_window": None,
            "tie_word_embeddings": True,
            "original_max_position_embeddings": 128,
            "rope_parameters": LONGROPE,
        },
    ),
    "PhiMoE": ("phimoe", {**LOCAL_EXPERTS, "lm_head_bias": True, "attention_bias": True, "sliding_window": None}),
    "Gemma": ("gemma", {"head_dim": 8}),
    "GLM-4": ("glm4", {"head_dim": 8}),
    "GLM-4-MoE": ("glm4_moe", {**ROUTED, "first_k_dense_replace": 1, "head_dim": 16, "use_qk_norm": True}),
    "GLM-4.7-Flash": ("glm4_moe_lite", {**LATENT, **ROUTED, "mlp_layer_types": ["dense", "sparse"]}),
    "DeepSeek-V2": (
        "deepseek_v2",
        {**LATENT, **ROUTED, "n_group": 2, "first_k_dense_replace": 1, "topk_method": "group_limited_greedy"},
    ),
    "DeepSeek-V3": (
        "deepseek_v3",
        {**LATENT, **ROUTED, "n_group": 2, "first_k_dense_replace": 1, "rope_parameters": YARN},
    ),
    "OLMo 2": ("olmo2", {}),
    "OLMoE": ("olmoe", {"num_experts": 4, "num_experts_per_tok": 2}),
    "SmolLM3": (
        "smollm3",
        {"num_hidden_layers": 4, "no_rope_layers": [1, 1, 1, 0], "layer_types": ["full_attention"] * 4},
    ),
    "Granite": ("granite", GRANITE),
    "Granite-MoE": ("granitemoe", {**LOCAL_EXPERTS, **GRANITE}),
    "Command-R": ("cohere", {"logit_scale": 0.25, "use_qk_norm": True}),
    "MiniMax-M2": ("minimax_m2", {**LOCAL_EXPERTS, "head_dim": 16}),
    "Hunyuan": ("hunyuan_v1_dense", {"head_dim": 8}),
    "Hunyuan-MoE": ("hunyuan_v1_moe", {"head_dim": 8, "num_experts": 4, "moe_topk": 2}),
    "Hunyuan-V3": ("hy_v3", {**FOUR_EXPERTS, "head_dim": 8, "mlp_layer_types": ["dense", "sparse"]}),
    "Ernie 4.5": ("ernie4_5", {"head_dim": 8}),
    "Ernie 4.5-MoE": (
        "ernie4_5_moe",
        {
            "moe_num_experts": 4,
            "moe_k": 2,
            "moe_intermediate_size": 16,
            "moe_num_shared_experts": 1,
            "moe_layer_start_index": 1,
            "moe_layer_end_index": 1,
        },
    ),
    "Seed-OSS": ("seed_oss", {"head_dim": 8, "attention_dropout": 0.0, "residual_dropout": 0.0}),
    "Apertus": ("apertus", {"rope_parameters": LLAMA3}),
    "Arcee": ("arcee", {"head_dim": 8}),
    "dots1": ("dots1", {**ROUTED, "first_k_dense_replace": 1}),
    "GPT-2": ("gpt2", {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256}),
    "GPT-NeoX": ("gpt_neox", {}),
    "OPT": ("opt", {"ffn_dim": 48, "word_embed_proj_dim": 32, "init_std": 0.15}),
    "Nemotron": ("nemotron", {}),
    "LongCat-Flash": (
        "longcat_flash",
        {
            **LATENT,
            "num_hidden_layers": None,
            "num_layers": 2,
            "ffn_hidden_size": 48,
            "expert_ffn_hidden_size": 16,
            "n_routed_experts": 4,
            "zero_expert_num": 2,
            "moe_topk": 2,
            "head_dim": 8,
        },
    ),
    "Solar-open": ("solar_open", {**ROUTED, "head_dim": 8}),
    "Youtu": ("youtu", {**LATENT, "pad_token_id": None}),
    "NanoChat": ("nanochat", {"final_logit_softcapping": 6.0}),
    "InternLM3": ("internlm3", {"head_dim": 8}),
    "Helium": ("helium", {"head_dim": 8}),
    "StableLM": ("stablelm", {}),
    "Falcon": ("falcon", {"num_kv_heads": 2, "new_decoder_architecture": True, "ffn_hidden_size": 48}),
    "GPT-J": ("gptj", {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256, "rotary_dim": 4}),
    "Mistral with a window": ("mistral", {"head_dim": 8, "sliding_window": 5}),
    "Gemma 2": ("gemma2", {**WINDOWS, "layer_types": ["sliding_attention", "full_attention"], **CAPS}),
    "Gemma 3": ("gemma3_text", {**WINDOWS, "layer_types": ["sliding_attention", "full_attention"]}),
    "Gemma 3n": (
        "gemma3n_text",
        {
            **WINDOWS,
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "num_kv_shared_layers": 2,
            "intermediate_size": [48] * 4,
            "activation_sparsity_pattern": [0.95, 0.0, 0.0, 0.0],
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": NUM_IDS,
            "laurel_rank": 8,
        },
    ),
    "Gemma 4": (
        "gemma4_text",
        {
            **WINDOWS,
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "num_kv_shared_layers": 2,
            "global_head_dim": 16,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": NUM_IDS,
        },
    ),
    "gpt-oss": (
        "gpt_oss",
        {**WINDOWS, **LOCAL_EXPERTS, "layer_types": ["sliding_attention", "full_attention"], "rope_parameters": YARN},
    ),
    "Qwen2.5-VL": ("qwen2_5_vl", {"text_config": {"rope_parameters": MROPE}, "vision_config": VISION, **IMAGES}),
    "Qwen3-VL": (
        "qwen3_vl",
        {
            "text_config": {"head_dim": 8, "rope_parameters": {**MROPE, "mrope_interleaved": True}},
            "vision_config": VISION,
            **IMAGES,
        },
    ),
    "Mistral 3": (
        "mistral3",
        {
            "text_config": {
                "model_type": "ministral3",
                "head_dim": 8,
                "rope_parameters": {**YARN, "llama_4_scaling_beta": 0.1},
            },
            "vision_config": {"model_type": "pixtral", **VISION},
            "image_token_index": 12,
            "tie_word_embeddings": False,
        },
    ),
}


def is_known(family: str) -> bool:
    """Whether the installed transformers has the family."""
    return DECODE_LOOP[family][0] in CONFIG_MAPPING_NAMES


def make_family(family: str, seed: int = 0) -> nn.Module:
    """A random model in eval mode, in which biases, norms and the padding's row matter."""
    torch.manual_seed(seed)
    kind, changes = DECODE_LOOP[family]
    if "text_config" in changes:
        settings = {**changes, "text_config": {**SIZES, **changes["text_config"]}}
    elif "n_embd" in changes:
        settings = {**IDS, "initializer_range": 0.15, **changes}
    else:
        removed = {name for name in SIZES if changes.get(name, "") is None}
        settings = {name: value for name, value in {**SIZES, **changes}.items() if name not in removed}
        settings["pad_token_id"] = changes.get("pad_token_id", 0)
    config = AutoConfig.for_model(kind, **copy.deepcopy(settings))
    auto = AutoModelForImageTextToText if "text_config" in changes else AutoModelForCausalLM
    model = auto.from_config(config).float().eval()
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
        for module in model.modules():
            if isinstance(module, nn.Embedding) and module.padding_idx is not None:
                row = module.weight[module.padding_idx]
                row.copy_(module.weight.std() * torch.randn(row.shape, generator=generator))
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = 1, 0
    return model

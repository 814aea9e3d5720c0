"""Model families with the structure of their published checkpoints (experts, latent attention, biases, tied heads), made small."""

from __future__ import annotations

import copy
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

NUM_IDS = 16  # 13 of the tokenizer, and those of images
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
PLAIN_YARN = {
    "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 8, "beta_fast": 32.0,
    "beta_slow": 1.0,
}  # fmt: skip
YARN = {**PLAIN_YARN, "mscale": 1.0, "mscale_all_dim": 1.0}
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
IMAGES = {"image_token_id": 15, "video_token_id": 14, "vision_start_token_id": 15, "vision_end_token_id": 15}
F, S, C, L, H = "full_attention", "sliding_attention", "chunked_attention", "linear_attention", "hybrid"
HEAVY, SPARSE = "heavily_compressed_attention", "compressed_sparse_attention"
WINDOW = {"sliding_window": 5, "head_dim": 8}
ONE_WINDOW = {"layer_types": [S, S, S, F], "num_hidden_layers": 4, **WINDOW}
SHARED_KEYS = {
    **WINDOW, "layer_types": [S, S, F, S, S, F], "num_hidden_layers": 6, "num_kv_shared_layers": 3,
    "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": NUM_IDS,
}  # fmt: skip
SPARSE_SECOND = {"mlp_layer_types": ["dense", "sparse"]}
DELTA = {
    "linear_conv_kernel_dim": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "layer_types": [L, L, L, F], "num_hidden_layers": 4,
}  # fmt: skip
KDA = {
    "q_lora_rank": None, "layer_types": [L, L, L, F], "num_hidden_layers": 4, "num_experts_per_token": 2,
    "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"], "moe_intermediate_size": 16, "linear_head_dim": 8,
    "linear_num_heads": 4, "linear_conv_kernel_dim": 4,
}  # fmt: skip
MAMBA = {
    "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_d_state": 8, "mamba_d_conv": 4,
    "mamba_expand": 2, "mamba_chunk_size": 8,
}  # fmt: skip
NO_ATTENTION = dict.fromkeys(
    ("intermediate_size", "num_attention_heads", "num_key_value_heads", "max_position_embeddings")
)
# Scores of few heads may all be 0, and ties are chosen at random.
INDEXER = {"index_topk": 6, "index_head_dim": 16, "index_n_heads": 16}
QWEN35 = {
    **DELTA, "head_dim": 32,
    "rope_parameters": {**MROPE, "mrope_interleaved": True, "partial_rotary_factor": 0.25},
}  # fmt: skip
TWO_ROPES = {
    "rope_parameters": {kind: {"rope_type": "default", "rope_theta": theta} for kind, theta in ((S, 1e4), (F, 1e6))}
}
GEMMA3 = {**ONE_WINDOW, **TWO_ROPES, "query_pre_attn_scalar": 8}
CAPPED = {
    **WINDOW, "layer_types": [S, F], "query_pre_attn_scalar": 8, "attn_logit_softcapping": 2.0,
    "final_logit_softcapping": 6.0,
}  # fmt: skip
MISTRAL3 = {"head_dim": 8, "rope_parameters": {**YARN, "llama_4_scaling_beta": 0.1}}
SHARED_EXPERT = {**FOUR_EXPERTS, "shared_expert_intermediate_size": 16}

# Model type, then the settings that differ from SIZES; None removes one of SIZES.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "Qwen2-MoE": ("qwen2_moe", SHARED_EXPERT),
    "Qwen3": ("qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
    "Qwen3-MoE": ("qwen3_moe", {**FOUR_EXPERTS, "head_dim": 16, "norm_topk_prob": True}),
    "Qwen3-Next": ("qwen3_next", {**DELTA, **SHARED_EXPERT, "head_dim": 16}),
    "Qwen3.5": ("qwen3_5_text", {**QWEN35, "tie_word_embeddings": True}),
    "Qwen3.5-MoE": ("qwen3_5_moe_text", {**QWEN35, **SHARED_EXPERT}),
    "Qwen4-Exp": ("qwen4_exp_text", {
        **DELTA, **SHARED_EXPERT, "layer_types": [L, L, L, "indexed_attention"], "head_dim": 16, "hc_count": 2,
        "hc_lowrank": 8, "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 8,
        "indexer_compress_ratio": 2,
    }),
    "Llama 3": ("llama", {"head_dim": 8, "rope_parameters": LLAMA3}),
    "Llama 4": ("llama4_text", {
        "layer_types": [C, C, C, F], "num_hidden_layers": 4, "head_dim": 8, "attention_chunk_size": 6, "floor_scale": 8,
        "num_local_experts": 4, "num_experts_per_tok": 1, "intermediate_size_mlp": 48, "no_rope_layers": [1, 1, 1, 0],
        "moe_layers": [0, 1, 2, 3],
    }),
    "Mistral": ("mistral", {"head_dim": 8, "sliding_window": None}),
    "Mistral-window": ("mistral", WINDOW),
    "Ministral": ("ministral", {**ONE_WINDOW, "layer_types": [F, S, S, S]}),
    "Ministral 3": ("ministral3", {**MISTRAL3, "sliding_window": None}),
    "Mixtral": ("mixtral", {**LOCAL_EXPERTS, "sliding_window": None}),
    "Phi-3": ("phi3", {"sliding_window": 5}),
    "Phi-4": ("phi3", {"sliding_window": None}),
    "Phi-4-mini": ("phi3", {
        "sliding_window": None, "tie_word_embeddings": True, "original_max_position_embeddings": 128,
        "rope_parameters": LONGROPE,
    }),
    "PhiMoE": ("phimoe", {**LOCAL_EXPERTS, "lm_head_bias": True, "attention_bias": True, "sliding_window": None}),
    "Gemma": ("gemma", {"head_dim": 8}),
    "Gemma 2": ("gemma2", CAPPED),
    "Gemma 3": ("gemma3_text", GEMMA3),
    "Gemma 3n": ("gemma3n_text", {
        **SHARED_KEYS, **TWO_ROPES, "intermediate_size": [48] * 6, "laurel_rank": 8,
        "activation_sparsity_pattern": [0.95, 0.95, 0.0, 0.0, 0.0, 0.0],
    }),
    "Gemma 4": ("gemma4_text", {
        **SHARED_KEYS, "global_head_dim": 16, "final_logit_softcapping": 6.0, "use_double_wide_mlp": True,
    }),
    "Gemma 4-MoE": ("gemma4_text", {
        **ONE_WINDOW, "global_head_dim": 16, "attention_k_eq_v": True, "num_global_key_value_heads": 1,
        "hidden_size_per_layer_input": 0, "enable_moe_block": True, "num_experts": 4, "top_k_experts": 2,
        "moe_intermediate_size": 16, "final_logit_softcapping": 6.0,
    }),
    "gpt-oss": ("gpt_oss", {
        **LOCAL_EXPERTS, **WINDOW, "layer_types": [S, F, S, F], "num_hidden_layers": 4,
        "rope_parameters": {**PLAIN_YARN, "truncate": False},
    }),
    "GLM-4": ("glm4", {"head_dim": 8}),
    "GLM-4-MoE": ("glm4_moe", {**ROUTED, "first_k_dense_replace": 1, "head_dim": 16, "use_qk_norm": True}),
    "GLM-4.7-Flash": ("glm4_moe_lite", {**LATENT, **ROUTED, **SPARSE_SECOND}),
    "GLM-5": ("glm_moe_dsa", {
        **LATENT, **ROUTED, **SPARSE_SECOND, **INDEXER, "layer_types": ["indexed_attention"] * 2,
        "indexer_types": ["full"] * 2,
    }),
    "DeepSeek-V2": ("deepseek_v2", {
        **LATENT, **ROUTED, "n_group": 2, "first_k_dense_replace": 1, "topk_method": "group_limited_greedy",
    }),
    "DeepSeek-V3": ("deepseek_v3", {
        **LATENT, **ROUTED, "n_group": 2, "first_k_dense_replace": 1, "rope_parameters": YARN,
    }),
    "DeepSeek-V3.2": ("deepseek_v32", {
        **LATENT, **ROUTED, **SPARSE_SECOND, **INDEXER, "n_group": 2, "layer_types": ["indexed_attention"] * 2,
    }),
    "DeepSeek-V4": ("deepseek_v4", {
        "intermediate_size": None, "num_key_value_heads": 1, "head_dim": 16, "partial_rotary_factor": 0.5,
        "q_lora_rank": 16, "num_hidden_layers": 4, "layer_types": [HEAVY, HEAVY, SPARSE, HEAVY],
        "mlp_layer_types": ["hash_moe", "moe", "moe", "moe"], "compress_rates": {SPARSE: 2, HEAVY: 4},
        "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "hc_mult": 2, "o_groups": 2,
        "sliding_window": 5, "o_lora_rank": 8, "index_n_heads": 16, "index_head_dim": 16, "index_topk": 4,
    }),
    "Kimi-Linear": ("kimi_linear", {**LATENT, **KDA, "num_experts": 4}),
    "OLMo 2": ("olmo2", {}),
    "OLMo 3": ("olmo3", ONE_WINDOW),
    "OLMoE": ("olmoe", {"num_experts": 4, "num_experts_per_tok": 2}),
    "OLMo-hybrid": ("olmo_hybrid", DELTA),
    "SmolLM3": ("smollm3", {"num_hidden_layers": 4, "no_rope_layers": [1, 1, 1, 0], "layer_types": [F] * 4}),
    "Granite": ("granite", GRANITE),
    "Granite-MoE": ("granitemoe", {**LOCAL_EXPERTS, **GRANITE}),
    "Granite-4-hybrid": ("granitemoehybrid", {
        **LOCAL_EXPERTS, **GRANITE, **MAMBA, "layer_types": [L, L, F, L], "num_hidden_layers": 4,
        "shared_intermediate_size": 32, "position_embedding_type": "nope",
    }),
    "Falcon-H1": ("falcon_h1", {
        **MAMBA, "mamba_d_ssm": 32, "mamba_n_heads": 2, "mamba_rms_norm": True, "embedding_multiplier": 3.0,
        "lm_head_multiplier": 0.5, "key_multiplier": 0.7, "attention_in_multiplier": 0.9, "ssm_in_multiplier": 1.2,
        "ssm_multipliers": [0.5, 0.8, 1.1, 0.9, 1.2], "mlp_multipliers": [0.9, 0.8],
    }),
    "Nemotron-H": ("nemotron_h", {
        "num_hidden_layers": None, "layers_block_type": [L, "moe", L, F, "mlp"], "head_dim": 8, "ssm_state_size": 8,
        "mamba_num_heads": 4, "mamba_head_dim": 16, "n_groups": 2, "chunk_size": 8, "n_routed_experts": 4,
        "num_experts_per_tok": 2, "moe_intermediate_size": 16, "moe_shared_expert_intermediate_size": 16,
    }),
    "LFM2": ("lfm2", {
        "layer_types": ["conv", "conv", F, "conv"], "num_hidden_layers": 4, "block_multiple_of": 8,
        "block_auto_adjust_ff_dim": False,
    }),
    "LFM2-MoE": ("lfm2_moe", {
        **FOUR_EXPERTS, "layer_types": ["conv", "conv", F, "conv"], "num_hidden_layers": 4, "num_dense_layers": 1,
    }),
    "LFM3": ("lfm3", {
        **TWO_ROPES, **WINDOW, "layer_types": ["conv", F, "conv", S, "conv", F], "num_hidden_layers": 6,
        "conv_L_cache": 7,
    }),
    "Mamba2": ("mamba2", {
        **NO_ATTENTION, "num_heads": 4, "head_dim": 16, "state_size": 8, "n_groups": 2, "chunk_size": 8,
    }),
    "Falcon-Mamba": ("falcon_mamba", {**NO_ATTENTION, "state_size": 8, "time_step_rank": 4}),
    "Bamba": ("bamba", {
        **MAMBA, "num_hidden_layers": 3, "attn_layer_indices": [1],
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
    }),
    "Jamba": ("jamba", {
        "num_hidden_layers": 4, "num_experts": 4, "num_experts_per_tok": 2, "attn_layer_period": 4,
        "attn_layer_offset": 2, "expert_layer_period": 2, "expert_layer_offset": 1, "mamba_d_state": 8,
        "mamba_dt_rank": 4,
    }),
    "Zamba2": ("zamba2", {
        "num_hidden_layers": 4, "layers_block_type": [L, H, L, H], "hybrid_layer_ids": [1, 3], "mamba_d_state": 8,
        "mamba_ngroups": 1, "n_mamba_heads": 4, "mamba_headdim": 16, "chunk_size": 8, "num_mem_blocks": 1,
        "use_mem_rope": True, "use_shared_attention_adapter": False, "adapter_rank": 4, "attention_head_dim": 16,
        "num_key_value_heads": 4, "attention_hidden_size": 64,
    }),
    "RecurrentGemma": ("recurrent_gemma", {
        "num_hidden_layers": 3, "head_dim": 8, "lru_width": 32, "attention_window_size": 5, "logits_soft_cap": 6.0,
    }),
    "Cohere2": ("cohere2", {**ONE_WINDOW, "logit_scale": 0.25}),
    "Command-R": ("cohere", {"logit_scale": 0.25, "use_qk_norm": True}),
    "StarCoder2": ("starcoder2", {"sliding_window": 5}),
    "MiniMax": ("minimax", {**LOCAL_EXPERTS, "layer_types": [L, F], "block_size": 8, "head_dim": 8}),
    "MiniMax-M2": ("minimax_m2", {**LOCAL_EXPERTS, "head_dim": 16}),
    "Hunyuan": ("hunyuan_v1_dense", {"head_dim": 8}),
    "Hunyuan-MoE": ("hunyuan_v1_moe", {"head_dim": 8, "num_experts": 4, "moe_topk": 2}),
    "Hunyuan-V3": ("hy_v3", {**FOUR_EXPERTS, **SPARSE_SECOND, "head_dim": 8}),
    "Ernie 4.5": ("ernie4_5", {"head_dim": 8}),
    "Ernie 4.5-MoE": ("ernie4_5_moe", {
        "moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 16, "moe_num_shared_experts": 1,
        "moe_layer_start_index": 1, "moe_layer_end_index": 1,
    }),
    "Seed-OSS": ("seed_oss", {"head_dim": 8, "attention_dropout": 0.1, "residual_dropout": 0.1}),
    "Exaone 4": ("exaone4", ONE_WINDOW),
    "Exaone-MoE": ("exaone_moe", {
        **ONE_WINDOW, **FOUR_EXPERTS, "num_shared_experts": 1,
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
    }),
    "Apertus": ("apertus", {"rope_parameters": LLAMA3}),
    "Arcee": ("arcee", {"head_dim": 8}),
    "CWM": ("cwm", {**ONE_WINDOW, "layer_types": [F, S, S, S], "bos_token_id": 0, "rope_parameters": LLAMA3}),
    "dots1": ("dots1", {**ROUTED, "first_k_dense_replace": 1}),
    "GPT-2": ("gpt2", {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256}),
    "GPT-NeoX": ("gpt_neox", {}),
    "GPT-J": ("gptj", {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256, "rotary_dim": 4}),
    "OPT": ("opt", {"ffn_dim": 48, "word_embed_proj_dim": 32, "init_std": 0.15}),
    "Bloom": ("bloom", {"hidden_size": 32, "n_layer": 2, "n_head": 4}),
    "Nemotron": ("nemotron", {}),
    "Zaya": ("zaya", {
        "layer_types": [H, H], "head_dim": 16, "num_experts": 4, "moe_intermediate_size": 16, "router_hidden_size": 8,
        "rope_parameters": {H: {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.5}},
    }),
    "Bailing-hybrid": ("bailing_hybrid", {**LATENT, **KDA, "num_experts": 4, "num_expert_group": 2, "topk_group": 1}),
    "MiMo-V2-Flash": ("mimo_v2_flash", {
        "layer_types": [F, S, S], "num_hidden_layers": 3, "mlp_layer_types": ["dense", "sparse", "sparse"],
        "head_dim": 12, "v_head_dim": 8, "sliding_window": 5, "n_routed_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
    }),
    "LongCat-Flash": ("longcat_flash", {
        **LATENT, "num_hidden_layers": None, "num_layers": 2, "ffn_hidden_size": 48, "expert_ffn_hidden_size": 16,
        "n_routed_experts": 4, "zero_expert_num": 2, "moe_topk": 2, "head_dim": 8,
    }),
    "Trinity": ("afmoe", {
        **ONE_WINDOW, **FOUR_EXPERTS, "num_dense_layers": 1, "num_shared_experts": 1, "mup_enabled": True,
    }),
    "Laguna": ("laguna", {
        **SHARED_EXPERT, **SPARSE_SECOND, **WINDOW, "layer_types": [F, S], "num_attention_heads_per_layer": [4, 4],
    }),
    "Solar-open": ("solar_open", {**ROUTED, "head_dim": 8}),
    "Youtu": ("youtu", {**LATENT, "pad_token_id": None}),
    "VaultGemma": ("vaultgemma", CAPPED),
    "NanoChat": ("nanochat", {"final_logit_softcapping": 6.0}),
    "InternLM3": ("internlm3", {"head_dim": 8}),
    "Helium": ("helium", {"head_dim": 8}),
    "StableLM": ("stablelm", {}),
    "Falcon": ("falcon", {"num_kv_heads": 2, "new_decoder_architecture": True, "ffn_hidden_size": 48}),
    "Qwen2.5-VL": ("qwen2_5_vl", {"text_config": {"rope_parameters": MROPE}, "vision_config": VISION, **IMAGES}),
    "Qwen3-VL": ("qwen3_vl", {
        "text_config": {"head_dim": 8, "rope_parameters": {**MROPE, "mrope_interleaved": True}},
        "vision_config": VISION, **IMAGES,
    }),
    "Qwen3-VL-MoE": ("qwen3_vl_moe", {
        "text_config": {
            **FOUR_EXPERTS, "norm_topk_prob": True, "head_dim": 8, "rope_parameters": {**MROPE, "mrope_interleaved": True},
        },
        "vision_config": VISION, **IMAGES,
    }),
    "Qwen3.5 with vision": ("qwen3_5", {"text_config": QWEN35, "vision_config": VISION, **IMAGES}),
    "Gemma 3 with vision": ("gemma3", {
        "text_config": GEMMA3, "vision_config": {**VISION, "vision_use_head": False}, "mm_tokens_per_image": 4,
        "image_token_index": 15, "boi_token_index": 14, "eoi_token_index": 14,
    }),
    "Gemma 4 with vision": ("gemma4", {
        "text_config": {**SHARED_KEYS, "global_head_dim": 16, "final_logit_softcapping": 6.0},
        **{f"{name}_token_id": 15 for name in ("image", "video", "audio")}, "boi_token_id": 14, "eoi_token_id": 14,
        "boa_token_id": 14, "eoa_token_index": 14,
    }),
    "Mistral 3": ("mistral3", {
        "text_config": {**MISTRAL3, "model_type": "ministral3"}, "vision_config": {"model_type": "pixtral", **VISION},
        "image_token_index": 15, "tie_word_embeddings": False,
    }),
}  # fmt: skip

# One of each class. Windows: plain, with capped scores, with sinks, with shared keys. Linear attention of two kinds. Mamba 2:
# with keys in the same layer, without positions. Mamba 1. Convolutions. Images. States outside of the cache.
REPRESENTATIVES = (
    *("Gemma 3", "Gemma 2", "gpt-oss", "Gemma 3n", "Gemma 4", "Qwen3.5", "Kimi-Linear", "Falcon-H1", "Nemotron-H"),
    *("Jamba", "LFM2", "Gemma 3 with vision", "MiniMax"),
)


def is_known(family: str) -> bool:
    """Whether the installed transformers has the family, and all kinds of its layers."""
    if FAMILIES[family][0] not in CONFIG_MAPPING_NAMES:
        return False
    try:
        make_config(family)
    except (ValueError, StrictDataclassError):
        return False
    return True


def make_family(family: str, seed: int = 0, auto: Any = None, **changes: Any) -> nn.Module:
    """A random model in eval mode, in which biases, norms and the padding's row matter; `changes` are of its (text) config."""
    torch.manual_seed(seed)
    if auto is None:
        auto = AutoModelForImageTextToText if "text_config" in FAMILIES[family][1] else AutoModelForCausalLM
    config = make_config(family)
    for name, value in changes.items():
        setattr(config if name == "num_labels" else config.get_text_config(), name, value)
    model = auto.from_config(config).float().eval()
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
        for name, buffer in model.named_buffers():
            if name.endswith(("correction_bias", "expert_bias")):
                buffer.add_(0.1 * torch.randn(buffer.shape, generator=generator))
        for module in model.modules():
            if isinstance(module, nn.Embedding) and module.padding_idx is not None:
                row = module.weight[module.padding_idx]
                row.copy_(module.weight.std() * torch.randn(row.shape, generator=generator))
    if auto.__name__ != "AutoModelForSequenceClassification":
        model.generation_config.eos_token_id, model.generation_config.pad_token_id = 1, 0
    return model


def make_config(family: str) -> Any:
    kind, changes = FAMILIES[family]
    if "text_config" in changes:
        settings = {**changes, "text_config": {**SIZES, **changes["text_config"]}}
    elif "n_layer" in changes:
        settings = {**IDS, "initializer_range": 0.15, **changes}
    else:
        settings = {key: value for key, value in {**SIZES, **changes}.items() if value is not None or key not in SIZES}
        settings["pad_token_id"] = changes.get("pad_token_id", 0)
    return AutoConfig.for_model(kind, **copy.deepcopy(settings))

"""Experts, which transformers joins and vLLM's kernels pack, and Mamba's layers arrive as the policy has them."""

from __future__ import annotations

import pytest
import torch
from transformers import (
    GraniteMoeHybridConfig,
    GraniteMoeHybridForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from lowpeak.arguments.vllm import ServerSettings, VllmSettings
from lowpeak.errors import EngineError
from lowpeak.vllm.weight_sync.push import push_weights, verify_unchanged
from vllm_in_process import TOLERANCE, engine, gap, perturb, slices

SETTINGS = VllmSettings(ServerSettings(()), bucket_bytes=1 << 16)
COMMON = dict(
    vocab_size=300,
    hidden_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=64,
)
COMMON |= dict(max_position_embeddings=128, initializer_range=0.1, pad_token_id=0, eos_token_id=1, bos_token_id=None)


def _qwen3_moe():
    config = Qwen3MoeConfig(**COMMON, moe_intermediate_size=64, num_experts=4, num_experts_per_tok=2, head_dim=32)
    return Qwen3MoeForCausalLM(config).eval()


def _mixtral():
    return MixtralForCausalLM(MixtralConfig(**COMMON, num_local_experts=4, num_experts_per_tok=2)).eval()


@pytest.mark.parametrize("make", [_qwen3_moe, pytest.param(_mixtral, marks=pytest.mark.release)])
def test_experts_arrive_as_transformers_has_them(make, tmp_path):
    torch.manual_seed(0)
    policy = make()
    with engine(policy, tmp_path) as vllm:
        for version in (1, 2):
            perturb(policy, version)
            assert gap(vllm, policy) > 0.1
            push_weights(slices(policy), [vllm], SETTINGS, version)
            assert gap(vllm, policy) < TOLERANCE
            verify_unchanged([vllm])
        lost = "layers.1.mlp.experts.down_proj"
        with pytest.raises(EngineError, match=r": model\.layers\.1\.\w+\.experts\.down_proj"):
            push_weights((piece for piece in slices(policy) if lost not in piece.name), [vllm], SETTINGS, 3)
        push_weights(slices(policy), [vllm], SETTINGS, 3)
        assert gap(vllm, policy) < TOLERANCE


@pytest.mark.release
def test_mamba_layers_arrive_as_transformers_has_them(tmp_path):
    torch.manual_seed(0)
    sizes = {"n_heads": 8, "d_head": 32, "d_state": 16, "n_groups": 1, "chunk_size": 8}
    config = GraniteMoeHybridConfig(
        **COMMON,
        **{f"mamba_{name}": size for name, size in sizes.items()},
        layer_types=["linear_attention", "full_attention"],
        num_local_experts=0,
        shared_intermediate_size=64,
    )
    policy = GraniteMoeHybridForCausalLM(config).eval()
    with engine(policy, tmp_path) as vllm:
        for version in (1, 2):
            perturb(policy, version)
            push_weights(slices(policy), [vllm], SETTINGS, version)
            assert gap(vllm, policy) < TOLERANCE
            verify_unchanged([vllm])

"""Bytes per token are those of the cache that transformers fills."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, GPT2Config, GPT2LMHeadModel, PreTrainedConfig
from transformers.cache_utils import DynamicCache

from lowpeak.errors import EngineError
from lowpeak.rollout.native import bytes_per_token
from tiny import tiny_model


def _measured(model: nn.Module) -> int:
    cache = DynamicCache()
    with torch.no_grad():
        model(input_ids=torch.tensor([[1, 2, 3]]), past_key_values=cache, use_cache=True)
    return sum(states.nbytes for layer in cache.layers for states in (layer.keys, layer.values)) // 3


def _latent() -> nn.Module:
    return DeepseekV3ForCausalLM(
        DeepseekV3Config(
            vocab_size=13, hidden_size=32, intermediate_size=32, moe_intermediate_size=16, num_hidden_layers=1,
            num_attention_heads=2, num_key_value_heads=2, n_routed_experts=2, n_group=1, topk_group=1,
            num_experts_per_tok=1, kv_lora_rank=8, q_lora_rank=8, qk_rope_head_dim=4, qk_nope_head_dim=8, v_head_dim=6,
        )
    )  # fmt: skip


@pytest.mark.parametrize(
    "make",
    [
        tiny_model,
        lambda: tiny_model(dtype=torch.bfloat16, hidden=64, layers=3),
        lambda: GPT2LMHeadModel(GPT2Config(vocab_size=13, n_embd=32, n_layer=3, n_head=4)),
    ],
    ids=["grouped heads", "bf16", "no key-value heads in the config"],
)
def test_bytes_per_token_are_those_of_a_real_cache(make):
    model = make()
    assert bytes_per_token(model) == _measured(model)


def test_latent_attention_is_counted_as_if_its_keys_were_stored_in_full():
    # Some versions of transformers store the latent instead, which takes less.
    assert bytes_per_token(_latent()) == 2 * (8 + 4 + 6) * 4 >= _measured(_latent())


class _LayersDiffer(PreTrainedConfig):
    """A config whose layers have unlike widths, which transformers refuses to read as one number."""

    hidden_size, num_hidden_layers, num_attention_heads = 32, 2, 4
    per_layer_config = (SimpleNamespace(head_dim=8), SimpleNamespace(head_dim=16))

    @property
    def head_dim(self) -> int:
        raise RuntimeError("head_dim may vary across layers")


def test_where_layers_differ_the_widest_counts():
    model = nn.Linear(2, 2)
    model.config = _LayersDiffer()
    assert bytes_per_token(model) == 2 * 4 * 2 * 16 * 4


def test_a_config_without_sizes_is_an_error_that_names_them():
    model = nn.Linear(2, 2)
    model.config = PreTrainedConfig()
    with pytest.raises(EngineError, match=r"hidden_size.*num_hidden_layers"):
        bytes_per_token(model)

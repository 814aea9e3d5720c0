"""The KV cache equals transformers' concatenating cache, bytes per token included; a prefill is a forward of each prompt."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    PreTrainedConfig,
)
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from forest_cases import model_of
from lowpeak.errors import EngineError
from lowpeak.rollout.native import slots
from lowpeak.rollout.native.cache import (
    SlotCache,
    bucket_size,
    cache_argument,
    left_pad,
    prefill_prompts,
    split_prefill,
)
from lowpeak.rollout.native.cache_bytes import bytes_per_token, sequence_bytes
from lowpeak.rollout.native.slots import MAX_COPIED, PromptLayer
from tiny_models import tiny_model


def _states(num_rows: int, length: int, seed: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    # Keys and values of unlike width, as models with latent attention have them, and keys that autocast left wide.
    keys = torch.randn(num_rows, 2, length, 4, generator=generator)
    return keys, torch.randn(num_rows, 2, length, 3, generator=generator).to(dtype)


def _prefilled(num_prompts: int, length: int, dtype: torch.dtype = torch.float32, layer: type = DynamicLayer) -> Cache:
    cache = Cache(layer_class_to_replicate=layer)
    for i in range(2):
        cache.update(*_states(num_prompts, length, i, dtype), i)
    return cache


def _filled(num_rows: int = 5, num_columns: int = 206) -> tuple[SlotCache, Cache]:
    """Rows of two prompts of six tokens, three of the first, and the same by transformers' own means."""
    ours, theirs = SlotCache(), _prefilled(2, 6)
    rows = [0, 0, 0, 1, 1][:num_rows]
    ours.reserve(num_rows, num_columns, 0)
    ours.place(_prefilled(2, 6, layer=PromptLayer), rows, [6, 6], range(len(rows)))
    theirs.batch_select_indices(torch.tensor(rows))
    return ours, theirs


def test_tokens_are_added_behind_the_prompts_in_buckets_of_cleared_columns():
    ours, theirs = _filled()
    for layer in ours.layers:  # what an allocator may hand out
        for buffer in layer.buffers:
            buffer[:, 64:] = float("nan")
    for column in range(6, 139):
        seen = ours.begin(torch.full((5,), column), column + 1)
        assert column < seen == min(206, bucket_size(column + 1))
        for layer in range(2):
            states = _states(5, 1, 100 + column)
            for mine, other in zip(ours.update(*states, layer), theirs.update(*states, layer), strict=True):
                assert torch.equal(mine[:, :, : column + 1], other)
                assert mine.shape[2] == seen
                assert not mine[:, :, column + 1 :].any()
        assert ours.get_seq_length() == seen - 1


def test_several_tokens_go_to_the_columns_of_each_slot_and_padding_goes_nowhere():
    ours, theirs = _filled()
    before = [layer.buffers[1].clone() for layer in ours.layers]
    assert ours.begin_feed(2, [6, 4], [2, 5]) == 9
    for layer in range(2):
        keys, values = _states(2, 5, 100 + layer)
        seen = ours.update(keys, values, layer)[1]
        assert torch.equal(
            seen[0], torch.cat([theirs.layers[layer].values[2, :, :6], values[0, :, :2], seen[0, :, 8:]], 1)
        )
        assert torch.equal(seen[1], torch.cat([theirs.layers[layer].values[3, :, :4], values[1]], 1))
        assert not seen[0, :, 8:].any()
        for slot in (0, 1, 4):
            assert torch.equal(ours.layers[layer].buffers[1][slot, :6], before[layer][slot, :6])
    assert ours.get_seq_length() == 4


@pytest.mark.parametrize("number", [1, 8, 9, 64, 100, 129, 300, 1025, 40_000])
def test_a_bucket_is_a_multiple_of_eight_and_adds_a_sixteenth_at_most(number):
    bucket = bucket_size(number)
    assert bucket % 8 == 0
    assert number <= bucket <= max(number + 7, number * 17 / 16)
    assert bucket_size(bucket) == bucket


def test_slots_need_not_have_the_columns_of_a_prompt_that_none_continues():
    ours, theirs = SlotCache(), _prefilled(2, 26, layer=PromptLayer)
    ours.reserve(2, 10, 0)
    ours.place(theirs, [1, 1], [26, 4], [0, 1])
    for mine, other in zip(ours.layers, theirs.layers, strict=True):
        assert torch.equal(mine.buffers[0][:, :4].transpose(1, 2), other.keys[1:, :, -4:].expand(2, -1, -1, -1))


@pytest.mark.parametrize("max_copied", [1, 1 << 22])
def test_slots_that_are_moved_are_read_before_any_is_written(max_copied, monkeypatch):
    monkeypatch.setattr(slots, "MAX_COPIED", max_copied)
    ours, theirs = _filled()
    ours.move([0, 4, 1], [4, 0, 3], 6)
    for layer, other in zip(ours.layers, theirs.layers, strict=True):
        expected = other.keys[torch.tensor([4, 3, 2, 3, 0])]
        assert torch.equal(layer.buffers[0][:, :6].transpose(1, 2), expected)


@pytest.mark.parametrize("max_copied", [1, 1 << 22])
def test_slots_become_narrower_in_place_and_keep_what_the_first_ones_hold(max_copied, monkeypatch):
    monkeypatch.setattr(slots, "MAX_COPIED", max_copied)
    ours, theirs = _filled(num_rows=4, num_columns=100)
    pointers = [buffer.data_ptr() for layer in ours.layers for buffer in layer.buffers]
    ours.begin(torch.full((4,), 6), 7)
    ours.reserve(10, 40, 4)
    ours.reserve(8, 50, 4)  # fewer slots change nothing
    for layer, other in zip(ours.layers, theirs.layers, strict=True):
        assert layer.buffers[1].shape == (10, 40, 2, 3)
        assert torch.equal(layer.buffers[1][:4, :6].transpose(1, 2), other.values)
        assert not layer.buffers[1][4:].any()
    assert [buffer.data_ptr() for layer in ours.layers for buffer in layer.buffers] == pointers
    ours.begin(torch.full((4,), 6), 7)
    assert torch.equal(ours.layers[1].keys[:, :, :6], theirs.layers[1].keys)


def test_one_buffer_has_all_layers_and_no_more_than_the_slots_take():
    ours, tokens = SlotCache(), 5 * 206
    ours.reserve(5, 206, 0)
    ours.place(_prefilled(2, 6, layer=PromptLayer), [0, 0, 0, 1, 1], [6, 6], range(5))
    (storage,) = {x.untyped_storage() for layer in ours.layers for x in layer.buffers}
    assert (ours.most_slots(206), ours.most_slots(103), ours.most_slots(207)) == (5, 10, 4)
    assert storage.nbytes() == 2 * tokens * 2 * (4 + 3) * 4


def test_rows_that_are_too_many_to_be_copied_at_once_go_in_parts():
    many = MAX_COPIED // (6 * 2 * 4) + 3
    rows = [i % 2 for i in range(many)]
    ours, theirs = SlotCache(), _prefilled(2, 6, layer=PromptLayer)
    ours.reserve(many, 6, 0)
    ours.place(theirs, rows, [6, 6], range(len(rows)))
    assert torch.equal(ours.layers[1].buffers[0][:, :6].transpose(1, 2), theirs.layers[1].keys[torch.tensor(rows)])


def test_keys_that_autocast_left_wide_are_stored_as_their_values():
    ours, theirs = SlotCache(), _prefilled(1, 6, torch.bfloat16, PromptLayer)
    assert theirs.layers[0].keys.dtype == torch.bfloat16
    ours.reserve(2, 10, 0)
    ours.place(theirs, [0, 0], [6], [0, 1])
    ours.begin(torch.tensor([6, 6]), 7)
    keys, values = ours.update(*_states(2, 1, 5, torch.bfloat16), 0)
    assert keys.dtype == values.dtype == torch.bfloat16
    assert torch.equal(keys[0, :, :6], _states(1, 6, 0)[0][0].bfloat16())


PROMPTS = [(2, 3, 4, 5, 6, 7, 8), (9, 9), (4, 5, 6), (3, 2, 4), (12,)]


@pytest.mark.parametrize(
    ("max_tokens", "parts"),
    [(1, [[0], [2], [3], [1], [4]]), (8, [[0], [2, 3], [1, 4]]), (1000, [[0, 2, 3, 1, 4]])],
)
def test_prompts_share_a_forward_while_its_padded_tokens_allow(max_tokens, parts):
    assert list(split_prefill([0, 2, 3, 1, 4], [len(ids) for ids in PROMPTS], max_tokens)) == parts


def test_logits_and_slots_are_those_of_each_prompt_alone():
    model, lengths = tiny_model(), [len(ids) for ids in PROMPTS]
    rows = [0, 0, 1, 2, 2, 2, 3, 4]
    ours = SlotCache()
    with torch.no_grad():
        logits, prefilled = prefill_prompts(model, PROMPTS, torch.device("cpu"))
        ours.reserve(10, 12, 0)
        ours.place(prefilled, rows, lengths, range(2, 10))
        for prompt, ids in enumerate(PROMPTS):
            alone = DynamicCache()
            expected = model(input_ids=torch.tensor([ids]), use_cache=True, **{cache_argument(model): alone}).logits[
                0, -1
            ]
            torch.testing.assert_close(logits[prompt], expected, atol=1e-5, rtol=1e-5)
            for slot in [2 + i for i, row in enumerate(rows) if row == prompt]:
                for mine, other in zip(ours.layers, alone.layers, strict=True):
                    for buffer, states in zip(mine.buffers, (other.keys, other.values), strict=True):
                        placed = buffer[slot, : len(ids)].transpose(0, 1)
                        torch.testing.assert_close(placed, states[0], atol=1e-5, rtol=1e-5)


def test_a_prompt_is_padded_with_its_own_token_so_that_no_penalty_meets_another():
    assert left_pad([(5, 6, 7), (4, 3)], torch.device("cpu")).tolist() == [[5, 6, 7], [4, 4, 3]]


def _measured(model: nn.Module) -> int:
    cache = DynamicCache()
    with torch.no_grad():
        model(input_ids=torch.tensor([[1, 2, 3]]), use_cache=True, **{cache_argument(model): cache})
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
        _latent,
    ],
    ids=["grouped heads", "bf16", "no key-value heads in the config", "latents"],
)
def test_bytes_per_token_are_those_of_a_real_cache(make):
    model = make()
    assert bytes_per_token(model) == _measured(model)


def test_a_window_counts_no_more_tokens_than_it_has():
    model = model_of("Mistral")
    assert [sequence_bytes(model, n) // (2 * 2 * 2 * 16 * 4) for n in (1, 3, 4, 5, 100)] == [1, 3, 4, 4, 4]


@pytest.mark.parametrize(("sizes", "width"), [({}, 32), ({"num_attention_heads": 4, "head_dim": 16}, 64)])
def test_code_that_cannot_run_without_numbers_is_bounded_by_keys_and_values_of_each_head(sizes, width):
    model = nn.Linear(2, 2)
    model.config = LlamaConfig(hidden_size=32, num_hidden_layers=2, **sizes)
    assert bytes_per_token(model) == 2 * 2 * width * 4


def test_a_config_without_sizes_is_an_error_that_names_them():
    model = nn.Linear(2, 2)
    model.config = PreTrainedConfig()
    with pytest.raises(EngineError, match=r"hidden_size.*num_hidden_layers"):
        bytes_per_token(model)

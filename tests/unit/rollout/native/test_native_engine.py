"""What the native engine promises around the tokens: draws, waves, budget, refusals, and a context left clean."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pytest
import torch
from accelerate import cpu_offload
from torch import nn
from transformers import (
    AttentionInterface,
    Lfm2Config,
    Lfm2ForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from lowpeak.arguments.sampling import Sampling
from lowpeak.errors import EngineError
from lowpeak.records import Group, Prompt
from lowpeak.rollout.engine import RolloutEngine
from lowpeak.rollout.native.cache import SlotCache, cache_argument
from lowpeak.rollout.native.cache_bytes import bytes_per_token, sequence_bytes
from lowpeak.rollout.native.cache_layers import storing_layers
from lowpeak.rollout.native.engine import NativeEngine
from tiny_models import char_tokenizer, tiny_model

TEXTS = ("12=", "987654321=", "5=", "33333=", "0=", "4711=")
SAMPLING = Sampling(num_generations=4, max_new_tokens=12, seed=3)


def prompts() -> list[Prompt]:
    tokenizer = char_tokenizer()
    return [Prompt(10 + i, tuple(tokenizer(text)["input_ids"]), text) for i, text in enumerate(TEXTS)]


def engine(model: nn.Module, kv_cache_bytes: int = 1 << 24, **settings) -> NativeEngine:
    made = NativeEngine(lambda: contextlib.nullcontext(model), char_tokenizer(), lambda: kv_cache_bytes, **settings)
    made.load([], 0)
    return made


def tokens(groups: list[Group]) -> dict[int, list[list[int]]]:
    return {group.prompt.serial: [c.ids.tolist() for c in group.completions] for group in groups}


class Forward(NamedTuple):
    """What a forward computes; of a decoding one its columns with the new token, the cache's bytes and the mask's dimensions."""

    rows: int
    tokens: int
    columns: int = 0
    held_bytes: int = 0
    mask_dims: int = 0


@contextlib.contextmanager
def watched(model: nn.Module) -> Iterator[list[Forward]]:
    seen: list[Forward] = []

    def note(module, args, kwargs) -> None:
        made, cache = Forward(*kwargs["input_ids"].shape), kwargs[cache_argument(module)]
        if isinstance(cache, SlotCache):
            storages = {states.untyped_storage() for layer in cache.layers for states in (layer.keys, layer.values)}
            held = sum(storage.nbytes() for storage in storages)  # used or not
            made = made._replace(columns=cache.get_seq_length() + 1, held_bytes=held)
            made = made._replace(mask_dims=kwargs["attention_mask"].ndim)
        seen.append(made)

    handle = model.register_forward_pre_hook(note, with_kwargs=True)
    yield seen
    handle.remove()


def decoding(seen: list[Forward]) -> list[Forward]:
    return [each for each in seen if each.columns]


def test_parameters_that_are_not_plain_tensors_are_never_read_in_inference_mode():
    class Sharded(nn.Parameter):
        pass

    model, modes = tiny_model(), []
    model.register_forward_pre_hook(lambda module, args: modes.append(torch.is_inference_mode_enabled()))
    expected = tokens(engine(model).generate(prompts(), SAMPLING))
    assert all(modes)
    modes.clear()
    model.model.norm.weight = Sharded(model.model.norm.weight.detach())
    assert tokens(engine(model).generate(prompts(), SAMPLING)) == expected
    assert modes
    assert not any(modes)


def test_an_error_in_the_middle_leaves_the_hold_and_goes_on():
    ends = []

    @contextlib.contextmanager
    def hold() -> Iterator[nn.Module]:
        try:
            yield tiny_model()
        finally:
            ends.append(1)

    def interrupt(useful: int, computed: int) -> None:
        raise KeyboardInterrupt

    made = engine(tiny_model(), on_tokens=interrupt)
    made.gather_policy = hold
    with pytest.raises(KeyboardInterrupt):
        made.generate(prompts(), SAMPLING)
    assert ends == [1]
    assert torch.is_grad_enabled()


def test_waves_follow_the_budget_of_the_moment():
    model, heard = tiny_model(), []
    budgets = iter([1 << 24, (10 + 12) * bytes_per_token(model)])
    made = engine(model, on_tokens=lambda _, rows: heard.append(rows))
    made.kv_cache_bytes = lambda: next(budgets)
    made.generate(prompts()[:1], SAMPLING)
    assert max(heard[1:]) == SAMPLING.num_generations
    heard.clear()
    made.generate(prompts()[:1], SAMPLING)
    assert heard[0] == SAMPLING.num_generations  # the first tokens of a group are drawn together
    assert max(heard[1:]) == 1


ENDING = replace(SAMPLING, max_new_tokens=40, num_generations=6, stop_token_ids=(3, 4))


@pytest.mark.parametrize("settings", [{}, {"repetition_penalty": 1.3}, {"temperature": 0.0}, {"stop": ("77", "0")}])
@pytest.mark.parametrize("slots", [1, 3, 8, 13])
def test_rows_that_enter_later_have_the_same_tokens_within_the_budget(slots, settings):
    model, sampling = tiny_model(), replace(ENDING, **settings)
    expected = engine(model).generate(prompts(), sampling)
    with watched(model) as seen:
        made = engine(model, kv_cache_bytes=slots * (10 + 40) * bytes_per_token(model)).generate(prompts(), sampling)
    assert max(each.rows * each.columns for each in seen) <= slots * (10 + 40)
    assert max(each.rows for each in decoding(seen)) >= slots
    assert sum(each.rows for each in seen if each.tokens > 1) == len(TEXTS)  # each prompt is forwarded once
    assert tokens(made) == tokens(expected)
    for group, other in zip(made, expected, strict=True):
        for mine, its in zip(group.completions, other.completions, strict=True):
            assert mine.finish_reason == its.finish_reason
            torch.testing.assert_close(mine.logprobs, its.logprobs, atol=1e-5, rtol=0)


def test_rows_of_a_window_that_enter_later_have_the_same_tokens_in_slots_of_the_windows_bytes():
    torch.manual_seed(0)
    model = MistralForCausalLM(
        MistralConfig(
            vocab_size=13, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, sliding_window=6, eos_token_id=1, pad_token_id=0, initializer_range=0.2,
        )
    ).eval()  # fmt: skip
    budget = 4 * 6 * bytes_per_token(model)
    with watched(model) as seen:
        made = engine(model, kv_cache_bytes=budget).generate(prompts(), ENDING)
    assert max(each.rows for each in decoding(seen)) == 4
    assert max(each.held_bytes for each in seen) == budget
    assert sum(each.rows for each in seen if each.tokens > 1) == len(TEXTS)  # each prompt is forwarded once
    assert tokens(made) == tokens(engine(model).generate(prompts(), ENDING))


@pytest.mark.parametrize("recurrent", ["linear_attention", "conv"])
def test_rows_with_states_that_enter_later_have_the_same_tokens_within_the_budget(recurrent, monkeypatch):
    torch.manual_seed(0)
    sizes = {
        "vocab_size": 13, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_hidden_layers": 2,
        "num_key_value_heads": 2, "eos_token_id": 1, "pad_token_id": 0, "initializer_range": 0.2,
        "layer_types": [recurrent, "full_attention"],
    }  # fmt: skip
    heads = {f"linear_{name}": 2 for name in ("num_value_heads", "num_key_heads")}
    widths = {f"linear_{name}_head_dim": 8 for name in ("key", "value")}
    experts = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16}
    model = (
        Lfm2ForCausalLM(Lfm2Config(**sizes))
        if recurrent == "conv"
        else Qwen3NextForCausalLM(Qwen3NextConfig(**sizes, **heads, **widths, **experts, head_dim=8))
    ).eval()
    held, allocate = [], SlotCache.allocate

    def note(cache: SlotCache, like: object) -> None:
        allocate(cache, like)
        held.append(sum(buffer.nbytes for layer in storing_layers(cache) for buffer in layer.buffers))

    monkeypatch.setattr(SlotCache, "allocate", note)
    budget = 4 * sequence_bytes(model, 10 + 40)
    made = engine(model, kv_cache_bytes=budget).generate(prompts(), ENDING)
    assert held == [pytest.approx(budget, rel=0.02)]
    assert tokens(made) == tokens(engine(model).generate(prompts(), ENDING))


def test_the_batch_stays_full_while_rows_wait():
    model, sampling = tiny_model(), replace(ENDING, num_generations=4)
    same_length = [replace(prompts()[1], serial=i) for i in range(40)]
    with watched(model) as seen:
        groups = engine(model, kv_cache_bytes=16 * (10 + 40) * bytes_per_token(model)).generate(same_length, sampling)
    useful = sum(len(c) - 1 for group in groups for c in group.completions)
    longest = max(len(c) for group in groups for c in group.completions)
    assert len(decoding(seen)) < useful / 16 + longest
    assert sum(each.rows for each in decoding(seen)) == useful  # rows that have ended leave the batch


@pytest.mark.parametrize("tokens_of_budget", [100, 200])
def test_short_prompts_beside_a_long_one_stay_within_the_budget(tokens_of_budget):
    """The long row's columns are everybody's: as it grows, fewer short rows may stand beside it."""
    model = tiny_model()
    lengths = [60, 2, 3, 60, 2, 2, 4, 3, 2, 40]
    uneven = [Prompt(i, tuple(2 + (i * k) % 10 for k in range(1, n + 1)), "") for i, n in enumerate(lengths)]
    sampling = replace(SAMPLING, max_new_tokens=40, num_generations=2, stop_token_ids=(3,))
    with watched(model) as seen:
        made = engine(model, kv_cache_bytes=tokens_of_budget * bytes_per_token(model)).generate(uneven, sampling)
    assert 0 < max(each.held_bytes for each in seen) <= tokens_of_budget * bytes_per_token(model)
    assert tokens(made) == tokens(engine(model).generate(uneven, sampling))


class _Autocast(nn.Module):
    """A model under bf16 autocast with fp32 weights, as accelerate prepares it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.config, self.generation_config, self.inner = model.config, model.generation_config, model

    def get_base_model(self) -> nn.Module:
        return self.inner

    def forward(self, **inputs):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.inner(**inputs)


def test_under_autocast_the_budget_is_counted_in_the_bytes_that_are_stored():
    model = _Autocast(tiny_model())
    same_length = [replace(prompts()[1], serial=i) for i in range(9)]
    budget = 8 * (10 + 12) * bytes_per_token(model)
    with watched(model) as seen:
        made = engine(model, kv_cache_bytes=budget).generate(same_length, SAMPLING)
    assert max(each.rows for each in decoding(seen)) == 16  # of bf16 twice as many as of fp32
    assert max(each.held_bytes for each in seen) == budget
    assert tokens(made) == tokens(engine(model).generate(same_length, SAMPLING))


def test_attention_that_makes_its_own_mask_gives_the_same_tokens():
    AttentionInterface.register("own_mask", sdpa_attention_forward)
    AttentionMaskInterface.register("own_mask", sdpa_mask)
    expected = engine(tiny_model()).generate(prompts(), ENDING)
    model = tiny_model()
    model.config._attn_implementation = "own_mask"
    with watched(model) as seen:
        made = engine(model, kv_cache_bytes=7 * (10 + 40) * bytes_per_token(model)).generate(prompts(), ENDING)
    assert {each.mask_dims for each in decoding(seen)} == {2}
    assert tokens(made) == tokens(expected)


@pytest.mark.parametrize("setting", [SAMPLING, replace(SAMPLING, repetition_penalty=1.3)])
def test_a_model_whose_weights_wait_elsewhere_generates_on_its_device(setting):
    expected = tokens(engine(tiny_model()).generate(prompts(), setting))
    offloaded = cpu_offload(tiny_model(), torch.device("cpu"))
    assert {p.device.type for p in offloaded.parameters()} == {"meta"}
    assert tokens(engine(offloaded, device=torch.device("cpu")).generate(prompts(), setting)) == expected


def test_the_native_engine_shares_its_weights_and_needs_a_load():
    made = NativeEngine(lambda: contextlib.nullcontext(tiny_model()), char_tokenizer(), lambda: 1 << 24)
    assert isinstance(made, RolloutEngine)
    assert made.policy_version is None
    with pytest.raises(EngineError, match=r"load\(\)"):
        made.generate(prompts(), SAMPLING)
    unread = iter([1, 2])
    made.load(unread, 5)
    assert list(unread) == [1, 2]
    made.sleep()
    made.wake()
    assert made.policy_version == 5
    assert made.generate([], SAMPLING) == []


def test_a_draw_depends_on_seed_rollout_serial_and_number_alone():
    made = engine(tiny_model())
    whole = tokens(made.generate(prompts(), SAMPLING))

    def drawn(prompt_list=None, **changed):
        return tokens(made.generate(prompt_list or prompts(), replace(SAMPLING, **changed)))

    assert drawn(prompts()[::-1]) == whole
    larger = drawn(num_generations=7)
    assert {serial: rows[:4] for serial, rows in larger.items()} == whole
    parts = [drawn(num_generations=count, first_completion=first) for first, count in ((0, 1), (1, 3))]
    assert {serial: parts[0][serial] + parts[1][serial] for serial in whole} == whole
    assert whole not in (drawn(seed=4), drawn(rollout=1))
    assert drawn([replace(prompts()[0], serial=99)])[99] != whole[10]


MINIMUM = {"stop_token_ids": (2, 3, 4, 5, 6, 7), "stop": ("8",), "min_new_tokens": 3}


def test_no_completion_ends_before_the_minimum_by_a_token_or_a_string():
    ended = [c for g in engine(tiny_model()).generate(prompts(), replace(SAMPLING, **MINIMUM)) for c in g.completions]
    assert min(len(c.ids) for c in ended) == 4
    ends = torch.tensor([1, *MINIMUM["stop_token_ids"]])
    assert not any(torch.isin(c.ids[:3], ends).any() for c in ended)
    freely = engine(tiny_model()).generate(prompts(), replace(SAMPLING, **{**MINIMUM, "min_new_tokens": 0}))
    assert min(len(c.ids) for g in freely for c in g.completions) < 3


@pytest.mark.parametrize("changed", [{"top_k": 5, "repetition_penalty": 1.2}, MINIMUM, {**MINIMUM, "top_p": 0.9}])
def test_completions_are_records_of_the_contract_with_the_logprobs_of_a_plain_forward(changed):
    model, prompt_list = tiny_model(), prompts()
    groups = engine(model).generate(prompt_list, replace(SAMPLING, temperature=0.8, **changed))
    assert [group.prompt for group in groups] == prompt_list
    for group in groups:
        assert len(group.completions) == 4
        for completion in group.completions:
            dtypes = completion.ids.dtype, completion.logprobs.dtype, completion.loss_mask.dtype
            assert dtypes == (torch.int32, torch.float32, torch.bool)
            assert completion.loss_mask.all()
            assert len(completion.ids) == len(completion.loss_mask)
            ids = torch.tensor([[*group.prompt.ids, *completion.ids.tolist()]])
            with torch.no_grad():
                logits = model(input_ids=ids).logits[0, len(group.prompt.ids) - 1 : -1].float()
            expected = (logits / 0.8).log_softmax(-1).gather(-1, completion.ids.long()[:, None])[:, 0]
            torch.testing.assert_close(completion.logprobs, expected, atol=1e-5, rtol=0)


def test_generating_moves_no_random_state_and_leaves_weights_that_can_be_trained():
    model, graphs = tiny_model(), []
    states = (torch.get_rng_state(), random.getstate(), np.random.get_state())
    handle = model.register_forward_hook(lambda module, args, output: graphs.append(output.logits.requires_grad))
    groups = engine(model).generate(prompts(), SAMPLING)
    handle.remove()
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert all(np.array_equal(a, b) for a, b in zip(np.random.get_state(), states[2], strict=True))
    assert set(graphs) == {False}
    tensors = [x for group in groups for c in group.completions for x in (c.ids, c.logprobs, c.loss_mask)]
    assert not any(tensor.is_inference() for tensor in tensors)
    model(input_ids=torch.tensor([[2, 3]])).logits.sum().backward()
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize(
    ("context", "prompt_list", "kv_cache_bytes", "match"),
    [
        (21, prompts(), 1 << 24, r"11 .*10 .*12 .*21"),
        (512, [Prompt(3, (), "a row")], 1 << 24, "3, 'a row'"),
        (512, prompts(), 100, "kv_cache_bytes"),
    ],
)
def test_a_row_that_cannot_be_generated_is_an_error_with_the_numbers(context, prompt_list, kv_cache_bytes, match):
    with pytest.raises(EngineError, match=match):
        engine(tiny_model(context=context), kv_cache_bytes=kv_cache_bytes).generate(prompt_list, SAMPLING)

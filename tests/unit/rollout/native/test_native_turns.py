"""Turns of conversations: the tokens of `generate` for any slots, tools and order, with each token forwarded once."""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import nn
from transformers import (
    AttentionInterface,
    FalconConfig,
    FalconForCausalLM,
    FalconH1Config,
    FalconH1ForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Lfm2Config,
    Lfm2ForCausalLM,
    Llama4ForCausalLM,
    Llama4TextConfig,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from lowpeak.arguments.sampling import Sampling
from lowpeak.errors import EngineError
from lowpeak.records import Completion, Prompt
from lowpeak.rollout.native import admission, decode_loop
from lowpeak.rollout.native.cache import SlotCache, cache_argument
from lowpeak.rollout.native.cache_bytes import bytes_per_token, sequence_bytes
from lowpeak.rollout.native.engine import NativeEngine
from lowpeak.rollout.turns import SampledTurn, TurnQueue, TurnRequest
from tiny_models import char_tokenizer, tiny_model
from turn_programs import Delay, Programs, by_generate

SAMPLING = Sampling(num_generations=4, max_new_tokens=60, seed=3, stop_token_ids=(3, 4))
LONGEST = 24 + 60  # tokens of a conversation
Log = list[tuple[TurnRequest, SampledTurn]]


def engine(model: nn.Module, kv_cache_bytes: int = 1 << 24, **settings) -> NativeEngine:
    made = NativeEngine(lambda: contextlib.nullcontext(model), char_tokenizer(), lambda: kv_cache_bytes, **settings)
    made.load([], 0)
    return made


def prompts(number: int = 16) -> list[Prompt]:
    """Prompts of 1 to 24 tokens, of which the first ten are shared."""
    rng = random.Random(1)
    shared = [rng.randrange(2, 13) for _ in range(10)]
    lengths = [1, 24, *(rng.randrange(12, 25) for _ in range(number - 2))]
    return [Prompt(5 + i, tuple((shared + [2 + i % 11] * n)[:n]), "") for i, n in enumerate(lengths)]


def delays(seed: int, most: float) -> Delay:
    return lambda conversation, turn: random.Random(f"{seed}{conversation}{turn}").random() * most


@cache
def alone(ids: tuple[int, ...], key: tuple[int, int], max_tokens: int, sampling: Sampling) -> Completion:
    return by_generate(engine(tiny_model()), TurnRequest(key, ids, max_tokens, key), sampling)


def check_turns(log: Log, sampling: Sampling, answer: Callable[..., Completion] = alone) -> None:
    """Compare each turn with what `generate` makes of its request by itself."""
    for request, turn in log:
        expected = answer(tuple(request.ids), request.key, request.max_tokens, sampling)
        assert turn.ids == expected.ids.tolist()
        assert turn.finish_reason == expected.finish_reason
        torch.testing.assert_close(torch.tensor(turn.logprobs), expected.logprobs, atol=1e-5, rtol=0)


@pytest.mark.parametrize("slots", [64, 16, 3, 1])
def test_turns_are_those_of_generate_for_any_number_of_slots_and_delay_of_tools(slots):
    model = tiny_model()
    made = engine(model, slots * LONGEST * bytes_per_token(model))
    log = Programs(prompts(), SAMPLING, delay=delays(slots, 0.02)).run(made)
    assert len({request.conversation for request, _ in log}) == 64
    assert len(log) > 128
    check_turns(log, SAMPLING)


@pytest.mark.parametrize(
    "settings",
    [
        {"stop": ("77", "0")},
        {"repetition_penalty": 1.3},
        {"temperature": 0.0},
        {"temperature": 0.7, "top_p": 0.9, "top_k": 8},
        {"min_p": 0.05},
    ],
    ids=str,
)
def test_penalties_filters_and_ends_see_what_they_see_in_a_conversation_of_one_turn(settings):
    sampling = replace(SAMPLING, num_generations=2, **settings)
    made = engine(tiny_model(), 3 * LONGEST * bytes_per_token(tiny_model()))
    log = Programs(prompts(4), sampling, delay=delays(0, 0.01)).run(made)
    check_turns(log, sampling)


@contextlib.contextmanager
def watched(model: nn.Module) -> Iterator[list[tuple[int, int, int]]]:
    """Rows, tokens and columns of each forward in slots."""
    seen: list[tuple[int, int, int]] = []

    def note(module, args, kwargs) -> None:
        slots = kwargs[cache_argument(model)]
        if isinstance(slots, SlotCache):
            seen.append((*kwargs["input_ids"].shape, slots.layers[0].keys.shape[2]))

    handle = model.register_forward_pre_hook(note, with_kwargs=True)
    yield seen
    handle.remove()


def num_distinct(log: Log) -> int:
    """Tokens that must be forwarded: of a group's prompt once, of a conversation the others except the last."""
    of_prompts = {key[0]: len(request.ids) - 1 for request, _ in reversed(log) for key in [request.conversation]}
    last = {request.conversation: len(request.ids) + len(turn.ids) - 1 for request, turn in log}
    return sum(of_prompts.values()) + sum(length - of_prompts[key[0]] for key, length in last.items())


def test_each_token_is_forwarded_once_and_slots_that_wait_are_not_computed():
    model, counts = tiny_model(), []
    rng = random.Random(4)
    distinct = [replace(each, ids=tuple(rng.randrange(2, 13) for _ in each.ids)) for each in prompts()]
    made = engine(model, on_tokens=lambda *both: counts.append(both))
    with watched(model) as seen:
        log = Programs(distinct, SAMPLING, delay=delays(0, 0.02)).run(made)
    forwarded, padded = sum(rows * tokens for rows, tokens, _ in seen), sum(n for useful, n in counts if not useful)
    assert forwarded - padded == num_distinct(log)
    assert forwarded < 1.08 * num_distinct(log)
    assert sum(useful for useful, _ in counts) == sum(len(turn.ids) for _, turn in log)


def test_a_conversation_that_waits_gives_its_slot_to_others_and_is_forwarded_again():
    model, counts = tiny_model(), []
    waits = lambda conversation, turn: 0.3 if conversation[0] == 5 else 0.0  # noqa: E731
    made = engine(model, 8 * LONGEST * bytes_per_token(model), on_tokens=lambda *both: counts.append(both))
    with watched(model) as seen:
        log = Programs(prompts(), replace(SAMPLING, num_generations=8), delay=waits).run(made)
    assert max(rows * columns for rows, _, columns in seen) <= 8 * LONGEST
    assert sum(n for useful, n in counts if not useful) > 0
    check_turns([pair for pair in log if pair[0].conversation[0] == 5], SAMPLING)


def test_with_a_lag_bits_do_not_depend_on_the_speed_of_tools():
    model, found = tiny_model(), []
    for seed, most in ((0, 0.0), (1, 0.02), (2, 0.05)):
        made = engine(model, 6 * LONGEST * bytes_per_token(model), turn_lag=3)
        with watched(model) as seen:
            log = Programs(prompts(6), SAMPLING, delay=delays(seed, most)).run(made)
        found.append((seen, [(request.conversation, list(request.ids), turn) for request, turn in log]))
    assert found[0] == found[1] == found[2]
    check_turns(log, SAMPLING)


def test_a_turn_has_its_own_limit():
    log = Programs(prompts(4), SAMPLING, longest_turn=5).run(engine(tiny_model()))
    assert {len(turn.ids) for _, turn in log if turn.finish_reason == "length"} == {5}
    check_turns(log, SAMPLING)


def test_conversations_that_begin_later_and_are_longer_have_slots_of_their_width():
    model, sampling = tiny_model(), replace(SAMPLING, num_generations=1)
    queue, made = TurnQueue(), engine(model, 3 * LONGEST * bytes_per_token(model))
    short, *longer = [replace(each, serial=i) for i, each in enumerate([prompts()[0], *prompts()[1:7]])]
    requests = [TurnRequest((each.serial, 0), each.ids, 60, (each.serial, 0)) for each in (short, *longer)]

    def begin() -> None:
        queue.submit(requests[0]).result(30)
        for request in requests[1:]:
            queue.submit(request)
        for request in requests[1:]:
            request.answer.result(30)
        queue.close()

    thread = threading.Thread(target=begin)
    thread.start()
    made.sample_turns(queue, sampling)
    thread.join(30)
    check_turns([(request, request.answer.result(0)) for request in requests], sampling)


def failing(model: nn.Module, at: int, error: Exception) -> nn.Module:
    """The model, whose forward raises once."""
    counts = iter(range(1, 1 << 30))

    def note(module, args) -> None:
        if next(counts) == at:
            raise error

    model.register_forward_pre_hook(note)
    return model


@pytest.mark.parametrize("at", [1, 2, 9])
def test_a_forward_that_fails_fails_all_requests_and_a_later_call_works(at):
    made = engine(failing(tiny_model(), at, ValueError("broken")))
    programs, threads = Programs(prompts(4), SAMPLING), threading.active_count()
    with pytest.raises(ValueError, match="broken"):
        programs.run(made)
    assert len(programs.failures) == 16
    assert {str(failure).partition(":")[0] for failure in programs.failures} <= {"broken", "the rollout is over"}
    assert threading.active_count() == threads
    check_turns(Programs(prompts(4), SAMPLING).run(made), SAMPLING)


@pytest.mark.parametrize("at", [3, 12, 20])
def test_out_of_memory_halves_the_cache_and_conversations_go_on(at, caplog):
    model = failing(tiny_model(), at, torch.OutOfMemoryError("full"))
    made = engine(model, 8 * LONGEST * bytes_per_token(model))
    with watched(model) as seen:
        log = Programs(prompts(8), SAMPLING, delay=delays(0, 0.01)).run(made)
    assert max(rows for rows, *_ in seen[at:]) == 4
    assert f"KV cache of {4 * LONGEST * bytes_per_token(model)} bytes" in caplog.text
    check_turns(log, SAMPLING)


def test_out_of_memory_with_one_slot_is_the_engines_error():
    model = failing(tiny_model(), 3, torch.OutOfMemoryError("full"))
    with pytest.raises(torch.OutOfMemoryError, match="full"):
        Programs(prompts(2), SAMPLING).run(engine(model, LONGEST * bytes_per_token(model)))


def test_a_conversation_that_fits_no_slot_is_an_error_with_the_numbers():
    model = tiny_model()
    with pytest.raises(EngineError, match=r"24\D+60\D+raise kv_cache_bytes"):
        Programs(prompts(4), SAMPLING).run(engine(model, (LONGEST - 1) * bytes_per_token(model)))


def falcon() -> nn.Module:
    torch.manual_seed(0)
    config = FalconConfig(
        vocab_size=13, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, alibi=True, eos_token_id=1,
        initializer_range=0.2,
    )  # fmt: skip
    return FalconForCausalLM(config).eval()


def own_mask() -> nn.Module:
    AttentionInterface.register("own_mask", sdpa_attention_forward)
    AttentionMaskInterface.register("own_mask", sdpa_mask)
    model = tiny_model()
    model.config._attn_implementation = "own_mask"
    return model


SIZES = {
    "vocab_size": 13, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "eos_token_id": 1, "pad_token_id": 0, "initializer_range": 0.2,
}  # fmt: skip


def with_windows() -> nn.Module:
    torch.manual_seed(0)
    return Gemma2ForCausalLM(Gemma2Config(**SIZES, sliding_window=9)).eval()


def with_chunks() -> nn.Module:
    torch.manual_seed(0)
    config = Llama4TextConfig(
        **SIZES, layer_types=["chunked_attention", "full_attention"], attention_chunk_size=6,
        attn_temperature_tuning=False, num_local_experts=2, intermediate_size_mlp=48,
    )  # fmt: skip
    return Llama4ForCausalLM(config).eval()


def with_states() -> nn.Module:
    """States beside keys and values, as in Falcon-H1."""
    torch.manual_seed(0)
    config = FalconH1Config(
        **SIZES, mamba_n_heads=4, mamba_d_head=16, mamba_d_ssm=64, mamba_n_groups=1, mamba_d_state=8, mamba_d_conv=4,
    )  # fmt: skip
    return FalconH1ForCausalLM(config).eval()


def with_convolutions() -> nn.Module:
    torch.manual_seed(0)
    return Lfm2ForCausalLM(Lfm2Config(**SIZES, layer_types=["conv", "full_attention"])).eval()


@pytest.mark.parametrize("make", [falcon, own_mask, with_windows, with_chunks, with_states, with_convolutions])
def test_turns_are_the_same_with_masks_of_attentions_own_windows_chunks_and_states(make):
    model = make()
    log = Programs(prompts(4), SAMPLING, delay=delays(0, 0.01)).run(engine(model, 5 * sequence_bytes(model, LONGEST)))
    check_turns(
        log,
        SAMPLING,
        lambda ids, key, most, sampling: by_generate(engine(model), TurnRequest(key, ids, most, key), sampling),
    )


def test_a_slot_that_was_shortened_lacks_what_later_tokens_took_the_place_of():
    """A chunk of 6: after 24 tokens a slot has those from 18 on, also for a sequence that shares the first 18 alone."""
    first, second = ([*range(shared), *range(50, 54)] for shared in (18, 14))
    table = admission.SlotTable(8, 8, lambda num_cached, num_kept: num_cached <= num_kept - num_kept % 6 + 6)
    table.kept.append(admission.CachedSequence(TurnRequest((0, 0), [*range(25)], 4, (0, 0)), [*range(25)], 24, 0, 7))
    requests = [TurnRequest((i, 0), ids, 4, (i, 0)) for i, ids in enumerate((first, second), start=1)]
    (shortened,) = table.admit(requests)
    assert (shortened.num_cached, shortened.slot) == (18, 0)
    shortened.num_cached = len(first) - 1
    (other,) = table.admit(requests[1:])
    assert (other.num_cached, other.slot) == (0, None)


@pytest.mark.parametrize(("max_tokens", "max_mask"), [(7, 1 << 24), (1 << 14, 300)])
def test_long_prompts_and_replies_are_fed_in_pieces(max_tokens, max_mask, monkeypatch):
    for module in (admission, decode_loop):
        monkeypatch.setattr(module, "MAX_PREFILL", max_tokens)
        monkeypatch.setattr(module, "MAX_MASK", max_mask)
    model = tiny_model()
    with watched(model) as seen:
        log = Programs(prompts(6), SAMPLING).run(engine(model))
    feeds = [each for each in seen if each[1] > 1]
    assert max(rows * tokens for rows, tokens, _ in feeds) <= max_tokens
    assert max(rows * tokens * columns for rows, tokens, columns in feeds) <= max_mask
    check_turns(log, SAMPLING)

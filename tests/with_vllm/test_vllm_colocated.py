"""A real vLLM in this process: it says what the native engine says, and leaves the process as it was."""

from __future__ import annotations

import asyncio
import copy
import gc
import os
import random
from dataclasses import replace
from functools import partial

import pytest
import torch

from agent_programs import agent
from lowpeak.arguments import ToolSettings
from lowpeak.arguments.sampling import Sampling
from lowpeak.data import PromptReader
from lowpeak.environments.engine import EnvironmentEngine
from lowpeak.environments.toolset import Toolset
from lowpeak.errors import ArgumentError, EngineError, LostEngineError
from lowpeak.ranks import Ranks, has_process_group
from lowpeak.records import Prompt
from lowpeak.rollout.native.engine import NativeEngine
from lowpeak.rollout.native.output import end_token_ids
from lowpeak.vllm.compatibility import warn_unsupported
from lowpeak.vllm.engine import EngineSharing, PolicyFacts, VllmEngine
from lowpeak.vllm.requests import CompletionLengths
from turn_programs import REPLY, converse, ids_of
from vllm_in_process import logprobs_of
from vllm_runs import TOKENIZER, grpo_arguments, grpo_trainer

GREEDY = Sampling(num_generations=2, max_new_tokens=12, temperature=0.0)
CACHE = 1 << 20  # 8 blocks of 128 tokens, of which vLLM uses one itself
SAMPLED = Sampling(num_generations=4, max_new_tokens=12, temperature=0.7, seed=5)


def trainer_in(folder, **changes):
    return grpo_trainer(grpo_arguments(folder, **changes))


@pytest.fixture(scope="module")
def trainer(tmp_path_factory):
    made = trainer_in(tmp_path_factory.mktemp("run"), kv_cache_bytes=CACHE)
    made.collector.engine.wake()
    made.collector.sync_weights(0)
    yield made
    made.collector.engine.close()


@pytest.fixture
def native(trainer):
    hold = lambda: trainer.run.strategy.gather_for_inference(trainer.model, None)  # noqa: E731
    engine = NativeEngine(hold, TOKENIZER, lambda: 1 << 24)
    engine.load((), 0)
    return engine


def over(trainer, **settings):
    """Return another engine over the same vLLM, with other settings, and loaded."""
    vllms, model = trainer.collector.engine._vllms, trainer.model
    made = VllmEngine(
        lambda: vllms,
        replace(trainer.collector.settings.vllm, **settings),
        PolicyFacts(lambda sampling: end_token_ids(model, TOKENIZER, sampling), len(TOKENIZER)),
        EngineSharing(Ranks()),
    )
    made.wake()
    made.load(slices(trainer, made), 0)
    return made


def own(trainer):
    """The trainer's engine with its weights again, since another engine may have pushed to its vLLM."""
    engine = trainer.collector.engine
    engine.load(slices(trainer, engine), 0)
    return engine


def slices(trainer, engine):
    form = engine.slice_form
    return trainer.run.strategy.slices(trainer.model, form.max_bytes, form.dtype, form.weights)


def prompts(*texts):
    return [Prompt(i, tuple(TOKENIZER(text)["input_ids"]), text) for i, text in enumerate(texts)]


MANY = prompts("12=", "3=", "9876543210=", "5=", "4455=", "000111=", "=")


def tokens(groups):
    return [[(one.ids.tolist(), one.finish_reason) for one in group.completions] for group in groups]


def assert_logprobs_are_the_policys(model, groups, temperature):
    for group in groups:
        for completion in group.completions:
            expected = logprobs_of(model, group.prompt.ids, completion.ids.tolist(), temperature)
            torch.testing.assert_close(completion.logprobs, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"repetition_penalty": 1.5},
        {"stop": ("7",)},
        {"stop": ("77", "=0", "22")},
        {"stop_token_ids": (4, 9)},
        {"max_new_tokens": 1},
    ],
)
def test_greedy_groups_are_the_native_engines(trainer, native, changes):
    sampling = replace(GREEDY, **changes)
    groups, expected = (engine.generate(MANY, sampling) for engine in (own(trainer), native))
    assert tokens(groups) == tokens(expected)
    for ours, theirs in zip(groups, expected, strict=True):
        for one, other in zip(ours.completions, theirs.completions, strict=True):
            torch.testing.assert_close(one.logprobs, other.logprobs, rtol=0, atol=1e-5)


@pytest.mark.parametrize("changes", [{}, {"top_k": 3}, {"top_p": 0.6}, {"min_p": 0.2}, {"temperature": 1.0}])
def test_sampling_logprobs_are_of_the_full_softmax_at_the_temperature(trainer, changes):
    sampling = replace(SAMPLED, **changes)
    groups = own(trainer).generate(MANY, sampling)
    assert_logprobs_are_the_policys(trainer.model, groups, sampling.temperature)
    assert len({str(rows) for rows in tokens(groups)}) == len(MANY)


def test_a_draw_depends_on_neither_waves_nor_order(trainer):
    whole = tokens(own(trainer).generate(MANY, SAMPLED))
    assert tokens(over(trainer, batch_size=3).generate(MANY, SAMPLED)) == whole
    assert tokens(own(trainer).generate(MANY[::-1], SAMPLED)) == whole[::-1]
    parts = [replace(SAMPLED, num_generations=2, first_completion=first) for first in (0, 2)]
    halves = [tokens(own(trainer).generate(MANY, part)) for part in parts]
    assert [first + second for first, second in zip(*halves, strict=True)] == whole
    assert tokens(own(trainer).generate(MANY, replace(SAMPLED, rollout=1))) != whole


def uneven(conversation, turn):
    return 0.05 * ((conversation[0] + turn) % 3)


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_turns_of_conversations_are_the_native_engines_at_any_speed_of_tools(trainer, native, sampling):
    long = prompts("0123456789" * 13 + "=")  # its turns find a block of 128 tokens in the prefix cache
    sampling = replace(sampling, num_generations=1)
    found = converse(own(trainer), [*MANY, replace(long[0], serial=7)], sampling, delay=uneven)
    narrow = converse(over(trainer, batch_size=3), [*MANY, replace(long[0], serial=7)], sampling)
    assert ids_of(found) == ids_of(narrow)
    assert len(found) == 8
    for ids, turn in (each for turns in found.values() for each in turns):
        expected = logprobs_of(trainer.model, ids, turn.ids, sampling.temperature or 1.0)
        torch.testing.assert_close(torch.tensor(turn.logprobs), expected, rtol=1e-5, atol=1e-5)
        if sampling.temperature == 0:
            (group,) = native.generate([Prompt(0, ids, "")], sampling)
            assert turn.ids == group.completions[0].ids.tolist()


def test_a_conversation_of_one_turn_is_an_ordinary_completion(trainer):
    engine = own(trainer)
    groups = engine.generate(MANY, SAMPLED)
    found = converse(engine, MANY, SAMPLED, num_turns=1)
    ids_by_row = {
        (group.prompt.serial, i): one.ids.tolist() for group in groups for i, one in enumerate(group.completions)
    }
    assert {conversation: turns[0][1].ids for conversation, turns in found.items()} == ids_by_row


def test_programs_draw_the_turns_of_conversations_and_one_that_leaves_frees_its_place(trainer):
    sampling, tokenizer = replace(SAMPLED, num_generations=1), copy.deepcopy(TOKENIZER)
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    rows = [replace(prompt, source=[{"role": "user", "content": "1"}], columns={"ids": prompt.ids}) for prompt in MANY]

    async def three_turns(client, row):
        history = list(row["ids"])
        for _ in range(3):
            turn = client.turn(history, max_tokens=sampling.max_new_tokens)
            if len(history) > len(row["ids"]):
                lost = asyncio.ensure_future(client.turn([*history, 7]))
                await asyncio.sleep(0.02)
                lost.cancel()
            history += [*await turn, *REPLY]

    toolset = Toolset([], agent(three_turns), ToolSettings(None, 60.0, max_branches=9))
    metrics = {}
    end_ids = partial(end_token_ids, trainer.model, TOKENIZER)
    engine = EnvironmentEngine(own(trainer), tokenizer, toolset, {}, PromptReader, end_ids, metrics.update)
    groups = engine.generate(rows, replace(sampling, max_new_tokens=60))
    toolset.close()
    expected = converse(own(trainer), MANY, sampling)
    for group in groups:
        (completion,) = group.completions
        turns = expected[group.prompt.serial, 0]
        assert completion.ids.tolist() == [*turns[2][0][len(group.prompt.ids) :], *turns[2][1].ids]
        assert not completion.conversation.has_failed
    assert metrics["programs/disconnected"].value() > 0


def test_turns_past_their_limit_or_refused_leave_an_engine_that_goes_on(trainer):
    expected = converse(own(trainer), MANY, GREEDY, num_turns=1)
    for settings, batch, error, match in (
        ({"wave_timeout": 1e-9}, MANY, LostEngineError, "vllm_wave_timeout"),
        ({}, [Prompt(0, (999,), "")], EngineError, "999"),
    ):
        with pytest.raises(error, match=match):
            converse(over(trainer, **settings), batch, SAMPLED)
    assert ids_of(converse(over(trainer), MANY, GREEDY, num_turns=1)) == ids_of(expected)


@pytest.fixture
def scheduled(trainer, monkeypatch):
    """Return counts of sequences that ran at once and of preemptions, and an engine that has seen no lengths."""
    (vllm,) = trainer.collector.engine._vllms
    scheduler = vllm.llm.llm_engine.engine_core.engine_core.scheduler
    step, preempt = vllm.llm.llm_engine.step, scheduler._preempt_request
    counts = {"at_once": 0, "preempted": 0}

    def counting_step():
        outputs = step()
        counts["at_once"] = max(counts["at_once"], len(scheduler.running))
        return outputs

    def counting_preempt(*args, **kwargs):
        counts["preempted"] += 1
        return preempt(*args, **kwargs)

    monkeypatch.setattr(vllm.llm.llm_engine, "step", counting_step)
    monkeypatch.setattr(scheduler, "_preempt_request", counting_preempt)

    def generate(sampling, *, forget=False):
        if forget:
            monkeypatch.setattr(vllm, "_lengths", CompletionLengths())
        counts.update(at_once=0, preempted=0)
        groups = own(trainer).generate(MANY, sampling)
        return tokens(groups), counts["at_once"], counts["preempted"]

    return generate


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_more_rows_run_once_lengths_are_known_and_say_the_same_even_if_vllm_preempts_some(scheduled, sampling):
    long = replace(sampling, num_generations=4, max_new_tokens=300)
    short = replace(long, stop_token_ids=tuple(range(3, len(TOKENIZER), 20)))
    first, at_once, _ = scheduled(short, forget=True)
    assert at_once == 3  # of 310 tokens at most
    second, at_once, preempted = scheduled(short)
    assert (second, at_once, preempted) == (first, 7, 0)  # a block each, of all but one
    too_many, _, preempted = scheduled(long)
    assert preempted > 0
    expected, at_once, preempted = scheduled(long, forget=True)
    assert (too_many, at_once, preempted) == (expected, 3, 0)


def test_a_regular_expression_bounds_completions(trainer):
    groups = over(trainer, structured_regex="[0-4]{2,8}").generate(MANY, SAMPLED)
    for group in groups:
        for completion in group.completions:
            text = TOKENIZER.decode(completion.ids.tolist(), skip_special_tokens=True)
            assert set(text) <= set("01234"), text


def test_keys_and_values_of_old_weights_are_forgotten(trainer):
    long = prompts("0123456789" * 30 + "=")  # more than the blocks of 128 tokens that are cached
    engine = own(trainer)
    engine.generate(long, SAMPLED)
    kept = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    try:
        with torch.no_grad():
            for parameter in trainer.model.parameters():
                parameter.mul_(0.9)
        trainer.collector.weight_sync.weights_changed = True
        trainer.collector.sync_weights(0)
        assert_logprobs_are_the_policys(trainer.model, engine.generate(long, SAMPLED), SAMPLED.temperature)
    finally:
        with torch.no_grad():
            for name, parameter in trainer.model.named_parameters():
                parameter.copy_(kept[name])
        trainer.collector.weight_sync.weights_changed = True
        trainer.collector.sync_weights(0)


def test_a_wave_past_its_limit_is_given_up_and_the_engine_goes_on(trainer):
    engine = over(trainer, wave_timeout=1e-9)
    with pytest.raises(LostEngineError, match="vllm_wave_timeout"):
        engine.generate(MANY, SAMPLED)
    assert tokens(over(trainer).generate(MANY, GREEDY)) == tokens(own(trainer).generate(MANY, GREEDY))


def test_weights_that_another_engine_pushed_under_the_same_version_are_noticed(trainer):
    engine = own(trainer)
    engine.generate(MANY, GREEDY)
    over(trainer)
    with pytest.raises(LostEngineError, match=r"version 0.*client"):
        engine.generate(MANY, GREEDY)


def test_a_prompt_that_vllm_refuses_is_an_error(trainer):
    with pytest.raises(EngineError, match="999"):
        own(trainer).generate([Prompt(0, (999,), "")], SAMPLED)


def state():
    """What building a vLLM would change."""
    return {
        "environment": dict(os.environ),
        "random": random.getstate(),
        "torch": torch.get_rng_state().tolist(),
        "threads": torch.get_num_threads(),
        "set_num_threads": torch.set_num_threads,
        "frozen": gc.get_freeze_count(),
        "grad": torch.is_grad_enabled(),
        "dtype": torch.get_default_dtype(),
    }


def test_building_and_freeing_leaves_the_process_as_it_was_and_nothing_behind(tmp_path, trainer):
    trainer.collector.engine.close()
    had_group, sizes = has_process_group(), []
    run = trainer_in(tmp_path)
    for _ in range(3):
        before = state()
        run.collector.engine.wake()
        assert state() == before
        run.collector.sync_weights(0)
        run.collector.engine.generate(MANY[:1], GREEDY)
        run.collector.engine.close()
        gc.collect()
        live = [x for x in gc.get_objects() if type(x) in (torch.Tensor, torch.nn.Parameter)]  # not a compiler's fakes
        sizes.append(sum(x.untyped_storage().nbytes() for x in live))
        assert has_process_group() == had_group
    assert sizes[2] <= sizes[1] <= sizes[0] * 1.01
    trainer.collector.engine.wake()
    trainer.collector.sync_weights(0)


REFUSED = [
    ({"vllm_engine_kwargs": {"no_such_option": 1}}, ArgumentError, "vllm_engine_kwargs.*no_such_option"),
    ({"vllm_max_model_length": 4096}, EngineError, r"\(4096\).*512.*vllm_max_model_length"),
    ({"kv_cache_bytes": 4096}, EngineError, r"kv_cache_bytes \(now 4096\).*offload_during_rollout=True"),
    ({"vllm_enable_sleep_mode": True}, ArgumentError, "vllm_enable_sleep_mode=True"),
]


def test_what_vllm_does_not_take_is_one_sentence_and_another_vllm_starts_afterwards(tmp_path, trainer):
    trainer.collector.engine.close()
    for changes, error, match in REFUSED:
        with pytest.raises(error, match=match):
            trainer_in(tmp_path, **changes).collector.engine.wake()
        assert not has_process_group()
    trainer.collector.engine.wake()
    trainer.collector.sync_weights(0)
    assert trainer.collector.engine.policy_version == 0


def test_a_type_error_of_vllms_own_is_not_blamed_on_engine_kwargs_that_nobody_gave(tmp_path, monkeypatch):
    monkeypatch.setattr("vllm.LLM", lambda **arguments: len(7))
    with pytest.raises(EngineError, match=r"'int'.*vllm_gpu_memory_utilization") as caught:
        trainer_in(tmp_path).collector.engine.wake()
    assert "vllm_engine_kwargs" not in str(caught.value)


def test_the_installed_vllm_is_in_the_supported_range(caplog):
    import vllm

    warn_unsupported(vllm.__version__)
    assert not caplog.records

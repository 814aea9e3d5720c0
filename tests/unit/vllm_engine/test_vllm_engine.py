"""The engine over scripted vLLMs: what it asks, in which waves, and what it does when something fails."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fake_vllm import END, SAMPLING, ScriptedVllm, answer_of, engine_over, prompts, scripted, slices
from lowpeak.arguments.vllm import ColocateSettings
from lowpeak.errors import EngineError, LostEngineError
from lowpeak.rollout.engine import RolloutEngine
from lowpeak.vllm.protocol import Answer, Vllm
from lowpeak.vllm.requests import completion_seed


def requests_of(vllm):
    return [request for wave in vllm.waves for request in wave]


def tokens(groups):
    return [[completion.ids.tolist() for completion in group.completions] for group in groups]


def test_groups_come_in_the_order_of_the_prompts_with_tokens_logprobs_and_ends():
    groups = engine_over(scripted()).generate(prompts(), SAMPLING)
    assert [group.prompt.serial for group in groups] == [0, 1, 2]
    for group in groups:
        for number, completion in enumerate(group.completions):
            seed = completion_seed(SAMPLING, group.prompt.serial, number)
            assert completion.ids.tolist() == [group.prompt.ids[0], 2 + seed % 7, 1 if seed % 2 else 3]
            assert completion.finish_reason == ("stop" if seed % 2 else "length")
            assert completion.loss_mask.all()
            assert completion.logprobs.dtype == torch.float32


def test_each_completion_has_a_seed_of_its_own_that_neither_waves_nor_parts_change():
    whole, narrow = scripted(), scripted()
    one = engine_over(whole).generate(prompts(), SAMPLING)
    many = engine_over(narrow, batch_size=2).generate(prompts(), SAMPLING)
    assert len(whole.waves) == 1
    assert len(narrow.waves) == 6
    assert tokens(one) == tokens(many)
    assert len({request.params["seed"] for request in requests_of(whole)}) == 12
    part = replace(SAMPLING, num_generations=2, first_completion=2)
    assert tokens(engine_over(scripted()).generate(prompts(), part)) == [group[2:] for group in tokens(one)]


def test_sampling_becomes_vllms_parameters():
    vllm = scripted()
    same = {"temperature": 0.7, "top_k": 5, "top_p": 0.9, "min_p": 0.1, "repetition_penalty": 1.2}
    changed_sampling = replace(SAMPLING, **same, stop=("a", "bc"), stop_token_ids=(7,))
    engine_over(vllm, structured_regex="[0-9]+", sampling_kwargs={"min_tokens": 2}).generate(
        prompts(1), changed_sampling
    )
    params = dict(requests_of(vllm)[0].params)
    del params["seed"]
    assert params == same | {
        "max_tokens": 3,
        "ignore_eos": True,
        "stop_token_ids": [1, 7],
        "logprobs": 0,
        "detokenize": True,
        "skip_special_tokens": False,
        "stop": ["a", "bc"],
        "include_stop_str_in_output": True,
        "structured_outputs": {"regex": "[0-9]+"},
        "min_tokens": 2,
    }


def test_speculative_decoding_is_refused_at_temperatures_for_which_it_returns_no_logprobs():
    engine = engine_over(scripted(speculates=True))
    for temperature in (0.0, 1.0):
        assert engine.generate(prompts(1), replace(SAMPLING, temperature=temperature))
    with pytest.raises(EngineError, match=r"temperature=0\.7: .*speculative_config"):
        engine.generate(prompts(1), replace(SAMPLING, temperature=0.7))


def test_a_wave_is_as_large_as_the_cache_holds_rows_of_full_length_unless_vllm_keeps_to_it_by_itself():
    vllm = scripted(kv_tokens=4 * 9)  # the longest row: 6 prompt tokens and 3 new ones
    engine_over(vllm).generate(prompts(), SAMPLING)
    assert [len(wave) for wave in vllm.waves] == [4, 4, 4]
    assert [len({request.prompt_ids for request in wave}) for wave in vllm.waves] == [1, 1, 1]
    assert [len(wave[0].prompt_ids) for wave in vllm.waves] == [6, 5, 4]
    vllm = scripted(kv_tokens=4 * 9, limits_to_cache=True)
    for settings in ({}, {"batch_size": 6}):
        engine_over(vllm, **settings).generate(prompts(), SAMPLING)
    assert [len(wave) for wave in vllm.waves] == [12, 6, 6]


def test_the_next_waves_are_as_large_as_the_completions_before_were_short_and_say_the_same():
    sampling = replace(SAMPLING, max_new_tokens=100)
    vllm = scripted(lambda request: [*answer_of(request)[:2], END], kv_tokens=300)  # the longest row has 106 tokens
    engine = engine_over(vllm)
    first, second = (engine.generate(prompts(), sampling) for _ in range(2))
    assert [len(wave) for wave in vllm.waves] == [2] * 6 + [12]
    assert tokens(first) == tokens(second)
    chosen = scripted(vllm._script, kv_tokens=300)
    engine = engine_over(chosen, batch_size=6)
    engine.generate(prompts(), sampling)
    engine.generate(prompts(), sampling)
    assert [len(wave) for wave in chosen.waves] == [6, 6, 6, 6]


def test_a_load_gives_all_slices_and_the_version():
    vllm = scripted()
    engine = engine_over(vllm)
    engine.load(slices((3.0, 4.0)), 5)
    assert engine.policy_version == vllm.policy_version == 5
    assert vllm.weights["weight"][0].tolist() == [3.0, 4.0]
    assert ("lowpeak_score_at_temperature", {}) in vllm.calls
    assert vllm.events == ["pause", "resume"] * 2  # nothing runs while weights change, no cache outlives them


def test_after_a_load_that_failed_every_vllm_that_can_goes_on():
    class Paused(ScriptedVllm):
        def resume(self):
            super().resume()
            if self.dies_after == 0:
                raise LostEngineError

    first, second = Paused(answer_of), scripted()
    engine = engine_over(first, second)
    first.push_error = EngineError("P1")
    first.dies_after = 0
    with pytest.raises(EngineError, match="P1") as found:
        engine.load(slices(), 1)
    assert not isinstance(found.value, LostEngineError)
    assert first.events[-2:] == second.events[-2:] == ["pause", "resume"]
    first.push_error = None
    with pytest.raises(LostEngineError):
        engine.load(slices(), 1)
    assert second.events[-1] == "resume"


@pytest.mark.parametrize("behind", ["restart", "hold"])
def test_a_vllm_that_was_started_again_or_loaded_by_others_is_not_asked(behind):
    vllm = scripted()
    engine = engine_over(vllm)
    engine.generate(prompts(1), SAMPLING)
    vllm.restart()
    if behind == "hold":
        vllm.hold(0)  # the same number, in another process
    with pytest.raises(LostEngineError):
        engine.generate(prompts(1), SAMPLING)
    assert engine.policy_version is None
    assert len(vllm.waves) == 1
    engine.load(slices(), 0)
    assert len(engine.generate(prompts(1), SAMPLING)) == 1


def test_what_was_answered_before_a_vllm_died_is_kept_and_not_asked_again():
    expected = tokens(engine_over(scripted()).generate(prompts(), SAMPLING))
    vllm = scripted()
    engine = engine_over(vllm, batch_size=4)
    vllm.dies_after = 6
    pending = engine.submit(prompts(), SAMPLING)
    with pytest.raises(LostEngineError):
        pending.result()
    assert [len(wave) for wave in vllm.waves] == [4, 4]  # the second was answered in half
    engine.load(slices(), 0)
    assert tokens(pending.result()) == expected
    assert pending.result() is pending.result()
    seeds = [request.params["seed"] for request in [*vllm.waves[0], *vllm.waves[1][:2], *requests_of(vllm)[8:]]]
    assert len(seeds) == len(set(seeds)) == 12


def test_a_wave_has_a_time_limit():
    vllm = scripted()
    engine = engine_over(vllm, wave_timeout=0.02)
    vllm.seconds = 0.008
    with pytest.raises(LostEngineError, match=r"0\.02"):
        engine.generate(prompts(), SAMPLING)


def test_one_of_two_vllms_that_dies_loses_its_own_rows_alone():
    first, second = scripted(), scripted()
    engine = engine_over(first, second)
    first.dies_after = 1
    pending = engine.submit(prompts(2), SAMPLING)
    with pytest.raises(LostEngineError):
        pending.result()
    engine.load(slices(), 0)
    pending.result()
    assert sum(len(wave) for wave in first.waves[1:] + second.waves[1:]) == 3


def answer(ids=(3, 1), logprobs=None, finish_reason="stop", versions=()):
    return Answer(ids, (0.0,) * len(ids) if logprobs is None else logprobs, finish_reason, frozenset(versions))


@pytest.mark.parametrize(
    ("bad", "match"),
    [
        (answer(ids=()), "0 tokens.*0 log-probs"),
        (answer(logprobs=(0.0,)), "2 tokens.*1 log-probs"),
        (answer(ids=(3,) * 4), "4 tokens.*4 log-probs.*3"),
        (answer(finish_reason="repetition"), "'repetition'"),
        (answer(finish_reason="length"), "'length' .*2 .*3"),
        (answer(ids=(13, 1)), " 13,.* 13:"),
        (answer(logprobs=(0.0, float("nan"))), "NaN"),
    ],
)
def test_a_malformed_answer_is_one_sentence(bad, match):
    with pytest.raises(EngineError, match=match) as caught:
        engine_over(scripted(lambda request: bad)).generate(prompts(1), SAMPLING)
    assert not isinstance(caught.value, LostEngineError)


@pytest.mark.parametrize(
    ("bad", "match"),
    [(answer(finish_reason="abort"), "1 of 4"), (answer(versions=[7]), r"\[7\]")],
)
def test_answers_of_other_weights_or_given_up_are_asked_again_after_a_load(bad, match):
    seeds = [completion_seed(SAMPLING, 0, number) for number in range(4)]
    messages = []

    def script(request):
        first = request.params["seed"] == seeds[1] and not messages
        messages.extend([1] if first else [])
        return bad if first else answer(versions=[0])

    vllm = scripted(script)
    engine = engine_over(vllm)
    pending = engine.submit(prompts(1), SAMPLING)
    with pytest.raises(LostEngineError, match=match):
        pending.result()
    engine.load(slices(), 0)
    assert len(pending.result()[0].completions) == 4
    assert [request.params["seed"] for request in vllm.waves[1]] == [seeds[1]]


def test_an_engine_that_sleeps_verifies_its_weights_when_it_wakes():
    vllm = scripted()
    engine = engine_over(vllm, where=ColocateSettings(sleeps=True))
    engine.sleep()
    engine.sleep()
    engine.wake()
    assert engine.policy_version is None  # the fake forgets them
    engine.load(slices(), 0)
    engine.sleep()
    vllm.hold(0)
    engine.wake()
    assert engine.policy_version == 0
    assert [event for event in vllm.events if event in ("sleep", "wake")] == ["sleep", "wake", "sleep", "wake"]


def test_a_base_that_slept_comes_again_and_is_asked_what_is_left_of_it():
    vllm = scripted(max_loras=1)
    engine = engine_over(vllm, adapter={"r": 4}, where=ColocateSettings(sleeps=True))
    engine.close()
    engine.wake()
    engine.load(slices(), 1, "base")
    engine.load(slices(), 1, "adapter")
    assert engine.slice_form.weights == "adapter"
    engine.sleep()
    engine.wake()
    assert vllm.num_checks == 1  # a worker that finds its base gone forgets which tensors it knows
    assert engine.policy_version is None
    assert engine.slice_form.weights == "base"


@pytest.mark.parametrize(("error", "num_left"), [(EngineError("broken"), 0), (KeyboardInterrupt(), 2)])
def test_a_push_that_fails_takes_the_slices_that_others_wait_for_but_ctrl_c_does_not(error, num_left):
    left = [1, 2, 3]

    def endangered():
        while left:
            left.pop()
            yield from slices()

    vllm = scripted()
    engine = engine_over(vllm)
    vllm.push_error = error
    with pytest.raises(type(error)):
        engine.load(endangered(), 1)
    assert len(left) == num_left
    assert engine.policy_version is None


def test_it_takes_slices_in_the_engines_dtype_that_fit_a_bucket():
    form = engine_over(scripted(dtype="bfloat16"), bucket_bytes=1 << 20).slice_form
    assert (form.max_bytes, form.dtype, form.weights) == (1 << 20, torch.bfloat16, "merged")
    with pytest.raises(EngineError, match="bfloat16, float32"):
        _ = engine_over(scripted(dtype="bfloat16"), scripted()).slice_form


def test_an_adapter_goes_on_its_base_which_comes_once():
    vllm = scripted(max_loras=1)
    engine = engine_over(vllm, adapter={"r": 4})
    engine.close()
    engine.wake()
    assert engine.slice_form.weights == "base"
    engine.load(slices(), 1, "base")
    assert engine.policy_version is None
    for version in (1, 2):
        assert engine.slice_form.weights == "adapter"
        engine.load(slices(), version, "adapter")
        assert engine.policy_version == version
        engine.generate(prompts(1), replace(SAMPLING, rollout=version))
    assert [vllm.adapters.get(wave[0].adapter.number, (None,))[0] for wave in vllm.waves] == [None, 2]
    assert vllm.events.count("pause") == 2  # for the weights that `engine_over` loads, and the base
    vllm.restart()
    with pytest.raises(LostEngineError):
        engine.generate(prompts(1), SAMPLING)
    assert engine.slice_form.weights == "base"


@pytest.mark.parametrize(("serves", "wanted"), [(False, True), (True, False)])
def test_merged_weights_go_where_an_adapter_is_not_served_or_not_wanted(serves, wanted):
    engine = engine_over(scripted(max_loras=int(serves)), adapter={"r": 4}, adapters=wanted)
    assert engine.slice_form.weights == "merged"
    engine.generate(prompts(1), SAMPLING)


def test_an_engine_needs_a_load_stays_awake_unless_told_to_sleep_and_closes_its_vllms_once():
    vllm = scripted()
    engine = engine_over(vllm)
    assert isinstance(engine, RolloutEngine)
    assert isinstance(vllm, Vllm)
    assert engine.generate([], SAMPLING) == vllm.waves == []
    engine.sleep()
    assert "sleep" not in vllm.events
    assert engine.policy_version == 0
    for _ in range(2):
        engine.close()
    assert vllm.events.count("close") == 1
    assert engine.policy_version is None
    engine.wake()
    with pytest.raises(EngineError, match=r"load\(\)"):
        engine.generate(prompts(), SAMPLING)


def test_another_seed_or_rollout_draws_anew_and_greedy_needs_no_seed():
    seeds = {completion_seed(replace(SAMPLING, seed=s, rollout=r), 3, 1) for s in (0, 1) for r in (0, 1)}
    assert len(seeds) == 4
    assert all(0 <= seed < 2**62 for seed in seeds)
    vllm = scripted()
    engine_over(vllm).generate(prompts(1), replace(SAMPLING, temperature=0.0))
    assert "seed" not in requests_of(vllm)[0].params


@pytest.mark.parametrize("change", ["another wave", "aborted", "other weights"])
def test_kept_answers_serve_their_own_wave_alone_and_no_other_weights(change):
    vllm = scripted()
    engine = engine_over(vllm)
    vllm.dies_after = 6
    pending = engine.submit(prompts(), SAMPLING)
    with pytest.raises(LostEngineError):
        pending.result()
    engine.load(slices(), 1 if change == "other weights" else 0)
    vllm.waves.clear()
    if change == "aborted":
        pending.abort()
    (engine.submit(prompts(), SAMPLING) if change == "another wave" else pending).result()
    assert len(requests_of(vllm)) == 12


@pytest.mark.parametrize("count", [4, 1])
def test_several_vllms_share_the_rows_evenly_in_whole_groups_if_there_are_enough(count):
    first, second = scripted(), scripted()
    groups = engine_over(first, second).generate(prompts(count), SAMPLING)
    assert tokens(groups) == tokens(engine_over(scripted()).generate(prompts(count), SAMPLING))
    assert len(requests_of(first)) == len(requests_of(second)) == 2 * count
    both = {r.prompt_ids for r in requests_of(first)} & {r.prompt_ids for r in requests_of(second)}
    assert len(both) == (count == 1)


@pytest.mark.parametrize(
    ("given", "answers_short", "match"),
    [
        ({"kv_tokens": 8}, 0, "9 .* 8 "),
        ({"max_model_len": 8}, 0, " 2 .* 6 .* 3 .* 8: .*vllm_max_model_length"),
        ({}, 1, "11 .*12"),
    ],
)
def test_rows_that_do_not_fit_and_answers_that_lack_are_errors_with_the_numbers(given, answers_short, match):
    vllm = scripted(**given)
    vllm.answers_short = answers_short
    with pytest.raises(EngineError, match=match):
        engine_over(vllm).generate(prompts(), SAMPLING)

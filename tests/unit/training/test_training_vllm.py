"""A run whose engine is over (scripted) vLLMs: weights follow the policy, and an engine that is lost loses nothing.

And what a run asks of servers before it trusts them with its weights.
"""

from __future__ import annotations

import logging
import re
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from peft import LoraConfig, get_peft_model

from fake_server import FakeServer, serving
from fake_vllm import answer_of, engine_over, scripted
from longrope_model import FIRST, longrope_model
from lowpeak import GRPOConfig, generate_rollout_completions
from lowpeak.arguments.vllm import ColocateSettings, ServerSettings, VllmSettings, resolve_vllm
from lowpeak.errors import ArgumentError, EngineError, LostEngineError, MissingPackageError
from lowpeak.setup.dry_run import describe_vllm
from lowpeak.setup.engines import connect_checked, why_adapters_idle, within_rotations
from lowpeak.training.weight_sync import MAX_RECONNECTS
from lowpeak.vllm.compatibility import fingerprint
from small_runs import journal, make, rows, same, weights
from tiny_models import char_tokenizer, tiny_model

DATA = rows(10)
AWAKE, SLEEPING = ColocateSettings(), ColocateSettings(sleeps=True)


class Reward:
    """Counts what it judges."""

    __name__ = "reward"

    def __init__(self):
        self.judged = []

    def __call__(self, completions, completion_ids, **columns):
        self.judged += [tuple(ids) for ids in completion_ids]
        return [float(sum(ids) % 5) for ids in completion_ids]


def run_over(folder, *vllms, reward=None, where=AWAKE, **changes):
    settings = {"max_completion_length": 3, "max_steps": 2, "reward_funcs": reward or Reward(), **changes}
    run = make("GRPO", folder, data=DATA, **settings)
    if vllms:
        run.collector.engine = engine_over(*vllms, where=where, batch_size=4)
        run.collector.engine.close()
    return run


class Watching:
    """A script that compares the vLLM's weights with the policy's whenever it is asked."""

    def __init__(self):
        self.run = None
        self.vllm = None
        self.versions = []

    def __call__(self, request):
        self.versions.append(self.vllm.policy_version)
        for name, parameter in self.run.model.named_parameters():
            pieces = torch.cat([piece.view(-1) for piece in self.vllm.weights[name]])
            assert torch.equal(pieces, parameter.detach().view(-1)), name
        return answer_of(request)


@pytest.mark.parametrize(("changes", "dtype"), [({}, "float32"), ({"weight_bits": 32}, "bfloat16")])
def test_every_rollout_is_written_by_the_policys_own_weights(tmp_path, changes, dtype):
    watching = Watching()
    watching.vllm = scripted(watching, dtype=dtype)
    watching.run = run_over(tmp_path, watching.vllm, **changes)
    watching.run.train()
    assert watching.versions == [0] * 8 + [1] * 8


def test_a_vllm_that_dies_in_a_rollout_changes_nothing_and_no_completion_is_judged_twice(tmp_path):
    calm, shaken, rewards = scripted(), scripted(), [Reward(), Reward()]
    undisturbed = run_over(tmp_path / "a", calm, reward=rewards[0])
    disturbed = run_over(tmp_path / "b", shaken, reward=rewards[1])
    undisturbed.train()
    shaken.dies_after = 8 + 6  # in the second wave of the second rollout
    disturbed.train()
    assert rewards[0].judged == rewards[1].judged
    assert [len(wave) for wave in shaken.waves] == [4, 4, 4, 4, 2]
    assert same(weights(undisturbed), weights(disturbed))


def test_a_rollout_func_that_runs_again_after_its_vllm_died_requests_only_the_missing_completions(tmp_path):
    def function(prompts, trainer):
        results = generate_rollout_completions(trainer, prompts)
        return {name: [result[name] for result in results] for name in ("prompt_ids", "completion_ids", "logprobs")}

    vllm = scripted()
    run = run_over(tmp_path, rollout_func=function, max_steps=1)
    run.collector.engine = replace(run.collector.engine, engine=engine_over(vllm, batch_size=4))
    run.collector.engine.close()
    vllm.dies_after = 6
    run.train()
    assert [len(wave) for wave in vllm.waves] == [4, 4, 2]


@pytest.mark.extended
def test_a_vllm_that_was_restarted_between_two_rollouts_is_loaded_again(tmp_path):
    vllm = scripted()
    run = run_over(tmp_path, vllm, steps_per_generation=2, max_steps=4)
    seen = []

    def reward(completions, **columns):
        seen.append(vllm.incarnation)
        vllm.restart()
        return [0.0, 1.0] * (len(completions) // 2)

    run.collector.panel.rewards[0].function = reward
    run.train()
    assert len(seen) >= 2


def test_a_vllm_that_never_comes_back_ends_the_run_after_so_many_tries(tmp_path):
    class Doomed:
        def __init__(self):
            self.vllm = None

        def __call__(self, request):
            self.vllm.dies_after = 0
            return answer_of(request)

    doomed = Doomed()
    doomed.vllm = scripted(doomed)
    run = run_over(tmp_path, doomed.vllm, per_device_train_batch_size=16)
    with pytest.raises(LostEngineError, match="died"):
        run.train()
    assert doomed.vllm.events.count("pause") == 1 + 1 + MAX_RECONNECTS  # the first load is the test's own
    lost = journal(tmp_path, "events")
    assert [row["event"] for row in lost] == ["engine lost"] * MAX_RECONNECTS
    assert "died" in lost[0]["error"]
    assert "close" in doomed.vllm.events


@pytest.mark.extended
def test_a_vllm_that_finds_no_memory_when_it_wakes_is_built_again_with_a_smaller_cache(tmp_path):
    calm, shaken = scripted(), scripted()
    undisturbed, disturbed = run_over(tmp_path / "a", calm), run_over(tmp_path / "b", shaken, where=SLEEPING)
    cache = disturbed.run.sizes.kv_cache_bytes

    def wake():
        shaken.wake = lambda: None
        raise RuntimeError("CUDA Error: out of memory at /workspace/csrc/cumem_allocator.cpp:119")

    shaken.wake = wake
    for run in (undisturbed, disturbed):
        run.train()
    assert shaken.events.count("close") == calm.events.count("close") + 1
    (event,) = journal(tmp_path / "b", "events")
    assert event["kv_cache_bytes"] == disturbed.run.sizes.kv_cache_bytes < cache
    assert "cumem_allocator" in event["reason"]
    assert same(weights(undisturbed), weights(disturbed))


def test_weights_that_do_not_fit_when_an_engine_was_lost_are_sent_in_smaller_buckets(tmp_path):
    def dies_once(request):
        if vllm.incarnation == 0:
            vllm.dies_after, vllm.push_error = 0, torch.OutOfMemoryError("no memory for a bucket")
        return answer_of(request)

    vllm = scripted(dies_once)
    run = run_over(tmp_path, vllm, max_steps=1)
    sizes = run.run.sizes

    def close():
        vllm.push_error = None

    vllm.close = close
    run.train()
    lowered = run.run.sizes
    assert (lowered.sync_bytes, lowered.kv_cache_bytes) == (sizes.sync_bytes // 2, sizes.kv_cache_bytes)
    assert [(row["event"], row.get("phase")) for row in journal(tmp_path, "events")] == [
        ("engine lost", None),
        ("out of memory", "sync"),
    ]


def test_after_training_the_engine_is_let_go_of_and_comes_back_for_an_evaluation(tmp_path):
    vllm = scripted()
    run = run_over(tmp_path, vllm)
    run.train()
    assert vllm.events[-1] == "close"
    assert all(row["time/sync"] > 0 for row in journal(tmp_path))
    assert "eval_reward" in run.evaluate(DATA)
    assert vllm.policy_version == 2
    greedy = [request for wave in vllm.waves for request in wave if request.params["temperature"] == 0]
    assert len(greedy) == len(DATA)


def test_without_vllm_installed_use_vllm_says_what_to_install(tmp_path):
    with pytest.raises(MissingPackageError, match=r"vLLM >=0\.31,<0\.34.*'\.\[vllm\]'"):
        run_over(tmp_path, use_vllm=True)


def test_what_vllm_was_told_is_described_without_its_token(tmp_path):
    def described(**arguments):
        args = GRPOConfig(output_dir=str(tmp_path), use_cpu=True, use_vllm=True, **arguments)
        return describe_vllm(resolve_vllm(args, 1, {}))

    description = described(vllm_mode="server", vllm_server_token="secret")
    assert (description["mode"], description["base_urls"], description["token"]) == (
        "server",
        ("http://127.0.0.1:8000",),
        "given",
    )
    assert "secret" not in str(description)
    assert "token" not in described()


LORA = {"r": 2, "target_modules": ["q_proj"]}
SERVING = ColocateSettings(engine_kwargs={"enable_lora": True})
THERE = ServerSettings(("http://a:1",))


@pytest.mark.parametrize(
    ("where", "lora", "because"),
    [
        (THERE, None, "adapter"),
        (AWAKE, LORA, "vllm_engine_kwargs .*enable_lora"),
        (SERVING, LORA | {"use_dora": True}, "vLLM .*adapter"),
        (THERE, LORA, None),
        (SERVING, LORA, None),
    ],
)
def test_why_adapters_are_merged_anyway_is_told(where, lora, because):
    policy = tiny_model() if lora is None else get_peft_model(tiny_model(), LoraConfig(**lora))
    assert why_adapters_idle(VllmSettings(where), policy) == ""
    found = why_adapters_idle(VllmSettings(where, adapters=False), policy)
    assert found == "" if because is None else re.search(because, found)


# what is asked of servers


def of_model(policy, **facts):
    """A fake server that has this model."""
    return serving(FakeServer(fingerprint=fingerprint(policy.config, char_tokenizer().get_vocab()), **facts))


@pytest.mark.parametrize(("version", "num_warnings"), [("0.32.0", 0), ("0.30.1", 1)])
def test_a_server_of_a_version_that_was_not_tried_is_warned_of(version, num_warnings, caplog):
    policy = tiny_model()
    with of_model(policy, version=version) as fake, caplog.at_level(logging.WARNING):
        (vllm,) = connect_checked(ServerSettings((fake.url,), timeout=10.0), policy, char_tokenizer())
        assert vllm.url == fake.url
        assert [path for path, body in fake.calls].count("/health") == 1  # it was waited for once
    assert sum(version in record.getMessage() for record in caplog.records) == num_warnings


def test_a_server_of_another_model_is_refused():
    with serving(FakeServer()) as fake, pytest.raises(EngineError, match="sizes"):
        connect_checked(ServerSettings((fake.url,), timeout=10.0), tiny_model(), char_tokenizer())


@pytest.mark.parametrize(("max_loras", "staleness"), [(0, 0), (1, 0), (0, 1), (2, 1), (3, 2), (1, 1), (2, 2), (0, 2)])
def test_a_server_must_hold_an_adapter_per_version_or_get_merged_weights_one_rollout_ahead(max_loras, staleness):
    policy = tiny_model()
    refused = staleness and (max_loras or staleness > 1) and max_loras <= staleness
    expectation = pytest.raises(EngineError, match=f"max-loras {staleness + 1}") if refused else nullcontext()
    with of_model(policy, max_loras=max_loras) as fake, expectation:
        connect_checked(ServerSettings((fake.url,), timeout=10.0), policy, char_tokenizer(), staleness=staleness)


def test_a_context_beyond_the_first_rotations_of_a_longrope_model_is_refused():
    policy = longrope_model()
    with of_model(policy) as fake, pytest.raises(EngineError, match=r"--max_model_len` 16"):
        connect_checked(ServerSettings((fake.url,), timeout=10.0), policy, char_tokenizer())
    assert within_rotations(ColocateSettings(), FIRST).max_model_length == FIRST
    assert within_rotations(ColocateSettings(max_model_length=8), FIRST).max_model_length == 8
    assert within_rotations(ColocateSettings(), None).max_model_length is None
    with pytest.raises(ArgumentError, match=r"vllm_max_model_length=32 .* 16"):
        within_rotations(ColocateSettings(max_model_length=32), FIRST)

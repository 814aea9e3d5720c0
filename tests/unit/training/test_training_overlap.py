"""Rollouts that are generated ahead: bits follow from counts, never from timing, and nothing is lost or rewarded twice."""

from __future__ import annotations

import logging
from collections import Counter

import pytest
import torch

from lowpeak.checkpoint.run_state import load_run_state
from lowpeak.errors import ArgumentError, CheckpointError
from lowpeak.report.figures import curve_figures, phase_figures
from lowpeak.report.run_data import read_runs
from overlap_runs import LORA, Delayed, Sampler, run_ahead, talk
from scripted_turns import questions
from small_runs import StopAfter, digits, journal, rows, same, weights
from tiny_models import tiny_model

SAVES = {"save_strategy": "steps", "save_steps": 1}
REFILLS = {"dynamic_sampling_rounds": 2}


def samplers(count, seed=None, lag=0, model=None, max_loras=0):
    """Samplers with random delays, each from a seed of its own."""
    delays = [None if seed is None else (seed, i).__hash__() for i in range(count)]
    return [Sampler(lag, each, model=model, max_loras=max_loras) for each in delays]


def trained(folder, of, staleness, resume=None, **changes):
    run = run_ahead(folder, of, staleness, **{"reward_funcs": digits, **changes})
    run.train(resume_from_checkpoint=resume)
    return run


def train_talk(folder, staleness, seed=None, resume=None, count=None, **changes):
    parts = talk(seed)
    of = samplers(count or staleness, seed, model=parts["model"])
    return trained(folder, of, staleness, resume, **{**parts, **changes})


def plain(seed=None):
    return {"model": tiny_model()}


def serials(folder):
    """Rollout, prompt and tokens of each completion of the journal, in order."""
    return [(row["rollout"], row["group"], row["prompt"], row["completion"]) for row in journal(folder, "rollouts")]


KINDS = {
    "GRPO": {},
    "two steps a rollout": {"steps_per_generation": 2},
    "PPO": {"num_iterations": 2, "beta": 0.05},
    "RLOO": {"old_policy": ..., "beta": 0.05},
    "OnlineDPO": {"old_policy": ...},
    "Distillation": {"distillation_mode": "sampled_token"},
    "conversations": {},
    "conversations over adapters": {"peft_config": LORA},
    "an adapter": {"peft_config": LORA},
}


def check_lag(folder, staleness, seeds, kind="GRPO", **changes):
    """The weights of runs with random delays, which are those of a run whose engine generates with weights of N pushes before."""
    new_parts = talk if kind.startswith("conversations") else plain
    kind = kind if kind in ("PPO", "RLOO", "OnlineDPO", "Distillation") else "GRPO"
    parts, max_loras = new_parts(), staleness + 1 if "peft_config" in changes else 0
    of = samplers(1, lag=staleness, model=parts["model"], max_loras=max_loras)
    simulated = trained(folder / "lag", of, 0, kind=kind, **parts, **changes)
    for seed in seeds:
        parts = new_parts(seed)
        of = samplers(1 if max_loras else staleness, seed, model=parts["model"], max_loras=max_loras)
        ahead = trained(folder / f"ahead{seed}", of, staleness, kind=kind, **parts, **changes)
        assert same(weights(simulated), weights(ahead))
        assert serials(folder / "lag") == serials(folder / f"ahead{seed}")
    initial = new_parts()["model"].named_parameters()
    assert not same(weights(simulated), {name: parameter.detach() for name, parameter in initial})
    return weights(simulated)


@pytest.mark.parametrize("kind", ["GRPO", "conversations"])
@pytest.mark.parametrize("staleness", [1, 2])
def test_delays_change_no_bit_and_the_weights_are_those_of_so_many_rollouts_before(tmp_path, staleness, kind):
    check_lag(tmp_path, staleness, range(3 if kind == "GRPO" else 2), kind)


@pytest.mark.parametrize("staleness", [1, 2])
def test_one_server_holds_an_adapter_per_version_and_a_new_one_touches_no_request(tmp_path, staleness):
    """With evaluations between the steps of a rollout; then resumed, on two servers."""
    changes = {
        "peft_config": LORA,
        "steps_per_generation": 2,
        "max_steps": 8,
        "save_strategy": "steps",
        "save_steps": 3,
    }
    expected = check_lag(tmp_path, staleness, [0], **changes)
    (server,) = of = samplers(1, 1, max_loras=staleness + 1)
    evaluated = {"eval_dataset": rows(1), "eval_strategy": "steps", "eval_steps": 3}
    ahead = trained(tmp_path / "evaluated", of, staleness, **changes, **evaluated)
    assert server.vllm.events.count("pause") == 1  # for the base
    assert server.vllm.most_adapters == staleness + 1
    saved = str(tmp_path / "ahead0/checkpoint-3")
    resumed = trained(tmp_path / "b", samplers(2, 9, max_loras=staleness + 1), staleness, resume=saved, **changes)
    assert same(expected, weights(ahead))
    assert same(expected, weights(resumed))


@pytest.mark.release
@pytest.mark.parametrize("staleness", [1, 2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_delays_of_20_seeds_change_no_bit(tmp_path, staleness, kind):
    if kind == "RLOO" and staleness > 1:
        pytest.skip("refused: ratios of sequences")
    changes = KINDS[kind] | ({"vllm_importance_sampling_mode": "sequence_truncate"} if kind == "RLOO" else {})
    check_lag(tmp_path, staleness, range(20), kind, max_steps=8, **changes)


@pytest.mark.extended
@pytest.mark.parametrize("kind", KINDS)
def test_each_algorithm_trains_on_rollouts_ahead(tmp_path, kind):
    changes = KINDS[kind] | ({"vllm_importance_sampling_mode": "sequence_truncate"} if kind == "RLOO" else {})
    check_lag(tmp_path, 1, [0], kind, **changes)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"rollout_func": lambda prompts, trainer: {}}, "rollout_func"),
        ({"vllm_group_port": 4000}, "vllm_group_port=4000"),
        ({"vllm_server_base_url": "http://a:1"}, "max_staleness=2 .*max_staleness=1"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_overlap_is_refused(tmp_path, changes, named):
    with pytest.raises(ArgumentError, match=named):
        run_ahead(tmp_path, samplers(2), 2, **changes)


def test_the_journal_tells_versions_staleness_and_idle_time(tmp_path):
    run = trained(tmp_path, samplers(2), 2, steps_per_generation=2)
    assert run.dry_run()["rollout"]["token_age_in_steps"] == [4, 5]
    steps = journal(tmp_path)
    assert [row["staleness/max"] for row in steps] == [0, 1, 2, 3, 4, 5]
    assert [row["policy_version"] for row in journal(tmp_path, "rollouts")][::16] == [0, 0, 0]
    assert all(0 <= row["idle/servers"] <= 1 and row["time/generate"] > 0 for row in steps[::2])
    assert all(row["time/wait_rollout"] >= 0 and 0 <= row["idle/trainer"] <= 1 for row in steps[2::2])
    runs = read_runs([tmp_path])
    titles = {figure["layout"]["title"]["text"]: len(figure["data"]) for figure in curve_figures(runs)}
    assert {"Staleness of tokens in steps": 2, "Idle shares of servers and trainer": 2}.items() <= titles.items()
    (times, _) = phase_figures(runs)
    assert not {"generate", "wait_rollout"} & {trace["name"] for trace in times["data"]}
    assert all(row["sampling/sampling_logp_difference/mean"] > 1e-3 for row in steps[2:])
    assert all(0 < row["sampling/effective_sample_size"] <= 1 for row in steps)


def test_the_recorded_version_generated_the_tokens(tmp_path):
    """Log-probs of each completion, computed anew with the weights that the run had at its recorded version."""
    run = run_ahead(tmp_path, samplers(2, 0), 2, reward_funcs=digits)
    versions, collect = {}, run.pipeline.collect

    def collect_and_keep(*args):
        versions[run.state.global_step] = weights(run)
        rollout = collect(*args)
        for record in rollout.records:
            (version,) = set(record.completion.policy_versions.tolist())
            model = tiny_model().eval()
            model.load_state_dict(versions[version], strict=False)
            ids = torch.tensor([[*record.prompt_ids, *record.completion.ids.tolist()]])
            with torch.no_grad():
                logprobs = model(input_ids=ids).logits[0, len(record.prompt_ids) - 1 : -1].log_softmax(-1)
            found = logprobs.gather(1, record.completion.ids.long()[:, None])[:, 0]
            torch.testing.assert_close(found, record.completion.logprobs, rtol=0, atol=1e-5)
        return rollout

    run.pipeline.collect = collect_and_keep
    run.train()


@pytest.mark.parametrize(
    ("staleness", "changes", "stops"),
    [
        (1, REFILLS, (2,)),
        (2, {"steps_per_generation": 2}, (3,)),
        *(
            pytest.param(staleness, changes, (1, 2, 4, 5), marks=pytest.mark.extended)
            for staleness in (1, 2, 3)
            for changes in ({}, REFILLS, {"steps_per_generation": 2})
        ),
    ],
    ids=str,
)
def test_a_run_resumes_from_any_checkpoint_to_the_same_bits(tmp_path, staleness, changes, stops):
    calm = trained(tmp_path / "calm", samplers(staleness), staleness, **SAVES, **changes)
    expected = serials(tmp_path / "calm")
    for step in stops:
        folder, of = tmp_path / f"at{step}", samplers(staleness, step)
        stop = {"callbacks": [StopAfter(step)]}
        run_ahead(folder, of, staleness, reward_funcs=digits, **stop, **SAVES, **changes).train()
        saved = load_run_state(folder / f"checkpoint-{step}")
        assert all(len(each.records) == each.num_prompts * 4 for each in saved.in_flight)
        resumed = trained(folder, samplers(staleness, step + 1), staleness, resume=True, **SAVES, **changes)
        assert same(weights(calm), weights(resumed))
        assert serials(folder) == expected


def tool_metrics(folder):
    return [
        {name: value for name, value in row.items() if name.startswith(("tools/", "environments/"))}
        for row in journal(folder)
    ]


@pytest.mark.parametrize(
    ("staleness", "changes", "stops"),
    [
        (1, {}, (2,)),
        (2, {"steps_per_generation": 2}, (3,)),
        *(pytest.param(n, each, (1, 4, 5), marks=pytest.mark.extended) for n in (1, 3) for each in ({}, REFILLS)),
    ],
    ids=str,
)
def test_conversations_resume_to_the_same_bits_and_no_function_is_called_again(tmp_path, staleness, changes, stops):
    """Environments, which rewards read, are called again instead: no checkpoint holds them."""
    calm = train_talk(tmp_path / "calm", staleness, 0, **SAVES, **changes)
    calls = Counter(Delayed.events)
    for step in stops:
        folder, stop = tmp_path / f"at{step}", {"callbacks": [StopAfter(step)]}
        train_talk(folder, staleness, step, **stop, **SAVES, **changes)
        before = Counter(Delayed.events)
        saved = load_run_state(folder / f"checkpoint-{step}").in_flight
        resumed = train_talk(folder, staleness, step + 1, resume=True, **SAVES, **changes)
        assert same(weights(calm), weights(resumed))
        assert serials(folder) == serials(tmp_path / "calm")
        assert tool_metrics(folder) == tool_metrics(tmp_path / "calm")
        both = before + Delayed.events
        assert both["add"] == calls["add"]
        assert both["reset"] == calls["reset"] + sum(len(each.records) for each in saved)


class Forgetful(Delayed):
    """An environment that answers otherwise when it is called again."""

    is_again = False

    def increase(self, by: int) -> int:
        """Add to the total.

        Args:
            by: How much.
        """
        return super().increase(by) + 100 * self.is_again


def test_a_conversation_goes_on_with_the_present_weights_where_an_environment_answers_otherwise(tmp_path, monkeypatch):
    changes = {"environment_factory": Forgetful, **SAVES}
    train_talk(tmp_path, 1, 0, callbacks=[StopAfter(2)], **changes)
    saved = {
        (record.group, i % 4): record.completion
        for i, record in enumerate(load_run_state(tmp_path / "checkpoint-2").in_flight[0].records)
    }
    monkeypatch.setattr(Forgetful, "is_again", True)
    train_talk(tmp_path, 1, 1, resume=True, **changes)
    found = [row for row in journal(tmp_path, "rollouts") if row["rollout"] == 2]
    versions = [[turn["policy_version"] for turn in row["turns"]] for row in found]
    assert all(each == sorted(each) and set(each) <= {1, 2} for each in versions)
    assert {1, 2} == {version for each in versions for version in each}
    assert len(found) == len(saved) == 8


def test_another_staleness_takes_what_is_saved_first_and_none_at_all_is_refused(tmp_path):
    folder = tmp_path / "a"
    run_ahead(folder, samplers(2), 2, callbacks=[StopAfter(2)], **SAVES).train()
    with pytest.raises(CheckpointError, match=r"\(2, 3\).*max_staleness=1"):
        trained(folder, [Sampler()], 0, resume=True)
    with pytest.raises(CheckpointError, match=r"num_generations.* 4 .* 2"):
        trained(folder, samplers(2), 2, resume=True, num_generations=2)
    for staleness in (1, 3):
        trained(folder, samplers(staleness), staleness, resume=str(folder / "checkpoint-2"), max_steps=8)
        versions = [row["policy_version"] for row in journal(folder, "rollouts")][::8]
        assert versions == {1: [0, 0, 0, 1, 3, 4, 5, 6], 3: [0, 0, 0, 1, 2, 2, 3, 4]}[staleness]


@pytest.mark.parametrize("dies_after", [8, *(pytest.param(n, marks=pytest.mark.extended) for n in (0, 3, 5, 13, 19))])
@pytest.mark.parametrize("count", [1, 2])
def test_a_server_that_dies_with_two_adapters_leaves_the_other_its_base_and_adapters(tmp_path, count, dies_after):
    of = samplers(count, max_loras=3)
    run = run_ahead(tmp_path, of, 2, reward_funcs=digits, peft_config=LORA)
    of[0].vllm.dies_after = dies_after
    run.train()
    found = journal(tmp_path, "rollouts")
    assert len(found) == 6 * 8
    later = [row for row in found if row["policy_version"] != max(0, row["rollout"] - 2)]
    if count == 2:
        # The second wave is submitted without a push before it, and waits for one if a server was lost already.
        assert {row["rollout"] for row in later} <= {1}
        assert of[1].vllm.events.count("pause") == 1
        return
    events = journal(tmp_path, "events")
    assert "engine lost" in [event["event"] for event in events]
    assert len(later) == sum(event.get("count", 0) for event in events)


POINTS = [pytest.param(point, marks=() if point == 7 else pytest.mark.release) for point in range(20)]


@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("staleness", [1, 2])
@pytest.mark.parametrize("servers", [1, 2])  # of a group
def test_a_server_that_dies_at_any_point_of_a_rollout_loses_nothing_and_nothing_is_rewarded_twice(
    tmp_path, servers, staleness, point
):
    """With another server in its group the version stays; alone it gets the present weights, which are recorded."""
    judged = []

    def reward(completions, **columns):
        judged.extend(completions)
        return digits(completions)

    of = samplers(servers * staleness)
    run = run_ahead(
        tmp_path, of, staleness, reward_funcs=reward, per_device_train_batch_size=20, max_steps=3 * staleness
    )
    of[0].vllm.dies_after = 20 // servers + point  # in its second rollout, or its third
    run.train()
    found = journal(tmp_path, "rollouts")
    assert len(found) == len(judged) == 20 * 3 * staleness
    assert [row["completion"] for row in found] == judged
    assert of[0].vllm.incarnation == 1
    later = [row for row in found if row["policy_version"] != max(0, row["rollout"] - staleness)]
    if servers == 2:
        assert not later
        return
    events = journal(tmp_path, "events")
    assert [event["event"] for event in events if "count" not in event] == ["engine lost"]
    assert all(row["policy_version"] == row["rollout"] for row in later)
    assert len(later) == sum(event.get("count", 0) for event in events) == 20 - point
    # A step each: the hand-over of a rollout follows as many.
    assert all(event["step"] == event["rollout"] for event in events if "count" in event)


@pytest.mark.parametrize("count", [1, 2])
def test_conversations_go_on_after_a_server_has_died(tmp_path, count):
    """From their last turns: in its group with the same weights and bits, alone with the present ones; no call is repeated."""
    calm = train_talk(tmp_path / "calm", 1, 0, count=count)
    calls = Counter(Delayed.events)
    parts = talk(1)
    of = samplers(count, 1, model=parts["model"])
    of[0].vllm.dies_after = 60 // count
    Delayed.most = 0.1  # most conversations wait for a call when it dies
    run = trained(tmp_path / "a", of, 1, **parts)
    assert of[0].vllm.incarnation == 1
    versions = [
        {turn["policy_version"] - max(0, row["rollout"] - 1) for turn in row["turns"]}
        for row in journal(tmp_path / "a", "rollouts")
    ]
    assert len(versions) == 6 * 8
    assert (Delayed.events["reset"], Delayed.events["overlapping"]) == (6 * 8, 0)
    if count == 2:
        assert set().union(*versions) == {0}
        assert same(weights(calm), weights(run))
        assert Delayed.events == calls
    else:
        assert {0, 1} in versions


@pytest.mark.parametrize("has_turns", [False, True])
def test_an_evaluation_is_that_of_the_present_weights_and_changes_no_bit(tmp_path, has_turns):
    data, new_parts = (questions(3), talk) if has_turns else (rows(3), plain)
    calm, run = (
        trained(tmp_path / name, samplers(2, 0, model=(parts := new_parts(0))["model"]), 2, **parts, **changes)
        for name, changes in (
            ("calm", {}),
            ("a", {"eval_dataset": data, "eval_strategy": "steps", "eval_steps": 2, **SAVES}),
        )
    )
    assert same(weights(calm), weights(run))
    evaluations = [row for row in run.state.log_history if "eval_reward" in row]
    assert [row["step"] for row in evaluations] == [2, 4, 6]
    parts = {"reward_funcs": digits, **new_parts()}
    alone = run_ahead(tmp_path / "b", samplers(1, model=parts["model"]), 0, **parts)
    for row in evaluations:
        checkpoint = tmp_path / "a" / f"checkpoint-{row['step']}"
        alone.model.load_state_dict(parts["model"].from_pretrained(checkpoint).state_dict())
        alone.state.global_step = row["step"]
        assert alone.evaluate(data)["eval_reward"] == row["eval_reward"]


def test_nothing_is_generated_beyond_the_last_rollout(tmp_path):
    of = samplers(2)
    trained(tmp_path, of, 2, max_steps=3)
    assert sum(len(each.asked) for each in of) == 3 * 8


def test_a_small_effective_sample_size_is_warned_of_once(tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        trained(tmp_path, samplers(1), 1, learning_rate=0.2)
    assert sum("effective sample size" in record.getMessage() for record in caplog.records) == 1

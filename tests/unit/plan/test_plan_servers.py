"""Plans of runs with vLLM servers: seconds of phases that overlap, and how many devices serve, by hand arithmetic."""

from __future__ import annotations

import pytest
from test_fit import FEW_CANDIDATES, request

from lowpeak.plan.cost import Work, seconds_range, total_seconds
from lowpeak.plan.device_split import DeviceSplit, compare_splits
from lowpeak.plan.fit import Search
from lowpeak.plan.hardware import GIB, Card, Machine
from lowpeak.plan.output import fit_lines, summary
from lowpeak.plan.plan import make_plan


def servers(number: int, staleness: int = 1) -> dict[str, object]:
    urls = [f"http://127.0.0.1:{8000 + i}" for i in range(number)]
    settings = {"vllm_mode": "server", "vllm_server_base_url": urls, "old_policy": "sampler"}
    return {"use_vllm": True, "max_staleness": staleness, **settings}


@pytest.mark.parametrize(("rollout", "expected"), [(4.0, 8.5), (8.0, 8.5), (9.0, 9.5)])
def test_a_step_takes_the_longer_side_and_the_push(rollout, expected):
    seconds = {"sync": 0.5, "rollout": rollout, "score": 2.0, "train": 5.0, "optimizer": 1.0}
    assert total_seconds(seconds, overlaps=True) == expected
    assert total_seconds(seconds, overlaps=False) == rollout + 8.5


def test_a_plan_counts_the_push_and_the_overlap():
    turns, overlapped = (make_plan(request(80, **FEW_CANDIDATES, **servers(2, n))) for n in (0, 1))
    assert turns.seconds == overlapped.seconds
    assert turns.phases.keys() == overlapped.phases.keys()
    assert all(turns.phases[name].peak == phase.peak for name, phase in overlapped.phases.items())
    seconds = turns.seconds
    assert seconds["sync"] == pytest.approx(2 * turns.counts.total / (0.7 * 25e9))
    assert turns.step_seconds == sum(seconds.values())
    trained = seconds["score"] + seconds["train"] + seconds["optimizer"]
    assert overlapped.step_seconds == max(seconds["rollout"], trained) + seconds["sync"]
    assert overlapped.tokens_per_second * overlapped.step_seconds == pytest.approx(8 * 64)
    text = " ".join(summary(overlapped, ()))
    assert "Servers: 2, each planned on 1 device of 80 GiB" in text
    assert "a prompt of 64 tokens (--prompt_tokens) and 64 after it" in text
    least, most = seconds_range(overlapped.work, overlapped.request.machine)
    assert least < overlapped.step_seconds < most


CARD = Card(memory=80 * GIB, flops=1e13, bandwidth=1e12, link=1e18, host_link=1e18)


def split_work(serving: int, rollout_tokens: int) -> tuple[Work, Machine]:
    """The work of a training device with 840 sequences a step, which decode one at a time.

    A token takes 2 * 3e9 / (0.6 * 1e12) = 0.01 s, in which weights are read; training takes 6 * 1e9 * tokens / (0.4 * 1e13).
    """
    training = 8 - serving
    work = Work(
        parameters=3 * 10**9, trained=3 * 10**9, active_parameters=10**9, layers=0, hidden=1, kv_bytes=0, prompt=0,
        completion=rollout_tokens, train_tokens=840_000 // training, score_tokens=0, score_passes=0,
        sequences=840 // serving, prompts=0, slots=1, num_batches=1, steps=1, checkpointing=False, overlaps=True,
    )  # fmt: skip
    return work, Machine(training, 80 * GIB, card=CARD)


def hand_seconds(serving: int, tokens: int) -> float:
    return max(840 // serving * tokens * 0.01, 6 * 1e9 * (840_000 // (8 - serving)) / 4e12)


@pytest.mark.parametrize(("tokens", "fastest", "least", "most"), [(1, 1, 1, 1), (150, 4, 2, 6)])
def test_the_number_of_serving_devices_is_where_both_sides_take_as_long(tokens, fastest, least, most):
    """With s of 8 serving, rollouts take 8.4 * tokens / s seconds and training 1260 / (8 - s).

    With one of the two four times as fast as the other, 2 of 8 serve, or 6.
    """
    works = {serving: split_work(serving, rollout_tokens=tokens) for serving in range(1, 8)}
    split = compare_splits(8, 2, works, {})
    assert split.seconds == pytest.approx({serving: hand_seconds(serving, tokens) for serving in works})
    assert split.fastest == min(works, key=lambda serving: hand_seconds(serving, tokens)) == fastest
    assert split.range == (least, most)


@pytest.mark.parametrize(("current", "fastest"), [(2, 2), (3, 3), (4, 1), (7, 1)])
def test_of_equal_numbers_the_current_one_stays_or_the_fewest_serve(current, fastest):
    seconds = {1: 300.0, 2: 300.0, 3: 308.0, 4: 315.0, 5: 420.0}
    assert DeviceSplit(8, current, seconds, (1, 3)).fastest == fastest


@pytest.mark.extended
def test_a_search_says_how_many_devices_serve_and_warns_if_the_cost_model_decides():
    found = Search(request(80, 4, **FEW_CANDIDATES, **servers(2))).run()
    assert set(found.split.seconds) <= {1, 2, 3, 4, 5}
    assert found.split.seconds[2] == pytest.approx(found.plan.step_seconds, rel=0.1)
    text = "\n".join(fit_lines(found))
    assert f"Of 6 devices {found.split.fastest} should serve" in text
    assert ("Warning" in text) == (found.split.range[0] != found.split.range[1])
    assert Search(request(80, **FEW_CANDIDATES)).run().split is None

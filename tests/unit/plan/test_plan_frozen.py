"""Plans of teachers and references: what they read, where they are, and what a run does not generate or score."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
from test_plan import SMALL, WIDE, plan, request

from lowpeak.errors import ArgumentError
from lowpeak.memory.usage import Kind
from lowpeak.plan.hardware import GIB, Machine
from lowpeak.plan.inputs import RunInputs
from lowpeak.plan.plan import make_plan

HEAD = SMALL.vocab_size * SMALL.hidden_size


def test_a_teacher_is_planned_as_it_is_loaded_sharded_and_in_host_memory():
    def planned(strategy="single", **changes):
        return make_plan(replace(request("distillation", strategy, **changes), teacher_config=WIDE))

    whole = planned()
    policy = whole.counts.total
    assert whole.phases["score"].device[Kind.FROZEN] == pytest.approx(4 * policy, rel=0.01)
    narrow = planned(teacher_model_init_kwargs={"dtype": "bfloat16"})
    assert narrow.phases["score"].device[Kind.FROZEN] == pytest.approx(2 * policy, rel=0.01)
    shard = planned("fsdp2").phases["score"].device[Kind.FROZEN]
    assert shard == pytest.approx(4 * policy / 8, rel=0.02)
    larger = copy.deepcopy(SMALL)
    larger.intermediate_size *= 8
    with_larger = make_plan(replace(request("distillation"), teacher_config=larger))
    assert with_larger.seconds["score"] > 1.5 * make_plan(request("distillation")).seconds["score"] > 0
    away = planned(offload_frozen_models=True).phases["score"]
    assert away.device[Kind.FROZEN] < 4 * policy
    assert away.host[Kind.FROZEN] == pytest.approx(4 * policy, rel=0.01)


def test_the_head_of_a_teacher_in_host_memory_is_on_the_device_while_a_step_trains():
    away = make_plan(replace(request("distillation", offload_frozen_models=True), teacher_config=WIDE))
    held = {name: phase.device.get(Kind.FROZEN, 0) for name, phase in away.phases.items()}
    assert held["forward"] == held["backward"] == 4 * HEAD
    assert held["optimizer"] == held["rollout"] == 0


def test_a_teachers_longer_prompts_and_its_states_are_planned():
    short = plan("distillation")
    long = make_plan(replace(request("distillation"), teacher_prompt_tokens=400))
    assert long.seconds["score"] > 3 * short.seconds["score"] > 0
    kinds = [each.phases["score"].device[Kind.ACTIVATIONS] for each in (short, long)]
    assert kinds[1] > kinds[0]
    assert long.phases["backward"].device[Kind.GRADIENTS] == short.phases["backward"].device[Kind.GRADIENTS]
    states = 8 * 64 * SMALL.hidden_size * 2  # rows, tokens of a completion, and bytes of a number
    assert {each.phases["forward"].host[Kind.TEACHER] for each in (short, long)} == {states}


def test_a_teachers_prompt_has_room_for_a_successful_completion():
    found = plan("distillation", use_successful_as_teacher=True)
    longer = make_plan(replace(request("distillation"), teacher_prompt_tokens=32 + 64))
    assert found.phases["score"].peak == longer.phases["score"].peak > plan("distillation").phases["score"].peak
    assert found.seconds == longer.seconds


def test_completions_of_the_dataset_are_not_generated():
    whole, half, nothing = (plan("distillation", lmbda=share, num_generations=1) for share in (1.0, 0.5, 0.0))
    assert nothing.seconds["rollout"] == 0 < half.seconds["rollout"] < whole.seconds["rollout"]
    assert Kind.KV_CACHE not in nothing.phases["rollout"].device
    assert half.phases["rollout"].peak == whole.phases["rollout"].peak > nothing.phases["rollout"].peak


def test_mismatched_pairs_of_kto_are_scored_by_policy_and_reference():
    matched, both = plan("kto", loss_type="apo_zero_unpaired", max_length=64), plan("kto", max_length=64)
    assert both.seconds["score"] == pytest.approx(3 * matched.seconds["score"])
    inputs = both.inputs
    assert (inputs.scores_mismatched, matched.inputs.scores_mismatched) == (True, False)


def test_a_reference_that_has_scored_the_data_is_freed():
    kept, freed = plan("dpo"), plan("dpo", precompute_ref_log_probs=True)
    frozen = kept.phases["load"].device[Kind.FROZEN]
    held = {name: phase.device.get(Kind.FROZEN, 0) for name, phase in freed.phases.items()}
    assert held == {**dict.fromkeys(freed.phases, 0), "load": frozen, "score": frozen}
    assert freed.seconds["score"] == 0 < kept.seconds["score"]


def test_a_plan_refuses_what_a_run_of_distillation_refuses():
    with pytest.raises(ArgumentError, match=r"lmbda=0\.5.*lmbda=1"):
        RunInputs(replace(request("distillation", lmbda=0.5, num_generations=1), has_tools=True))
    with pytest.raises(ArgumentError, match=r"distillation.*fsdp2"):
        make_plan(replace(request("distillation", "tp", Machine(4, 80 * GIB)), tensor_parallel=2))

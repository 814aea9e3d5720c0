"""Each family has a plan of the engine that will run, and a cache whose bytes are those that the loop allocates."""

from __future__ import annotations

import pytest
import torch
from plan_checks import PROMPT, cache_errors, check_plan, plan_family

from lowpeak.memory import Kind
from lowpeak.rollout.native.engine import unsupported_reason
from model_families import FAMILIES, is_known, make_family

KNOWN = [family for family in FAMILIES if is_known(family)]
PLANNED_IN_CI = ("Nemotron-H", "GLM-5", "LongCat-Flash")
WITHOUT_PLAN = ("LongCat-Flash",)
MEASURED_IN_CI = ("DeepSeek-V3", "Gemma 3n", "gpt-oss", "Falcon-H1", "LFM2", "Qwen3.5", "LongCat-Flash")


def marked(chosen: tuple[str, ...]) -> list:
    return [pytest.param(each, marks=() if each in chosen else pytest.mark.release) for each in KNOWN]


@pytest.mark.parametrize("family", marked(PLANNED_IN_CI))
def test_a_plan_ends_or_is_refused_in_one_sentence(family):
    said = check_plan(family)
    assert "reads values of tensors" in said if family in WITHOUT_PLAN else said == "yes"


@pytest.mark.parametrize("family", marked(MEASURED_IN_CI))
def test_a_sequences_measured_bytes_are_those_of_the_loops_slots(family):
    model = make_family(family)
    if unsupported_reason(model) is not None:
        pytest.skip("it generates by generate()")
    for dtype in (torch.float32, torch.bfloat16):
        assert cache_errors(model.to(dtype)) == pytest.approx([0, 0], abs=0.02)


def test_generate_keeps_keys_of_each_sequence_with_its_prompt_within_the_budget():
    one = (PROMPT + 140) * plan_family("Bloom").inputs.sequence_bytes(1, torch.float32)
    for num_sequences, changes in ((8, {}), (3, {"kv_cache_bytes": 3 * one})):
        found = plan_family("Bloom", max_completion_length=140, **changes)
        # A layer's keys and values are copied when a token is added.
        planned = found.phases["rollout"].device[Kind.KV_CACHE]
        assert 0.99 * num_sequences * one <= planned <= 1.5 * num_sequences * one

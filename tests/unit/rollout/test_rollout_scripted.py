"""The fake engine follows its script and remembers its calls."""

from __future__ import annotations

import pytest
import torch

from lowpeak.config.rollout import Sampling
from lowpeak.errors import EngineError
from lowpeak.records import Completion, Prompt, WeightSlice
from lowpeak.rollout.engine import RolloutEngine
from lowpeak.rollout.scripted import ScriptedEngine

SAMPLING = Sampling(num_generations=3, max_new_tokens=4)
PROMPT = Prompt(serial=7, ids=(5, 6), source="ab")


def _ready(script) -> ScriptedEngine:
    engine = ScriptedEngine(script)
    engine.load([], 0)
    return engine


def test_the_scripted_engine_is_a_rollout_engine():
    assert isinstance(ScriptedEngine({}), RolloutEngine)


@pytest.mark.parametrize("key", ["ab", (5, 6)])
def test_a_mapping_answers_by_source_or_by_ids_and_starts_again(key):
    (group,) = _ready({key: [[1, 2], [3]]}).generate([PROMPT], SAMPLING)
    assert group.prompt is PROMPT
    assert [c.ids.tolist() for c in group.completions] == [[1, 2], [3], [1, 2]]
    assert [c.loss_mask.tolist() for c in group.completions] == [[True, True], [True], [True, True]]


def test_a_function_of_the_prompt_may_return_whole_completions():
    cut = Completion(torch.tensor([4]), torch.tensor([-0.5]), torch.tensor([True]), "length")
    (group,) = _ready(lambda prompt: [cut, [prompt.serial]]).generate([PROMPT], SAMPLING)
    assert [c.finish_reason for c in group.completions] == ["length", "stop", "length"]
    assert group.completions[1].ids.tolist() == [7]


def test_calls_are_kept_with_the_version_that_answered():
    engine = _ready({"ab": [[1]]})
    engine.generate([PROMPT], SAMPLING)
    engine.load([WeightSlice("head", (2,), torch.float32, 0, torch.zeros(2))], 4)
    engine.generate([PROMPT], SAMPLING)
    assert [call.policy_version for call in engine.calls] == [0, 4]
    assert engine.calls[0].prompts == (PROMPT,)
    assert engine.loads == [(0, ()), (4, ("head",))]
    assert engine.policy_version == 4


def test_generating_before_the_first_load_is_refused():
    engine = ScriptedEngine({"ab": [[1]]})
    assert engine.policy_version is None
    with pytest.raises(EngineError, match="call load"):
        engine.generate([PROMPT], SAMPLING)


def test_generating_asleep_is_refused_until_it_wakes():
    engine = _ready({"ab": [[1]]})
    engine.sleep()
    with pytest.raises(EngineError, match="call wake"):
        engine.generate([PROMPT], SAMPLING)
    engine.wake()
    assert len(engine.generate([PROMPT], SAMPLING)) == 1


def test_a_prompt_that_is_not_in_the_script_is_named():
    with pytest.raises(EngineError, match="prompt 7"):
        _ready({}).generate([PROMPT], SAMPLING)

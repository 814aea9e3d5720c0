"""Arguments that have no effect beside the others are named before a model is loaded."""

from __future__ import annotations

import re

import pytest

from lowpeak.errors import ArgumentError
from small_runs import make

# The last argument of each case is the one without effect.
CASES = {
    "PPO": [
        {"num_iterations": 1, "cliprange": 0.1},
        {"num_iterations": 1, "cliprange_value": 0.5},
        {"num_iterations": 1, "early_stop_kl": 0.5},
        {"beta": 0.0, "kl_target": 1.0},
        {"kl_horizon": 5},
        {"dynamic_sampling_rounds": 2},
        {"mask_truncated_completions": True, "missing_eos_penalty": 1.0},
        {"vf_coef": 0.0, "cliprange_value": 0.5},
        {"vf_coef": 0.0, "value_learning_rate": 0.5},
    ],
    "OnlineDPO": [
        {"epsilon": 0.1},
        {"epsilon_high": 0.3},
        {"kl_estimator": "k1"},
        {"mask_truncated_completions": True, "missing_eos_penalty": 1.0},
        {"vllm_importance_sampling_correction": True},
        {"use_vllm": True, "vllm_importance_sampling_correction": True},
    ],
    "SFT": [{"packing_strategy": "wrapped"}, {"per_device_eval_batch_size": 4}],
    "Reward": [{"logprob_chunk_size": 8}, {"log_entropy": False}, {"per_device_eval_batch_size": 4}],
}


@pytest.mark.parametrize(
    ("kind", "changes"),
    [(kind, changes) for kind, cases in CASES.items() for changes in cases],
    ids=lambda part: part if isinstance(part, str) else ",".join(part),
)
def test_an_argument_without_effect_is_named(tmp_path, kind, changes):
    name, value = list(changes.items())[-1]
    with pytest.raises(ArgumentError, match=re.escape(f"{name}={value!r} ")):
        make(kind, tmp_path, "a model that is nowhere", tokenizer=False, strict_arguments=True, **changes)

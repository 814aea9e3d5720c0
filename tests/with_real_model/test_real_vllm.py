"""Real weights in a real vLLM: pushed and verified there, with the log-probs of the trainer."""

from __future__ import annotations

import pytest
from real_runs import make_real

from small_runs import column


@pytest.mark.parametrize(("dtype", "most"), [("float32", 1e-4), ("bfloat16", 0.1)])
def test_vllms_log_probs_are_the_trainers(smollm2, dtype, most, tmp_path):
    arguments = {"use_vllm": True, "max_steps": 2, "model_init_kwargs": {"dtype": dtype}}
    run = make_real("GRPO", tmp_path, smollm2, **arguments)
    run.train()
    assert max(column(run, "sampling/sampling_logp_difference/mean")) < most
    assert all(value > 0 for value in column(run, "grad_norm"))

"""Memory runs out beside a real vLLM, and in it: the run goes on with smaller sizes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from allocation_cap import CappedPhases
from lowpeak.memory.phases import Phase
from vllm_runs import grpo_arguments, grpo_trainer, weights_of

SIZES: dict[str, Any] = {"micro_batch_tokens": 256, "logprob_chunk_size": 64, "beta": 0.1, "num_iterations": 2,
    "max_completion_length": 64}  # fmt: skip


def run(folder: Any, caps: dict[Phase, int], **changes: Any) -> Any:
    """A run over a vLLM of this process: its weights, its sizes, and what each phase took."""
    trainer = grpo_trainer(grpo_arguments(folder, vllm_mode="colocate", max_steps=2, **{**SIZES, **changes}))
    phases = CappedPhases(trainer, caps)
    trainer.train()
    return weights_of(trainer), trainer.run.sizes, phases.highest


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    return run(tmp_path_factory.mktemp("large"), {})


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return run(tmp_path_factory.mktemp("small"), {}, micro_batch_tokens=16, logprob_chunk_size=16)


@pytest.mark.release
@pytest.mark.parametrize("phase", [Phase.SCORE, Phase.TRAIN])
def test_passes_beside_a_vllm_run_again_to_the_bits_of_smaller_sizes(tmp_path, large, small, phase):
    cap = (large[2][phase.value] + small[2][phase.value]) // 2
    assert large[2][phase.value] > small[2][phase.value]
    weights, sizes, _ = run(tmp_path / "capped", {phase: cap})
    assert sizes.lowered
    chosen = {name: getattr(sizes, name) for name in ("micro_batch_tokens", "logprob_chunk_size")}
    same, _, _ = run(tmp_path / "same", {}, **chosen)
    assert [name for name in same if not torch.equal(same[name], weights[name])] == []
    for name, values in large[0].items():
        torch.testing.assert_close(weights[name], values, atol=5e-6, rtol=0)


def test_a_vllm_that_runs_out_of_memory_is_built_again_with_a_smaller_cache(tmp_path, large):
    trainer = grpo_trainer(grpo_arguments(tmp_path, vllm_mode="colocate", max_steps=2, **SIZES))
    submit, failures = trainer.collector.engine.submit, []

    def failing_once(*args: Any, **kwargs: Any) -> Any:
        if not failures:
            failures.append(torch.OutOfMemoryError("vLLM's activations do not fit"))
            raise failures[0]
        return submit(*args, **kwargs)

    trainer.collector.engine.submit = failing_once
    trainer.train()
    assert trainer.run.sizes.lowered == {"kv_cache_bytes"}
    weights = weights_of(trainer)
    assert [name for name in large[0] if not torch.equal(large[0][name], weights[name])] == []

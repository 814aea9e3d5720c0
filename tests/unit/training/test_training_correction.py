"""The correction of a sampler in whole runs: it stops what drifted too far; parity/test_step_correction.py has the numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from lowpeak.algorithms.grpo import make_grpo
from lowpeak.algorithms.rloo import make_rloo
from lowpeak.arguments.correction import Correction
from lowpeak.arguments.grpo import resolve_grpo
from lowpeak.arguments.rloo import resolve_rloo
from small_runs import make, same, spread, weights

MODES = {
    "token_truncate": Correction(False, False, 0.9, 1.1),
    "token_mask": Correction(False, True, 0.9, 1.1),
    "sequence_truncate": Correction(True, False, 0.9, 1.1),
    "sequence_mask": Correction(True, True, 0.9, 1.1),
}
KINDS = {"GRPO": (resolve_grpo, make_grpo), "RLOO": (resolve_rloo, make_rloo)}
RATIO = "sampling/importance_sampling_ratio"


def trained(folder, correction, kind="GRPO", drift=0.0, **changes):
    """A run of the native engine whose log-probs are off by `drift` nats a token."""
    resolve, make_algorithm = KINDS[kind]
    settings = {"reward_funcs": spread, "beta": 0.0, "max_completion_length": 6, **changes}
    run = make(kind, folder, **settings)
    algorithm = make_algorithm(replace(resolve(run.acting_args, run.collector.settings), correction=correction))
    run.run = replace(run.run, algorithm=algorithm)
    generate = run.collector.engine.generate

    def drifting(prompts, sampling):
        return [
            replace(group, completions=tuple(replace(c, logprobs=c.logprobs + drift) for c in group.completions))
            for group in generate(prompts, sampling)
        ]

    run.collector.engine.generate = drifting
    before = weights(run)
    run.train()
    return run, before


REUSED = {"num_iterations": 2}


@pytest.mark.parametrize(
    ("kind", "mode", "steps"),
    [("GRPO", "token_mask", REUSED), ("GRPO", "sequence_mask", {}), ("RLOO", "sequence_mask", REUSED)],
)
def test_what_drifted_beyond_its_bounds_trains_nothing(tmp_path, kind, mode, steps):
    run, before = trained(tmp_path, MODES[mode], kind, drift=0.5, **steps)
    assert same(before, dict(run.model.named_parameters()))
    row = next(row for row in run.state.log_history if f"{RATIO}/max" in row)
    assert row[f"{RATIO}/max"] == 0.0


def test_truncated_weights_train_as_much_less_as_their_bound_says(tmp_path):
    """With a bound of a half on every token, plain SGD without clipping goes exactly half as far in its first step."""
    sgd = {"optim": "sgd", "max_grad_norm": 0.0, "max_steps": 1, "learning_rate": 0.5}
    plain, before = trained(tmp_path / "plain", None, **sgd)
    halved, _ = trained(tmp_path / "halved", Correction(False, False, None, 0.5), drift=-1.0, **sgd)
    for name, weight in plain.model.named_parameters():
        expected = (weight - before[name]) / 2
        torch.testing.assert_close(halved.model.get_parameter(name) - before[name], expected, atol=1e-6, rtol=1e-3)

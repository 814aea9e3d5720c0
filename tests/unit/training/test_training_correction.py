"""The correction of a sampler in whole runs: it changes nothing where nothing drifts, and stops what drifted too far."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from lowpeak import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer
from lowpeak.algorithms.grpo import make_grpo
from lowpeak.algorithms.rloo import make_rloo
from lowpeak.config.correction import Correction
from lowpeak.config.grpo import resolve_grpo
from lowpeak.config.rloo import resolve_rloo
from tiny import char_tokenizer, tiny_model

DATA = [{"prompt": f"{i}="} for i in range(16)]
MODES = {
    "token_truncate": Correction(False, False, 0.9, 1.1),
    "token_mask": Correction(False, True, 0.9, 1.1),
    "sequence_truncate": Correction(True, False, 0.9, 1.1),
    "sequence_mask": Correction(True, True, 0.9, 1.1),
}
KINDS = {
    "grpo": (GRPOConfig, GRPOTrainer, resolve_grpo, make_grpo),
    "rloo": (RLOOConfig, RLOOTrainer, resolve_rloo, make_rloo),
}
RATIO = "sampling/importance_sampling_ratio"


def spread(completions, **columns):
    return [len(set(text)) / 5 + len(text) / 50 for text in completions]


def trained(folder, correction, kind="grpo", drift=0.0, **changes):
    """A run of the native engine whose log-probs are off by `drift` nats a token."""
    config, trainer, resolve, make = KINDS[kind]
    args = {"beta": 0.0, "num_generations": 4, "max_completion_length": 6, "max_steps": 4, "learning_rate": 1e-2}
    args |= {"logging_steps": 1, "save_strategy": "no", "report_to": "none", "use_cpu": True, "disable_tqdm": True}
    args = config(output_dir=str(folder), per_device_train_batch_size=8, **{**args, **changes})
    run = trainer(tiny_model(), spread, args, DATA, processing_class=char_tokenizer())
    algorithm = make(replace(resolve(args, run.maker.settings), correction=correction))
    run.run.algorithm = run.maker.algorithm = algorithm
    generate = run.maker.engine.generate

    def drifting(prompts, sampling):
        return [
            replace(group, completions=tuple(replace(c, logprobs=c.logprobs + drift) for c in group.completions))
            for group in generate(prompts, sampling)
        ]

    run.maker.engine.generate = drifting
    before = {name: weight.detach().clone() for name, weight in run.model.named_parameters()}
    run.train()
    return run, before


def same(first, second):
    return all(torch.equal(weight, second[name]) for name, weight in first.items())


@pytest.mark.parametrize("steps", [{}, {"num_iterations": 2}], ids=["on-policy", "reused"])
@pytest.mark.parametrize(
    ("kind", "mode"), [*(("grpo", mode) for mode in MODES), ("rloo", "sequence_truncate"), ("rloo", "sequence_mask")]
)
def test_where_the_sampler_is_the_policy_a_corrected_run_is_the_run_without(tmp_path, kind, mode, steps):
    sgd = {"optim": "sgd", "learning_rate": 0.1}  # AdamW divides by gradients that may be rounding alone
    plain, before = trained(tmp_path / "plain", None, kind, **sgd, **steps)
    corrected, _ = trained(tmp_path / "corrected", MODES[mode], kind, **sgd, **steps)
    assert not same(before, dict(plain.model.named_parameters()))
    for name, weight in plain.model.named_parameters():
        torch.testing.assert_close(corrected.model.get_parameter(name), weight, atol=5e-5, rtol=0, msg=name)
    rows = [row for row in corrected.state.log_history if f"{RATIO}/mean" in row]
    assert rows
    for row in rows:
        assert (row[f"{RATIO}/min"], row[f"{RATIO}/mean"], row[f"{RATIO}/max"]) == pytest.approx((1, 1, 1), abs=1e-4)


@pytest.mark.parametrize("steps", [{}, {"num_iterations": 2}], ids=["on-policy", "reused"])
@pytest.mark.parametrize(
    ("kind", "mode"), [("grpo", "token_mask"), ("grpo", "sequence_mask"), ("rloo", "sequence_mask")]
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

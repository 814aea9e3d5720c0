"""What an evaluation measures beside rewards: TRL's metrics of the sampled completions, by one scoring pass."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from datasets import Dataset, DatasetDict, IterableDatasetDict

from lowpeak.training.rollout import make_step_batches, score_records, with_advantages
from lowpeak.training.step import measure_step
from small_runs import DATA, column, make, rows, same, spread, weights

HELD_OUT = Dataset.from_list([{"prompt": f"{i}{i + 1}="} for i in range(3)])


def trainer_of(tmp_path, kind="GRPO", reward=spread, **changes):
    settings = {"num_generations": 4, "micro_batch_tokens": 48, "max_steps": 1, **changes}
    return make(kind, tmp_path, eval_dataset=HELD_OUT, reward_funcs=reward, **settings)


CASES = {
    "GRPO with a KL and reused rollouts": ("GRPO", {"beta": 0.1, "num_iterations": 2}),
    "GSPO": ("GRPO", {"importance_sampling_level": "sequence", "loss_type": "grpo", "num_iterations": 2}),
    "uncertain tokens alone": ("GRPO", {"top_entropy_quantile": 0.5}),
    "an entropy bonus": ("GRPO", {"entropy_coef": 0.01}),
    "RLOO with a KL": ("RLOO", {"beta": 0.1}),
    "PPO": ("PPO", {"beta": 0.1}),
    "Online DPO": ("OnlineDPO", {"beta": 0.1}),
}


@pytest.mark.parametrize("case", CASES)
def test_the_loss_is_what_a_step_would_have_on_the_same_rows(tmp_path, case, monkeypatch):
    """Compared with a second forward, which an evaluation does without."""
    name, changes = CASES[case]
    run = trainer_of(tmp_path, name, **changes)
    run.train()
    scored = []
    noting = lambda *args: scored.append(score_records(*args)) or scored[-1]  # noqa: E731
    monkeypatch.setattr("lowpeak.training.evaluation.score_records", noting)
    metrics = run.evaluate()
    ((rows, _),) = scored
    algorithm, coefficients = run.run.algorithm, run.coefficients()
    rows = with_advantages(rows, algorithm.advantages(rows, coefficients))
    batches = make_step_batches(rows, range(len(rows)), algorithm, run.run.budget, run.run.strategy.ranks)
    reweighted = [replace(batch, tokens=replace(batch.tokens, coefficients=coefficients)) for batch in batches]
    loss, measured = measure_step(
        run.model.eval(), reweighted, algorithm, run.run.logprob_settings, run.run.strategy.ranks
    )
    assert metrics["eval_loss"] == pytest.approx(float(loss), rel=1e-4, abs=1e-6)
    if name != "OnlineDPO":  # which scores pairs alone
        assert metrics["eval_reward_std"] == pytest.approx(float(torch.tensor([row.reward for row in rows]).std()))
        lengths = [len(row.completion) for row in rows]
        assert metrics["eval_completions/mean_length"] == pytest.approx(sum(lengths) / len(lengths))
    for metric, value in measured.items() if not algorithm.skip_zero_advantage else ():  # a step leaves idle rows out
        assert metrics[f"eval_{metric}"] == pytest.approx(float(value.value()), rel=1e-4, abs=1e-5), metric
    kl = "objective/kl" if name == "OnlineDPO" else "kl"
    assert {"eval_entropy", "eval_reward_std", "eval_frac_reward_zero_std"} <= metrics.keys()
    assert (f"eval_{kl}" in metrics) == bool(changes.get("beta"))


@pytest.mark.parametrize("case", ["an entropy bonus", "GRPO with a KL and reused rollouts", "PPO", "Online DPO"])
def test_an_evaluation_takes_one_pass_of_the_policy_and_one_of_the_reference(tmp_path, case):
    name, changes = CASES[case]
    run = trainer_of(tmp_path, name, **{**changes, "micro_batch_tokens": 4096})
    passes = {"policy": 0, "reference": 0}

    def counted(whose):
        def hook(module, args, kwargs):
            passes[whose] += "head_request" in kwargs  # generation has none

        return hook

    reference = run.run.reference
    run.model.register_forward_pre_hook(counted("policy"), with_kwargs=True)
    if reference is not None:
        reference.model.register_forward_pre_hook(counted("reference"), with_kwargs=True)
    run.evaluate()
    assert passes == {"policy": 1, "reference": int(reference is not None)}


def test_a_run_that_evaluates_trains_the_same_weights(tmp_path):
    found = []
    whole = {"beta": 0.1, "max_steps": 2, "micro_batch_tokens": 512}
    for often in ("no", "steps"):
        run = trainer_of(tmp_path / often, **whole, eval_strategy=often, eval_steps=1 if often == "steps" else None)
        run.train()
        found.append(weights(run))
    assert same(*found)


def test_held_out_ties_have_no_pair_and_no_loss(tmp_path):
    run = trainer_of(tmp_path, "OnlineDPO", lambda completions, **columns: [1.0] * len(completions))
    metrics = run.evaluate()
    assert "eval_loss" not in metrics
    names = ("eval_num_pairs", "eval_num_ties", "eval_frac_reward_zero_std")
    assert [metrics[name] for name in names] == [0.0, 3.0, 1.0]


def test_without_log_entropy_none_is_measured(tmp_path):
    run = trainer_of(tmp_path, log_entropy=False)
    run.train()
    assert column(run, "entropy") == []
    metrics = run.evaluate()
    assert "eval_entropy" not in metrics
    assert "eval_loss" in metrics


@pytest.mark.parametrize("kind", ["GRPO", "SFT"])
def test_before_training_an_evaluation_computes_in_the_precision_of_training(tmp_path, kind):
    held_out = HELD_OUT if kind == "GRPO" else Dataset.from_list([{"prompt": "12=", "completion": "21"}])
    run = make(kind, tmp_path, eval_dataset=held_out, bf16=True, eval_on_start=True, max_steps=1)
    before = run.evaluate()
    run.train()
    at_start = next(row for row in run.state.log_history if "eval_loss" in row)
    for name in ("eval_loss", "eval_entropy"):
        assert before[name] == at_start[name]


@pytest.mark.parametrize("kind", ["GRPO", "Distillation", "DPO", "KTO", "Reward", "SFT"])
def test_held_out_data_are_a_dataset_or_a_stream_or_several_by_name(tmp_path, kind):
    run, data = make(kind, tmp_path), DATA.get(kind, rows)(4)
    alone = run.evaluate(data)["eval_loss"]
    for split in (data, data.to_iterable_dataset()):
        assert run.evaluate(split)["eval_loss"] == alone
        container = DatasetDict if split is data else IterableDatasetDict
        for several in ({"a": split, "b": split}, container({"a": split, "b": split})):
            metrics = run.evaluate(several)
            assert metrics["eval_a_loss"] == metrics["eval_b_loss"] == alone
            assert make(kind, tmp_path, eval_dataset=several).evaluate()["eval_b_loss"] == alone

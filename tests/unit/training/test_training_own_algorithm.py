"""A sixth algorithm in a user's own file, `examples/own_algorithm.py`: it has what every algorithm has, and nothing knows of it."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from examples.own_algorithm import ReinforceConfig, ReinforceTrainer
from peft import LoraConfig

import lowpeak
from lowpeak.errors import ArgumentError
from rounding import assert_each_close_to_largest
from small_runs import COMMON, PARTS, TOKENIZER, column, digits, journal, make, same, weights
from tiny_models import tiny_model


def reinforce(folder, trainer=ReinforceTrainer, **changes):
    parts = {"reward_funcs": digits} | {name: changes.pop(name) for name in PARTS if name in changes}
    small = {**COMMON, "max_completion_length": 6, "max_steps": 3, "kv_cache_bytes": 1 << 24}
    return trainer(
        model=tiny_model(),
        args=ReinforceConfig(output_dir=str(folder), **{**small, **changes}),
        train_dataset=Dataset.from_list([{"prompt": f"{i}{i * 7 % 10}="} for i in range(40)]),
        processing_class=TOKENIZER,
        **parts,
    )


def test_the_library_does_not_know_it():
    source = Path(lowpeak.__file__).parent
    assert not [path for path in source.rglob("*.py") if "einforceTrainer" in path.read_text()]


def test_the_baseline_is_the_moving_average_of_earlier_rewards_also_in_a_resumed_run_of_the_same_bits(tmp_path):
    changes = {"max_steps": 4, "baseline_decay": 0.5, "save_strategy": "steps", "save_steps": 3}
    whole = reinforce(tmp_path / "whole", **changes)
    whole.train()
    r = column(whole, "reward")
    expected = [0.0, r[0], (r[0] + 2 * r[1]) / 3, (r[0] + 2 * r[1] + 4 * r[2]) / 7]
    assert column(whole, "baseline") == pytest.approx(expected)
    again = reinforce(tmp_path / "again", **changes)
    again.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-3"))
    assert same(weights(again), weights(whole))
    assert again.algorithm_state == whole.algorithm_state
    assert again.algorithm_state["weight"] == pytest.approx(1 - 0.5**4)


def test_its_step_is_the_plain_gradient_of_the_weighed_log_probs(tmp_path):
    ids, prompt = [[4, 7, 1], [5, 9, 2, 1]], TOKENIZER("12=")["input_ids"]

    def written(prompts, trainer):
        return {"prompt_ids": [prompt] * 2, "completion_ids": ids, "logprobs": [[0.0] * len(row) for row in ids]}

    run = reinforce(
        tmp_path, reward_funcs=lambda completions, **columns: [2.0, -1.0], rollout_func=written, num_generations=2,
        per_device_train_batch_size=2, max_steps=1, max_grad_norm=0.0, optim="sgd", learning_rate=1.0,
    )  # fmt: skip
    plain = tiny_model()
    for row, reward in zip(ids, (2.0, -1.0), strict=True):
        logprobs = plain(torch.tensor([[*prompt, *row]])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        (-reward / 2 * logprobs.gather(-1, torch.tensor(row)[:, None]).sum()).backward()
    run.train()
    moved = {name: parameter.detach() - weights(run)[name] for name, parameter in plain.named_parameters()}
    assert_each_close_to_largest(moved, {name: parameter.grad for name, parameter in plain.named_parameters()}, 2e-5)


def test_an_adapter_a_reference_and_an_evaluation_are_there_as_for_every_algorithm(tmp_path):
    run = reinforce(
        tmp_path, beta=0.5, peft_config=LoraConfig(r=4, target_modules="all-linear"), eval_strategy="steps",
        eval_steps=3, eval_dataset=Dataset.from_list([{"prompt": "12="}]),
    )  # fmt: skip
    run.train()
    kl = column(run, "objective/kl")
    assert kl[0] == pytest.approx(0.0, abs=1e-5)
    assert abs(kl[2]) > 1e-3
    assert len(column(run, "eval_reward")) == 1
    assert {"baseline", "entropy", "reward", "time/rollout"} <= journal(tmp_path)[0].keys()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_iterations": 2}, "num_iterations"),
        ({"epsilon": 0.1, "strict_arguments": True}, r"epsilon=0\.1"),
        ({"baseline_decay": 1.0}, r"baseline_decay=1\.0"),
        ({"baseline_decays": 0.5}, "baseline_decays"),
        ({"dynamic_sampling_rounds": 2}, "dynamic_sampling_rounds=2"),
    ],
)
def test_what_cannot_act_is_refused_as_everywhere(tmp_path, changes, words):
    with pytest.raises(ArgumentError, match=words):
        reinforce(tmp_path, **changes)


def advantages_with(change):
    def changed_advantages(records, coefficients):
        result = lowpeak.Advantages(tuple(torch.ones(len(record.completion)) for record in records), {})
        return change(result, records)

    return changed_advantages


def first_advantage(change):
    return advantages_with(
        lambda result, records: replace(result, per_token=(change(result.per_token[0]), *result.per_token[1:]))
    )


def summed_loss(logprobs_T, tokens):
    return -(tokens.advantages_T * logprobs_T).sum()


def detached_loss(logprobs_T, tokens):
    return -tokens.advantages_T * logprobs_T.detach()


def plain_number(logprobs_T, tokens):
    return 0.5


def measured(metrics):
    def own_measure(logprobs_T, entropy_T, tokens):
        return metrics

    return own_measure


FULL = {"needs_full_sequence": True}


@pytest.fixture(scope="module")
def small_run(tmp_path_factory):
    """A trainer of one step, and its parts with the algorithm as it was."""
    small = {"per_device_train_batch_size": 8, "num_generations": 2, "max_steps": 1}
    run = reinforce(tmp_path_factory.mktemp("small"), **small)
    return run, run.run


@pytest.mark.extended
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"loss": summed_loss}, r"summed_loss.*\[\].*\[\d+\]"),
        ({"loss": plain_number}, "plain_number.*float.*"),
        ({"loss": lambda logprobs_T, tokens: logprobs_T, "unit": "sequence"}, r"lambda.*\[\d\d\].*\[\d\].*sequence"),
        ({"loss": detached_loss, **FULL}, "detached_loss.*gradient"),
        ({"advantages": lambda records, coefficients: [1.0] * len(records)}, "advantages.*list.*Advantages"),
        (
            {"advantages": advantages_with(lambda result, records: replace(result, per_token=result.per_token[1:]))},
            "changed_advantages.* 7 .*per_token.* 8 ",
        ),
        ({"advantages": advantages_with(lambda result, records: replace(result, returns=()))}, "returns.* 8 "),
        ({"advantages": first_advantage(lambda values: 1.0)}, r"per_token\[0\].*float.*\[\d\]"),
        ({"advantages": first_advantage(lambda values: torch.ones(9))}, r"per_token\[0\].*\[9\].*\[\d\]"),
        ({"advantages": first_advantage(torch.Tensor.double)}, r"per_token\[0\].*float64.*float32"),
        ({"advantages": first_advantage(lambda values: values * torch.nan)}, r"per_token\[0\] nan.*reward \d"),
        ({"select": lambda records: list(range(len(records)))}, "select.*list.*Selection"),
        ({"select": lambda records: lowpeak.Selection((0, 99), 0)}, "select.* 99.* 7"),
        ({"measure": measured({"share": 0.5})}, "own_measure.*float.*share.*Metric"),
        ({"measure": measured({"share": lowpeak.Metric(torch.ones(3))})}, r"share.*own_measure.*total.*\[3\]"),
        ({"measure": measured({"share": lowpeak.Metric(1.0, kind="median")})}, "share.*median.*mean, sum"),
        ({"measure": measured({"loss": lowpeak.Metric(1.0)})}, "own_measure.*'loss'"),
        ({"measure": measured({3: lowpeak.Metric(1.0)})}, "own_measure.* 3"),
        ({"measure": measured(None)}, "own_measure.*NoneType.*Metric"),
        ({"update": lambda state, metrics: None}, "update.*reinforce.*None.*average, weight"),
        ({"update": lambda state, metrics: {"average": 0.0}}, r"update.*'average': 0\.0.*average, weight"),
        ({"update": lambda state, metrics: {**state, "weight": torch.zeros(())}}, "update.*weight.*tensor"),
        ({"update": lambda state, metrics: {**state, "weight": math.nan}}, "update.*weight.*nan"),
        ({"schedule": lambda step, epoch: None}, "schedule.*reinforce.*None"),
        ({"schedule": lambda step, epoch: {"weight": 1.0}}, r"schedule.*reinforce.*weight"),
        ({"advantages": lambda records, state: lowpeak.Advantages(iter(()), {})}, "advantages.*tuple_iterator"),
        ({"reduction": lambda length, counts: None}, "reduction.*reinforce.*None"),
        ({"reduction": lambda length, counts: math.inf}, "reduction.*reinforce.*inf"),
    ],
)  # fmt: skip
def test_what_a_function_returned_is_refused_by_its_name_and_value(small_run, changes, words):
    run, parts = small_run
    run.run = replace(parts, algorithm=replace(parts.algorithm, **changes))
    with pytest.raises(ArgumentError, match=words):
        run.train()


def test_a_function_that_returns_no_algorithm_is_named(tmp_path):
    class EmptyTrainer(ReinforceTrainer):
        @staticmethod
        def make_algorithm(args, settings):
            return None

    with pytest.raises(ArgumentError, match=r"make_algorithm.*None.*lowpeak\.Algorithm"):
        reinforce(tmp_path, trainer=EmptyTrainer)


def mean_loss(values_T, tokens):
    return values_T.mean()


def constant_loss(values_T, tokens):
    return torch.zeros_like(tokens.weights_U)


def test_a_loss_on_values_is_checked_too(tmp_path):
    run = make("Reward", tmp_path, max_steps=1)
    algorithm = run.run.algorithm
    for loss, words in ((mean_loss, r"mean_loss.*\[\].*\[\d\]"), (constant_loss, "constant_loss.*gradient")):
        run.run = replace(run.run, algorithm=replace(algorithm, values=replace(algorithm.values, loss=loss)))
        with pytest.raises(ArgumentError, match=words):
            run.train()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"unit": "tokens"}, "unit.*token, sequence, pair.*tokens"),
        ({"needs": {"old"}}, "needs.*frozenset"),
        ({"needs": frozenset({"olds"})}, "needs.*olds"),
        ({"select": None}, "select.*None"),
        ({"loss": 3}, "loss.* 3"),
        ({"loss": None}, "loss=None.*values=None"),
        ({"values": summed_loss}, "values.*ValueTerm.*summed_loss"),
        ({"skip_zero_advantage": "no"}, "skip_zero_advantage.*no"),
        ({"state": {"average": torch.zeros(())}}, "state.*average"),
    ],
)
def test_a_field_of_an_algorithm_is_checked_when_it_is_made(small_run, changes, words):
    _, parts = small_run
    with pytest.raises(ArgumentError, match=words):
        replace(parts.algorithm, **changes)

"""Online DPO end to end on a tiny model: its pairs train what DPO by plain forwards would, and each argument acts."""

from __future__ import annotations

import copy
import json
from functools import partial

import pytest
import torch
from torch.nn.functional import logsigmoid

from lowpeak import GRPOConfig, OnlineDPOConfig, OnlineDPOTrainer
from lowpeak.arguments.online import resolve_online
from lowpeak.arguments.online_dpo import resolve_online_dpo
from lowpeak.arguments.validation import reset_idle_arguments
from lowpeak.errors import ArgumentError, CheckpointError
from lowpeak.rewards.model import ModelReward
from lowpeak.training.step import run_step
from preference_data import ScriptedJudge, tiny_classifier
from rounding import assert_each_close_to_largest
from small_runs import (
    COMMON,
    LAYOUTS,
    TOKENIZER,
    column,
    journal,
    make,
    rows,
    same,
    spread,
    steps,
    trained,
    weights,
)
from tiny_models import tiny_model

SMALL = {"reward_funcs": spread, "per_device_train_batch_size": 16, "micro_batch_tokens": 48, "logprob_chunk_size": 16}
online_dpo = partial(make, "OnlineDPO", **SMALL)
trained_dpo = partial(trained, "OnlineDPO", **SMALL)


def judge():
    return ScriptedJudge(lambda prompt, text: spread([text])[0])


# the loss of a run


def plain_sum(model, record, temperature):
    """A completion's log-probs over its counted tokens, from the logits of one plain forward."""
    ids = torch.tensor([[*record.prompt_ids, *record.completion.ids.tolist()]])
    logprobs = (model(input_ids=ids).logits[0, :-1] / temperature).log_softmax(-1)
    targets = logprobs.gather(1, ids[0, 1:, None])[len(record.prompt_ids) - 1 :, 0]
    return targets[record.completion.loss_mask].sum()


def plain_dpo(policy, reference, records, beta, loss_type, temperature):
    groups = {}
    for record in records:
        groups.setdefault(record.group, []).append(record)
    losses = []
    for pair in groups.values():
        worst, best = sorted(pair, key=lambda record: record.reward)
        with torch.no_grad():
            anchor = plain_sum(reference, best, temperature) - plain_sum(reference, worst, temperature)
        logit = plain_sum(policy, best, temperature) - plain_sum(policy, worst, temperature) - anchor
        losses.append(-logsigmoid(beta * logit) if loss_type == "sigmoid" else (logit - 1 / (2 * beta)) ** 2)
    return sum(losses) / len(losses)


@pytest.mark.parametrize(("layout", "loss_type"), [("shared", "ipo"), ("rows", "sigmoid"), ("padded", "sigmoid")])
def test_a_step_trains_what_dpo_by_plain_forwards_would(tmp_path, layout, loss_type):
    run = online_dpo(tmp_path, loss_type=loss_type, beta=0.3, temperature=0.8, micro_batch_tokens=24, **LAYOUTS[layout])
    reference = copy.deepcopy(run.model)
    work = run.next_step()
    torch.manual_seed(0)
    with torch.no_grad():  # as after some steps: the policy is no longer the reference
        for parameter in run.model.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
    assert len(work.micro_batches) > 1
    loss, _ = run_step(
        run.model, work.micro_batches, run.run.algorithm, run.run.logprob_settings, run.run.strategy, run.coefficients()
    )
    ours = {name: parameter.grad.clone() for name, parameter in run.model.named_parameters()}
    run.model.zero_grad(set_to_none=True)
    plain = plain_dpo(run.model, reference, run.rollout.records, 0.3, loss_type, 0.8)
    plain.backward()
    torch.testing.assert_close(loss, plain.detach(), rtol=1e-5, atol=4e-6)
    assert_each_close_to_largest(ours, {name: p.grad for name, p in run.model.named_parameters()}, 2e-5)


def test_a_rollout_trains_on_the_best_and_the_worst_of_each_group_and_logs_all_completions(tmp_path):
    run = trained_dpo(tmp_path, num_generations=8, max_steps=1)
    judged, logged = journal(tmp_path, "rollouts"), run.state.log_history[0]
    groups = {row["group"] for row in judged}
    for group in groups:
        answers = [(row["reward"], row["advantage"]) for row in judged if row["group"] == group]
        assert len(answers) == 8
        best, worst = max(answers)[0], min(answers)[0]
        chosen = [(best, 1.0), (worst, -1.0)] if best > worst else []
        assert sorted((answer for answer in answers if answer[1]), reverse=True) == chosen
    lengths = [row["num_tokens"] for row in judged]
    prompts = sum(len(TOKENIZER(row["prompt"]).input_ids) for row in judged)
    assert logged["completions/mean_length"] == pytest.approx(sum(lengths) / len(lengths))
    assert logged["num_tokens"] == sum(lengths) + prompts
    assert len(judged) > 2 * len(groups)


def chosen_pairs(run):
    """The completions of a rollout that are trained on, each with its side of the pair."""
    run.next_step()
    assert run.rollout.records
    return [(record.completion.ids.tolist(), record.advantages.tolist()) for record in run.rollout.records]


def test_a_judge_chooses_the_pairs_that_its_values_would(tmp_path):
    two = {"num_generations": 2, "per_device_train_batch_size": 32}
    by_judge = online_dpo(tmp_path, reward_funcs=None, judge=judge(), **two)
    assert chosen_pairs(by_judge) == chosen_pairs(online_dpo(tmp_path, **two))
    found = by_judge.evaluate(rows(4))
    assert "eval_greedy_accuracy" not in found
    assert found["eval_reward"] == pytest.approx(0.5)


def test_a_reward_model_chooses_the_pairs_that_a_function_of_its_scores_would(tmp_path):
    model = tiny_classifier(seed=3)
    scorer = ModelReward(model, TOKENIZER, name="same")

    def scores(prompts, completions, completion_ids, **columns):
        return scorer(prompts, completions, completion_ids)

    by_model = online_dpo(tmp_path, reward_funcs=model, reward_processing_classes=TOKENIZER)
    assert chosen_pairs(by_model) == chosen_pairs(online_dpo(tmp_path, reward_funcs=scores))


def test_metrics_have_trls_names(tmp_path):
    first, second = steps(trained_dpo(tmp_path, num_iterations=2))
    assert first["loss"] == pytest.approx(0.6931, abs=1e-3)
    assert first["objective/kl"] == pytest.approx(0.0, abs=1e-5)
    names = """rewards/chosen rewards/rejected rewards/margins rewards/accuracies logps/chosen logps/rejected objective/kl
        objective/entropy objective/non_score_reward beta"""
    assert set(names.split()) <= second.keys()
    metric_names = "objective/scores objective/scores_margin val/contain_eos_token num_pairs num_ties reward entropy"
    assert set(metric_names.split()) <= first.keys()
    assert second["rewards/margins"] == pytest.approx(second["rewards/chosen"] - second["rewards/rejected"], abs=1e-5)
    assert second["rewards/margins"] > 0.0
    assert first["num_pairs"] + first["num_ties"] == 4.0


# arguments


def test_a_list_of_betas_is_checked(tmp_path):
    def resolved(**changes):
        args = OnlineDPOConfig(output_dir=str(tmp_path), use_cpu=True, **changes)
        online = resolve_online(args, 1, 1)
        return resolve_online_dpo(reset_idle_arguments(args, online.facts), online)

    assert resolved(beta=[0.1, 0.2], max_steps=2).betas == (0.1, 0.2)
    assert resolved(beta=1, max_steps=2).betas == (1.0,)
    for beta in (0.0, -0.1, [0.1, 0.0], [], "0.1", True, float("inf")):
        with pytest.raises(ArgumentError, match="beta="):
            resolved(beta=beta, max_steps=2)
    with pytest.raises(ArgumentError, match=r"beta.* 3 .*num_train_epochs=2\.0"):
        resolved(beta=[0.1, 0.2, 0.3], num_train_epochs=2.0)
    with pytest.raises(ArgumentError, match=r"beta=\[0.1\]"):
        resolve_online(GRPOConfig(output_dir=str(tmp_path), use_cpu=True, beta=[0.1]), 1, 1)


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"beta": [0.1, 0.2, 0.3], "max_steps": 1}, "beta.* 3 .*max_steps=1"),
        ({"loss_type": "dapo"}, "loss_type='dapo'.*'sigmoid', 'ipo'"),
        ({"reward_funcs": None, "judge": judge(), "num_generations_eval": 1}, "num_generations_eval=1"),
    ],
)
def test_an_argument_that_online_dpo_cannot_take_is_named(tmp_path, changes, names):
    with pytest.raises(ArgumentError, match=names):
        online_dpo(tmp_path, **changes)


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        *(("max_length", "overlong_prompts"), ("judge", "trainer"), ("cache_implementation", "engine")),
    ],
)
def test_names_of_trl_that_have_another_place_say_so(name, remedy):
    with pytest.raises(ArgumentError, match=rf"'{name}'.*TRL.*{remedy}"):
        OnlineDPOConfig(output_dir="out", **{name: 1})


def test_the_constructor_is_trls(tmp_path):
    args = OnlineDPOConfig(output_dir=str(tmp_path), **COMMON)
    shared = {"train_dataset": rows(), "processing_class": TOKENIZER}
    assert OnlineDPOTrainer(tiny_model(), None, spread, args, **shared).collector.panel.names == ("spread",)
    other, policy = tiny_model(seed=1), tiny_model()
    assert OnlineDPOTrainer(policy, other, spread, args, **shared).run.reference.model is other
    with pytest.raises(ArgumentError, match="ref_model"):
        OnlineDPOTrainer(policy, policy, spread, args, **shared)
    with pytest.raises(ArgumentError, match="judge"):
        online_dpo(tmp_path, judge=judge())


@pytest.mark.extended
def test_a_rollout_of_ties_alone_trains_nothing(tmp_path):
    run = trained_dpo(tmp_path, reward_funcs=lambda completions, **c: [1.0] * len(completions), max_steps=1)
    assert same(weights(run), dict(tiny_model().named_parameters()))
    assert (column(run, "num_pairs"), column(run, "num_ties")) == ([0.0], [4.0])


@pytest.mark.extended
def test_a_rollout_that_the_judge_left_without_scores_is_told_once(tmp_path, caplog):
    def absent(prompt, text):
        raise ConnectionError("no judge")

    changes = {"reward_funcs": None, "reward_failures": "none"}
    online_dpo(tmp_path, judge=ScriptedJudge(absent), **changes).next_step()
    (message,) = [record.message for record in caplog.records if record.funcName == "warn_of_unrewarded"]
    assert {"16", "ScriptedJudge,"} <= set(message.split())


# resuming, what is said


@pytest.mark.extended
def test_beta_follows_its_list_by_epochs_and_a_resumed_run_goes_on_with_it_or_another_but_with_no_other_judge(tmp_path):
    by_epochs = {"num_train_epochs": 2, "max_steps": -1, "beta": [0.1, 0.4], "data": rows(4)}
    settings = {**by_epochs, "num_iterations": 2, "save_strategy": "steps", "save_steps": 3}
    whole = trained_dpo(tmp_path, **settings)
    assert column(whole, "beta") == pytest.approx([0.1, 0.1, 0.4, 0.4])
    in_a_rollout = tmp_path / "checkpoint-3"
    resumed = trained_dpo(tmp_path / "same", **settings, resume=in_a_rollout)
    assert same(weights(whole), weights(resumed))
    other = trained_dpo(tmp_path / "other", **{**settings, "beta": 0.7}, resume=in_a_rollout)
    assert column(other, "beta") == pytest.approx([0.1, 0.1, 0.4, 0.7])
    with pytest.raises(CheckpointError, match=r"'spread'.*'ScriptedJudge'"):
        trained_dpo(tmp_path / "judged", reward_funcs=None, judge=judge(), **settings, resume=in_a_rollout)


def test_a_dry_run_says_that_pairs_are_trained_and_trains_nothing(tmp_path):
    run = online_dpo(tmp_path)
    plan = run.dry_run()
    assert plan["algorithm"] == {"name": "online_dpo", "unit": "pair", "scored_before_training": ["reference"]}
    assert plan["model"]["reference"] == "Qwen2ForCausalLM"
    assert plan["rollout"]["completions"] == 16
    assert plan["micro_batches"]["longest_row"] == 3 + 5
    assert run.state.global_step == 0
    json.dumps(plan)


def test_a_trainer_that_is_not_to_sample_evaluates_greedily_and_does_not_train(tmp_path):
    run = online_dpo(tmp_path, generation_kwargs={"do_sample": False})
    rows = run.predict(run.train_dataset).predictions
    texts = {way: [row["completion"] for row in rows if row["decoding"] == way] for way in ("greedy", "sampled")}
    assert texts["sampled"] == [text for text in texts["greedy"] for _ in range(run.num_generations_eval)]
    with pytest.raises(ArgumentError, match=r"do_sample.*evaluate"):
        run.train()

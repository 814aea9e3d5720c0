"""Online DPO end to end on a tiny model: its pairs train what DPO by plain forwards would, and each argument acts."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from torch.nn.functional import logsigmoid
from transformers import Qwen2Config, Qwen2ForSequenceClassification

from closeness import assert_each_close_to_largest
from lowpeak import GRPOConfig, OnlineDPOConfig, OnlineDPOTrainer
from lowpeak.config.online import resolve_online
from lowpeak.config.online_dpo import resolve_online_dpo
from lowpeak.errors import ArgumentError, CheckpointError
from lowpeak.rewards.judge import ScriptedJudge
from lowpeak.rewards.model import ModelReward
from lowpeak.training.step import run_step
from tiny import char_tokenizer, tiny_model
from vllms import engine_over, scripted

TOKENIZER = char_tokenizer()
PARTS = ("judge", "peft_config", "rollout_func", "eval_dataset", "reward_processing_classes")
SMALL = {
    "per_device_train_batch_size": 16,
    "num_generations": 4,
    "max_completion_length": 5,
    "max_steps": 2,
    "learning_rate": 1e-2,
    "logging_steps": 1,
    "save_strategy": "no",
    "disable_tqdm": True,
    "use_cpu": True,
    "report_to": "none",
    "micro_batch_tokens": 48,
    "logprob_chunk_size": 16,
}
LAYOUTS = {
    "auto": {},
    "shared": {"share_prompt": True},
    "rows": {"share_prompt": False},
    "padded": {"padding_free": False},
}


def rows(count=16):
    return Dataset.from_list([{"prompt": f"{i % 10}{i * 7 % 10}="} for i in range(count)])


def value(text):
    """A number from the text that seldom is another's."""
    return sum(ord(letter) * (i + 1) for i, letter in enumerate(text)) % 7 / 7


def spread(completions, **columns):
    return [value(text) for text in completions]


def online_dpo(tmp_path, reward=spread, model=None, data=None, config=None, **changes):
    more = {name: changes.pop(name) for name in PARTS if name in changes}
    args = OnlineDPOConfig(output_dir=str(tmp_path), **{**SMALL, **changes})
    return OnlineDPOTrainer(
        model or tiny_model(),
        reward_funcs=reward,
        args=args,
        train_dataset=rows() if data is None else data,
        processing_class=TOKENIZER,
        **more,
    )


def weights(run):
    return {name: p.detach().clone() for name, p in run.model.named_parameters() if p.requires_grad}


def logs(run):
    return [row for row in run.state.log_history if "loss" in row]


def journal(tmp_path, name):
    return [json.loads(line) for line in (tmp_path / "journal" / f"{name}.jsonl").read_text().splitlines()]


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


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("loss_type", ["sigmoid", "ipo"])
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
        run.model, work.micro_batches, run.run.algorithm, run.run.core, run.run.strategy, run.coefficients()
    )
    ours = {name: parameter.grad.clone() for name, parameter in run.model.named_parameters()}
    run.model.zero_grad(set_to_none=True)
    plain = plain_dpo(run.model, reference, run.rollout.records, 0.3, loss_type, 0.8)
    plain.backward()
    torch.testing.assert_close(loss, plain.detach(), rtol=1e-5, atol=4e-6)
    assert_each_close_to_largest(ours, {name: p.grad for name, p in run.model.named_parameters()}, 2e-5)


def test_a_rollout_keeps_the_best_and_the_worst_of_each_group(tmp_path):
    run = online_dpo(tmp_path, num_generations=8)
    run.train()
    judged = journal(tmp_path, "rollouts")
    for group in {(row["step"], row["group"]) for row in judged}:
        rows = sorted(
            (row for row in judged if (row["step"], row["group"]) == group),
            key=lambda row: (-row["reward"], -row["advantage"]),
        )
        assert len(rows) == 8
        if rows[0]["reward"] > rows[-1]["reward"]:
            assert [row["advantage"] for row in rows if row["advantage"]] == [1.0, -1.0]
            assert rows[0]["advantage"] == 1.0
            rejected = min(rows, key=lambda row: row["advantage"])
            assert rejected["reward"] == rows[-1]["reward"]
        else:
            assert {row["advantage"] for row in rows} == {0.0}


def test_what_is_told_of_completions_counts_those_that_are_in_no_pair(tmp_path):
    run = online_dpo(tmp_path, num_generations=8, max_steps=1, logging_steps=1)
    run.train()
    rows, logged = journal(tmp_path, "rollouts"), run.state.log_history[0]
    lengths = [row["num_tokens"] for row in rows]
    assert logged["completions/mean_length"] == pytest.approx(sum(lengths) / len(lengths))
    assert logged["num_tokens"] == sum(lengths) + sum(
        len(run.processing_class(row["prompt"]).input_ids) for row in rows
    )
    assert len(rows) > 2 * len({row["group"] for row in rows})


def test_the_prompt_of_a_pair_is_forwarded_once_and_never_projected(tmp_path):
    run = online_dpo(tmp_path, share_prompt=True, micro_batch_tokens=512)
    (batch,) = run.next_step().micro_batches
    records = [run.rollout.records[i] for i in batch.record_indices]
    trees = [tree for tree in batch.forest.trees]
    assert [len(tree.completions) for tree in trees] == [2] * len(trees)
    assert [tree.prompt for tree in trees] == [len(records[2 * i].prompt_ids) for i in range(len(trees))]
    needed = sum(tree.num_tokens for tree in trees)
    assert needed == sum(tree.prompt + sum(tree.completions) for tree in trees) <= batch.input_ids_BL.numel()
    assert len(batch.positions_T) == sum(int(record.completion.loss_mask.sum()) for record in records)


def test_the_reward_that_chooses_pairs_rises(tmp_path):
    def ones(completions, **columns):
        return [float(text.count("1")) for text in completions]

    run = online_dpo(tmp_path, reward=ones, per_device_train_batch_size=64, num_generations=8, max_steps=12, beta=0.05)
    run.train()
    found = [row["reward"] for row in logs(run)]
    assert sum(found[-5:]) / 5 > sum(found[:5]) / 5 + 2.0


def test_a_judge_chooses_the_pairs_that_its_values_would(tmp_path):
    by_reward, by_judge = (
        online_dpo(tmp_path / "a", num_generations=2, per_device_train_batch_size=32),
        online_dpo(
            tmp_path / "b",
            reward=None,
            judge=ScriptedJudge(lambda prompt, text: value(text)),
            num_generations=2,
            per_device_train_batch_size=32,
        ),
    )
    for run in (by_reward, by_judge):
        run.train()
    assert all(torch.equal(weight, weights(by_judge)[name]) for name, weight in weights(by_reward).items())
    assert "eval_greedy_accuracy" not in by_judge.evaluate(rows(4))
    assert by_judge.evaluate(rows(4))["eval_reward"] == pytest.approx(0.5)


def test_metrics_have_trls_names(tmp_path):
    run = online_dpo(tmp_path, num_iterations=2, max_steps=2)
    run.train()
    first, second = logs(run)
    assert first["loss"] == pytest.approx(0.6931, abs=1e-3)
    assert first["objective/kl"] == pytest.approx(0.0, abs=1e-5)
    names = """rewards/chosen rewards/rejected rewards/margins rewards/accuracies logps/chosen logps/rejected objective/kl
        objective/entropy objective/non_score_reward beta"""
    assert set(names.split()) <= second.keys()
    said = "objective/scores objective/scores_margin val/contain_eos_token num_pairs num_ties reward entropy"
    assert set(said.split()) <= first.keys()
    assert second["rewards/margins"] == pytest.approx(second["rewards/chosen"] - second["rewards/rejected"], abs=1e-5)
    assert second["rewards/margins"] > 0.0
    assert first["num_pairs"] + first["num_ties"] == 4.0


# arguments


@pytest.mark.parametrize(
    ("base", "changes"),
    [
        ({}, {"beta": 0.5}),
        ({}, {"loss_type": "ipo"}),
        ({}, {"missing_eos_penalty": 1.0}),
        ({}, {"mask_truncated_completions": True}),
        ({}, {"num_generations": 2}),
        ({}, {"temperature": 0.7}),
        ({}, {"reward_weights": [-1.0]}),
        ({}, {"num_iterations": 2}),
        ({}, {"sync_ref_model": True, "ref_model_sync_steps": 1, "ref_model_mixup_alpha": 0.5}),
    ],
    ids=str,
)
def test_each_argument_of_online_dpo_trains_other_weights(tmp_path, base, changes):
    settings = {"max_steps": 3, "optim": "sgd", "learning_rate": 0.1, **base}
    changed, plain = online_dpo(tmp_path / "a", **{**settings, **changes}), online_dpo(tmp_path / "b", **settings)
    for run in (changed, plain):
        run.train()
    assert any(not torch.equal(weights(changed)[name], weight) for name, weight in weights(plain).items())


def test_beta_follows_its_list_by_epochs(tmp_path):
    run = online_dpo(tmp_path, data=rows(8), beta=[0.1, 0.4], num_train_epochs=3, max_steps=-1)
    run.train()
    assert [row["beta"] for row in logs(run)] == pytest.approx([0.1, 0.1, 0.4, 0.4, 0.4, 0.4])


def test_a_list_of_betas_is_checked(tmp_path):
    def resolved(**changes):
        args = OnlineDPOConfig(output_dir=str(tmp_path), **{**SMALL, **changes})
        return resolve_online_dpo(args, resolve_online(args, 1, 1))

    assert resolved(beta=[0.1, 0.2]).betas == (0.1, 0.2)
    assert resolved(beta=1).betas == (1.0,)
    for beta in (0.0, -0.1, [0.1, 0.0], [], "0.1", True, float("inf")):
        with pytest.raises(ArgumentError, match=r"beta=.* must be a number above 0, or a list of such"):
            resolved(beta=beta)
    with pytest.raises(ArgumentError, match=r"beta has 3 values and num_train_epochs=2\.0 is over before"):
        resolved(beta=[0.1, 0.2, 0.3], num_train_epochs=2.0, max_steps=-1)
    with pytest.raises(ArgumentError, match=r"beta=.* must be a number"):
        resolve_online(GRPOConfig(output_dir=str(tmp_path), beta=[0.1]), 1, 1)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"mask_truncated_completions": True, "missing_eos_penalty": 1.0}, "missing_eos_penalty=1.0 has no effect"),
        ({"missing_eos_penalty": 0.0}, "must be a number above 0"),
        (
            {"beta": [0.1, 0.2, 0.3], "max_steps": 1},
            r"beta has 3 values and max_steps=1 is over in epoch 1, of \d+ steps",
        ),
        ({"loss_type": "dapo"}, "must be one of 'sigmoid', 'ipo'"),
        ({"num_generations": 1}, "must be at least 2"),
    ],
)
def test_what_cannot_act_in_online_dpo_raises(tmp_path, changes, words):
    with pytest.raises(ArgumentError, match=words):
        online_dpo(tmp_path, **changes)


def test_no_correction_of_a_sampler_acts_with_vllm(tmp_path):
    asked = {"vllm_importance_sampling_correction": True, "strict_arguments": True}
    args = OnlineDPOConfig(output_dir=str(tmp_path), use_vllm=True, **asked)
    with pytest.raises(ArgumentError, match="vllm_importance_sampling_correction=True"):
        resolve_online_dpo(args, resolve_online(args, 1, 1))
    args = OnlineDPOConfig(output_dir=str(tmp_path), use_vllm=True)
    assert resolve_online_dpo(args, resolve_online(args, 1, 1)).betas == (0.1,)


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("max_length", "prompts are never cut"),
        ("reward_model_path", "as reward_funcs"),
        ("judge", "to the trainer"),
        ("cache_implementation", "own engine"),
    ],
)
def test_names_of_trl_that_have_another_place_say_so(name, remedy):
    with pytest.raises(ArgumentError, match=f"'{name}' is TRL's and does not exist in lowpeak: .*{remedy}"):
        OnlineDPOConfig(output_dir="out", **{name: 1})


def test_the_constructor_is_trls(tmp_path):
    args = OnlineDPOConfig(output_dir=str(tmp_path), **SMALL)
    run = OnlineDPOTrainer(tiny_model(), None, spread, args, train_dataset=rows(), processing_class=TOKENIZER)
    assert run.maker.panel.names == ("spread",)
    assert run.model.training is False or run.user_args.disable_dropout
    other = tiny_model(seed=1)
    run = OnlineDPOTrainer(tiny_model(), other, spread, args, train_dataset=rows(), processing_class=TOKENIZER)
    assert run.maker.reference.model is other
    policy = tiny_model()
    with pytest.raises(ArgumentError, match="ref_model is the model itself"):
        OnlineDPOTrainer(policy, policy, spread, args, train_dataset=rows(), processing_class=TOKENIZER)
    with pytest.raises(ArgumentError, match="compute_metrics is not supported"):
        OnlineDPOTrainer(tiny_model(), reward_funcs=spread, args=args, data_collator=None, compute_metrics=len)
    with pytest.raises(ArgumentError, match="both were given"):
        online_dpo(tmp_path, judge=ScriptedJudge(lambda prompt, text: 0.0))


def test_groups_without_a_difference_are_asked_again_under_dynamic_sampling(tmp_path):
    calls = []

    def reward(prompts, completions, **columns):
        calls.append(len(completions))
        return [float(i % 2) if int(prompt[0]) % 2 else 1.0 for i, prompt in enumerate(prompts)]

    run = online_dpo(tmp_path, reward=reward, dynamic_sampling_rounds=6, max_steps=1, shuffle_dataset=False)
    run.train()
    assert calls == [16, 8, 4, 4]
    assert len(run.rollout.records) == 8
    (log,) = logs(run)
    assert (log["num_pairs"], log["num_ties"], log["dropped_groups"]) == (4.0, 4.0, 4.0)


def test_a_rollout_of_ties_alone_trains_nothing(tmp_path):
    run = online_dpo(tmp_path, reward=lambda completions, **c: [1.0] * len(completions), max_steps=1)
    before = weights(run)
    run.train()
    assert all(torch.equal(weight, before[name]) for name, weight in weights(run).items())
    assert (logs(run)[0]["num_pairs"], logs(run)[0]["num_ties"]) == (0.0, 4.0)


def test_a_rollout_that_the_judge_left_without_scores_is_told_once(tmp_path, caplog):
    def absent(prompt, text):
        raise ConnectionError("no judge")

    changes = {"reward": None, "reward_failures": "none", "max_steps": 1}
    online_dpo(tmp_path, judge=ScriptedJudge(absent), **changes).train()
    (message,) = [record.message for record in caplog.records if "no reward" in record.message]
    assert message.startswith("All 16 completions have no reward from ScriptedJudge, so nothing")


def test_a_rollout_func_writes_the_pairs(tmp_path):
    def tools(prompts, trainer):
        count = len(prompts)
        ids = [[2 + i, 3, 1] for i in range(count)]
        return {"prompt_ids": [[2, 3]] * count, "completion_ids": ids, "logprobs": [[-1.0] * 3] * count}

    run = online_dpo(tmp_path, rollout_func=tools, per_device_train_batch_size=8, max_steps=1)
    run.train()
    assert logs(run)[0]["num_pairs"] == 2.0


def test_a_vllm_that_dies_in_a_rollout_of_pairs_changes_nothing(tmp_path):
    def over(vllm, folder):
        def reward(completion_ids, **columns):
            return [float(sum(ids) % 5) for ids in completion_ids]

        run = online_dpo(folder, reward=reward, max_completion_length=3)
        run.maker.engine = engine_over(vllm, batch_size=4)
        run.maker.engine.close()
        return run

    calm, shaken = scripted(), scripted()
    undisturbed, disturbed = over(calm, tmp_path / "a"), over(shaken, tmp_path / "b")
    undisturbed.train()
    shaken.dies_after = 16 + 6  # in the second rollout
    disturbed.train()
    assert len(shaken.waves) > len(calm.waves)
    assert logs(undisturbed)[1]["num_pairs"] == logs(disturbed)[1]["num_pairs"] > 0
    for name, weight in weights(undisturbed).items():
        assert torch.equal(weights(disturbed)[name], weight), name


# reference, resuming, what is said


def test_under_lora_the_reference_is_the_policy_with_its_adapter_off(tmp_path):
    lora = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    run = online_dpo(tmp_path, peft_config=lora, num_iterations=2, max_steps=2)
    base = {name: p.clone() for name, p in run.model.named_parameters() if not p.requires_grad}
    start = weights(run)
    run.train()
    assert run.maker.reference.model is None
    first, second = logs(run)
    assert first["objective/kl"] == pytest.approx(0.0, abs=1e-5)
    assert second["rewards/margins"] > 0.0
    assert all(torch.equal(dict(run.model.named_parameters())[name], weight) for name, weight in base.items())
    assert any(not torch.equal(weight, start[name]) for name, weight in weights(run).items())


@pytest.mark.parametrize("save_at", [2, 3])
def test_a_run_resumed_in_the_middle_of_a_rollout_of_pairs_goes_on_to_the_same_weights(tmp_path, save_at):
    settings = {
        "num_iterations": 2,
        "num_train_epochs": 4,
        "max_steps": -1,
        "beta": [0.1, 0.7, 0.2],
        "data": rows(8),
        "save_strategy": "steps",
        "save_steps": save_at,
    }
    whole = online_dpo(tmp_path, **settings)
    whole.train()
    resumed = online_dpo(tmp_path, **settings)
    resumed.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{save_at}"))
    assert logs(whole)[-1]["beta"] == pytest.approx(0.2)
    for name, weight in weights(whole).items():
        assert torch.equal(weight, weights(resumed)[name]), name


def test_a_run_resumed_with_another_beta_trains_with_it_at_once(tmp_path):
    online_dpo(tmp_path, save_strategy="steps", save_steps=2, max_steps=2).train()
    run = online_dpo(tmp_path / "again", beta=0.7, max_steps=4)
    run.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert [row["beta"] for row in logs(run)] == pytest.approx([0.1, 0.1, 0.7, 0.7])


def test_a_judge_has_something_to_compare_in_an_evaluation(tmp_path):
    with pytest.raises(ArgumentError, match="num_generations_eval=1 leaves the judge nothing to compare"):
        online_dpo(tmp_path, reward=None, judge=ScriptedJudge(lambda p, t: value(t)), num_generations_eval=1)


def test_in_the_middle_of_a_rollout_the_judge_cannot_change(tmp_path):
    settings = {"save_strategy": "steps", "save_steps": 1, "num_iterations": 2, "max_steps": 1}
    online_dpo(tmp_path, **settings).train()
    with pytest.raises(CheckpointError, match=r"'spread'.* and is .*'ScriptedJudge'"):
        online_dpo(tmp_path, reward=None, judge=ScriptedJudge(lambda p, t: value(t)), **settings).train(
            resume_from_checkpoint=True
        )


def test_a_dry_run_says_that_pairs_are_trained(tmp_path):
    said = online_dpo(tmp_path).dry_run()
    assert said["algorithm"] == {"name": "online_dpo", "unit": "pair", "scored_before_training": ["reference"]}
    assert said["model"]["reference"] == "Qwen2ForCausalLM"


def test_pairs_are_chosen_by_a_reward_model_as_by_a_function_of_its_scores(tmp_path):
    torch.manual_seed(3)
    config = Qwen2Config(
        vocab_size=13, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=64, num_labels=1, initializer_range=0.2, pad_token_id=0,
    )  # fmt: skip
    model = Qwen2ForSequenceClassification(config)
    judge = ModelReward(model, TOKENIZER, name="same")

    def same(prompts, completions, completion_ids, **columns):
        return judge(prompts, completions, completion_ids)

    by_model = online_dpo(tmp_path / "model", model, reward_processing_classes=TOKENIZER)
    by_function = online_dpo(tmp_path / "function", same)
    for run in (by_model, by_function):
        run.train()
    expected = dict(by_function.model.named_parameters())
    for name, parameter in by_model.model.named_parameters():
        assert torch.equal(parameter, expected[name]), name

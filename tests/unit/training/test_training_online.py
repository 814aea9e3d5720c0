"""What users of transformers' Trainer and of TRL expect of an online run."""

from __future__ import annotations

import json
import logging

import pandas
import pytest
import torch
from datasets import Dataset, IterableDataset
from transformers import (
    OPTConfig,
    OPTForCausalLM,
    Qwen2Config,
    Qwen2ForSequenceClassification,
    TrainerCallback,
)

from closeness import assert_each_close_to_largest
from longrope import FIRST, longrope_model
from lowpeak import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer, SFTConfig, SFTTrainer
from lowpeak.errors import ArgumentError, ModelError
from lowpeak.training.arguments import use_one_device
from tiny import char_tokenizer, tiny_model

TOKENIZER = char_tokenizer()
SMALL = {
    "per_device_train_batch_size": 8,
    "max_completion_length": 5,
    "max_steps": 2,
    "learning_rate": 1e-2,
    "logging_steps": 1,
    "save_strategy": "no",
    "disable_tqdm": True,
    "use_cpu": True,
    "micro_batch_tokens": 512,
    "logprob_chunk_size": 64,
}
SGD = {"optim": "sgd", "learning_rate": 0.1}  # AdamW makes whole steps of gradients that are rounding alone


def rows(count=16):
    return Dataset.from_list([{"prompt": f"{i % 10}{i * 7 % 10}=", "answer": str(i % 10)} for i in range(count)])


def ones(completions, **columns):
    return [float(text.count("1")) for text in completions]


def grpo(tmp_path, data=None, reward=ones, model=None, trainer=None, **changes):
    args = GRPOConfig(output_dir=str(tmp_path), **{**SMALL, "num_generations": 4, **changes})
    return GRPOTrainer(
        model=model or tiny_model(),
        reward_funcs=reward,
        args=args,
        train_dataset=rows() if data is None else data,
        processing_class=TOKENIZER,
        **(trainer or {}),
    )


def journal(tmp_path, name="steps"):
    return [json.loads(line) for line in (tmp_path / "journal" / f"{name}.jsonl").read_text().splitlines()]


def weights(run):
    return {name: p.detach().clone() for name, p in run.model.named_parameters()}


def test_training_raises_the_reward_it_is_given(tmp_path):
    run = grpo(tmp_path, max_steps=30, per_device_train_batch_size=32, learning_rate=2e-2)
    run.train()
    rewards = [row["reward"] for row in run.state.log_history if "reward" in row]
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 1.0


@pytest.mark.parametrize("beta", [0.0, 0.05])
def test_rloo_trains(tmp_path, beta):
    args = RLOOConfig(
        output_dir=str(tmp_path), **{**SMALL, "max_steps": 25, "per_device_train_batch_size": 32}, beta=beta
    )
    run = RLOOTrainer(tiny_model(), ones, args, rows(), processing_class=TOKENIZER)
    run.train()
    rewards = [row["reward"] for row in run.state.log_history if "reward" in row]
    assert sum(rewards[-5:]) > sum(rewards[:5])
    assert ("kl" in run.state.log_history[0]) == (beta > 0)


def test_micro_batches_and_chunks_change_no_weight(tmp_path):
    one, many = (
        grpo(tmp_path / name, micro_batch_tokens=budget, logprob_chunk_size=chunk, beta=0.1, **SGD)
        for name, budget, chunk in (("a", 4096, 512), ("b", 20, 3))
    )
    one.train()
    many.train()
    assert len(many.next_step().micro_batches) > len(one.next_step().micro_batches)
    assert_each_close_to_largest(weights(many), weights(one), 4e-6)


def test_gradient_accumulation_is_only_a_larger_step(tmp_path):
    wide = grpo(tmp_path / "a", per_device_train_batch_size=16, **SGD)
    accumulated = grpo(tmp_path / "b", per_device_train_batch_size=4, gradient_accumulation_steps=4, **SGD)
    wide.train()
    accumulated.train()
    assert wide.state.global_step == accumulated.state.global_step == 2
    assert_each_close_to_largest(weights(accumulated), weights(wide), 4e-6)


def test_an_epoch_asks_each_prompt_once(tmp_path):
    seen = []

    def reward(prompts, completions, **columns):
        seen.extend(prompts[::4])
        return ones(completions)

    run = grpo(tmp_path, reward=reward, max_steps=-1, num_train_epochs=2)
    run.train()
    assert run.state.global_step == 2 * 16 // 2
    assert sorted(seen) == sorted([row["prompt"] for row in rows()] * 2)
    assert seen[:16] != seen[16:]
    assert run.state.epoch == 2.0


def test_a_rollout_serves_its_iterations_and_steps(tmp_path):
    calls = []

    def reward(completions, **columns):
        calls.append(len(completions))
        return ones(completions)

    grpo(tmp_path, reward=reward, steps_per_generation=2, num_iterations=3, max_steps=7).train()
    assert calls == [16, 16]


def test_columns_and_state_reach_the_rewards(tmp_path):
    def reward(prompts, completions, completion_ids, answer, trainer_state, **columns):
        assert len(answer) == len(prompts) == len(completions) == len(completion_ids) == 8
        assert answer[0] == answer[3] == prompts[0][0]
        assert trainer_state.max_steps == 2
        return ones(completions)

    grpo(tmp_path, reward=reward).train()


def test_an_iterable_data_set_trains_to_max_steps(tmp_path):
    data = IterableDataset.from_generator(lambda: ({"prompt": f"{i % 10}="} for i in range(5)))
    run = grpo(tmp_path, data=data, max_steps=4)
    run.train()
    assert run.state.global_step == 4


def test_prompts_of_a_stream_that_are_too_long_are_counted_in_the_log(tmp_path):
    lengths = (1, 600, 2, 600, 3)
    data = IterableDataset.from_generator(lambda: ({"prompt": "1" * length} for length in lengths))
    run = grpo(tmp_path, data=data, max_steps=2, overlong_prompts="drop", logging_steps=1)
    run.train()
    told = [entry["num_overlong_prompts"] for entry in run.state.log_history if "num_overlong_prompts" in entry]
    assert told == sorted(told)
    assert told[-1] >= 2


@pytest.mark.parametrize("by", ["instance", "path"])
def test_a_reward_model_judges_beside_a_function(tmp_path, by):
    config = Qwen2Config(
        vocab_size=len(TOKENIZER),
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        intermediate_size=32,
        num_labels=1,
        pad_token_id=0,
    )
    judge = Qwen2ForSequenceClassification(config).eval()
    judge.save_pretrained(tmp_path / "judge")
    TOKENIZER.save_pretrained(tmp_path / "judge")
    judge.config.pad_token_id = 0
    args = GRPOConfig(output_dir=str(tmp_path / "out"), **{**SMALL, "num_generations": 4, "reward_weights": [1.0, 0.5]})
    run = GRPOTrainer(
        tiny_model(),
        [ones, judge if by == "instance" else str(tmp_path / "judge")],
        args,
        rows(),
        processing_class=TOKENIZER,
        reward_processing_classes=[None, TOKENIZER] if by == "instance" else None,
    )
    run.train()
    record = run.rollout.records[0]
    ids = torch.tensor([[*record.prompt_ids, *TOKENIZER(completion_text(record)).input_ids]])
    assert record.rewards[1] == pytest.approx(judge(input_ids=ids).logits.item(), abs=1e-5)
    assert record.reward == pytest.approx(record.rewards[0] + 0.5 * record.rewards[1])


def completion_text(record):
    return TOKENIZER.decode(record.completion.ids.tolist(), skip_special_tokens=True)


def test_several_evaluation_sets_are_reported_under_their_names(tmp_path):
    sets = {"easy": rows(4), "hard": rows(6)}
    run = grpo(tmp_path, trainer={"eval_dataset": sets}, eval_strategy="steps", eval_steps=1, num_generations_eval=2)
    run.train()
    metrics = run.evaluate()
    for name in sets:
        assert {f"eval_{name}_reward", f"eval_{name}_greedy_accuracy", f"eval_{name}_pass@2"} <= metrics.keys()
    logged = [row for row in run.state.log_history if "eval_hard_reward" in row]
    assert [row["step"] for row in logged] == [1, 2, 2]


def test_evaluating_changes_nothing_and_gives_the_same_twice(tmp_path):
    run = grpo(tmp_path, trainer={"eval_dataset": rows(4)})
    before, state = weights(run), torch.get_rng_state()
    first, second = run.evaluate(), run.evaluate()
    timed = ("eval_runtime", "eval_samples_per_second")
    assert {k: v for k, v in first.items() if k not in timed} == {k: v for k, v in second.items() if k not in timed}
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(weight, before[name]) for name, weight in weights(run).items())


def test_evaluation_in_portions_gives_the_same_rewards(tmp_path):
    whole = grpo(tmp_path / "a", trainer={"eval_dataset": rows(6)}).evaluate()
    portions = grpo(tmp_path / "b", trainer={"eval_dataset": rows(6)}, per_device_eval_batch_size=4).evaluate()
    assert portions["eval_reward"] == pytest.approx(whole["eval_reward"])
    assert portions["eval_greedy_reward"] == pytest.approx(whole["eval_greedy_reward"])
    assert portions["eval_pass@4"] == pytest.approx(whole["eval_pass@4"])


def test_predict_gives_completions_with_their_rewards(tmp_path):
    result = grpo(tmp_path).predict(rows(3))
    assert len(result.predictions) == 3 + 3 * 4
    assert {"prompt", "completion", "reward", "decoding"} <= result.predictions[0].keys()
    assert "test_reward" in result.metrics


def test_success_is_told_by_the_reward_and_threshold_that_were_named(tmp_path):
    def never(completions, **columns):
        return [0.0] * len(completions)

    run = grpo(
        tmp_path, reward=[never, ones], trainer={"eval_dataset": rows(4)}, success_reward="ones", success_threshold=0.0
    )
    assert run.evaluate()["eval_accuracy"] == 1.0
    assert grpo(tmp_path, reward=[never, ones], trainer={"eval_dataset": rows(4)}).evaluate()["eval_accuracy"] == 0.0


def test_callbacks_optimizers_and_reports_work_as_in_transformers(tmp_path):
    class Watch(TrainerCallback):
        def __init__(self):
            self.steps, self.logs = 0, []

        def on_step_end(self, args, state, control, **kwargs):
            self.steps += 1

        def on_log(self, args, state, control, logs=None, **kwargs):
            self.logs.append(logs)

    model, watch = tiny_model(), Watch()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    run = grpo(tmp_path, model=model, trainer={"callbacks": [watch], "optimizers": (optimizer, schedule)})
    run.train()
    assert watch.steps == 2
    assert "reward" in watch.logs[0]
    assert watch.logs[0]["learning_rate"] == 0.5


def test_the_journal_has_one_record_a_step_and_every_rollout_row(tmp_path):
    run = grpo(tmp_path, num_iterations=2, max_steps=4)
    run.train()
    steps, rollouts = journal(tmp_path), journal(tmp_path, "rollouts")
    assert [row["step"] for row in steps] == [1, 2, 3, 4]
    assert {"loss", "grad_norm", "reward", "time/rollout", "peak_memory/train"} <= steps[0].keys()
    assert [row["step"] for row in rollouts] == [1] * 8 + [3] * 8
    assert pandas.read_json(tmp_path / "journal" / "rollouts.jsonl", lines=True)["ones"].notna().all()


def test_metrics_have_trls_names_and_the_share_of_useful_tokens(tmp_path):
    run = grpo(tmp_path, beta=0.05, num_iterations=2)
    run.train()
    expected = {
        "reward", "reward_std", "frac_reward_zero_std", "rewards/ones/mean", "rewards/ones/std", "completions/mean_length",
        "completions/min_length", "completions/max_length", "completions/clipped_ratio", "kl", "entropy", "num_tokens",
        "clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/region_mean", "useful_tokens/train",
        "useful_tokens/score", "useful_tokens/rollout", "tokens_per_second", "step_time",
        "peak_memory/rollout", "peak_memory/score",
    }  # fmt: skip
    assert expected <= run.state.log_history[0].keys()


def test_completions_are_printed_when_asked_for(tmp_path, capsys):
    grpo(tmp_path, log_completions=True, num_completions_to_print=2, log_unique_prompts=True, max_steps=1).train()
    printed = capsys.readouterr().out
    assert "completion" in printed
    assert "advantage" in printed


def test_completions_are_printed_once_in_so_many_steps(tmp_path, capsys):
    grpo(tmp_path, log_completions=True, log_completions_steps=3, logging_steps=1, max_steps=4).train()
    printed = capsys.readouterr().out
    assert [f"step {step}" in printed for step in (1, 2, 3, 4)] == [True, False, True, False]


def test_groups_with_equal_rewards_are_asked_again_under_dynamic_sampling(tmp_path):
    calls = []

    def reward(prompts, completions, **columns):
        calls.append(len(completions))
        odd = [int(prompt[0]) % 2 for prompt in prompts]
        return [float(i % 2) if o else 1.0 for i, o in enumerate(odd)]

    run = grpo(tmp_path, reward=reward, dynamic_sampling_rounds=6, max_steps=1, shuffle_dataset=False)
    run.train()
    assert calls == [8, 4, 4]
    assert len(run.rollout.records) == 8
    assert run.state.log_history[0]["frac_reward_zero_std"] == 0.0
    assert run.state.log_history[0]["dropped_groups"] == 2.0


def test_when_no_group_is_left_the_last_answer_is_used(tmp_path):
    run = grpo(
        tmp_path, reward=lambda completions, **c: [1.0] * len(completions), dynamic_sampling_rounds=1, max_steps=1
    )
    before = weights(run)
    run.train()
    assert len(run.rollout.records) == 8
    assert all(torch.equal(weight, before[name]) for name, weight in weights(run).items())


def test_the_reference_moves_towards_the_policy_when_asked(tmp_path):
    run = grpo(tmp_path, beta=0.1, sync_ref_model=True, ref_model_sync_steps=2, ref_model_mixup_alpha=0.25)
    start = weights(run)
    run.train()
    reference = dict(run.maker.reference.model.named_parameters())
    for name, policy in weights(run).items():
        torch.testing.assert_close(reference[name], 0.75 * start[name] + 0.25 * policy, rtol=1e-5, atol=1e-6)


def test_truncated_completions_can_be_left_out_of_the_loss(tmp_path):
    run = grpo(tmp_path, mask_truncated_completions=True, max_completion_length=2)
    rollout = run.maker.make(0, 0, run.state)
    cut = [record.completion for record in rollout.records if record.completion.finish_reason == "length"]
    assert cut
    assert not any(completion.loss_mask.any() for completion in cut)


def test_rows_that_nobody_scored_train_nothing(tmp_path):
    run = grpo(tmp_path, reward=lambda completions, **c: [None] * len(completions), max_steps=1)
    before = weights(run)
    run.train()
    assert all(torch.equal(weight, before[name]) for name, weight in weights(run).items())


def unscored(caplog):
    return [record.message for record in caplog.records if "no reward" in record.message]


def test_a_rollout_that_nobody_scored_is_told_once(tmp_path, caplog):
    reward = {
        "one": lambda completions, **c: [None] * len(completions),
        "other": lambda prompts, **c: [None] * len(prompts),
    }
    run = grpo(tmp_path, reward=list(reward.values()), max_steps=2, dynamic_sampling_rounds=1)
    run.train()
    messages = unscored(caplog)
    assert len(messages) == 2
    assert messages[0].startswith(
        "All 16 completions have no reward from <lambda>, <lambda>_2, so nothing is learned from them"
    )


def test_completions_that_nobody_scored_are_counted_and_the_first_is_shown(tmp_path, caplog):
    def reward(completions, **columns):
        return [None if i in (3, 5) else float(i) for i, _ in enumerate(completions)]

    run = grpo(tmp_path, reward=reward, max_steps=1)
    run.train()
    row = run.rollout.rows[3]
    (message,) = unscored(caplog)
    assert message.startswith("2 of 8 completions have no reward from reward, so nothing")
    assert f"The first is {row['completion']!r} to {row['prompt']!r}" in message
    caplog.clear()
    grpo(tmp_path / "scored", max_steps=1).train()
    assert unscored(caplog) == []


def test_a_dry_run_says_what_was_resolved_and_trains_nothing(tmp_path):
    run = grpo(tmp_path, beta=0.1)
    plan = run.dry_run()
    assert plan["rollout"]["completions"] == 8
    assert plan["model"]["reference"] == "Qwen2ForCausalLM"
    assert plan["micro_batches"]["longest_row"] == 3 + 5
    assert run.state.global_step == 0
    json.dumps(plan)


def test_save_model_writes_what_from_pretrained_reads(tmp_path):
    run = grpo(tmp_path)
    run.train()
    run.save_model(str(tmp_path / "final"))
    again = type(run.model).from_pretrained(tmp_path / "final")
    for name, weight in again.named_parameters():
        assert torch.equal(weight, weights(run)[name])


def test_a_model_given_by_path_is_loaded_with_its_tokenizer(tmp_path):
    tiny_model(dtype=torch.bfloat16).save_pretrained(tmp_path / "model")
    TOKENIZER.save_pretrained(tmp_path / "model")
    args = GRPOConfig(output_dir=str(tmp_path / "out"), **{**SMALL, "num_generations": 4, "beta": 0.1})
    run = GRPOTrainer(str(tmp_path / "model"), ones, args, rows())
    assert {p.dtype for p in run.model.parameters()} == {torch.float32}
    assert {p.dtype for p in run.maker.reference.model.parameters()} == {torch.bfloat16}
    run.train()


def test_a_model_folder_without_a_tokenizer_is_an_error(tmp_path):
    tiny_model().save_pretrained(tmp_path / "model")
    args = GRPOConfig(output_dir=str(tmp_path / "out"), **{**SMALL, "num_generations": 4})
    with pytest.raises(ModelError, match="no tokenizer beside"):
        GRPOTrainer(str(tmp_path / "model"), ones, args, rows())


def test_bf16_compute_trains_fp32_weights(tmp_path):
    run = grpo(tmp_path, bf16=True, beta=0.05, num_iterations=2)
    run.train()
    assert {p.dtype for p in run.model.parameters()} == {torch.float32}
    drift = run.state.log_history[0]["sampling/sampling_logp_difference/mean"]
    assert 0 < drift < 0.05


def test_under_bf16_an_unmoved_policy_has_exactly_its_references_log_probs(tmp_path):
    run = grpo(tmp_path, bf16=True, beta=0.05, num_iterations=2, learning_rate=0.0)
    run.train()
    for record in run.rollout.records:
        assert torch.equal(record.old, record.reference)


def test_the_best_checkpoint_by_reward_is_loaded_at_the_end(tmp_path):
    run = grpo(
        tmp_path,
        trainer={"eval_dataset": rows(6)},
        max_steps=6,
        eval_strategy="steps",
        eval_steps=2,
        save_strategy="steps",
        save_steps=2,
        save_total_limit=1,
        load_best_model_at_end=True,
        metric_for_best_model="eval_reward",
        greater_is_better=True,
    )
    run.train()
    scores = {row["step"]: row["eval_reward"] for row in run.state.log_history if "eval_reward" in row}
    best = max(scores, key=scores.get)
    assert run.state.best_model_checkpoint == str(tmp_path / f"checkpoint-{best}")
    assert run.maker.weights_changed, "an engine with a copy of the weights has to get them again"
    saved = type(run.model).from_pretrained(run.state.best_model_checkpoint)
    assert all(torch.equal(weight, weights(run)[name]) for name, weight in saved.named_parameters())


def test_dropout_can_be_turned_off(tmp_path):
    model = tiny_model()
    model.model.layers[0].self_attn.attention_dropout = 0.3
    model.model.extra = torch.nn.Dropout(0.5)
    grpo(tmp_path, model=model, disable_dropout=True)
    assert model.model.extra.p == 0.0
    assert model.model.layers[0].self_attn.attention_dropout == 0.0


def test_messages_are_asked_through_the_chat_template(tmp_path, caplog):
    tokenizer = char_tokenizer(chat=True)
    data = Dataset.from_list([{"prompt": [{"role": "user", "content": str(i % 10)}]} for i in range(8)])

    def reward(prompts, completions, **columns):
        assert completions[0][0]["role"] == "assistant"
        assert prompts[0][0]["role"] == "user"
        return [float(len(c[0]["content"])) for c in completions]

    args = GRPOConfig(output_dir=str(tmp_path), **{**SMALL, "num_generations": 4})
    with caplog.at_level(logging.WARNING):
        run = GRPOTrainer(tiny_model(len(tokenizer)), reward, args, data, processing_class=tokenizer)
        run.train()
    assert run.rollout.records[0].prompt_ids[0] == tokenizer.convert_tokens_to_ids("<user>")


def test_supervised_training_lowers_its_loss_and_evaluates(tmp_path):
    data = Dataset.from_list([{"prompt": f"{i % 10}=", "completion": str(i % 10)} for i in range(40)])
    args = SFTConfig(output_dir=str(tmp_path), **{**_sft(), "max_steps": 40, "per_device_train_batch_size": 20})
    run = SFTTrainer(tiny_model(), args, train_dataset=data, eval_dataset=data, processing_class=TOKENIZER)
    before = run.evaluate()["eval_loss"]
    run.train()
    assert run.evaluate()["eval_loss"] < 0.3 < before


def test_supervised_loss_is_transformers_own(tmp_path):
    data = Dataset.from_list([{"prompt": f"{i}=", "completion": str(i) * (1 + i % 3)} for i in range(8)])
    model = tiny_model()
    args = SFTConfig(output_dir=str(tmp_path), **_sft())
    loss = SFTTrainer(model, args, train_dataset=data, eval_dataset=data, processing_class=TOKENIZER).evaluate()[
        "eval_loss"
    ]
    total, count = 0.0, 0
    for row in data:
        prompt, completion = (TOKENIZER(row[name]).input_ids for name in ("prompt", "completion"))
        ids = torch.tensor([prompt + completion + [TOKENIZER.eos_token_id]])
        labels = ids.clone()
        labels[:, : len(prompt)] = -100
        tokens = len(completion) + 1
        total, count = total + model(input_ids=ids, labels=labels).loss.item() * tokens, count + tokens
    assert loss == pytest.approx(total / count, rel=1e-5)


def _sft():
    return {name: value for name, value in SMALL.items() if name != "max_completion_length"}


def test_autocast_keeps_no_copies_of_weights_until_a_forward_ends(tmp_path):
    run = grpo(tmp_path, max_steps=1, bf16=True)
    found = set()
    layer = run.model.model.layers[0].self_attn.q_proj
    kept = lambda *args: found.add((torch.is_autocast_enabled("cpu"), torch.is_autocast_cache_enabled()))  # noqa: E731
    layer.register_forward_hook(kept)
    run.train()
    assert found == {(True, False)}


def test_a_process_that_sees_several_devices_trains_on_one_and_says_so(tmp_path, caplog):
    args = GRPOConfig(output_dir=str(tmp_path), use_cpu=True)
    args._n_gpu = 4
    use_one_device(args)
    assert args.n_gpu == 1
    assert "One process sees 4 devices and trains on the first" in caplog.text


def test_dropout_that_modules_keep_as_numbers_is_disabled_in_policy_and_reference(tmp_path):
    config = OPTConfig(
        vocab_size=13, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, ffn_dim=64, word_embed_proj_dim=32,
        dropout=0.3, attention_dropout=0.2, activation_dropout=0.1, layerdrop=0.1, pad_token_id=0, max_position_embeddings=64,
    )  # fmt: skip
    run = grpo(tmp_path, model=OPTForCausalLM(config), disable_dropout=True, beta=0.1)
    for model in (run.model, run.maker.reference.model):
        rates = [v for m in model.modules() for n, v in vars(m).items() if "drop" in n and isinstance(v, float)]
        assert len(rates) > 4
        assert set(rates) == {0.0}
    assert run.run.sizes.choice.layout == "shared"


def test_rows_of_a_longrope_model_stay_within_its_first_set_of_rotations(tmp_path):
    grpo(tmp_path, model=longrope_model(), max_completion_length=FIRST // 2)
    with pytest.raises(ArgumentError, match="no room for a prompt in the model's context of 16"):
        grpo(tmp_path, model=longrope_model(), max_completion_length=FIRST)

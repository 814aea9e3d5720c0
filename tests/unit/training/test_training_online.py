"""What users of transformers' Trainer and of TRL expect of an online run."""

from __future__ import annotations

import copy
import logging
import re
from functools import partial

import pandas
import pytest
import torch
from datasets import Dataset, IterableDataset
from peft import LoraConfig
from transformers import OPTConfig, OPTForCausalLM

from longrope_model import FIRST, longrope_model
from lowpeak import GRPOConfig
from lowpeak.errors import ArgumentError, ModelError
from lowpeak.trainers.configs import use_one_device
from model_families import make_family
from preference_data import tiny_classifier
from rounding import assert_each_close_to_largest
from small_runs import (
    SAVED,
    SGD,
    TOKENIZER,
    StopAfter,
    column,
    journal,
    make,
    ones,
    rows,
    same,
    saved,
    spread,
    trained,
    weights,
)
from tiny_models import char_tokenizer, tiny_model

grpo, trained_grpo = partial(make, "GRPO"), partial(trained, "GRPO")


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run of two rollouts that served two steps each, with a reference, saved in the end; and its folder."""
    folder = tmp_path_factory.mktemp("finished")
    run = trained_grpo(folder, beta=0.05, num_iterations=2, max_steps=4)
    run.save_model(str(folder / "final"))
    return run, folder


def test_training_raises_the_reward_it_is_given(tmp_path):
    run = trained_grpo(tmp_path, max_steps=20, per_device_train_batch_size=32, learning_rate=2e-2, beta=0.0)
    rewards = column(run, "reward")
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 1.0
    assert "kl" not in run.state.log_history[0]


def test_gradient_accumulation_changes_no_weight(tmp_path):
    wide, narrow = {"per_device_train_batch_size": 16}, {"per_device_train_batch_size": 4}
    one = trained_grpo(tmp_path / "one", **wide, **SGD)
    many = trained_grpo(tmp_path / "many", **narrow, gradient_accumulation_steps=4, **SGD)
    assert one.state.global_step == many.state.global_step == 2
    assert_each_close_to_largest(weights(many), weights(one), 4e-6)


def test_an_epoch_asks_each_prompt_once(tmp_path):
    seen = []

    def reward(prompts, completions, **columns):
        seen.extend(prompts[::4])
        return ones(completions)

    run = trained_grpo(tmp_path, data=rows(6), reward_funcs=reward, max_steps=-1, num_train_epochs=2)
    assert run.state.global_step == 2 * 6 // 2
    assert sorted(seen) == sorted([row["prompt"] for row in rows(6)] * 2)
    assert seen[:6] != seen[6:]
    assert run.state.epoch == 2.0


def test_a_rollout_serves_its_iterations_and_steps_and_columns_and_state_reach_the_rewards(tmp_path):
    calls = []

    def reward(prompts, completions, completion_ids, answer, trainer_state, **columns):
        assert len(answer) == len(prompts) == len(completions) == len(completion_ids)
        assert answer[0] == answer[3] == prompts[0][0]
        assert trainer_state.max_steps == 5
        calls.append(len(completions))
        return ones(completions)

    trained_grpo(tmp_path, reward_funcs=reward, steps_per_generation=2, num_iterations=2, max_steps=5)
    assert calls == [16, 16]


def test_a_stream_trains_to_max_steps_and_counts_prompts_that_are_too_long(tmp_path):
    lengths = (1, 600, 2, 600, 3)
    data = IterableDataset.from_generator(lambda: ({"prompt": "1" * length} for length in lengths))
    run = trained_grpo(tmp_path, data=data, max_steps=3, overlong_prompts="drop")
    assert run.state.global_step == 3
    dropped = column(run, "num_overlong_prompts")
    assert dropped == sorted(dropped)
    assert dropped[-1] >= 2


@pytest.mark.parametrize("by", ["instance", "path"])
def test_a_reward_model_judges_beside_a_function(tmp_path, by):
    judge = tiny_classifier()
    folder = saved(tmp_path / "judge", judge)
    extra = {"reward_processing_classes": [None, TOKENIZER]} if by == "instance" else {}
    both = [ones, judge if by == "instance" else folder]
    run = grpo(tmp_path, reward_funcs=both, reward_weights=[1.0, 0.5], **extra)
    run.next_step()
    record = run.rollout.records[0]
    text = TOKENIZER.decode(record.completion.ids.tolist(), skip_special_tokens=True)
    ids = torch.tensor([[*record.prompt_ids, *TOKENIZER(text).input_ids]])
    assert record.rewards[1] == pytest.approx(judge(input_ids=ids).logits.item(), abs=1e-5)
    assert record.reward == pytest.approx(record.rewards[0] + 0.5 * record.rewards[1])


@pytest.mark.extended
def test_several_evaluation_sets_are_reported_under_their_names(tmp_path):
    sets = {"easy": rows(4), "hard": rows(6)}
    evaluated = {"eval_dataset": sets, "eval_strategy": "steps", "eval_steps": 1, "num_generations_eval": 2}
    evaluated["success_threshold"] = 1.0
    run = trained_grpo(tmp_path, max_steps=1, **evaluated)
    metrics = run.evaluate()
    for name in sets:
        assert {f"eval_{name}_reward", f"eval_{name}_greedy_accuracy", f"eval_{name}_pass@2"} <= metrics.keys()
    logged = [row for row in run.state.log_history if "eval_hard_reward" in row]
    assert [row["step"] for row in logged] == [1, 1]


def test_evaluating_changes_nothing_and_gives_the_same_twice_and_in_portions(tmp_path):
    evaluated = {"eval_dataset": rows(6), "success_threshold": 1.0}
    run = grpo(tmp_path, **evaluated)
    before, state = weights(run), torch.get_rng_state()
    first, second = run.evaluate(), run.evaluate()
    assert all(first[name] == second[name] for name in first if name not in ("eval_runtime", "eval_samples_per_second"))
    assert torch.equal(torch.get_rng_state(), state)
    assert same(weights(run), before)
    portions = grpo(tmp_path, **evaluated, per_device_eval_batch_size=4).evaluate()
    for name in ("eval_reward", "eval_greedy_reward", "eval_pass@4"):
        assert portions[name] == pytest.approx(first[name])


@pytest.mark.extended
def test_predict_gives_completions_with_their_rewards(tmp_path):
    result = grpo(tmp_path).predict(rows(3))
    assert len(result.predictions) == 3 + 3 * 4
    assert {"prompt", "completion", "reward", "decoding"} <= result.predictions[0].keys()
    assert "test_reward" in result.metrics


@pytest.mark.extended
@pytest.mark.parametrize(
    ("changes", "accuracy"), [({}, 0.0), ({"success_reward": "ones", "success_threshold": 0.0}, 1.0)]
)
def test_a_success_follows_the_reward_and_threshold_that_were_named(tmp_path, changes, accuracy):
    def never(completions, **columns):
        return [0.0] * len(completions)

    run = grpo(tmp_path, reward_funcs=[never, ones], eval_dataset=rows(4), **changes)
    assert run.evaluate()["eval_accuracy"] == accuracy


def right_or_none(completions, **columns):
    return [None if "1" in text else float("2" in text) for text in completions]


@pytest.mark.parametrize(
    ("reward", "changes", "counted"),
    [
        (right_or_none, {}, True),
        (spread, {}, False),
        (spread, {"success_threshold": 1.0}, True),
        (spread, {"success_reward": "spread"}, True),
        (spread, {"metric_for_best_model": "greedy_accuracy"}, True),
    ],
)
def test_successes_are_counted_if_rewards_are_0_or_1_or_the_user_chose_a_criterion(tmp_path, reward, changes, counted):
    metrics = grpo(tmp_path, reward_funcs=reward, eval_dataset=rows(4), **changes).evaluate()
    names = {"eval_accuracy", "eval_greedy_accuracy", "eval_pass@1", "eval_pass@4"}
    assert names & metrics.keys() == (names if counted else set())
    assert {"eval_reward", "eval_greedy_reward"} <= metrics.keys()


def test_callbacks_an_optimizer_and_a_schedule_are_taken_as_in_transformers(tmp_path):
    model = tiny_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    run = trained_grpo(tmp_path, model, callbacks=[StopAfter(1)], optimizers=(optimizer, schedule))
    assert run.state.global_step == 1
    assert column(run, "learning_rate") == [0.5]


def test_the_journal_has_one_record_a_step_and_every_rollout_row(finished):
    _, folder = finished
    steps, rollouts = journal(folder), journal(folder, "rollouts")
    assert [row["step"] for row in steps] == [1, 2, 3, 4]
    assert {"loss", "grad_norm", "reward", "time/rollout", "peak_memory/train"} <= steps[0].keys()
    assert [row["step"] for row in rollouts] == [1] * 8 + [3] * 8
    table = pandas.read_json(folder / "journal" / "rollouts.jsonl", lines=True)
    assert pandas.json_normalize(table["rewards"])["ones"].notna().all()


def test_metrics_have_trls_names_and_the_entry_of_a_fully_logged_run_has_transformers_own(finished):
    expected = """reward reward_std frac_reward_zero_std rewards/ones/mean rewards/ones/std completions/mean_length
        completions/min_length completions/max_length completions/clipped_ratio kl entropy num_tokens
        clip_ratio/low_mean clip_ratio/high_mean clip_ratio/region_mean useful_tokens/train useful_tokens/score
        useful_tokens/rollout tokens_per_second step_time peak_memory/rollout peak_memory/score"""
    first, *_, last = finished[0].state.log_history
    assert set(expected.split()) <= first.keys()
    assert "train_loss" in last
    assert "reward" not in last


def test_save_model_writes_what_from_pretrained_reads(finished):
    run, folder = finished
    assert same(dict(type(run.model).from_pretrained(folder / "final").named_parameters()), weights(run))


@pytest.mark.extended
def test_completions_are_printed_when_asked_for_and_once_in_so_many_steps(tmp_path, capsys):
    shown = {"num_completions_to_print": 2, "log_unique_prompts": True, "log_completions_steps": 3}
    trained_grpo(tmp_path, log_completions=True, max_steps=4, **shown)
    printed = capsys.readouterr().out
    assert [bool(re.search(rf"step {step}\b(?!/)", printed)) for step in (1, 2, 3, 4)] == [True, False, True, False]
    assert "completion" in printed
    assert "advantage" in printed


def test_groups_with_equal_rewards_are_asked_again_under_dynamic_sampling(tmp_path):
    calls = []

    def reward(prompts, completions, **columns):
        calls.append(len(completions))
        odd = [int(prompt[0]) % 2 for prompt in prompts]
        return [float(i % 2) if o else 1.0 for i, o in enumerate(odd)]

    asking = {"dynamic_sampling_rounds": 6, "max_steps": 1, "shuffle_dataset": False}
    run = trained_grpo(tmp_path, reward_funcs=reward, **asking)
    assert calls == [8, 4, 4]
    assert len(run.rollout.records) == 8
    assert run.state.log_history[0]["frac_reward_zero_std"] == 0.0
    assert run.state.log_history[0]["dropped_groups"] == 2.0


def test_the_reference_moves_towards_the_policy_when_asked(tmp_path):
    run = grpo(tmp_path, beta=0.1, sync_ref_model=True, ref_model_sync_steps=2, ref_model_mixup_alpha=0.25)
    start = weights(run)
    run.train()
    reference = dict(run.run.reference.model.named_parameters())
    for name, policy in weights(run).items():
        torch.testing.assert_close(reference[name], 0.75 * start[name] + 0.25 * policy, rtol=1e-5, atol=1e-6)


@pytest.mark.extended
def test_completions_without_a_score_are_counted_in_one_message_a_rollout(tmp_path, caplog):
    def warned(**changes):
        caplog.clear()
        run = grpo(tmp_path, **changes)
        before = weights(run)
        run.train()
        messages = [record.message for record in caplog.records if record.funcName == "warn_of_unrewarded"]
        return run, messages, same(weights(run), before)

    nothing = [lambda completions, **c: [None] * len(completions), lambda prompts, **c: [None] * len(prompts)]
    run, messages, unmoved = warned(reward_funcs=nothing, dynamic_sampling_rounds=1)
    assert len(messages) == 2
    assert len(run.rollout.records) == 8
    assert {"16", "<lambda>,", "<lambda>_2,"} <= set(messages[0].split())
    assert unmoved
    two = lambda completions, **c: [None if i in (3, 5) else float(i) for i, _ in enumerate(completions)]  # noqa: E731
    run, (message,), _ = warned(reward_funcs=two, max_steps=1)
    assert message.startswith("2 of 8 ")
    assert all(repr(run.rollout.rows[3][column]) in message for column in ("completion", "prompt"))


def test_a_model_given_by_path_is_loaded_with_its_tokenizer_and_not_without_one(tmp_path):
    tiny_model(dtype=torch.bfloat16).save_pretrained(tmp_path / "model")
    with pytest.raises(ModelError, match="processing_class=tokenizer"):
        grpo(tmp_path, str(tmp_path / "model"), tokenizer=False)
    TOKENIZER.save_pretrained(tmp_path / "model")
    run = grpo(tmp_path, str(tmp_path / "model"), tokenizer=False, beta=0.1)
    assert {p.dtype for p in run.model.parameters()} == {torch.float32}
    assert {p.dtype for p in run.run.reference.model.parameters()} == {torch.bfloat16}
    run.next_step()  # the reference scores


def test_bf16_compute_keeps_no_copies_and_an_unmoved_policy_has_its_references_log_probs(tmp_path):
    run = grpo(tmp_path, bf16=True, beta=0.05, num_iterations=2, learning_rate=0.0)
    found = set()
    run.model.model.layers[0].self_attn.q_proj.register_forward_hook(
        lambda *args: found.add((torch.is_autocast_enabled("cpu"), torch.is_autocast_cache_enabled()))
    )
    run.train()
    assert found == {(True, False)}
    assert {p.dtype for p in run.model.parameters()} == {torch.float32}
    assert 0 < column(run, "sampling/sampling_logp_difference/mean")[0] < 0.05
    for record in run.rollout.records:
        assert torch.equal(record.old, record.reference)


@pytest.mark.extended
def test_the_best_checkpoint_by_reward_is_loaded_at_the_end(tmp_path):
    best = {"load_best_model_at_end": True, "metric_for_best_model": "eval_reward", "greater_is_better": True}
    evaluated = {"eval_dataset": rows(6), "eval_strategy": "steps", "eval_steps": 1}
    run = trained_grpo(tmp_path, max_steps=3, **SAVED, save_total_limit=1, **best, **evaluated)
    scores = {row["step"]: row["eval_reward"] for row in run.state.log_history if "eval_reward" in row}
    best = max(scores, key=scores.get)
    assert run.state.best_model_checkpoint == str(tmp_path / f"checkpoint-{best}")
    assert run.collector.weight_sync.weights_changed, "an engine with a copy of the weights has to get them again"
    assert same(dict(type(run.model).from_pretrained(run.state.best_model_checkpoint).named_parameters()), weights(run))


def test_messages_are_asked_through_the_chat_template(tmp_path):
    tokenizer = char_tokenizer(chat=True)
    data = Dataset.from_list([{"prompt": [{"role": "user", "content": str(i % 10)}]} for i in range(8)])

    def reward(prompts, completions, **columns):
        assert completions[0][0]["role"] == "assistant"
        assert prompts[0][0]["role"] == "user"
        return [float(len(c[0]["content"])) for c in completions]

    run = grpo(tmp_path, tiny_model(len(tokenizer)), data, tokenizer, reward_funcs=reward)
    run.next_step()
    assert run.rollout.records[0].prompt_ids[0] == tokenizer.convert_tokens_to_ids("<user>")


def test_a_process_that_sees_several_devices_trains_on_one_and_says_so(tmp_path, caplog):
    args = GRPOConfig(output_dir=str(tmp_path), use_cpu=True)
    args._n_gpu = 4
    use_one_device(args)
    assert args.n_gpu == 1
    assert "4 devices" in caplog.text


def test_dropout_of_modules_and_numbers_is_off_in_policy_and_reference_but_for_adapters(tmp_path, caplog):
    config = OPTConfig(
        vocab_size=13, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, ffn_dim=64, word_embed_proj_dim=32,
        dropout=0.3, attention_dropout=0.2, activation_dropout=0.1, layerdrop=0.1, pad_token_id=0, max_position_embeddings=64,
    )  # fmt: skip
    model = OPTForCausalLM(config)
    model.model.extra = torch.nn.Dropout(0.5)
    adapter = LoraConfig(r=2, target_modules=["q_proj"], lora_dropout=0.4)
    adapted = grpo(tmp_path / "lora", copy.deepcopy(model), peft_config=adapter).model
    assert {m.p for m in adapted.modules() if isinstance(m, torch.nn.Dropout)} == {0.0, 0.4}
    with caplog.at_level(logging.INFO):
        run = grpo(tmp_path, model, beta=0.1)
    assert "Dropout of OPTForCausalLM, up to 0.5, is off" in caplog.text
    for model in (run.model, run.run.reference.model):
        rates = [v for m in model.modules() for n, v in vars(m).items() if "drop" in n and isinstance(v, float)]
        assert len(rates) > 4
        assert model.model.extra.p == 0.0
        assert set(rates) == {0.0}
    assert run.run.sizes.layout_choice.layout == "shared"


def test_a_router_with_noise_computes_as_in_evaluation_and_its_experts_train(tmp_path):
    model = grpo(tmp_path, make_family("PhiMoE")).model.train()
    router = model.model.layers[0].mlp.router
    states = torch.randn(50, 32)
    assert torch.equal(router(states)[2], router(states)[2])
    assert model.model.layers[0].mlp.experts.training
    assert not copy.deepcopy(model).train().model.layers[0].mlp.router.training


def test_rows_of_a_longrope_model_stay_within_its_first_set_of_rotations(tmp_path):
    grpo(tmp_path, model=longrope_model(), max_completion_length=FIRST // 2)
    with pytest.raises(ArgumentError, match=rf"max_completion_length={FIRST} .* 16 "):
        grpo(tmp_path, model=longrope_model(), max_completion_length=FIRST)

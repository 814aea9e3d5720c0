"""The step benchmark: forced lengths, what is counted as useful, phases in time and memory."""

from __future__ import annotations

import pytest
from benchmarks import long_completions, step_table
from benchmarks.harness.clock import PhaseClock, watch_step
from benchmarks.harness.flops import forward_flops, gflops_per_second, useful_tokens
from benchmarks.harness.process import peaks_by_phase
from benchmarks.harness.shapes import countdown, draw_lengths, make_prompts, make_tokenizer
from benchmarks.harness.stepping import Passes, StepRequest, difference, our_countdowns, settings_of, spread
from datasets import Dataset

from lowpeak import GRPOConfig, GRPOTrainer
from tiny import char_tokenizer, tiny_model

MODEL = {"body": 10, "head": 100, "layers": 2, "hidden": 4, "vocabulary": 25}


def test_a_prompt_has_the_asked_number_of_tokens_and_ends_with_the_start():
    tokenizer = make_tokenizer()
    ids = tokenizer(make_prompts(2, 64))["input_ids"]
    assert [len(row) for row in ids] == [64, 64]
    assert {row[-1] for row in ids} == {151_935}
    assert ids[0] != ids[1]


def test_lengths_are_skewed_and_cut_and_the_same_for_a_seed():
    lengths = draw_lengths(2000, seed=1)
    assert lengths == draw_lengths(2000, seed=1)
    assert (min(lengths), max(lengths)) == (1, 256)
    assert 50 < sum(lengths) / 2000 < 75
    assert countdown(4) == [4, 3, 2, 1]


def test_our_canned_completions_are_one_for_each_prompt():
    class Trainer:
        processing_class = make_tokenizer()

    found = our_countdowns(["w400 <start>"] * 8, Trainer(), iter([[2, 1, 3, 1, 1, 1, 1, 1]]))
    assert found["prompt_ids"] == [[400, 151_935]] * 8
    assert found["completion_ids"][:3] == [[2, 1], [1], [3, 2, 1]]


def test_every_row_of_a_group_has_a_reward_of_its_own():
    lengths: list[list[int]] = []
    rewards = spread(lengths)(["a"] * 16, [[1, 2]] * 16)
    assert len(set(rewards[:8])) == 8
    assert all(reward != sum(rewards[:8]) / 8 for reward in rewards)
    assert lengths == [[2] * 16]


def test_both_sides_of_w2_get_groups_of_8_in_batches_of_8():
    request = StepRequest("lowpeak", "w2", True, 2, 64, 3, 0.04, "start", "folder", options={"seed": 5})
    found = settings_of(request)
    assert found["per_device_train_batch_size"] * found["gradient_accumulation_steps"] == 16
    assert (found["beta"], found["gradient_checkpointing"], found["seed"]) == (0.04, True, 5)


def test_a_prompt_is_useful_once_for_its_group():
    assert useful_tokens([3, 1, 2, 2], prompt_length=5, num_generations=2) == 2 * 5 + 8


def test_the_head_is_counted_for_completions_and_attention_for_pairs():
    # one group of two: 4 + 5 tokens through the body, 5 through the head; pairs 4 * 4 / 2 + (2*4 + 2) + (3*4 + 4.5)
    expected = 2 * 10 * 9 + 2 * 100 * 5 + 4 * 4 * 2 * (8 + 10 + 16.5)
    assert forward_flops(MODEL, [2, 3], 4, 2) == expected
    reached = gflops_per_second(MODEL, [[2, 3]], 4, 2, {"train": expected / 1e9, "rollout": 0.0})
    assert reached == {"train": 3.0}


def test_a_sample_belongs_to_the_phase_that_had_begun():
    events = [(1.0, "train"), (2.0, "rest"), (3.0, "train")]
    samples = [(0.5, 9 << 20), (1.5, 3 << 20), (2.0, 7 << 20), (3.5, 5 << 20)]
    assert peaks_by_phase(events, samples) == {"train": 5.0, "rest": 7.0}


def test_seconds_of_a_step_are_between_two_stamps():
    assert difference({"total": 1.0}, {"total": 3.5, "train": 2.0}) == {"total": 2.5, "train": 2.0}


def test_medians_are_of_each_phase_and_the_rest_is_what_no_phase_took():
    steps = [{"total": 10.0, "train": 6.0, "rollout": 1.0}, {"total": 4.0, "train": 2.0}, {"total": 5.0, "train": 3.0}]
    found = step_table.median_seconds(steps)
    assert found == {"rollout": 0.0, "score": 0.0, "train": 3.0, "rest": 2.0, "total": 5.0}


def test_commands_without_a_size_measure_the_learning_task_and_quick_ones_little():
    assert (step_table.parse([]).shape, step_table.parse([]).num_prompts) == ("w1", 32)
    quick = step_table.parse(["--shape", "w2", "--prompt", "512", "--kind", "whole", "--quick"])
    assert (quick.prompt_length, quick.canned, quick.num_prompts, quick.steps) == (512, False, 1, 2)
    assert long_completions.parse([])["length"] == 16_384


def test_what_only_must_be_there_is_told_from_activations():
    run = {
        "model": {"body": 1 << 20, "head": 1 << 20, "vocabulary": 1 << 18},
        "own": {"sizes": {"logprob_chunk_size": 2}, "peak_memory": {"train": 200.0}},
        "start_rss_mb": 100.0,
    }
    found = step_table.parts_of_peak(run)["mb"]
    assert found == {
        "weights": 8.0, "gradients": 8.0, "adam": 16.0, "logits of one chunk": 2.0, "activations and temporaries": 74.0
    }  # fmt: skip


@pytest.mark.parametrize("beta", [0.0, 0.04])
def test_all_phases_of_our_trainer_are_timed_and_their_tokens_counted(beta, tmp_path):
    args = GRPOConfig(
        output_dir=str(tmp_path), per_device_train_batch_size=8, num_generations=4, max_completion_length=4,
        max_steps=1, save_strategy="no", use_cpu=True, disable_tqdm=True, beta=beta,
    )  # fmt: skip
    data = Dataset.from_list([{"prompt": f"{i}="} for i in range(4)])
    lengths: list[list[int]] = []
    trainer = GRPOTrainer(tiny_model(), spread(lengths), args, data, processing_class=char_tokenizer())
    clock = PhaseClock()
    watch_step(trainer, "lowpeak", clock)
    passes = Passes(clock)
    trainer.model.get_input_embeddings().register_forward_pre_hook(passes)
    trainer.train()
    expected = {"rollout", "reward", "train", "optimizer"} | ({"score"} if beta else set())
    assert expected <= clock.seconds.keys()
    assert {name for _, name in clock.events} - {"rest", "sync"} == expected
    # A prompt of two tokens once or for each row, and a completion's last token, which predicts nothing, or not.
    assert 2 * 2 + sum(lengths[0]) - 8 <= passes.tokens["train"] <= 8 * 2 + sum(lengths[0])
    assert passes.forwards["train"] >= 1

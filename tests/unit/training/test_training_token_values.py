"""Token values in the journal equal those of full logits, stand at the right tokens, and outlive a resumed run."""

from __future__ import annotations

import copy
import random
import re

import pytest
import torch

from lowpeak.logprobs.reference import naive_logprobs
from lowpeak.training.token_values import choose_evenly, token_texts
from small_runs import SAVED, journal, make, rows, spread, trained
from tiny_models import byte_tokenizer, char_tokenizer, metaspace_tokenizer, tiny_model


def test_a_character_stands_at_the_last_of_its_tokens():
    tokenizer = byte_tokenizer()
    text = "aé 😀b"
    texts = token_texts(tokenizer.encode(text), tokenizer.decode)
    assert texts == ["a", "", "é", " ", "", "", "", "😀", "b"]


@pytest.mark.parametrize("build", [byte_tokenizer, metaspace_tokenizer, char_tokenizer])
def test_joined_texts_are_the_text_of_all_tokens_also_of_invalid_bytes(build):
    tokenizer = build()
    dice = random.Random(0)
    for _ in range(200):
        ids = [dice.randrange(len(tokenizer)) for _ in range(dice.randrange(30))]
        texts = token_texts(ids, tokenizer.decode)
        assert len(texts) == len(ids)
        assert "".join(texts) == tokenizer.decode(ids)


def test_a_long_row_of_incomplete_characters_is_not_decoded_over_and_over():
    tokenizer = byte_tokenizer()
    (first, _) = tokenizer.encode("é")
    longest = 0

    def decode(ids: list[int]) -> str:
        nonlocal longest
        longest = max(longest, len(ids))
        return tokenizer.decode(ids)

    assert len(token_texts([first] * 300, decode)) == 300
    assert longest < 40


def test_completions_are_chosen_at_even_distances_and_others_in_the_next_rollout():
    assert choose_evenly(range(12), 3) == (0, 4, 8)
    assert choose_evenly(range(12), 3, offset=13) == (1, 5, 9)
    assert sorted(choose_evenly([5, 6], 3, offset=1)) == [5, 6]
    assert choose_evenly([], 3) == ()
    assert choose_evenly(range(12), 0) == ()


def test_values_are_those_of_full_logits(tmp_path):
    model = tiny_model()
    untrained = copy.deepcopy(model)
    run = trained("GRPO", tmp_path, model, max_steps=1, num_completions_with_tokens=8, reward_funcs=spread)
    found, rollouts = journal(tmp_path, "tokens"), journal(tmp_path, "rollouts")
    assert len(found) > 4
    for row, index in zip(found, run.observed, strict=True):
        record = run.rollout.records[index]
        ids = record.completion.ids.long()
        sequence = torch.cat([torch.tensor(record.prompt_ids), ids])
        hidden = untrained.model(sequence[None]).last_hidden_state[0, len(record.prompt_ids) - 1 : -1]
        logprobs, entropy = naive_logprobs(hidden, untrained.lm_head.weight, None, ids, 1.0)
        policy = [a + b for a, b in zip(row["logprobs"], row["mismatch"], strict=True)]
        assert policy == pytest.approx(logprobs.tolist(), abs=1e-3)
        assert row["entropy"] == pytest.approx(entropy.tolist(), abs=1e-3)
        assert row["loss_mask"] == [1] * len(ids)
        assert re.sub("<(pad|eos)>", "", "".join(row["pieces"])) == rollouts[row["row"]]["completion"]


@pytest.mark.parametrize("kind", ["GRPO", "PPO", "OnlineDPO"])
def test_each_rollout_has_its_values_once(tmp_path, kind):
    trained(kind, tmp_path, max_steps=3, num_iterations=2, reward_funcs=spread, num_completions_with_tokens=2)
    found = journal(tmp_path, "tokens")
    assert [row["step"] for row in found] == [1, 1, 3, 3]
    assert len({(row["step"], row["row"]) for row in found}) == 4
    assert all(abs(value) < 1e-3 for row in found for value in row["mismatch"])


def test_masked_tokens_are_marked_and_have_no_value_of_the_step(tmp_path):
    changes = {"mask_truncated_completions": True, "max_completion_length": 2, "num_completions_with_tokens": 8}
    trained("GRPO", tmp_path, max_steps=1, reward_funcs=spread, **changes)
    for row in journal(tmp_path, "tokens"):
        counted = [value is not None for value in row["entropy"]]
        assert counted == [bool(each) for each in row["loss_mask"]]
        assert row["loss_mask"] == [int(row["pieces"][-1] == "<eos>")] * len(row["pieces"])


@pytest.mark.extended
def test_a_resumed_run_does_not_double_values_and_tells_that_it_was_resumed(tmp_path):
    settings = {"reward_funcs": spread, **SAVED}
    trained("GRPO", tmp_path, **settings)
    alone = journal(tmp_path, "tokens")
    assert not (tmp_path / "journal" / "events.jsonl").exists()
    trained("GRPO", tmp_path, resume=tmp_path / "checkpoint-1", **settings)
    assert journal(tmp_path, "tokens") == alone
    (event,) = journal(tmp_path, "events")
    assert (event["step"], event["event"], event["restarts"]) == (1, "resumed", 0)


def test_the_journal_has_learning_rates_and_evaluations_in_training_alone_and_no_values_if_none_are_asked_for(tmp_path):
    evaluated = {"eval_strategy": "steps", "eval_steps": 1, "eval_dataset": rows(4), "num_completions_with_tokens": 0}
    run = make("GRPO", tmp_path, **evaluated, learning_rate=0.4, lr_scheduler_type="linear", warmup_steps=0)
    run.evaluate()
    assert not (tmp_path / "journal").exists()
    run.train()
    found = journal(tmp_path, "evaluations")
    assert [row["step"] for row in found] == [1, 2]
    assert "eval_reward" in found[0]
    assert [row["learning_rate"] for row in journal(tmp_path)] == pytest.approx([0.4, 0.2])
    assert not (tmp_path / "journal" / "tokens.jsonl").exists()

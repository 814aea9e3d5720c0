"""Reward model training: runs, resumes, exports and adapters; and what it refuses, each in one clear sentence."""

from __future__ import annotations

import logging
from functools import partial

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification

from lowpeak.errors import ArgumentError, CheckpointError, DataError, HeadMismatchError, ModelError
from lowpeak.rewards.model import ModelReward
from preference_data import FirstToken, plain_loss, tiny_classifier
from small_runs import SAVED, TOKENIZER, column, granite, journal, make, rows, same, saved, steps, trained, weights
from tiny_models import char_tokenizer, tiny_model

ROWS = [
    {"prompt": f"{i % 10}{i * 7 % 10}=", "chosen": str(i % 10) * (1 + i % 3), "rejected": str((i + 3) % 10)}
    for i in range(16)
]
TABLE = Dataset.from_list(ROWS)
SMALL = {"data": TABLE, "per_device_train_batch_size": 4, "max_steps": 4, "micro_batch_tokens": 32}
LORA = {"r": 4, "target_modules": ["q_proj", "v_proj"]}
trainer, trained_reward = partial(make, "Reward", **SMALL), partial(trained, "Reward", **SMALL)


def ids_of(row, side):
    return TOKENIZER(row["prompt"] + row[side], add_special_tokens=False)["input_ids"]


@pytest.fixture
def checkpoint(tmp_path):
    """A causal language model in a folder, with its tokenizer; its config does not say what pads rows."""
    model = tiny_model(tied=False)
    model.config.pad_token_id = None
    return saved(tmp_path / "causal", model)


# what a run does


def test_an_evaluation_is_the_papers_loss_and_trls_metrics(tmp_path):
    rows = [{**row, "margin": 0.1 * i} for i, row in enumerate(ROWS)]
    found = trainer(tmp_path, eval_dataset=Dataset.from_list(rows), center_rewards_coefficient=0.05).evaluate()
    pairs = [(ids_of(row, "chosen"), ids_of(row, "rejected"), row["margin"]) for row in rows]
    with torch.no_grad():
        assert found["eval_loss"] == pytest.approx(plain_loss(tiny_classifier(), pairs, 0.05).item(), rel=1e-5)
    judge = ModelReward(tiny_classifier(), TOKENIZER)
    prompts = [row["prompt"] for row in rows]
    chosen, rejected = (judge(prompts, [row[side] for row in rows], [[]] * 16) for side in ("chosen", "rejected"))
    gaps = [a - b for a, b in zip(chosen, rejected, strict=True)]
    expected = {
        "eval_accuracy": sum(gap > 0 for gap in gaps) / 16,
        "eval_margin": sum(gaps) / 16,
        "eval_mean_reward": sum(chosen + rejected) / 32,
        "eval_min_reward": min(chosen + rejected),
        "eval_max_reward": max(chosen + rejected),
    }
    assert {name: found[name] for name in expected} == pytest.approx(expected, abs=5e-6)


@pytest.fixture(scope="module")
def rows_apart(tmp_path_factory):
    """The weights of a run whose rows share no prompt; a small epsilon would make whole steps of gradients near zero."""
    return weights(trained_reward(tmp_path_factory.mktemp("rows"), adam_epsilon=1e-3, share_prompt=False))


@pytest.mark.parametrize("changes", [{"padding_free": False}, {"share_prompt": True}, {"micro_batch_tokens": 400}])
def test_every_layout_trains_the_same_reward_model(tmp_path, rows_apart, changes):
    run = trained_reward(tmp_path, adam_epsilon=1e-3, **changes)
    for name, weight in weights(run).items():
        torch.testing.assert_close(weight, rows_apart[name], rtol=0, atol=5e-6, msg=name)
    assert (rows_apart["score.weight"] - tiny_classifier().score.weight).abs().max() > 1e-2


def test_a_run_learns_its_pairs_and_says_so_in_log_and_journal(tmp_path):
    run = trained_reward(tmp_path, eval_dataset=TABLE, max_steps=30)
    logged = steps(run)
    assert {"accuracy", "margin", "mean_reward", "min_reward", "max_reward", "num_tokens"} <= logged[0].keys()
    assert run.evaluate()["eval_accuracy"] == 1.0
    assert logged[-1]["loss"] < 0.1
    assert len(journal(tmp_path)) == 30
    lengths = [len(ids_of(row, side)) for row in ROWS for side in ("chosen", "rejected")]
    assert logged[3]["num_tokens"] == sum(lengths)  # four steps of four pairs are each pair once


def test_a_resumed_run_ends_with_the_same_bits(tmp_path):
    saving = {**SAVED, "max_steps": 3}
    whole = trained_reward(tmp_path, **saving)
    again = trained_reward(tmp_path, **saving, resume=tmp_path / "checkpoint-1")
    assert same(weights(whole), weights(again))
    with pytest.raises(CheckpointError, match=r"num_rows=16.*num_rows=8"):
        trained_reward(tmp_path, data=TABLE.select(range(8)), resume=True)


# where a model comes from, and where it goes


def test_a_causal_checkpoint_starts_a_reward_model_with_a_head_drawn_from_the_seed(tmp_path, checkpoint, caplog):
    with caplog.at_level(logging.WARNING):
        heads = [trainer(tmp_path, checkpoint, tokenizer=False, seed=s).model.score.weight for s in (1, 1, 2)]
    assert "seed 2" in caplog.text
    assert torch.equal(heads[0], heads[1])
    assert not torch.equal(heads[0], heads[2])
    assert heads[0].abs().max() < 1.0


def test_what_is_saved_is_a_classifier_that_judges_a_grpo_run(tmp_path, checkpoint):
    run = trainer(tmp_path, checkpoint, tokenizer=False)
    run.train()
    folder = str(tmp_path / "judge")
    run.save_model(folder)
    model, report = AutoModelForSequenceClassification.from_pretrained(folder, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert (model.config.num_labels, model.config.pad_token_id) == (1, TOKENIZER.pad_token_id)
    assert torch.equal(model.score.weight, run.model.score.weight)
    online = trained("GRPO", tmp_path / "grpo", reward_funcs=folder, data=rows())
    assert column(online, "rewards/judge/mean")


def test_a_tokenizer_that_pads_with_nothing_is_saved_padding_as_its_model_looks_for(tmp_path):
    words = char_tokenizer()
    words.pad_token = None
    run = trained_reward(tmp_path, tokenizer=words, max_steps=1)
    run.save_model(str(tmp_path / "judge"))
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "judge")
    assert model.config.pad_token_id == words.eos_token_id
    assert ModelReward(str(tmp_path / "judge")).tokenizer.pad_token_id == words.eos_token_id
    assert words.pad_token_id is None


def test_an_adapter_trains_its_head_and_merges_into_a_classifier(tmp_path, checkpoint):
    run = trainer(tmp_path, checkpoint, tokenizer=False, peft_config=LoraConfig(modules_to_save=["score"], **LORA))
    frozen = {n: p.clone() for n, p in run.model.named_parameters() if not p.requires_grad}
    run.train()
    assert all(torch.equal(weight, frozen[n]) for n, weight in run.model.named_parameters() if n in frozen)
    run.save_merged_model(str(tmp_path / "merged"))
    rows, answers = [row["prompt"] for row in ROWS], [row["chosen"] for row in ROWS]
    own = ModelReward(run.model, TOKENIZER)(rows, answers, [[]] * 16)
    assert ModelReward(str(tmp_path / "merged"))(rows, answers, [[]] * 16) == pytest.approx(own, abs=1e-5)


def test_a_dry_run_says_how_pairs_are_cut(tmp_path):
    resolved = trainer(tmp_path, max_length=8).dry_run()
    assert resolved["algorithm"] == {"name": "reward", "unit": "pair"}
    assert resolved["data"]["usable_rows"] == 16
    plan = resolved["micro_batches"]
    assert (plan["rows_per_step"], plan["longest_row"], plan["micro_batches_at_most"]) == (4, 8, 2)


def test_a_row_as_long_as_the_context_leaves_no_place_for_its_slot(tmp_path, caplog):
    longest = [{"chosen": "1" * n, "rejected": "2"} for n in (127, 128)]
    with caplog.at_level(logging.WARNING):
        run = trainer(tmp_path, data=Dataset.from_list(longest), per_device_train_batch_size=1, padding_free=False)
    assert "1 of 2" in caplog.text
    assert "127" in caplog.text
    run.train()


# what is refused


@pytest.mark.parametrize(
    ("data", "pattern"),
    [
        (None, "train_dataset"),
        ([], "empty"),
        ([{"prompt": "1", "completion": "2"}], "row 0 .*'prompt', 'completion'"),
        ([*ROWS, {"prompt": "1", "chosen": "2", "rejected": None}], "row 16 .*'rejected' .*NoneType"),
        ([{"chosen": "1", "rejected": "1"}], " 1 rows .* 127 "),
        ([{"chosen": "1" * 200, "rejected": "1"}], " 1 rows "),
    ],
)
def test_a_data_set_that_cannot_be_used_is_refused(tmp_path, data, pattern):
    with pytest.raises(DataError, match=pattern):
        trainer(tmp_path, data=data if data is None else Dataset.from_list(data))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("center_rewards_coefficient", -1.0), ("max_length", 1), ("pad_token", "x"), ("eos_token", "x")),
        *(("chat_template_path", "x"), ("beta", 0.1)),
    ],
)
def test_an_argument_that_a_reward_model_cannot_take_is_named(tmp_path, name, value):
    stated = f"'{name}'" if name == "beta" else f"{name}={value!r}"
    with pytest.raises(ArgumentError, match=stated):
        trainer(tmp_path, **{name: value})


def refuse_model(tmp_path, error, names, model, **changes):
    with pytest.raises(error, match=names):
        trainer(tmp_path, model, **changes)


def test_a_model_that_gives_no_single_score_at_the_last_token_is_refused(tmp_path):
    for model in (tiny_model(), tiny_classifier(num_labels=2)):
        refuse_model(tmp_path, ModelError, "`score`", model)
    tiny_classifier(num_labels=3).save_pretrained(tmp_path / "three")
    refuse_model(tmp_path, ModelError, "three", str(tmp_path / "three"))
    refuse_model(tmp_path, HeadMismatchError, "score", FirstToken(tiny_classifier().config))
    base = saved(tmp_path / "base", granite())
    refuse_model(tmp_path, ModelError, "AutoModelForSequenceClassification.*GraniteConfig", base)


def test_an_adapter_trains_and_saves_a_new_head_too_and_says_so(tmp_path, checkpoint, caplog):
    lora = LoraConfig(**LORA)
    run = trained_reward(tmp_path / "run", checkpoint, peft_config=lora)
    assert "modules_to_save=['score']" in caplog.text
    assert lora.modules_to_save is None
    run.save_model(str(tmp_path / "saved"))
    (head,) = (weight for name, weight in weights(run).items() if "score.modules_to_save" in name)
    files = load_file(tmp_path / "saved" / "adapter_model.safetensors")
    assert torch.equal(files["base_model.model.score.weight"], head)
    assert not torch.equal(head, run.model.get_base_model().score.original_module.weight)


def test_an_adapter_leaves_a_trained_head_as_it_is_and_one_for_another_task_is_refused(tmp_path):
    kept = trainer(tmp_path, peft_config=LoraConfig(**LORA))
    assert not kept.model.get_base_model().score.weight.requires_grad
    causal = LoraConfig(task_type="CAUSAL_LM", **LORA)
    refuse_model(tmp_path, ArgumentError, "task_type='SEQ_CLS'.*'CAUSAL_LM'", tiny_classifier(), peft_config=causal)

"""Reward model training: runs, resumes, exports and adapters; and what it refuses, each in one clear sentence."""

from __future__ import annotations

import copy
import logging

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForSequenceClassification, GraniteConfig, GraniteForCausalLM

from lowpeak import GRPOConfig, GRPOTrainer, RewardConfig, RewardTrainer
from lowpeak.errors import ArgumentError, CheckpointError, DataError, HeadMismatchError, ModelError
from lowpeak.rewards.model import ModelReward
from preferences import FirstToken, plain_loss, tiny_classifier
from tiny import char_tokenizer, tiny_model

TOKENIZER = char_tokenizer()
SMALL = {
    "per_device_train_batch_size": 4,
    "max_steps": 4,
    "learning_rate": 1e-2,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
    "use_cpu": True,
    "micro_batch_tokens": 32,
}
ROWS = [
    {"prompt": f"{i % 10}{i * 7 % 10}=", "chosen": str(i % 10) * (1 + i % 3), "rejected": str((i + 3) % 10)}
    for i in range(16)
]
TABLE = Dataset.from_list(ROWS)
LORA = {"r": 4, "target_modules": ["q_proj", "v_proj"]}


def trainer(tmp_path, model=None, data=TABLE, tokenizer=TOKENIZER, peft_config=None, eval_dataset=None, **changes):
    return RewardTrainer(
        model=model or tiny_classifier(),
        args=RewardConfig(output_dir=str(tmp_path / "run"), **{**SMALL, **changes}),
        train_dataset=data,
        eval_dataset=eval_dataset,
        processing_class=tokenizer,
        peft_config=peft_config,
    )


def weights_of(run):
    return {name: parameter.detach().clone() for name, parameter in run.model.named_parameters()}


def ids_of(row, side):
    return TOKENIZER(row["prompt"] + row[side], add_special_tokens=False)["input_ids"]


@pytest.fixture
def checkpoint(tmp_path):
    """A causal language model in a folder, with its tokenizer; its config does not say what pads rows."""
    model = tiny_model(tied=False)
    model.config.pad_token_id = None
    model.save_pretrained(tmp_path / "causal")
    TOKENIZER.save_pretrained(tmp_path / "causal")
    return str(tmp_path / "causal")


# what a run does


def test_an_evaluation_is_the_papers_loss_and_trls_metrics(tmp_path):
    rows = [{**row, "margin": 0.1 * i} for i, row in enumerate(ROWS)]
    found = trainer(tmp_path, eval_dataset=Dataset.from_list(rows), center_rewards_coefficient=0.05).evaluate()
    pairs = [(ids_of(row, "chosen"), ids_of(row, "rejected"), row["margin"]) for row in rows]
    with torch.no_grad():
        assert found["eval_loss"] == pytest.approx(plain_loss(tiny_classifier(), pairs, 0.05).item(), rel=1e-5)
    judge = ModelReward(tiny_classifier(), TOKENIZER)
    asked = [row["prompt"] for row in rows]
    chosen, rejected = (judge(asked, [row[side] for row in rows], [[]] * 16) for side in ("chosen", "rejected"))
    gaps = [a - b for a, b in zip(chosen, rejected, strict=True)]
    expected = {
        "eval_accuracy": sum(gap > 0 for gap in gaps) / 16,
        "eval_margin": sum(gaps) / 16,
        "eval_mean_reward": sum(chosen + rejected) / 32,
        "eval_min_reward": min(chosen + rejected),
        "eval_max_reward": max(chosen + rejected),
    }
    assert {name: found[name] for name in expected} == pytest.approx(expected, abs=5e-6)


@pytest.mark.parametrize("changes", [{"padding_free": False}, {"share_prompt": True}, {"micro_batch_tokens": 400}])
def test_every_layout_trains_the_same_reward_model(tmp_path, changes):
    small = {"adam_epsilon": 1e-3}  # with 1e-8, where a gradient is nearly zero its last bit would become a whole step
    runs = [trainer(tmp_path, **{**small, **settings}) for settings in ({"share_prompt": False}, changes)]
    for run in runs:
        run.train()
    before, (one, other) = weights_of(trainer(tmp_path)), map(weights_of, runs)
    for name, weight in one.items():
        torch.testing.assert_close(other[name], weight, rtol=0, atol=5e-6, msg=name)
    assert (one["score.weight"] - before["score.weight"]).abs().max() > 1e-2


def test_a_run_learns_its_pairs_and_says_so_in_log_and_journal(tmp_path):
    run = trainer(tmp_path, eval_dataset=TABLE, max_steps=30)
    run.train()
    logged = [row for row in run.state.log_history if "loss" in row]
    assert {"accuracy", "margin", "mean_reward", "min_reward", "max_reward", "num_tokens"} <= logged[0].keys()
    assert run.evaluate()["eval_accuracy"] == 1.0
    assert logged[-1]["loss"] < 0.1
    assert len((tmp_path / "run" / "journal" / "steps.jsonl").read_text().splitlines()) == 30
    lengths = [len(ids_of(row, side)) for row in ROWS for side in ("chosen", "rejected")]
    assert logged[3]["num_tokens"] == sum(lengths)  # four steps of four pairs are each pair once


def test_centering_draws_rewards_to_zero(tmp_path):
    means = []
    for coefficient in (None, 1.0):
        run = trainer(tmp_path, eval_dataset=TABLE, max_steps=30, center_rewards_coefficient=coefficient)
        run.train()
        means.append(abs(run.evaluate()["eval_mean_reward"]))
    assert means[1] < 0.2 * means[0]


def test_margins_push_pairs_further_apart(tmp_path):
    margins = []
    for margin in (0.0, 5.0):
        run = trainer(tmp_path, data=Dataset.from_list([{**row, "margin": margin} for row in ROWS]), max_steps=20)
        run.train()
        margins.append(run.evaluate(TABLE)["eval_margin"])
    assert margins[1] > margins[0] + 1


def test_a_resumed_run_ends_with_the_same_bits(tmp_path):
    saving = {"save_strategy": "steps", "save_steps": 2, "max_steps": 5}
    whole = trainer(tmp_path, **saving)
    whole.train()
    again = trainer(tmp_path, **saving)
    again.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-2"))
    assert all(torch.equal(weight, weights_of(again)[name]) for name, weight in weights_of(whole).items())
    with pytest.raises(CheckpointError, match="num_rows=16, this run has num_rows=8"):
        trainer(tmp_path, data=TABLE.select(range(8))).train(resume_from_checkpoint=True)


# where a model comes from, and where it goes


def test_a_causal_checkpoint_starts_a_reward_model_with_a_head_drawn_from_the_seed(tmp_path, checkpoint, caplog):
    with caplog.at_level(logging.WARNING):
        heads = [trainer(tmp_path, checkpoint, tokenizer=None, seed=s).model.score.weight for s in (1, 1, 2)]
    assert "has no score head: it starts with a new one, drawn from seed 2" in caplog.text
    assert torch.equal(heads[0], heads[1])
    assert not torch.equal(heads[0], heads[2])
    assert heads[0].abs().max() < 1.0


def test_what_is_saved_is_a_classifier_that_judges_a_grpo_run(tmp_path, checkpoint):
    run = trainer(tmp_path, checkpoint, tokenizer=None)
    run.train()
    folder = str(tmp_path / "judge")
    run.save_model(folder)
    model, report = AutoModelForSequenceClassification.from_pretrained(folder, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert (model.config.num_labels, model.config.pad_token_id) == (1, TOKENIZER.pad_token_id)
    assert torch.equal(model.score.weight, run.model.score.weight)
    settings = {name: value for name, value in SMALL.items() if name != "max_steps"}
    online = GRPOTrainer(
        model=tiny_model(),
        reward_funcs=folder,
        args=GRPOConfig(output_dir=str(tmp_path / "grpo"), max_steps=2, num_generations=4, max_completion_length=4, **settings),
        train_dataset=TABLE,
        processing_class=TOKENIZER,
    )  # fmt: skip
    online.train()
    assert "rewards/judge/mean" in online.state.log_history[0]


@pytest.mark.parametrize("trained", [False, True])
def test_a_tokenizer_that_pads_with_nothing_is_saved_padding_as_its_model_looks_for(tmp_path, trained):
    words = char_tokenizer()
    words.pad_token = None
    run = trainer(tmp_path, tokenizer=words, max_steps=1)
    if trained:
        run.train()
    run.save_model(str(tmp_path / "judge"))
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "judge")
    assert model.config.pad_token_id == words.eos_token_id
    assert ModelReward(str(tmp_path / "judge")).tokenizer.pad_token_id == words.eos_token_id
    assert words.pad_token_id is None


def test_a_model_in_half_precision_trains_in_fp32(tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        run = trainer(tmp_path, tiny_classifier(dtype=torch.bfloat16))
    assert "were loaded in half precision and are now fp32" in caplog.text
    run.train()
    assert {p.dtype for p in run.model.parameters()} == {torch.float32}


def test_an_adapter_trains_its_head_and_merges_into_a_classifier(tmp_path, checkpoint):
    run = trainer(tmp_path, checkpoint, tokenizer=None, peft_config=LoraConfig(modules_to_save=["score"], **LORA))
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
    assert "1 of 2 rows are left out: one of the two has more than 127 tokens" in caplog.text
    run.train()


# what is refused


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (None, "train_dataset is None: pass a data set with chosen and rejected, with or without prompt"),
        ([], "The data set is empty"),
        (
            [{"prompt": "1", "completion": "2"}],
            "row 0 has the columns 'prompt', 'completion'; a reward model is trained",
        ),
        ([*ROWS, {"prompt": "1", "chosen": "2", "rejected": None}], "row 16 has 'rejected' of type NoneType"),
        (
            [{"chosen": "1", "rejected": "1"}],
            "All 1 rows are left out: one of the two has more than 127 tokens, or chosen",
        ),
        ([{"chosen": "1" * 200, "rejected": "1"}], "All 1 rows are left out"),
    ],
)
def test_a_data_set_that_cannot_be_used_is_told(tmp_path, data, words):
    with pytest.raises(DataError, match=words):
        trainer(tmp_path, data=data if data is None else Dataset.from_list(data))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"center_rewards_coefficient": -1.0}, "center_rewards_coefficient=-1.0 must be 0 or more"),
        ({"max_length": 1}, "max_length=1 must be at least 2 tokens"),
        ({"dataset_num_proc": 2}, "'dataset_num_proc' is TRL's and does not exist in lowpeak: rows are tokenised as"),
        ({"pad_token": "x"}, "pad_token='x' is not in the tokenizer's vocabulary: name a token that it has"),
        ({"eos_token": "x"}, "eos_token='x' is not in the tokenizer's vocabulary: name a token that it has"),
        (
            {"chat_template_path": "x"},
            "chat_template_path='x' must be a .jinja or .j2 file",
        ),
        ({"beta": 0.1}, "Unknown argument 'beta'"),
    ],
)
def test_an_argument_that_cannot_act_is_told(tmp_path, changes, words):
    with pytest.raises(ArgumentError, match=words):
        trainer(tmp_path, **changes)


def test_a_model_that_gives_no_single_score_is_told(tmp_path):
    for model in (tiny_model(), tiny_classifier(num_labels=2)):
        with pytest.raises(ModelError, match="has no `score` head that gives one number; pass a name or path"):
            trainer(tmp_path, model)
    tiny_classifier(num_labels=3).save_pretrained(tmp_path / "three")
    with pytest.raises(ModelError, match="cannot be loaded as a classifier with one label"):
        trainer(tmp_path, str(tmp_path / "three"))


def test_a_model_that_scores_elsewhere_is_told_before_it_trains(tmp_path):
    with pytest.raises(HeadMismatchError, match="reads its score elsewhere than at a row's last token"):
        trainer(tmp_path, FirstToken(tiny_classifier().config))


def test_a_new_head_that_an_adapter_would_not_train_is_told(tmp_path, checkpoint):
    with pytest.raises(ArgumentError, match=r"pass LoraConfig\(modules_to_save=\['score'\], ...\)"):
        trainer(tmp_path, checkpoint, peft_config=LoraConfig(**LORA))
    kept = trainer(tmp_path, copy.deepcopy(tiny_classifier()), peft_config=LoraConfig(**LORA))
    assert not kept.model.get_base_model().score.weight.requires_grad


def test_a_family_without_a_classifier_is_told(tmp_path):
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2}
    GraniteForCausalLM(GraniteConfig(vocab_size=13, intermediate_size=64, **sizes)).save_pretrained(tmp_path / "base")
    with pytest.raises(ModelError, match=r"no AutoModelForSequenceClassification for .*GraniteConfig.* another family"):
        trainer(tmp_path, str(tmp_path / "base"))


def test_an_adapter_for_a_language_model_is_told(tmp_path):
    with pytest.raises(ArgumentError, match="task_type='SEQ_CLS' in peft_config in place of 'CAUSAL_LM'"):
        trainer(tmp_path, copy.deepcopy(tiny_classifier()), peft_config=LoraConfig(task_type="CAUSAL_LM", **LORA))


def test_arguments_of_another_trainer_are_told(tmp_path):
    args = GRPOConfig(output_dir=str(tmp_path), use_cpu=True)
    with pytest.raises(ArgumentError, match=r"this trainer takes a lowpeak\.RewardConfig"):
        RewardTrainer(tiny_classifier(), args, train_dataset=TABLE, processing_class=TOKENIZER)

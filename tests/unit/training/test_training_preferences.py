"""Runs of DPO and KTO: layouts, accumulation, reference, resume, evaluation; and what they refuse, each in one sentence."""

from __future__ import annotations

import gc
import logging
import math
import weakref

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig

from lowpeak.errors import ArgumentError, CheckpointError
from small_runs import LAYOUTS, SAVED, SGD, column, make, same, saved, steps, trained, weights
from tiny_models import tiny_model

PAIRS = Dataset.from_list(
    [
        {"prompt": f"{i % 10}{i * 7 % 10}=", "chosen": str(i % 10) * (1 + i % 3), "rejected": str((i + 3) % 10) * 2}
        for i in range(16)
    ]
)
LABELLED = Dataset.from_list(
    [
        {"prompt": row["prompt"], "completion": row["rejected" if i % 3 else "chosen"], "label": i % 3 == 0}
        for i, row in enumerate(PAIRS)
    ]
)
DATA = {"DPO": PAIRS, "KTO": LABELLED}
MIXED = {"loss_type": ["sigmoid", "ipo", "sft"], "ld_alpha": 0.5}
MOVED = {"sync_ref_model": True, "ref_model_sync_steps": 1}


def run_of(kind, folder, **changes):
    return trained(kind, folder, **{"data": DATA[kind], "max_steps": 3, **changes})


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", DATA)
def test_equal_models_have_log_ratios_of_exactly_zero_in_every_layout(kind, layout, tmp_path):
    evaluated = make(kind, tmp_path, data=DATA[kind], eval_dataset=DATA[kind], **LAYOUTS[layout]).evaluate()
    assert evaluated["eval_loss"] == pytest.approx({"DPO": math.log(2), "KTO": 0.5}[kind], abs=1e-7)
    assert evaluated["eval_rewards/chosen"] == evaluated["eval_rewards/rejected"] == 0.0


@pytest.mark.parametrize(("kind", "changes"), [("DPO", MIXED), ("KTO", {"undesirable_weight": 0.5})])
def test_accumulation_and_layouts_change_nothing(kind, changes, tmp_path):
    whole = {**SGD, **changes, "shuffle_dataset": False}
    one = run_of(kind, tmp_path / "one", **whole, share_prompt=True)
    split = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "micro_batch_tokens": 16}
    other = run_of(kind, tmp_path / "other", **whole, share_prompt=False, **split)
    for name in ("loss", "grad_norm", "rewards/chosen", "rewards/margins"):
        assert column(one, name) == pytest.approx(column(other, name), rel=1e-5, abs=1e-6)
    before = {name: parameter.detach() for name, parameter in tiny_model().named_parameters()}
    for name, weight in weights(one).items():
        torch.testing.assert_close(weight, weights(other)[name], rtol=0, atol=1e-6, msg=name)
    assert max(float((weight - before[name]).abs().max()) for name, weight in weights(one).items()) > 1e-3
    assert "sampling/sampling_logp_difference/mean" not in steps(one)[0]


def test_a_pairs_prompt_is_forwarded_once(tmp_path):
    few = PAIRS.select(range(10))  # no two prompts are equal
    step = make("DPO", tmp_path, data=few, share_prompt=True, per_device_train_batch_size=10).next_step()
    prompts = sum(len(record.prompt_ids) for record in step.records[::2])
    # The last token of a completion predicts nothing.
    assert step.num_useful == prompts + sum(len(record.completion) - 1 for record in step.records)


@pytest.mark.parametrize("kind", DATA)
def test_a_resumed_run_ends_with_the_same_bits_and_the_same_reference(kind, tmp_path):
    saving = {**SAVED, **MOVED}
    whole = run_of(kind, tmp_path, **saving)
    again = run_of(kind, tmp_path, **saving, resume=tmp_path / "checkpoint-1")
    assert same(weights(whole), weights(again))
    pairs = zip(whole.ref_model.parameters(), again.ref_model.parameters(), strict=True)
    assert all(one.equal(other) for one, other in pairs)
    assert not same(weights(whole), weights(run_of(kind, tmp_path / "fixed")))


@pytest.mark.parametrize("kind", DATA)
def test_under_an_adapter_the_reference_is_the_base_without_a_second_model(kind, tmp_path):
    run = run_of(kind, tmp_path, peft_config=LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    assert run.ref_model is None
    margins = column(run, "rewards/margins")
    assert margins[0] == 0.0
    assert margins[-1] != 0.0
    with pytest.raises(ArgumentError, match=r"sync_ref_model.*adapter"):
        make(kind, tmp_path, data=DATA[kind], peft_config=LoraConfig(r=4), **MOVED)


def test_a_reference_may_be_another_model_by_name(tmp_path):
    other = saved(tmp_path / "other", tiny_model(seed=1))
    rewards = column(run_of("DPO", tmp_path / "run", ref_model=other, max_steps=1), "rewards/chosen")
    assert rewards[0] != 0.0


def test_another_reference_by_name_is_another_run(tmp_path):
    names = [saved(tmp_path / name, tiny_model(seed=seed)) for seed, name in enumerate(("one", "other"))]
    run_of("DPO", tmp_path / "run", ref_model=names[0], max_steps=1, **SAVED)
    with pytest.raises(CheckpointError, match=r"'one'.*'other'"):
        run_of("DPO", tmp_path / "run", ref_model=names[1], max_steps=2, resume="auto", **SAVED)


@pytest.mark.parametrize(("kind", "changes"), [("DPO", {"ld_alpha": 0.5}), ("KTO", {"loss_type": "apo_zero_unpaired"})])
def test_with_precomputed_log_probs_a_run_is_the_same_and_its_reference_is_freed(kind, changes, tmp_path):
    changes |= {"eval_dataset": DATA[kind].select(range(4)), "adam_epsilon": 1e-3}
    found = []
    for precompute in (False, True):
        reference = tiny_model(seed=1)
        freed = weakref.ref(reference)
        folder = tmp_path / str(precompute)
        saving = {**SAVED, "precompute_ref_log_probs": precompute, "eval_strategy": "epoch", "num_train_epochs": 2}
        run = run_of(kind, folder, ref_model=reference, max_steps=-1, **saving, **changes)
        del reference
        gc.collect()
        assert (freed() is None) is precompute
        found.append([column(run, name) for name in ("loss", "grad_norm", "rewards/chosen", "eval_rewards/margins")])
        again = run_of(
            kind,
            folder,
            ref_model=tiny_model(seed=2 if precompute else 1),  # the checkpoint has the log-probs of the first one
            max_steps=-1,
            **saving,
            **changes,
            resume=folder / "checkpoint-2",
        )
        assert same(weights(run), weights(again))
    for computed, precomputed in zip(*found, strict=True):
        assert computed == pytest.approx(precomputed, rel=1e-4, abs=1e-6)
    with pytest.raises(ArgumentError, match=r"precompute_ref_log_probs.*eval_dataset"):
        run.evaluate(
            Dataset.from_list([{"prompt": "1", "chosen": "2", "rejected": "3", "completion": "2", "label": True}])
        )


def test_stored_log_probs_are_of_the_weights_of_tokens(tmp_path, caplog):
    parts = {"precompute_ref_log_probs": True, "max_steps": 2, **SAVED}
    run_of("DPO", tmp_path / "run", ld_alpha=0.1, **parts)
    resumed = {"ld_alpha": 0.9, "resume": tmp_path / "run" / "checkpoint-1"}
    stored, scored = (
        column(run_of("DPO", tmp_path / "run", **{**parts, **resumed, "precompute_ref_log_probs": each}), "loss")
        for each in (True, False)
    )
    assert stored == pytest.approx(scored, rel=1e-4)
    assert "without a name" in caplog.text


@pytest.mark.parametrize("kind", DATA)
def test_predictions_are_the_implicit_rewards_of_the_metrics(kind, tmp_path):
    found = {}

    def metrics(given):
        found["rewards"], found["labels"] = given.predictions, given.label_ids
        return {"mean": float(given.predictions.mean())}

    run = make(
        kind, tmp_path, data=DATA[kind], eval_dataset=DATA[kind], compute_metrics=metrics, ref_model=tiny_model(seed=1)
    )
    evaluated = run.evaluate()
    rewards, labels = found["rewards"], found["labels"]
    chosen, rejected = (rewards[:, 0], rewards[:, 1]) if kind == "DPO" else (rewards[labels == 1], rewards[labels == 0])
    expected = [chosen.mean(), rejected.mean(), rewards.mean()]
    names = ("eval_rewards/chosen", "eval_rewards/rejected", "eval_mean")
    assert [evaluated[name] for name in names] == pytest.approx(expected, rel=1e-4)
    assert evaluated["eval_rewards/margins"] == pytest.approx(expected[0] - expected[1], rel=1e-4)


def test_an_evaluation_of_one_label_has_no_margin(tmp_path):
    rows = [row for row in DATA["KTO"] if row["label"]]
    evaluated = make("KTO", tmp_path, data=DATA["KTO"], eval_dataset=Dataset.from_list(rows)).evaluate()
    assert "eval_rewards/chosen" in evaluated
    assert "eval_rewards/margins" not in evaluated


def test_z0_is_the_mean_log_ratio_of_each_prompt_with_the_completion_before_it(tmp_path):
    changes = {"shuffle_dataset": False, "per_device_train_batch_size": 16, "max_steps": 1}
    reference, policy = tiny_model(), tiny_model(seed=1)
    run = run_of("KTO", tmp_path, model=tiny_model(seed=1), ref_model=reference, **changes)
    records = make("KTO", tmp_path, data=LABELLED, **changes).next_step().records

    def logprob(model, prompt, completion):
        ids = torch.tensor([[*prompt, *completion]])
        with torch.no_grad():
            logprobs = model(input_ids=ids).logits.log_softmax(-1)[0, len(prompt) - 1 : -1]
        return float(logprobs.gather(1, ids[0, len(prompt) :, None]).sum())

    pairs = [(r.prompt_ids, records[i - 1].completion.ids.tolist()) for i, r in enumerate(records)]
    ratios = [logprob(policy, *pair) - logprob(reference, *pair) for pair in pairs]
    assert steps(run)[0]["kl"] == pytest.approx(max(0.0, sum(ratios) / 16), rel=1e-5)
    assert sum(ratios) > 0


@pytest.mark.parametrize("data", [PAIRS, PAIRS.to_list()], ids=["dataset", "list"])
def test_pairs_are_trained_on_as_two_labelled_rows_each(data, tmp_path):
    run = make("KTO", tmp_path, data=data)
    assert len(run.train_dataset) == 32
    assert run.num_steps_per_epoch() == 4


@pytest.mark.parametrize(
    ("kind", "changes", "pattern"),
    [
        ("DPO", {"loss_type": "aot"}, "'aot'.*sort.*micro-batches"),
        ("DPO", {"loss_type": ["sigmoid", "ipoo"]}, "ipoo.*must be one or several"),
        ("DPO", {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0]}, "loss_weights has 1 values for 2"),
        ("DPO", {"loss_weights": [0.0]}, "would train nothing"),
        ("KTO", {"desirable_weight": 0.0, "undesirable_weight": 0.0}, "would train nothing"),
        ("DPO", {"loss_type": "exo_pair"}, "label_smoothing=0.0.*exo_pair"),
        ("DPO", {"loss_type": "robust", "label_smoothing": 0.5}, "label_smoothing=0.5.*robust"),
        ("DPO", {"beta": 0.0}, "beta"),
        ("DPO", {"precompute_ref_log_probs": True, **MOVED}, "precompute_ref_log_probs.*sync_ref_model"),
        ("KTO", {"precompute_ref_log_probs": True}, "precompute_ref_log_probs.*each step.*apo_zero_unpaired"),
        ("DPO", {"f_divergence_type": "forward_kl", "loss_type": "bco_pair"}, "forward_kl.*'bco_pair'"),
        ("DPO", {"rpo_alpha": 1.0}, 'rpo_alpha.*loss_type=\\["sigmoid", "sft"\\]'),
        ("DPO", {"use_weighting": True}, "use_weighting.*WPO"),
        ("KTO", {"per_device_train_batch_size": 1}, "per_device_train_batch_size=1.*z0"),
        ("KTO", {"train_sampling_strategy": "sequential"}, "train_sampling_strategy.*shuffle_dataset"),
    ],
)
def test_what_cannot_be_trained_is_refused_by_name(kind, changes, pattern, tmp_path):
    with pytest.raises(ArgumentError, match=pattern):
        make(kind, tmp_path, data=DATA[kind], **changes)


def test_a_dry_run_counts_pairs_as_rows(tmp_path):
    plan = make("DPO", tmp_path, data=PAIRS, micro_batch_tokens=1 << 16).dry_run()["micro_batches"]
    counts = ("rows_per_step", "rows_per_rank_at_most", "rows_per_micro_batch_at_least")
    assert [plan[name] for name in counts] == [8, 8, 8]


def test_arguments_of_other_losses_are_named_as_without_effect(tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        make("DPO", tmp_path, data=PAIRS, label_smoothing=0.1, discopop_tau=0.1, loss_type="sigmoid")
    assert {"label_smoothing=0.1", "discopop_tau=0.1"} <= {word for word in caplog.text.replace(":", " ").split()}

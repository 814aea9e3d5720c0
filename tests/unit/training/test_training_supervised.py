"""What users of TRL's SFTTrainer expect of a supervised run: its metrics and its arguments of data."""

from __future__ import annotations

import pytest
import torch
from datasets import Dataset

from lowpeak.errors import ArgumentError
from small_runs import TOKENIZER, make, refused_model, same, steps, weights
from tiny_models import tiny_model


def rows(model):
    """Prompts of several lengths; of every other completion the first token is the model's likeliest."""
    found = []
    for i in range(8):
        prompt, answer = f"{i}{i * 7 % 10}="[i % 2 :], str(i) * (1 + i % 3)
        if i % 2 == 0:
            likeliest = model(input_ids=TOKENIZER(prompt, return_tensors="pt").input_ids).logits[0, -1].argmax()
            answer = TOKENIZER.decode(likeliest) + answer
        found.append({"prompt": prompt, "completion": answer})
    return found


def sft(tmp_path, data, model=None, **changes):
    data = Dataset.from_list(data)
    still = {"max_steps": 1, "learning_rate": 0.0, "micro_batch_tokens": 40, "logprob_chunk_size": 4}
    return make("SFT", tmp_path, model, data, eval_dataset=data, **{**still, **changes})


def naive(model, data):
    """Loss, token accuracy and entropy over all completions, and the tokens of all rows: one row and all logits at a time."""
    logprobs, hits, entropies, num_tokens = [], [], [], 0
    for row in data:
        prompt = TOKENIZER(row["prompt"]).input_ids
        ids = torch.tensor([*prompt, *TOKENIZER(row["completion"]).input_ids, TOKENIZER.eos_token_id])
        with torch.no_grad():
            rows = model(input_ids=ids[None]).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        targets = ids[len(prompt) :]
        logprobs.append(rows.gather(-1, targets[:, None])[:, 0])
        hits.append(rows.argmax(-1) == targets)
        entropies.append(-(rows.exp() * rows).sum(-1))
        num_tokens += len(ids)
    accuracy = float(torch.cat(hits).float().mean())
    return -float(torch.cat(logprobs).mean()), accuracy, float(torch.cat(entropies).mean()), num_tokens


@pytest.mark.parametrize("padding_free", [None, False])
def test_evaluation_and_training_tell_trls_metrics_of_the_counted_tokens(tmp_path, padding_free):
    model = tiny_model()
    data = rows(model)
    loss, accuracy, entropy, num_tokens = naive(model, data)
    assert 0 < accuracy < 1
    run = sft(tmp_path, data, model, padding_free=padding_free)
    found = run.evaluate()
    expected = {"loss": loss, "mean_token_accuracy": accuracy, "entropy": entropy, "num_tokens": 0}
    assert {f"eval_{name}" for name in expected} == found.keys() - {"eval_runtime", "epoch"}
    for name, value in expected.items():
        assert found[f"eval_{name}"] == pytest.approx(value, rel=1e-5)
    run.train()
    (logged,) = steps(run)
    for name, value in {**expected, "num_tokens": num_tokens}.items():
        assert logged[name] == pytest.approx(value, rel=1e-5)
    assert run.evaluate()["eval_num_tokens"] == num_tokens


def test_labels_of_token_ids_give_the_loss_that_transformers_gives_and_entropy_may_be_left_out(tmp_path):
    model = tiny_model()
    data = [
        {"input_ids": [3, 4, 5, 6, 7, 1], "labels": [-100, -100, 5, -100, 7, 1]},
        {"input_ids": [9, 8, 7], "labels": [9, 8, 7]},
    ]
    with torch.no_grad():
        losses = [model(**{name: torch.tensor([ids]) for name, ids in row.items()}).loss.item() for row in data]
    found = sft(tmp_path, data, model, log_entropy=False).evaluate()
    assert found["eval_loss"] == pytest.approx((3 * losses[0] + 2 * losses[1]) / 5, rel=1e-5)
    assert "eval_entropy" not in found


def test_packing_is_the_layout_without_padding_or_an_error(tmp_path, caplog):
    data = rows(tiny_model())
    plain, packed = (sft(tmp_path / str(on), data, packing=on, learning_rate=1e-2) for on in (False, True))
    for run in (plain, packed):
        assert all(batch.forest is not None for batch in run.next_step().micro_batches)
        run.train()
    assert same(weights(plain), weights(packed))
    (line,) = [record.message for record in caplog.records if "packing" in record.message]
    assert "per_device_train_batch_size x gradient_accumulation_steps" in line
    with pytest.raises(ArgumentError, match=r"packing=True .*attn_temperature_tuning"):
        sft(tmp_path, data, refused_model(), packing=True)
    with pytest.raises(ArgumentError, match=r"packing=True .*padding_free=False"):
        sft(tmp_path, data, packing=True, padding_free=False)


@pytest.mark.parametrize("strategy", ["bfd_split", "bfd-requeue", "wrapped", "best"])
def test_a_packing_that_would_change_what_is_learned_is_refused(tmp_path, strategy):
    with pytest.raises(ArgumentError, match=r"packing_strategy='.*'bfd'"):
        sft(tmp_path, [{"text": "1"}], packing=True, packing_strategy=strategy)


def test_eval_packing_changes_nothing_and_says_so(tmp_path, caplog):
    data = rows(tiny_model())
    losses = {sft(tmp_path, data, eval_packing=on).evaluate()["eval_loss"] for on in (None, False, True)}
    assert len(losses) == 1
    assert sum("eval_packing=" in record.message for record in caplog.records) == 2

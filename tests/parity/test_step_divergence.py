"""A step towards a teacher: its loss and gradients against naive logits of both models, and what does not change them."""

from __future__ import annotations

import copy

import pytest
import torch
from peft import LoraConfig

from lowpeak.errors import MemoryExhaustedError
from lowpeak.logprobs.reference import naive_divergence
from lowpeak.training.teacher import score as run_passes
from rounding import assert_each_close_to_largest
from small_runs import SGD, TOKENIZER, column, granite, make, rows, same, trained, weights
from tiny_models import tiny_model

TEMPERATURE = 0.8


def teacher(vocab_size=16, **changes):
    """A teacher whose head has rows that the policy lacks."""
    return tiny_model(vocab_size, seed=1, **{"hidden": 48, "tied": False, **changes})


def first_step(folder, monkeypatch, **changes):
    """A trainer, the records of its first step, and the loss and gradients of it."""
    run = make("Distillation", folder, **{"temperature": TEMPERATURE, "max_steps": 1, **SGD, **changes})
    seen = {}
    optimizer_step = torch.optim.SGD.step

    def step(self, *args, **keywords):
        seen.update({name: p.grad.clone() for name, p in run.model.named_parameters() if p.grad is not None})
        return optimizer_step(self, *args, **keywords)

    monkeypatch.setattr(torch.optim.SGD, "step", step)
    before = copy.deepcopy(run.model)
    run.train()
    return run, before, seen


def logits_of(model, prompt_ids, record):
    """The logits of a record's completion after these prompt's ids."""
    ids = torch.tensor([[*prompt_ids, *record.completion.ids.tolist()]])
    return model(input_ids=ids).logits[0, len(prompt_ids) - 1 : -1, : len(TOKENIZER)] / TEMPERATURE


def naive_loss(model, other, records, beta):
    """The mean over the step's tokens, each sequence by itself."""
    found = []
    for record in records:
        z = logits_of(model, record.prompt_ids, record)
        u = logits_of(other, record.teacher_prompt_ids or record.prompt_ids, record).detach()
        found.append(naive_divergence(z, u, beta)[record.completion.loss_mask])
    return torch.cat(found).mean()


def privileged_rows(count=8):
    """Rows whose answer a teacher reads."""
    return rows(count).add_column("privileged_context", ["12345678"[: 1 + i % 5] for i in range(count)])


@pytest.mark.parametrize(
    ("beta", "make_teacher"),
    [(0.0, teacher), (0.5, teacher), (1.0, teacher), (1.0, granite)],
    ids=["0", "0.5", "1", "granite"],
)
def test_loss_and_gradients_are_those_of_both_models_logits(tmp_path, monkeypatch, beta, make_teacher):
    other = make_teacher()
    changes = {"teacher_model": other, "beta": beta, "max_grad_norm": 0.0, "micro_batch_tokens": 24}
    run, before, gradients = first_step(tmp_path, monkeypatch, **changes)
    expected = naive_loss(before.double(), other.double(), run.rollout.records, beta)
    expected.backward()
    assert column(run, "loss")[0] == pytest.approx(expected.item(), rel=1e-5)
    assert column(run, "divergence")[0] == pytest.approx(expected.item(), rel=1e-5)
    exact = {name: p.grad.float() for name, p in before.named_parameters()}
    assert_each_close_to_largest(gradients, exact, 1e-4)


def test_a_teacher_that_is_the_policy_gives_a_loss_and_gradients_of_zero(tmp_path, monkeypatch):
    model = tiny_model()
    run, _, gradients = first_step(tmp_path, monkeypatch, model=model, teacher_model=copy.deepcopy(model))
    assert column(run, "loss")[0] == column(run, "divergence")[0] == 0.0
    assert max(gradient.abs().max() for gradient in gradients.values()) < 1e-7


@pytest.mark.parametrize("changes", [{"micro_batch_tokens": 16}, {"share_prompt": False}, {"padding_free": False}])
def test_micro_batches_and_layouts_change_nothing(tmp_path, changes):
    one, other = (
        trained("Distillation", tmp_path / name, teacher_model=teacher(), num_generations=2, **SGD, **more)
        for name, more in (("one", {}), ("other", changes))
    )
    assert column(one, "loss") == pytest.approx(column(other, "loss"), rel=1e-6)
    assert_each_close_to_largest(weights(one), weights(other), 1e-6)


def test_the_base_without_its_adapter_teaches_as_a_separate_model_does(tmp_path):
    lora = LoraConfig(r=2, target_modules=["q_proj", "lm_head"], init_lora_weights=False)
    runs = [
        trained("Distillation", tmp_path / str(i), model=tiny_model(tied=False), peft_config=lora, teacher_model=each)
        for i, each in enumerate((None, tiny_model(tied=False)))
    ]
    assert min(column(runs[0], "divergence")) > 1e-4
    assert column(runs[0], "loss") == pytest.approx(column(runs[1], "loss"), rel=1e-6)
    assert_each_close_to_largest(weights(runs[0]), weights(runs[1]), 1e-6)


def test_memory_that_runs_out_in_the_teachers_pass_leaves_the_result_of_smaller_micro_batches(tmp_path, monkeypatch):
    failures = iter([True])

    def failing(model, batches, *args, **keywords):
        if next(failures, False):
            raise MemoryExhaustedError("no room", "no room")
        return run_passes(model, batches, *args, **keywords)

    monkeypatch.setattr("lowpeak.training.teacher.score", failing)
    failed = trained("Distillation", tmp_path / "failed", teacher_model=teacher())
    sizes = {"micro_batch_tokens": failed.run.sizes.micro_batch_tokens}
    small = trained("Distillation", tmp_path / "small", teacher_model=teacher(), **sizes)
    assert sizes["micro_batch_tokens"] < 512
    assert same(weights(failed), weights(small))


def test_an_evaluation_measures_the_divergence_and_rewards_train_nothing(tmp_path):
    def worthless(completions, **columns):
        return [float(len(text)) for text in completions]

    runs = [
        trained("Distillation", tmp_path / str(i), eval_dataset=rows(4), reward_funcs=each)
        for i, each in enumerate((None, worthless))
    ]
    found = [run.evaluate() for run in runs]
    assert found[0]["eval_loss"] == found[1]["eval_loss"] == pytest.approx(found[0]["eval_divergence"], rel=1e-6)
    assert "eval_reward" in found[1].keys() - found[0].keys()
    assert same(weights(runs[0]), weights(runs[1]))


@pytest.mark.parametrize("layout", [{}, {"share_prompt": False}, {"padding_free": False}], ids=str)
def test_a_policy_that_reads_privileged_prompts_teaches_itself(tmp_path, monkeypatch, layout):
    changes = {"data": privileged_rows(), "teacher_model": None, "teacher_model_kind": "live", "num_generations": 2}
    settings = {
        "teacher_prompt_template": "{privileged_context}={prompt}",
        "micro_batch_tokens": 24,
        "max_grad_norm": 0.0,
    }
    run, before, gradients = first_step(tmp_path, monkeypatch, **changes, **settings, **layout)
    records = run.rollout.records
    assert all(len(record.teacher_prompt_ids) > len(record.prompt_ids) for record in records)
    expected = naive_loss(before.double(), copy.deepcopy(before), records, 1.0)
    expected.backward()
    assert column(run, "loss")[0] == pytest.approx(expected.item(), rel=1e-5)
    exact = {name: p.grad.float() for name, p in before.named_parameters()}
    assert_each_close_to_largest(gradients, exact, 1e-4)


def test_an_adapter_and_its_head_belong_to_a_live_teacher(tmp_path):
    lora = LoraConfig(r=2, target_modules=["q_proj", "lm_head"], init_lora_weights=False)
    changes = {
        "model": tiny_model(tied=False),
        "peft_config": lora,
        "teacher_model": None,
        "teacher_model_kind": "live",
    }
    template = "{prompt}{privileged_context}"
    data = rows(8).add_column("privileged_context", [""] * 8)
    run = trained("Distillation", tmp_path, data=data, teacher_prompt_template=template, **changes)
    assert column(run, "divergence")[0] == 0.0


@pytest.mark.parametrize("data", [None, privileged_rows()], ids=["plain", "privileged"])
def test_sampled_divergences_are_advantages(tmp_path, monkeypatch, data):
    other = tiny_model(seed=1)
    changes = {"distillation_mode": "sampled_token", "max_grad_norm": 0.0, "micro_batch_tokens": 24}
    changes |= {} if data is None else {"data": data}
    template = "{privileged_context}={prompt}"
    run, before, gradients = first_step(
        tmp_path, monkeypatch, teacher_model=other, teacher_prompt_template=template, **changes
    )
    losses = []
    for record in run.rollout.records:
        ids, read = record.completion.ids.long()[:, None], record.teacher_prompt_ids or record.prompt_ids
        prompts = zip((before, other), (record.prompt_ids, read), strict=True)
        own, others = (logits_of(m, prompt, record).log_softmax(-1).gather(1, ids) for m, prompt in prompts)
        losses.append(((own - others).detach() * own)[:, 0][record.completion.loss_mask])
    torch.cat(losses).mean().backward()
    assert_each_close_to_largest(gradients, {name: p.grad for name, p in before.named_parameters()}, 1e-4)
    assert column(run, "teacher_kl")[0] > 0


@pytest.mark.parametrize("mode", ["full_logits", "sampled_token"])
def test_a_weight_below_one_leaves_the_rest_to_rewards(tmp_path, monkeypatch, mode):
    def lengths(completions, **columns):
        return [float(len(text)) for text in completions]

    shared = {"num_generations": 4, "per_device_train_batch_size": 8, "max_grad_norm": 0.0, "temperature": TEMPERATURE}
    mixed = {"teacher_model": teacher(13), "reward_funcs": lengths, "distillation_mode": mode}
    found = {
        weight: first_step(tmp_path / str(weight), monkeypatch, distillation_weight=weight, **shared, **mixed)[2]
        for weight in (0.0, 0.25, 1.0)
    }
    sums = {name: 0.75 * found[0.0][name] + 0.25 * found[1.0][name] for name in found[1.0]}
    assert_each_close_to_largest(found[0.25], sums, 1e-4)
    seen = {}

    def step(self, *args, **keywords):
        seen.update({name: p.grad.clone() for name, p in grpo.model.named_parameters() if p.grad is not None})

    grpo = make("GRPO", tmp_path / "grpo", reward_funcs=lengths, max_steps=1, beta=0.0, **shared, **SGD)
    monkeypatch.setattr(torch.optim.SGD, "step", step)
    grpo.train()
    assert_each_close_to_largest(found[0.0], seen, 1e-4)


def test_an_average_of_the_policy_follows_it(tmp_path):
    changes = {
        "teacher_model": None,
        "teacher_model_kind": "ema",
        "teacher_update_rate": 0.25,
        "data": privileged_rows(),
    }
    start = tiny_model()
    run = trained("Distillation", tmp_path, model=copy.deepcopy(start), max_steps=1, **changes, **SGD)
    assert run.teacher_model is not run.model
    first = dict(start.named_parameters())
    expected = {name: 0.25 * weight + 0.75 * first[name].detach() for name, weight in weights(run).items()}
    assert_each_close_to_largest(dict(run.teacher_model.named_parameters()), expected, 1e-6)
    assert not same(weights(run), dict(start.named_parameters()))


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_completions_of_the_dataset_take_the_place_of_a_share_of_generated_ones(tmp_path, monkeypatch, share):
    data = rows(64).add_column("completion", ["1234"] * 64)
    other = teacher(13)
    changes = {"lmbda": share, "data": data, "per_device_train_batch_size": 32, "max_grad_norm": 0.0}
    run, before, gradients = first_step(tmp_path, monkeypatch, teacher_model=other, beta=0.0, **changes)
    records = run.rollout.records
    written = [r.completion.ids.tolist() == TOKENIZER("1234")["input_ids"] + [1] for r in records]
    assert sum(written) == 32 if share == 0 else 8 < sum(written) < 24
    assert [bool(r.completion.logprobs.isnan().all()) for r in records] == written
    expected = naive_loss(before.double(), other.double(), records, 0.0)
    expected.backward()
    assert_each_close_to_largest(gradients, {name: p.grad.float() for name, p in before.named_parameters()}, 1e-4)

"""PPO's trainer: its critic's layouts, what is saved of it and resumed, what each argument does and what cannot act."""

from __future__ import annotations

import copy
import itertools
import json
from functools import cache, partial
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, TrainerCallback

from file_damage import sign_again
from lowpeak import PPOConfig
from lowpeak.errors import ArgumentError, CheckpointError, ModelError
from lowpeak.memory.phases import Phase
from lowpeak.training.rollout import score_records
from preference_data import tiny_classifier
from small_runs import SGD, TOKENIZER, column, digits, granite, make, same, saved, trained, weights
from tiny_models import char_tokenizer, tiny_model, trained_adapter

LORA = LoraConfig(r=4, target_modules="all-linear")
CRITICS = [("head", None), ("model", None), ("head", LORA), ("adapter", LORA), ("model", LORA)]
SAVED = {"save_strategy": "steps", "save_steps": 2}


SMALL = {"reward_funcs": digits, "max_steps": 4, "num_iterations": 2}
ppo = partial(make, "PPO", **SMALL)
trained_ppo = partial(trained, "PPO", **SMALL)
classifier = partial(tiny_classifier, seed=3)


class FirstStep(TrainerCallback):
    """Keeps the weights before and after a run's first step."""

    def on_train_begin(self, args, state, control, model, **kwargs):
        self.before = {name: p.detach().clone() for name, p in model.named_parameters()}

    def on_step_end(self, args, state, control, model, **kwargs):
        if state.global_step == 1:
            self.after = {name: p.detach().clone() for name, p in model.named_parameters()}


@pytest.fixture(scope="module", params=CRITICS, ids=lambda pair: f"{pair[0]}{' with lora' if pair[1] else ''}")
def with_critic(request, tmp_path_factory):
    """A run with each critic, which alone learns in step 1; saved in the middle of its second rollout; its arguments."""
    critic, peft = request.param
    changes = {"critic": critic, "peft_config": peft, "value_warmup_steps": 1, "value_learning_rate": 3e-2}
    folder, first = tmp_path_factory.mktemp("ppo"), FirstStep()
    run = trained_ppo(folder, **changes, save_strategy="steps", save_steps=3, callbacks=[first])
    return SimpleNamespace(run=run, folder=folder, changes=changes, first=first)


def test_a_run_cut_in_the_middle_of_a_rollout_goes_on_to_the_same_bits(tmp_path, with_critic):
    again = trained_ppo(tmp_path, **with_critic.changes, resume=with_critic.folder / "checkpoint-3")
    assert same(weights(again), weights(with_critic.run))
    assert column(again, "loss")[-1] == column(with_critic.run, "loss")[-1]


def test_values_warm_up_while_the_policy_stays_where_it_is(with_critic):
    first, last = with_critic.first, weights(with_critic.run)
    moved = {name for name, after in first.after.items() if not torch.equal(after, first.before[name])}
    assert moved
    assert all("critic" in name.split(".") for name in moved)
    assert any(not torch.equal(last[name], after) for name, after in first.after.items() if name not in moved)


def test_a_saved_model_is_the_policy_alone_and_its_separate_critic_beside_it(tmp_path, with_critic):
    run, changes = with_critic.run, with_critic.changes
    critic, peft = changes["critic"], changes["peft_config"]
    run.save_model(str(tmp_path))
    names = load_file(tmp_path / ("adapter_model.safetensors" if peft else "model.safetensors")).keys()
    assert {"critic" in name for name in names} == {False}
    if not peft:
        own = {name: p for name, p in run.model.named_parameters() if not name.startswith("critic.")}
        for name, parameter in AutoModelForCausalLM.from_pretrained(tmp_path).named_parameters():
            assert torch.equal(parameter, own[name])
    assert (tmp_path / "critic").exists() == (critic == "model")
    if critic == "model":
        read = AutoModelForSequenceClassification.from_pretrained(tmp_path / "critic")
        trained = {n.split("classifier.")[1]: p for n, p in run.model.named_parameters() if "classifier." in n}
        assert same(dict(read.named_parameters()), trained)


@pytest.mark.extended
def test_a_policy_that_ppo_trained_starts_other_runs_without_the_old_critic(tmp_path, with_critic):
    first = with_critic.run
    run = trained("GRPO", tmp_path, copy.deepcopy(first.model), reward_funcs=digits, max_steps=1)
    assert not [name for name, _ in run.model.named_parameters() if "critic" in name]
    if with_critic.changes["peft_config"] is None:
        return
    for second in ("head", "adapter", "model"):
        fresh = ppo(tmp_path, critic=second, peft_config=LORA, beta=0.0)
        again = ppo(tmp_path, copy.deepcopy(first.model), critic=second, beta=0.0)
        assert weights(again).keys() == weights(fresh).keys()


def test_a_reward_models_checkpoint_can_start_the_critic(tmp_path):
    path = saved(tmp_path / "judge", classifier())
    for given in ({"value_model_path": path}, {"value_model": classifier()}):
        own = dict(ppo(tmp_path, critic="model", **given).model.critic.classifier.named_parameters())
        assert same(own, dict(classifier().named_parameters()))
        assert all(p.requires_grad for p in own.values())


def test_a_separate_critic_starts_on_the_policys_backbone_with_values_of_zero(tmp_path):
    for model in (tiny_model(), saved(tmp_path / "policy", tiny_model())):
        run = ppo(tmp_path / "run", model, critic="model")
        own = dict(run.model.critic.classifier.model.named_parameters())
        for name, parameter in run.model.model.named_parameters():
            assert torch.equal(own[name], parameter)
            assert own[name] is not parameter
        assert not run.model.critic.classifier.score.weight.any()


def test_the_critic_has_a_rate_of_its_own_and_its_groups_the_exceptions_of_weight_decay(tmp_path):
    run = ppo(tmp_path, critic="model", value_learning_rate=0.0, weight_decay=0.1)
    groups = run.create_optimizer().param_groups
    assert {(g["lr"], g["weight_decay"]) for g in groups} == {(lr, decay) for lr in (1e-2, 0.0) for decay in (0.0, 0.1)}
    assert sum(len(group["params"]) for group in groups) == len(list(run.model.parameters()))
    still = {id(parameter) for group in groups if group["lr"] == 0.0 for parameter in group["params"]}
    assert still == {id(parameter) for parameter in run.model.critic.classifier.parameters()}


@pytest.mark.extended
def test_a_policy_that_has_moved_too_far_gets_a_new_rollout(tmp_path):
    for limit, fresh in ((1e-6, True), (None, False)):
        run = trained_ppo(tmp_path, num_iterations=3, max_steps=3, learning_rate=5e-2, early_stop_kl=limit)
        assert (run.rollout.number >= 1) == fresh


@pytest.mark.extended
def test_the_steered_coefficient_is_logged_and_survives_a_resume(tmp_path):
    changes = {"kl_target": 0.01, "kl_horizon": 40, **SAVED}
    run = trained_ppo(tmp_path / "a", **changes)
    assert len(set(column(run, "kl_coef"))) > 1
    again = trained_ppo(tmp_path / "b", **changes, resume=tmp_path / "a" / "checkpoint-2")
    assert again.coefficients() == run.coefficients()


def test_trls_names_say_the_same(tmp_path):
    shared = {"output_dir": str(tmp_path), "use_cpu": True, "gradient_accumulation_steps": 2}
    ours = PPOConfig(**shared, beta=0.1, num_iterations=3, epsilon=0.1, steps_per_generation=4)
    trls = PPOConfig(**shared, kl_coef=0.1, num_ppo_epochs=3, cliprange=0.1, num_mini_batches=2)
    names = ("beta", "num_iterations", "epsilon", "steps_per_generation")
    assert [getattr(trls, name) for name in names] == [getattr(ours, name) for name in names]
    with pytest.raises(ArgumentError, match=r"kl_coef=0.1 .*beta=0.2"):
        PPOConfig(**shared, kl_coef=0.1, beta=0.2)


def test_a_reward_model_and_a_reference_are_taken_by_trls_names(tmp_path):
    parts = {"reward_model": classifier(), "ref_model": tiny_model(seed=1), "reward_processing_classes": [TOKENIZER]}
    run = trained_ppo(tmp_path, reward_funcs=None, **parts, beta=0.1, max_steps=1)
    assert abs(column(run, "kl")[0]) > 0.01  # another model's


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"cliprange": -0.1}, r"cliprange=-0\.1"),
        ({"num_mini_batches": 0}, "num_mini_batches=0"),
        ({"num_mini_batches": 2.0}, r"num_mini_batches=2\.0"),
        ({"num_mini_batches": 2, "generation_batch_size": 8}, "generation_batch_size=8 .*num_mini_batches"),
        ({"critic": "adapter"}, "critic='adapter'.*LoRA"),
        ({"critic": "none"}, "critic='none'"),
        ({"value_model": tiny_model(), "critic": "head"}, "value_model.*critic='head'"),
        ({"critic": "model", "value_model": tiny_model()}, "value_model.*Qwen2ForCausalLM"),
        ({"beta": 0.0, "ref_model": tiny_model()}, "ref_model.*beta"),
        ({"kl_target": -1.0}, "kl_target=-1.0"),
        ({"value_warmup_steps": 2, "vf_coef": 0.0}, "vf_coef"),
        ({"value_warmup_steps": 4, "max_steps": 4}, "max_steps"),
        ({"vf_coef": float("inf")}, "vf_coef=inf"),
        ({"value_warmup_steps": 2, "weight_decay": 0.1}, "weight_decay=0.1"),
        (
            {"critic": "model", "value_model": classifier(max_position_embeddings=5)},
            "max_completion_length=5.* 5 tokens",  # the critic's context
        ),
        ({"model": get_peft_model(tiny_model(), LORA, adapter_name="critic")}, "'critic'.*adapter_name"),
    ],
)
def test_what_is_out_of_range_or_contradicts_another_argument_is_named_as_it_was_written(tmp_path, changes, names):
    with pytest.raises((ArgumentError, ModelError), match=names):
        ppo(tmp_path, **changes)


def test_a_wrong_argument_of_the_algorithm_costs_no_loading(tmp_path):
    with pytest.raises(ArgumentError, match=r"vf_coef=-1.0"):
        ppo(tmp_path, "a model that is nowhere", tokenizer=False, vf_coef=-1.0)


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        *(("response_length", "max_completion_length"), ("mini_batch_size", "per_device_train_batch_size")),
        ("stop_token_id", "generation_kwargs"),
    ],
)
def test_an_argument_of_trls_former_trainer_names_its_remedy(name, remedy):
    with pytest.raises(ArgumentError, match=rf"{name}.*{remedy}"):
        PPOConfig(output_dir="x", use_cpu=True, **{name: 1})


def test_a_checkpoint_without_a_critic_is_refused(tmp_path):
    trained_ppo(tmp_path, max_steps=2, **SAVED)
    critic = tmp_path / "checkpoint-2" / "critic"
    critic.rename(tmp_path / "elsewhere")
    sign_again(critic.parent)
    with pytest.raises(CheckpointError, match=str(critic)):
        trained_ppo(tmp_path / "again", resume=critic.parent)


def test_rewards_of_single_tokens_reach_their_tokens(tmp_path):
    def early(completion_ids, **columns):
        return [[1.0] + [0.0] * (len(ids) - 1) for ids in completion_ids]

    run = ppo(tmp_path, reward_funcs=early, lam=1.0, whiten_advantages=False, beta=0.0)
    for record in run.collector.collect(0, 0, None).records:
        assert record.reward == 1.0
        assert record.returns.tolist() == [1.0] + [0.0] * (len(record.completion) - 1)


@pytest.mark.release
def test_the_critic_learns_the_exact_values_of_a_small_chain(tmp_path):
    """With the policy at rest V(prefix) = E[reward | prefix], summed over all completions of at most three tokens."""
    tokenizer = char_tokenizer("abc")
    policy = tiny_model(len(tokenizer), seed=2)
    prompt = "cb"  # of several tokens: attention over equal ones cannot count them

    def letters(completions, **columns):
        return [float(text.count("a") - 2 * ("bb" in text)) for text in completions]

    run = make(
        "PPO", tmp_path, policy, Dataset.from_list([{"prompt": prompt}] * 256), tokenizer, reward_funcs=letters,
        per_device_train_batch_size=256, max_steps=240, num_iterations=4, learning_rate=0.0, max_completion_length=3,
        critic="model", value_learning_rate=3e-3, lam=1.0, beta=0.0, cliprange_value=None, vf_coef=1.0, max_grad_norm=1e9,
        lr_scheduler_type="cosine", micro_batch_tokens=4096,
    )  # fmt: skip
    exact = exact_values(policy, tokenizer.encode(prompt), letters, tokenizer)
    ids = tokenizer.encode(prompt)
    run.train()
    found: dict[tuple[int, ...], float] = {}
    for record in run.collector.collect(99, 99, None).records:
        for t, value in enumerate(record.values.tolist()):
            found[tuple(record.completion.ids[:t].tolist())] = value
    spread = torch.tensor([exact[prefix] for prefix in found]).std()
    # A rare prefix is learned from few samples.
    often = {prefix for prefix in found if sequence_logprob(policy, ids, prefix).exp() > 0.05}
    assert len(found) > 8
    assert float(spread) > 0.5
    assert max(abs(found[prefix] - exact[prefix]) for prefix in often) < 0.1


@torch.no_grad()
def sequence_logprob(policy, prompt, ids):
    logits = policy(torch.tensor([[*prompt, *ids]])).logits[0].log_softmax(-1)
    return sum((logits[len(prompt) - 1 + t, token] for t, token in enumerate(ids)), torch.zeros(()))


@torch.no_grad()
def exact_values(policy, prompt, reward, tokenizer):
    """V of every prefix by enumeration: what ends at <eos> or at three tokens is paid."""

    @cache
    def value(prefix):
        if len(prefix) == 3 or prefix[-1:] == (1,):
            return reward([tokenizer.decode(list(prefix), skip_special_tokens=True)])[0]
        p = policy(torch.tensor([[*prompt, *prefix]])).logits[0, -1].softmax(-1).tolist()
        return sum(p[token] * value((*prefix, token)) for token in range(len(p)))

    prefixes = (prefix for length in range(4) for prefix in itertools.product(range(len(tokenizer)), repeat=length))
    return {prefix: value(prefix) for prefix in prefixes}


@pytest.mark.extended
@pytest.mark.parametrize(
    ("changes", "scored"), [({"num_iterations": 1, "beta": 0.0}, False), ({"num_iterations": 2}, True)]
)
def test_the_head_runs_in_scoring_only_where_old_log_probs_are_needed(tmp_path, changes, scored):
    run = ppo(tmp_path, **{"beta": 0.0, **changes})
    records = run.collector.collect(0, 0, None).records
    calls = []
    hook = run.model.lm_head.register_forward_pre_hook(lambda *args: calls.append(1))
    found, _ = score_records(run, records, run.run.algorithm.needs, Phase.SCORE)
    hook.remove()
    assert bool(calls) == scored
    for record, again in zip(records, found, strict=True):
        assert (again.old is not None) == scored
        assert torch.equal(again.values, record.values)


@pytest.mark.parametrize("critic", ["head", "adapter", "model"])
def test_an_adapter_that_came_in_trained_is_its_own_reference_beside_every_critic(tmp_path, critic):
    policy = trained_adapter(tiny_model(), LORA)
    run = ppo(tmp_path, policy, critic=critic, beta=0.1, num_iterations=1, max_steps=2)
    assert not [name for name, _ in run.model.named_parameters() if "critic.classifier" in name and "lora_" in name]
    run.train()
    kl = column(run, "kl")
    assert kl[0] == pytest.approx(0.0, abs=1e-6)
    assert kl[-1] > 1e-4


@pytest.mark.extended
def test_a_reference_adapter_of_an_earlier_run_makes_room_for_the_next_ones(tmp_path):
    model = trained_adapter(tiny_model(), LORA)
    for run in range(2):
        ppo(tmp_path / str(run), model=model, beta=0.1)
    assert sorted(model.peft_config) == ["default", "reference"]


@pytest.mark.extended
def test_a_critic_of_another_vocabulary_or_tokenizer_is_refused(tmp_path):
    small = classifier()
    small.resize_token_embeddings(7)
    with pytest.raises(ArgumentError, match=r"critic.* 7 .* 13"):
        ppo(tmp_path, critic="model", value_model=small)
    folder = tmp_path / "reward"
    extra = {"critic": "model", "value_model_path": saved(folder, classifier())}
    ppo(tmp_path / "same", **extra)
    words = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = words["model"]["vocab"]
    vocabulary["7"], vocabulary["8"] = vocabulary["8"], vocabulary["7"]
    (folder / "tokenizer.json").write_text(json.dumps(words))
    with pytest.raises(ArgumentError, match=r"'7' .* 10 .* 9"):
        ppo(tmp_path / "other", **extra)


@pytest.mark.extended
def test_an_optimizer_of_the_users_trains_policy_and_critic_or_is_refused(tmp_path):
    policy, critic = tiny_model(), classifier()
    with pytest.raises(ArgumentError, match=r"critic.*value_learning_rate"):
        ppo(tmp_path, policy, optimizers=(torch.optim.SGD(policy.parameters(), lr=0.1), None))
    optimizer = torch.optim.SGD([*policy.parameters(), *critic.parameters()], lr=0.1)
    before = critic.score.weight.detach().clone()
    trained_ppo(tmp_path, policy, critic="model", optimizers=(optimizer, None), value_model=critic, max_steps=1)
    assert not torch.equal(critic.score.weight.detach(), before)


@pytest.fixture(scope="module")
def halfway(tmp_path_factory):
    """The checkpoint of a run's second step, each of which had a rollout; SGD has no momentum of the steps before."""
    folder = tmp_path_factory.mktemp("halfway")
    trained_ppo(folder, num_iterations=1, beta=0.05, max_steps=2, **SGD, **SAVED)
    return folder / "checkpoint-2"


@pytest.mark.extended
@pytest.mark.parametrize(
    ("changes", "coefficients"),
    [({"beta": 0.5}, [0.5, 0.5]), ({"kl_target": 0.01, "kl_horizon": 40, "beta": 0.2}, [0.2])],
)
def test_a_resumed_run_trains_with_its_own_beta_and_steers_from_there(tmp_path, halfway, changes, coefficients):
    found = column(trained_ppo(tmp_path, num_iterations=1, **SGD, **changes, resume=halfway), "kl_coef")
    assert found[:2] == [0.05, 0.05]
    assert found[2 : 2 + len(coefficients)] == pytest.approx(coefficients)


@pytest.mark.extended
def test_a_run_resumed_with_a_longer_warm_up_holds_the_policy_still_at_once(tmp_path, halfway):
    run = ppo(tmp_path, value_warmup_steps=3, num_iterations=1, **SGD)
    kept = {}

    class Keep(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            kept[state.global_step] = run.model.model.embed_tokens.weight.detach().clone()

    run.add_callback(Keep())
    run.train(resume_from_checkpoint=str(halfway))
    saved = load_file(halfway / "model.safetensors")["model.embed_tokens.weight"]
    assert torch.equal(kept[3], saved)
    assert not torch.equal(kept[4], saved)


@pytest.mark.extended
@pytest.mark.parametrize("named", [True, False])
def test_a_family_without_a_classifier_is_told_which_critics_it_can_have(tmp_path, named):
    model = saved(tmp_path / "policy", granite()) if named else granite()
    with pytest.raises(ArgumentError, match=r"granite.*critic='head'.*'adapter'"):
        ppo(tmp_path / "run", model, critic="model")
    ppo(tmp_path / "run", model, critic="model", value_model=classifier())
    ppo(tmp_path / "run", model, critic="head")

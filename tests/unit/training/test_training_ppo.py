"""PPO's trainer: its critic's layouts, what is saved of it and resumed, what each argument does and what cannot act."""

from __future__ import annotations

import itertools
import json

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    GraniteConfig,
    GraniteForCausalLM,
    Qwen2Config,
    TrainerCallback,
)
from transformers import Qwen2ForSequenceClassification as Classifier

from damage import sign_again
from lowpeak import GRPOConfig, GRPOTrainer, PPOConfig, PPOTrainer
from lowpeak.errors import ArgumentError, CheckpointError, ModelError
from lowpeak.memory.phases import Phase
from tiny import char_tokenizer, tiny_model

TOKENIZER = char_tokenizer()
LORA = LoraConfig(r=4, target_modules="all-linear")
SMALL = {
    "per_device_train_batch_size": 8,
    "max_completion_length": 5,
    "max_steps": 4,
    "num_iterations": 2,
    "learning_rate": 1e-2,
    "logging_steps": 1,
    "save_strategy": "no",
    "disable_tqdm": True,
    "use_cpu": True,
    "micro_batch_tokens": 512,
    "logprob_chunk_size": 64,
}
CRITICS = [("head", None), ("model", None), ("head", LORA), ("adapter", LORA), ("model", LORA)]


def rows(count=16):
    return Dataset.from_list([{"prompt": f"{i % 10}{i * 7 % 10}="} for i in range(count)])


def digits(completions, **columns):
    return [sum(int(c) for c in text if c.isdigit()) / 9 for text in completions]


def ppo(folder, reward=digits, model=None, trainer=None, **changes):
    args = PPOConfig(output_dir=str(folder), **{**SMALL, **changes})
    return PPOTrainer(
        model=model or tiny_model(),
        reward_funcs=reward,
        args=args,
        train_dataset=rows(),
        processing_class=TOKENIZER,
        **(trainer or {}),
    )


def classifier(seed=3, hidden=32, **changes):
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=13, hidden_size=hidden, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=64, num_labels=1, initializer_range=0.2, pad_token_id=0, **changes,
    )  # fmt: skip
    return Classifier(config)


def all_weights(run):
    return {name: p.detach().clone() for name, p in run.model.named_parameters()}


class StopAfter(TrainerCallback):
    """Ends a run early."""

    def __init__(self, steps):
        self.steps = steps

    def on_step_end(self, args, state, control, **more):
        control.should_training_stop = state.global_step >= self.steps


def losses(run):
    return [row["loss"] for row in run.state.log_history if "loss" in row]


def test_training_raises_the_reward_it_is_given(tmp_path):
    run = ppo(tmp_path, max_steps=60, per_device_train_batch_size=16, learning_rate=1e-2, beta=0.0)
    run.train()
    rewards = [row["reward"] for row in run.state.log_history if "reward" in row]
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 1.0


@pytest.mark.parametrize(("critic", "peft"), CRITICS)
def test_a_run_cut_in_the_middle_of_a_rollout_goes_on_to_the_same_bits(tmp_path, critic, peft):
    changes = {"critic": critic, "max_steps": 5, "save_strategy": "steps", "save_steps": 3, "value_learning_rate": 3e-2}
    whole = ppo(tmp_path / "whole", trainer={"peft_config": peft}, **changes)
    whole.train()
    again = ppo(tmp_path / "again", trainer={"peft_config": peft}, **changes)
    again.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-3"))
    for (name, expected), found in zip(all_weights(whole).items(), all_weights(again).values(), strict=True):
        assert torch.equal(found, expected), name
    assert losses(again)[-1] == losses(whole)[-1]


@pytest.mark.parametrize(("critic", "peft"), CRITICS)
def test_what_is_saved_is_the_policy_as_ever_and_a_critic_of_its_own_beside_it(tmp_path, critic, peft):
    run = ppo(tmp_path, critic=critic, trainer={"peft_config": peft})
    run.train()
    run.save_model()
    saved = load_file(tmp_path / ("adapter_model.safetensors" if peft else "model.safetensors"))
    assert saved
    assert not [name for name in saved if "critic" in name]
    if not peft:
        policy = AutoModelForCausalLM.from_pretrained(tmp_path)
        own = {name: p for name, p in run.model.named_parameters() if not name.startswith("critic.")}
        for name, parameter in policy.named_parameters():
            assert torch.equal(parameter, own[name])
    assert (tmp_path / "critic").exists() == (critic == "model")
    if critic == "model":
        read = AutoModelForSequenceClassification.from_pretrained(tmp_path / "critic")
        trained = {n.split("classifier.")[1]: p for n, p in run.model.named_parameters() if "classifier." in n}
        assert {name for name, _ in read.named_parameters()} == trained.keys()
        for name, parameter in read.named_parameters():
            assert torch.equal(parameter, trained[name])


def test_a_reward_models_checkpoint_can_start_the_critic(tmp_path):
    classifier().save_pretrained(tmp_path / "judge")
    TOKENIZER.save_pretrained(tmp_path / "judge")
    by_path = ppo(tmp_path / "a", critic="model", value_model_path=str(tmp_path / "judge"))
    by_instance = ppo(tmp_path / "b", critic="model", trainer={"value_model": classifier()})
    for run in (by_path, by_instance):
        own = dict(run.model.critic.classifier.named_parameters())
        for name, parameter in classifier().named_parameters():
            assert torch.equal(own[name], parameter)
        assert all(p.requires_grad for p in own.values())


def test_a_critic_of_its_own_starts_on_the_policys_backbone_and_says_zero(tmp_path):
    tiny_model().save_pretrained(tmp_path / "policy")
    TOKENIZER.save_pretrained(tmp_path / "policy")
    for model in (tiny_model(), str(tmp_path / "policy")):
        run = ppo(tmp_path / "run", model=model, critic="model")
        own = dict(run.model.critic.classifier.model.named_parameters())
        for name, parameter in run.model.model.named_parameters():
            assert torch.equal(own[name], parameter)
            assert own[name] is not parameter
        assert not run.model.critic.classifier.score.weight.any()


@pytest.mark.parametrize(("critic", "peft"), CRITICS)
def test_values_warm_up_while_the_policy_stays_where_it_is(tmp_path, critic, peft):
    more = {"peft_config": peft, "callbacks": [StopAfter(2)]}
    run = ppo(tmp_path, critic=critic, max_steps=4, value_warmup_steps=2, trainer=more)
    before = all_weights(run)
    run.train()
    moved = {name for name, after in all_weights(run).items() if not torch.equal(after, before[name])}
    assert moved
    assert all("critic" in name.split(".") for name in moved)


def test_the_critic_learns_at_a_rate_of_its_own(tmp_path):
    run = ppo(tmp_path, value_learning_rate=0.0, vf_coef=1.0, max_steps=2)
    before = all_weights(run)
    run.train()
    after = all_weights(run)
    still = {name for name in after if torch.equal(after[name], before[name])}
    assert still == {"critic.score.weight"}
    assert sorted({group["initial_lr"] for group in run.optimizer.param_groups}) == [0.0, 1e-2]


def test_weight_decay_and_its_exceptions_hold_in_the_critics_groups(tmp_path):
    run = ppo(tmp_path, critic="model", value_learning_rate=1e-3, weight_decay=0.1)
    run.create_optimizer()
    found = {(group["lr"], group["weight_decay"]) for group in run.optimizer.param_groups}
    assert found == {(lr, decay) for lr in (1e-2, 1e-3) for decay in (0.0, 0.1)}
    count = sum(len(group["params"]) for group in run.optimizer.param_groups)
    assert count == len(list(run.model.parameters()))


def test_a_policy_that_has_moved_too_far_gets_a_new_rollout(tmp_path):
    run = ppo(tmp_path, num_iterations=4, max_steps=4, learning_rate=5e-2, early_stop_kl=1e-6)
    run.train()
    assert run.rollout.number >= 1
    free = ppo(tmp_path / "free", num_iterations=4, max_steps=4, learning_rate=5e-2)
    free.train()
    assert free.rollout.number == 0


def test_the_steered_coefficient_is_logged_and_survives_a_resume(tmp_path):
    changes = {"kl_target": 0.01, "kl_horizon": 40, "max_steps": 6, "save_strategy": "steps", "save_steps": 4}
    run = ppo(tmp_path / "a", **changes)
    run.train()
    coefs = [row["kl_coef"] for row in run.state.log_history if "kl_coef" in row]
    assert len(set(coefs)) > 1
    again = ppo(tmp_path / "b", **changes)
    again.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-4"))
    assert again.coefficients() == run.coefficients()


@pytest.mark.parametrize(
    "changes",
    [
        {"gamma": 0.5},
        {"lam": 0.5},
        {"whiten_rewards": True},
        {"whiten_advantages": False},
        {"missing_eos_penalty": 1.0},
        {"vf_coef": 1.0},
        {"cliprange_value": 1e-4},
        {"epsilon": 1e-3},
        {"epsilon_high": 1e-3},
        {"kl_estimator": "k3"},
        {"mask_truncated_completions": True},
        {"value_warmup_steps": 1},
        {"num_generations": 2},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_each_argument_of_ppo_trains_other_weights(tmp_path, changes):
    base = {"beta": 0.5, "num_iterations": 3, "max_steps": 6, "vf_coef": 0.3}
    runs = [ppo(tmp_path / str(i), **{**base, **more}) for i, more in enumerate(({}, changes))]
    for run in runs:
        run.train()
    first, second = (all_weights(run) for run in runs)
    assert any(not torch.equal(first[name], second[name]) for name in first)


def test_trls_names_say_the_same(tmp_path):
    ours = PPOConfig(
        output_dir=str(tmp_path), use_cpu=True, beta=0.1, num_iterations=3, epsilon=0.1, steps_per_generation=4,
        gradient_accumulation_steps=2,
    )  # fmt: skip
    trls = PPOConfig(
        output_dir=str(tmp_path), use_cpu=True, kl_coef=0.1, num_ppo_epochs=3, cliprange=0.1, num_mini_batches=2,
        gradient_accumulation_steps=2,
    )  # fmt: skip
    for name in ("beta", "num_iterations", "epsilon", "steps_per_generation"):
        assert getattr(trls, name) == getattr(ours, name)
    with pytest.raises(ArgumentError, match=r"kl_coef=0.1 and beta=0.2 say the same thing; give one"):
        PPOConfig(output_dir=str(tmp_path), use_cpu=True, kl_coef=0.1, beta=0.2)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"cliprange": -0.1}, r"cliprange=-0\.1 must be"),
        ({"num_mini_batches": 0}, "num_mini_batches=0 must be a whole number of at least 1"),
        ({"num_mini_batches": 2.0}, r"num_mini_batches=2\.0 must be a whole number"),
        (
            {"num_mini_batches": 2, "generation_batch_size": 8},
            "generation_batch_size=8 and num_mini_batches say the same",
        ),
    ],
)
def test_an_error_names_what_was_written(tmp_path, changes, words):
    with pytest.raises(ArgumentError, match=words):
        ppo(tmp_path, **changes)


def test_a_reward_model_and_a_reference_are_taken_by_trls_names(tmp_path):
    judge = classifier()
    run = ppo(
        tmp_path,
        reward=None,
        trainer={"reward_model": judge, "ref_model": tiny_model(seed=1), "reward_processing_classes": [TOKENIZER]},
        beta=0.1,
    )
    run.train()
    first = next(row for row in run.state.log_history if "kl" in row)
    assert abs(first["kl"]) > 0.01  # another model's


@pytest.mark.parametrize(
    ("changes", "trainer", "words"),
    [
        ({"critic": "adapter"}, {}, "critic='adapter' needs a policy under LoRA"),
        ({"critic": "none"}, {}, "critic='none' must be one of"),
        ({"value_model_path": "x"}, {}, "value_model_path='x' has no effect"),
        ({}, {"value_model": tiny_model()}, "value_model has no effect with critic='head'"),
        ({"critic": "model"}, {"value_model": tiny_model()}, "value_model is a Qwen2ForCausalLM; a critic is"),
        ({"dynamic_sampling_rounds": 2}, {}, "dynamic_sampling_rounds=2 has no effect: PPO learns"),
        ({"beta": 0.0}, {"ref_model": tiny_model()}, "ref_model has no effect: beta is 0"),
        ({"mask_truncated_completions": True, "missing_eos_penalty": 1.0}, {}, "missing_eos_penalty=1.0 has no effect"),
        ({"kl_target": -1.0}, {}, "kl_target=-1.0 must be above 0"),
        ({"value_warmup_steps": 2, "vf_coef": 0.0}, {}, "vf_coef must be above 0"),
        ({"value_warmup_steps": 4, "max_steps": 4}, {}, "and max_steps above them"),
        ({"vf_coef": float("inf")}, {}, "vf_coef=inf must be a finite number"),
        ({"value_warmup_steps": 2, "weight_decay": 0.1}, {}, "weight_decay=0.1 would shrink it meanwhile"),
    ],
)
def test_what_cannot_act_is_told_with_the_remedy(tmp_path, changes, trainer, words):
    with pytest.raises((ArgumentError, ModelError), match=words):
        ppo(tmp_path, trainer=trainer, **changes)


def test_a_wrong_argument_of_the_algorithm_costs_no_loading(tmp_path):
    args = PPOConfig(output_dir=str(tmp_path), use_cpu=True, vf_coef=0.0, value_warmup_steps=2)
    with pytest.raises(ArgumentError, match="value_warmup_steps=2"):
        PPOTrainer(
            "a model that is nowhere", lambda completions, **columns: [0.0], args, train_dataset=[{"prompt": "1"}]
        )


def test_names_of_trls_former_trainer_are_told_what_to_do_instead():
    for name, words in {
        "total_episodes": "set max_steps",
        "response_length": "its name is max_completion_length",
        "reward_model_path": "pass it as reward_funcs",
        "stop_token_id": "generation_kwargs",
        "world_size": "the launcher starts",
        "num_total_batches": "it counts rollouts",
        "mini_batch_size": "it follows from per_device_train_batch_size",
    }.items():
        with pytest.raises(ArgumentError, match=words):
            PPOConfig(output_dir="x", use_cpu=True, **{name: 1})


def test_a_checkpoint_without_a_critic_is_told(tmp_path):
    run = ppo(tmp_path, save_strategy="steps", save_steps=2)
    run.train()
    critic = tmp_path / "checkpoint-2" / "critic"
    critic.rename(tmp_path / "elsewhere")
    sign_again(critic.parent)
    with pytest.raises(CheckpointError, match="holds no critic"):
        ppo(tmp_path / "again").train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))


def test_rewards_of_single_tokens_reach_their_tokens(tmp_path):
    def early(completion_ids, **columns):
        return [[1.0] + [0.0] * (len(ids) - 1) for ids in completion_ids]

    run = ppo(tmp_path, reward=early, lam=1.0, whiten_advantages=False, beta=0.0)
    made = run.maker.make(0, 0, None)
    for record in made.records:
        assert record.reward == 1.0
        assert record.returns.tolist() == [1.0] + [0.0] * (len(record.completion) - 1)


def test_the_critic_learns_the_exact_values_of_a_small_chain(tmp_path):
    """With the policy at rest V(prefix) = E[reward | prefix], summed over all completions of at most three tokens."""
    tokenizer = char_tokenizer("abc")
    policy = tiny_model(len(tokenizer), seed=2)
    prompt = "cb"  # of several tokens: attention over equal ones cannot count them
    args = PPOConfig(
        output_dir=str(tmp_path),
        **{**SMALL, "per_device_train_batch_size": 256, "max_steps": 240, "num_iterations": 4, "learning_rate": 0.0},
        critic="model", value_learning_rate=3e-3, lam=1.0, beta=0.0, cliprange_value=None, vf_coef=1.0, max_grad_norm=1e9,
        lr_scheduler_type="cosine",
    )  # fmt: skip
    args.max_completion_length = 3

    def letters(completions, **columns):
        return [float(text.count("a") - 2 * ("bb" in text)) for text in completions]

    run = PPOTrainer(policy, letters, args, Dataset.from_list([{"prompt": prompt}] * 256), processing_class=tokenizer)
    exact = exact_values(policy, tokenizer.encode(prompt), letters, tokenizer)
    ids = tokenizer.encode(prompt)
    run.train()
    rollout = run.maker.make(99, 99, None)
    found: dict[tuple[int, ...], float] = {}
    for record in rollout.records:
        for t, value in enumerate(record.values.tolist()):
            found[tuple(record.completion.ids[:t].tolist())] = value
    spread = torch.tensor([exact[prefix] for prefix in found]).std()
    errors = torch.tensor([abs(value - exact[prefix]) * weight(policy, ids, prefix) for prefix, value in found.items()])
    assert len(found) > 8
    assert float(spread) > 0.5
    assert float(errors.max()) < 0.1, {prefix: (value, exact[prefix]) for prefix, value in found.items()}


def weight(policy, prompt, prefix):
    """1 for what is often seen: a rare prefix is learned from few samples."""
    return float(torch.exp(sequence_logprob(policy, prompt, prefix)) > 0.05)


@torch.no_grad()
def sequence_logprob(policy, prompt, ids):
    logits = policy(torch.tensor([[*prompt, *ids]])).logits[0].log_softmax(-1)
    return sum((logits[len(prompt) - 1 + t, token] for t, token in enumerate(ids)), torch.zeros(()))


def exact_values(policy, prompt, reward, tokenizer):
    """V of every prefix by enumeration: what ends at <eos> or at three tokens is paid."""
    values: dict[tuple[int, ...], float] = {}

    def value(prefix):
        if len(prefix) == 3 or prefix[-1:] == (1,):
            return reward([tokenizer.decode(list(prefix), skip_special_tokens=True)])[0]
        if prefix not in values:
            with torch.no_grad():
                p = policy(torch.tensor([[*prompt, *prefix]])).logits[0, -1].softmax(-1).tolist()
            values[prefix] = sum(p[token] * value((*prefix, token)) for token in range(len(p)))
        return values[prefix]

    for length in range(4):
        for prefix in itertools.product(range(len(tokenizer)), repeat=length):
            value(prefix)
    return values


def test_the_journal_has_the_rollouts_numbers(tmp_path):
    run = ppo(tmp_path)
    run.train()
    steps = [json.loads(line) for line in (tmp_path / "journal" / "steps.jsonl").read_text().splitlines()]
    assert {"objective/kl", "value/mean", "loss/value_avg", "policy/approxkl_avg"} <= steps[0].keys()


@pytest.mark.parametrize(
    ("changes", "scored"), [({"num_iterations": 1, "beta": 0.0}, False), ({"num_iterations": 2}, True)]
)
def test_the_head_runs_in_scoring_only_where_old_log_probs_are_needed(tmp_path, changes, scored):
    run = ppo(tmp_path, **{"beta": 0.0, **changes})
    records = run.maker.make(0, 0, None).records
    asked = []
    hook = run.model.lm_head.register_forward_pre_hook(lambda *args: asked.append(1))
    found, _ = run.maker.score(records, run.run.algorithm.needs, Phase.SCORE)
    hook.remove()
    assert bool(asked) == scored
    for record, again in zip(records, found, strict=True):
        assert (again.old is not None) == scored
        assert torch.equal(again.values, record.values)


def trained_adapter():
    model = get_peft_model(tiny_model(), LORA)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.05)
    return model


@pytest.mark.parametrize("critic", ["head", "adapter", "model"])
def test_an_adapter_that_came_in_trained_is_its_own_reference_beside_every_critic(tmp_path, critic):
    run = ppo(tmp_path, model=trained_adapter(), critic=critic, beta=0.1)
    assert not [name for name, _ in run.model.named_parameters() if "critic.classifier" in name and "lora_" in name]
    run.train()
    kl = [row["kl"] for row in run.state.log_history if "kl" in row]
    assert kl[0] == pytest.approx(0.0, abs=1e-6)
    assert kl[-1] > 1e-4


@pytest.mark.parametrize("critic", ["head", "adapter", "model"])
@pytest.mark.parametrize("second", ["head", "adapter", "model"])
def test_a_policy_that_ppo_trained_starts_another_run_without_the_old_critic(tmp_path, critic, second):
    first = ppo(tmp_path / "1", critic=critic, trainer={"peft_config": LORA}, max_steps=2)
    first.train()
    fresh = ppo(tmp_path / "2", critic=second, trainer={"peft_config": LORA}, max_steps=2, beta=0.0)
    again = ppo(tmp_path / "3", model=first.model, critic=second, max_steps=2, beta=0.0)
    assert all_weights(again).keys() == all_weights(fresh).keys()
    again.train()


def test_a_reference_adapter_of_an_earlier_run_makes_room_for_the_next_ones(tmp_path):
    model = trained_adapter()
    for run in range(2):
        ppo(tmp_path / str(run), model=model, beta=0.1)
    assert sorted(model.peft_config) == ["default", "reference"]


@pytest.mark.parametrize(("critic", "peft"), CRITICS)
def test_other_algorithms_leave_the_critic_of_a_policy_behind(tmp_path, critic, peft):
    first = ppo(tmp_path / "1", critic=critic, trainer={"peft_config": peft}, max_steps=2)
    first.train()
    shared = {name: value for name, value in SMALL.items() if name != "max_steps"}
    args = GRPOConfig(output_dir=str(tmp_path / "2"), num_generations=4, max_steps=2, **shared)
    run = GRPOTrainer(first.model, digits, args, rows(), processing_class=TOKENIZER)
    assert not [name for name, _ in run.model.named_parameters() if "critic" in name]
    run.train()


def test_a_critic_that_does_not_embed_the_policys_tokens_is_told(tmp_path):
    small = classifier()
    small.resize_token_embeddings(7)
    with pytest.raises(ArgumentError, match="the critic embeds 7 tokens and the policy's tokenizer has 13"):
        ppo(tmp_path, critic="model", trainer={"value_model": small})


def test_a_critic_with_another_tokenizer_is_told(tmp_path):
    folder = tmp_path / "reward"
    classifier().save_pretrained(folder)
    TOKENIZER.save_pretrained(folder)
    ppo(tmp_path / "same", critic="model", value_model_path=str(folder))
    named = folder / "tokenizer.json"
    saved = json.loads(named.read_text())
    words = saved["model"]["vocab"]
    words["7"], words["8"] = words["8"], words["7"]
    named.write_text(json.dumps(saved))
    with pytest.raises(ArgumentError, match="the critic's tokenizer has '7' as token 10 and the policy's as 9"):
        ppo(tmp_path / "other", critic="model", value_model_path=str(folder))


def test_prompts_fit_the_critics_context_too(tmp_path):
    with pytest.raises(ArgumentError, match="leaves no room for a prompt"):
        ppo(tmp_path, critic="model", trainer={"value_model": classifier(max_position_embeddings=5)})


def test_an_optimizer_without_the_critic_is_told(tmp_path):
    policy = tiny_model()
    with pytest.raises(ArgumentError, match="holds no parameter of the critic"):
        ppo(tmp_path, model=policy, trainer={"optimizers": (torch.optim.SGD(policy.parameters(), lr=0.1), None)})


def test_an_optimizer_that_holds_both_trains_both(tmp_path):
    policy, critic = tiny_model(), classifier()
    optimizer = torch.optim.SGD([*policy.parameters(), *critic.parameters()], lr=0.1)
    before = critic.score.weight.detach().clone()
    run = ppo(tmp_path, model=policy, critic="model", trainer={"optimizers": (optimizer, None), "value_model": critic})
    run.train()
    assert not torch.equal(critic.score.weight.detach(), before)


def test_a_run_resumed_with_another_beta_trains_with_it(tmp_path):
    shared = {"beta": 0.05, "num_iterations": 1, "max_steps": 4}
    ppo(tmp_path, save_strategy="steps", save_steps=2, **shared).train()
    run = ppo(tmp_path / "again", **{**shared, "beta": 0.5})
    run.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert [row["kl_coef"] for row in run.state.log_history if "kl_coef" in row] == [0.05, 0.05, 0.5, 0.5]


def test_a_run_resumed_with_a_longer_warm_up_holds_the_policy_still_at_once(tmp_path):
    shared = {"optim": "sgd", "learning_rate": 0.1}  # without momentum of the steps before
    ppo(tmp_path, save_strategy="steps", save_steps=2, **shared).train()
    run = ppo(tmp_path / "again", value_warmup_steps=3, **shared)
    kept = {}

    class Keep(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            kept[state.global_step] = run.model.model.embed_tokens.weight.detach().clone()

    run.add_callback(Keep())
    run.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    saved = load_file(tmp_path / "checkpoint-2/model.safetensors")["model.embed_tokens.weight"]
    assert torch.equal(kept[3], saved)
    assert not torch.equal(kept[4], saved)


def test_a_coefficient_that_a_resumed_run_steers_starts_at_its_beta(tmp_path):
    shared = {"num_iterations": 1, "max_steps": 4}
    ppo(tmp_path, save_strategy="steps", save_steps=2, **shared).train()
    run = ppo(tmp_path / "again", kl_target=0.01, kl_horizon=40, beta=0.2, **shared)
    run.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert [row["kl_coef"] for row in run.state.log_history if "kl_coef" in row][2] == pytest.approx(0.2)


def test_an_adapter_under_the_critics_name_is_told(tmp_path):
    model = get_peft_model(tiny_model(), LORA, adapter_name="critic")
    with pytest.raises(ArgumentError, match="an adapter of the name 'critic'"):
        ppo(tmp_path, model=model)


def granite():
    """A family without a sequence classifier in transformers."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2}
    return GraniteForCausalLM(
        GraniteConfig(vocab_size=13, intermediate_size=64, max_position_embeddings=128, pad_token_id=0, **sizes)
    )


@pytest.mark.parametrize("named", [True, False])
def test_a_family_without_a_classifier_is_told_which_critics_it_can_have(tmp_path, named):
    granite().save_pretrained(tmp_path / "policy")
    model = str(tmp_path / "policy") if named else granite()
    with pytest.raises(ArgumentError, match=r"transformers has none for granite: set critic='head' or 'adapter'"):
        ppo(tmp_path / "run", model=model, critic="model")
    ppo(tmp_path / "run", model=model, critic="model", trainer={"value_model": classifier()})
    ppo(tmp_path / "run", model=model, critic="head")

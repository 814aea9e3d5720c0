"""Storage formats in runs of every trainer: what is trained in which dtype, checkpoints, and arguments that contradict."""

from __future__ import annotations

import logging

import pytest
import torch
from peft import LoraConfig

from lowpeak import GRPOConfig, SFTConfig, SFTTrainer
from lowpeak.arguments.online import resolve_online
from lowpeak.arguments.storage import StorageFormat, resolve_storage
from lowpeak.errors import ArgumentError
from lowpeak.optim.compact_adamw import find_compact
from lowpeak.parallel.checkpoint_state import trained_parameters
from preference_data import tiny_classifier
from small_runs import COMMON, SAVED, TOKENIZER, make, ones, same, saved, supervised_rows, trained, weights
from tiny_models import tiny_experts, tiny_model

BF16 = {"model_init_kwargs": {"dtype": "bfloat16"}}


def wide_model() -> torch.nn.Module:
    """A model whose matrices are large enough for 8-bit states."""
    return tiny_model(hidden=64)


def real_weights(trainer) -> dict[str, torch.Tensor]:
    optimizer = find_compact(trainer.optimizer)
    assert optimizer is not None
    return {name: optimizer.read(p, "weight", 0, p.numel()) for name, p in trained_parameters(trainer.model).items()}


def assert_same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []


@pytest.mark.parametrize("kind", ["GRPO", "RLOO", "OnlineDPO", "Reward"])
def test_every_trainer_trains_bf16_weights_with_low_bits(tmp_path, kind):
    trainer = trained(kind, tmp_path, None if kind == "Reward" else wide_model(), weight_bits=32, max_steps=1)
    assert_low_bits(trainer)


def assert_low_bits(trainer) -> None:
    """Assert that all weights are bf16, and that the optimizer has low bits and each parameter's name."""
    assert {p.dtype for p in trainer.model.parameters()} == {torch.bfloat16}
    optimizer = find_compact(trainer.optimizer)
    assert {state["low_bits"].dtype for state in optimizer.state.values()} == {torch.int16}
    named = trained_parameters(trainer.model)
    assert {name: optimizer.shard(p).name for name, p in named.items()} == {name: name for name in named}


def resumed_to_the_same_bits(tmp_path, kind, **arguments):
    """A run whose resumed twin has the same bits."""
    run = {**SAVED, **arguments}
    whole = trained(kind, tmp_path, wide_model(), **run)
    again = trained(kind, tmp_path, wide_model(), **run, resume=tmp_path / "checkpoint-1")
    assert_same(real_weights(again), real_weights(whole))
    return whole


def test_ppo_resumes_low_bits_of_policy_and_critic(tmp_path):
    assert_low_bits(resumed_to_the_same_bits(tmp_path, "PPO", weight_bits=32))


def test_8_bit_states_go_with_fp32_weights_and_are_resumed(tmp_path):
    trainer = resumed_to_the_same_bits(tmp_path, "SFT", state_bits=8)
    assert {p.dtype for p in trainer.model.parameters()} == {torch.float32}
    kinds = {state["exp_avg"].dtype for state in find_compact(trainer.optimizer).state.values()}
    assert kinds == {torch.int8, torch.float32}


def test_dtype_bfloat16_asks_for_them_and_the_log_names_the_format(tmp_path, caplog):
    model = saved(tmp_path / "model", wide_model())
    with caplog.at_level(logging.INFO):
        trainer = make("GRPO", tmp_path / "run", model, **BF16)
    assert trainer.run.storage == StorageFormat(32, 8)
    assert "8.06" in caplog.text
    assert {p.dtype for p in trainer.model.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize(("kind", "optim"), [("GRPO", "adafactor"), ("Reward", "adamw_torch")])
def test_without_arguments_everything_stays_fp32(tmp_path, kind, optim, caplog):
    model = tiny_classifier(dtype=torch.bfloat16) if kind == "Reward" else tiny_model(dtype=torch.bfloat16)
    trainer = trained(kind, tmp_path, model, optim=optim, max_steps=1)
    assert trainer.run.storage is None
    assert {p.dtype for p in trainer.model.parameters()} == {torch.float32}
    assert find_compact(trainer.optimizer) is None
    assert "converted to fp32" in caplog.text
    assert "rounds bf16 weights" not in caplog.text


@pytest.mark.extended
def test_a_run_goes_on_with_fewer_bits(tmp_path):
    first = trained("GRPO", tmp_path, wide_model(), **SAVED, weight_bits=32)
    start = {name: p.detach().float().clone() for name, p in first.model.named_parameters()}
    again = trained("GRPO", tmp_path, wide_model(), **SAVED, weight_bits=24, max_steps=3, resume=True)
    assert all(state["step"] == 3 for state in find_compact(again.optimizer).state.values())
    moved = max(float((p.detach().float() - start[name]).abs().max()) for name, p in again.model.named_parameters())
    assert moved < 0.05  # five learning rates: no weight was lost


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"weight_bits": 8}, "weight_bits=8 .*16"),
        ({"state_bits": 4}, "state_bits=4 .*8"),
        ({"weight_bits": 32, "optim": "adafactor"}, "weight_bits=32 .*adafactor"),
        ({"state_bits": 8, "optim": "sgd"}, "state_bits=8 .*sgd"),
        ({"weight_bits": 32, "model_init_kwargs": {"dtype": "float32"}}, "weight_bits=32 .*float32"),
    ],
)
def test_formats_that_contradict_other_arguments_are_errors(tmp_path, arguments, message):
    model = saved(tmp_path / "model", tiny_model())
    with pytest.raises(ArgumentError, match=message):
        make("GRPO", tmp_path / "run", model, **arguments)


@pytest.mark.parametrize(
    "arguments",
    [
        {"weight_bits": 32},
        {"state_bits": 8},
        {"gradient_bits": 16},
        {"offload_optimizer": True},
        {"shard_optimizer_states": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("by", ["argument", "preset"])
def test_deepspeed_has_weights_of_its_own(tmp_path, monkeypatch, arguments, by):
    args = GRPOConfig(output_dir=str(tmp_path), use_cpu=True, **arguments)
    if by == "argument":
        args.deepspeed = {"zero_optimization": {"stage": 2}}
    else:
        monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    with pytest.raises(ArgumentError, match=f"{next(iter(arguments))}=.*DeepSpeed.*zero_optimization"):
        resolve_storage(args)


def test_dtype_bfloat16_leaves_the_weights_to_the_deepspeed_of_a_preset(tmp_path, monkeypatch):
    args = GRPOConfig(output_dir=str(tmp_path), use_cpu=True, **BF16)
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    settings = resolve_online(args, 1, 1).model
    assert settings.storage is None
    assert not settings.trains_bf16


def test_an_adapter_trains_in_fp32_whatever_the_dtype_of_its_base(tmp_path, caplog):
    model, lora = saved(tmp_path / "model", wide_model()), LoraConfig(r=64, target_modules=["q_proj"])
    plain = make("GRPO", tmp_path / "plain", model, **BF16, peft_config=lora)
    assert plain.run.storage is None
    with_format = make("GRPO", tmp_path / "with_format", model, weight_bits=32, state_bits=8, peft_config=lora)
    assert "weight_bits=32 (all trained weights are LoRA's" in caplog.text
    assert with_format.run.storage == StorageFormat(None, 8, 32)
    with pytest.raises(ArgumentError, match="weight_bits=32"):
        make("GRPO", tmp_path / "strict", model, weight_bits=32, peft_config=lora, strict_arguments=True)
    with_format.train()
    assert {state["exp_avg"].dtype for state in find_compact(with_format.optimizer).state.values()} == {torch.int8}


@pytest.mark.extended
def test_fp32_sums_train_as_gradients_beside_the_weights_do(tmp_path):
    """With one micro-batch a sum is its one gradient, but for the head's, which is no longer rounded to bf16."""
    separate, summed = (
        make("GRPO", tmp_path / str(bits), wide_model(), weight_bits=32, gradient_bits=bits, max_steps=1)
        for bits in (16, 32)
    )
    for trainer in (separate, summed):
        trainer.train()
    assert separate.state.log_history[0]["grad_norm"] == pytest.approx(
        summed.state.log_history[0]["grad_norm"], rel=1e-3
    )
    ours, theirs = real_weights(summed), real_weights(separate)
    moved = max(float(values.abs().max()) for values in ours.values())
    assert max(float((ours[name] - theirs[name]).abs().max()) for name in ours) < 0.05 * moved


@pytest.mark.extended
def test_frozen_models_follow_the_dtype_and_a_run_with_a_reference_learns(tmp_path):
    model = saved(tmp_path / "model", wide_model())
    trainer = make("GRPO", tmp_path / "run", model, **BF16, beta=0.1, reward_funcs=ones, max_steps=3)
    trainer.train()
    assert {p.dtype for p in trainer.run.reference.model.parameters()} == {torch.bfloat16}
    assert trainer.state.log_history[0]["kl"] == pytest.approx(0, abs=1e-6)


@pytest.mark.extended
@pytest.mark.parametrize("only_model", [False, True], ids=["with states", "without states"])
def test_a_mixture_of_experts_gets_its_best_weights_back_and_resumes_to_the_same_bits(tmp_path, only_model):
    """transformers stores its experts one by one, and so no loading by names fits the model."""
    evaluated = {"eval_strategy": "steps", "eval_steps": 1, "eval_dataset": supervised_rows()}
    choice = {"load_best_model_at_end": True, "greater_is_better": True, "metric_for_best_model": "loss"}
    best = trained("SFT", tmp_path, tiny_experts(), **SAVED, **evaluated, **choice, save_only_model=only_model)
    assert best.state.best_global_step == 1
    assert same(weights(best), weights(trained("SFT", tmp_path / "one", tiny_experts(), max_steps=1)))
    if not only_model:
        again = trained("SFT", tmp_path, tiny_experts(), **SAVED, resume=tmp_path / "checkpoint-1")
        assert same(weights(again), weights(trained("SFT", tmp_path / "two", tiny_experts())))


def test_training_that_fails_leaves_no_hooks_on_the_users_model(tmp_path):
    """They would take the gradients of a later Trainer, which would train nothing."""

    def fail(completions, **columns):
        if run.state.global_step:
            raise RuntimeError("reward-failure")
        return ones(completions)

    model = wide_model()
    run = make("GRPO", tmp_path, model, reward_funcs=fail, weight_bits=32, gradient_bits=32)
    with pytest.raises(RuntimeError, match="reward-failure"):
        run.train()
    assert not any(hasattr(parameter, "gradient_sink") for parameter in model.parameters())
    assert not any(parameter._post_accumulate_grad_hooks for parameter in model.parameters())


class OwnOptimizer(SFTTrainer):
    def create_optimizer(self, model=None):
        self.optimizer = torch.optim.SGD(self.model.parameters())
        return self.optimizer


class OwnChoice(SFTTrainer):
    @staticmethod
    def get_optimizer_cls_and_kwargs(args, model=None):
        return torch.optim.SGD, {"lr": 0.1}


@pytest.mark.parametrize(
    ("kind", "message"), [(OwnOptimizer, "SGD.*weights in bf16.*optimizers="), (OwnChoice, "OwnChoice.get_opt.*bf16")]
)
def test_a_subclass_with_another_optimizer_is_an_error_that_names_both(tmp_path, kind, message):
    args = SFTConfig(output_dir=str(tmp_path), **COMMON, weight_bits=32)
    with pytest.raises(ArgumentError, match=message):
        kind(wide_model(), args, train_dataset=supervised_rows(), processing_class=TOKENIZER).train()


def test_an_optimizer_that_is_passed_in_or_set_on_the_trainer_is_an_error_too(tmp_path):
    model = wide_model()
    with pytest.raises(ArgumentError, match="weight_bits=32"):
        make("GRPO", tmp_path, model, optimizers=(torch.optim.SGD(model.parameters()), None), weight_bits=32)
    run = make("GRPO", tmp_path, wide_model(), weight_bits=32)
    run.optimizer = torch.optim.AdamW(run.model.parameters())
    with pytest.raises(ArgumentError, match=r"AdamW .* bf16"):
        run.train()


def test_torch_dtype_is_another_name_of_dtype_and_the_users_dict_stays(tmp_path):
    def config(kwargs, **arguments):
        return GRPOConfig(output_dir=str(tmp_path), use_cpu=True, model_init_kwargs=kwargs, **arguments)

    kwargs = {"torch_dtype": torch.bfloat16}
    assert resolve_storage(config(kwargs)) == StorageFormat(32, 8)
    assert kwargs == {"torch_dtype": torch.bfloat16}
    for given in (kwargs, {**kwargs, "dtype": "bfloat16"}):
        assert str(config(given).model_init_kwargs["dtype"]).endswith("bfloat16")
        assert "torch_dtype" not in config(given).model_init_kwargs
    with pytest.raises(ArgumentError, match=r"weight_bits=32 .*'float32'"):
        resolve_storage(config({"torch_dtype": "float32"}, weight_bits=32))
    with pytest.raises(ArgumentError, match="dtype 'float32' and torch_dtype 'bfloat16'"):
        config({**kwargs, "dtype": "float32"})

"""Overridden methods: those that a trainer never calls raise when the class is defined, all others act."""

from __future__ import annotations

import inspect
from collections import Counter

import pytest
from transformers import Trainer

import lowpeak
from lowpeak.errors import ArgumentError
from lowpeak.trainers.overrides import uncalled_methods
from small_runs import DATA, KINDS, SAVED, make, rows
from trl_wheel import methods_of, needs_trl

ALL_KINDS = KINDS
# Called only on several devices, under adapters, with the hub, in a search, or by the user.
ELSEWHERE = {
    *("_defer_fsdp_gradient_reduction", "_has_mixed_mesh_grads", "_mixed_mesh_grad_norm", "_update_auto_batch_size"),
    *("_sync_replicated_trainable_parameters", "get_cp_size", "get_sp_size", "get_tp_size", "_finish_current_push"),
    *("_push_from_checkpoint", "init_hf_repo", "push_to_hub", "hyperparameter_search", "_hp_search_setup"),
    *("_report_to_hp_search", "_tune_save_checkpoint", "call_model_init", "pop_callback", "remove_callback"),
    *("_save_scaler", "_load_scaler", "_get_output_dir", "num_examples", "_move_model_to_device", "create_model_card"),
    *("_save", "store_flos", "metrics_format", "_load_best_model", "_issue_warnings_after_load"),
}


def define(kind, name, value=lambda self, *args: None):
    return type("Mine", (getattr(lowpeak, f"{kind}Trainer"),), {name: value})


@pytest.mark.parametrize(
    ("kind", "name", "place"),
    [
        ("GRPO", "compute_loss", "make_algorithm"),
        ("RLOO", "_compute_loss", "make_algorithm"),
        ("GRPO", "_get_per_token_logps_and_entropies", "make_algorithm"),
        ("SFT", "compute_loss", "make_algorithm"),
        ("GRPO", "_generate_and_score_completions", "rollout_func"),
        ("PPO", "_generate", "rollout_func"),
        ("GRPO", "_calculate_rewards", "reward function"),
        ("OnlineDPO", "prediction_step", "on_evaluate"),
        ("Reward", "evaluation_loop", "on_evaluate"),
        ("GRPO", "_prepare_inputs", "train_dataset"),
        ("SFT", "_prepare_dataset", "train_dataset"),
        ("GRPO", "_get_train_sampler", "shuffle_dataset"),
        ("GRPO", "get_train_dataloader", "train_dataset"),
        ("Reward", "_set_signature_columns_if_needed", "train_dataset"),
    ],
)
def test_a_method_that_would_never_be_called_raises_when_it_is_defined_with_the_place_for_it(kind, name, place):
    with pytest.raises(ArgumentError, match=rf"Mine .*{name}.*{kind}Trainer .*{place}"):
        define(kind, name)


def test_methods_of_mixins_count_and_helpers_of_ones_own_do_not():
    mixin = type("Mixin", (), {"compute_loss": lambda self: None})
    with pytest.raises(ArgumentError, match=r"Mixin .*compute_loss"):
        type("Mine", (mixin, lowpeak.GRPOTrainer), {})
    own = define("GRPO", "_my_helper")
    with pytest.raises(ArgumentError, match=r"Mine .*_prepare_inputs"):
        type("Mine", (own,), {"_prepare_inputs": lambda self: None})
    define("SFT", "_generate")  # TRL's SFTTrainer has none


def counting(base, calls):
    """A subclass that counts the calls of every method of transformers' Trainer, refused ones too."""

    def counted(name):
        def method(self, *args, **keywords):
            calls[name] += 1
            return getattr(super(mine, self), name)(*args, **keywords)

        return method

    names = [name for name, value in vars(Trainer).items() if inspect.isfunction(value) and name != "__init__"]
    mine = type(base.__name__, (base,), {name: counted(name) for name in names})
    return mine


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_a_refused_method_is_never_called_and_every_other_one_is(kind, tmp_path, monkeypatch):
    base, calls = getattr(lowpeak, f"{kind}Trainer"), Counter()
    monkeypatch.setattr("lowpeak.trainers.base.check_overrides", lambda *arguments: None)
    monkeypatch.setattr(lowpeak, f"{kind}Trainer", counting(base, calls), raising=False)
    data = DATA.get(kind, rows)()
    evaluated = {"eval_dataset": data, "eval_strategy": "steps", "eval_steps": 1, "load_best_model_at_end": True}
    evaluated["metric_for_best_model"] = "loss" if kind in (*DATA, "Distillation") else "reward"
    if kind == "SFT":
        evaluated["preprocess_logits_for_metrics"] = lambda logits, labels: logits.argmax(-1)
    run = make(kind, tmp_path, **SAVED, **evaluated)
    run.train()
    run.predict(data)
    run.save_model(tmp_path / "final")
    make(kind, tmp_path, **SAVED, **evaluated).train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    refused = uncalled_methods(base)
    # lowpeak calls its own data loader, of which it reads nothing.
    assert {name for name in refused if calls[name]} == {"get_train_dataloader"}
    methods = {name: value.__code__.co_names for name, value in vars(Trainer).items() if inspect.isfunction(value)}
    called = {name for names in methods.values() for name in names if name in methods}
    assert called - refused.keys() - ELSEWHERE - {"__init__"} <= {name for name in calls if calls[name]}


@needs_trl
@pytest.mark.parametrize("kind", [kind for kind in ALL_KINDS if kind != "PPO"])
def test_each_method_of_trls_trainers_is_refused_or_exists(kind):
    base = getattr(lowpeak, f"{kind}Trainer")
    # How weights reach vLLM is no place for a user's code.
    names = {name for name in methods_of(kind) - {"__init__"} if "_to_vllm" not in name}
    assert names - uncalled_methods(base).keys() <= set(dir(base))
    assert len(names) > 5

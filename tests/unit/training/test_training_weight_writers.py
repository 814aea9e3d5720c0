"""Code that writes trained weights brings or clears the bits beside them; exports and pushes are the bf16 weights as they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from safetensors.torch import load_file
from torch import Tensor

from lowpeak.optim.compact_adamw import find_compact
from lowpeak.parallel.checkpoint_state import trained_parameters
from small_runs import DATA, SAVED, make, same, trained, weights
from tiny_models import tiny_model

pytestmark = pytest.mark.extended

SYNC = {"beta": 0.1, "sync_ref_model": True, "ref_model_sync_steps": 1, "ref_model_mixup_alpha": 0.01}
BEST = {
    "eval_strategy": "steps", "eval_steps": 1, "load_best_model_at_end": True, "metric_for_best_model": "loss",
    "greater_is_better": True,
}  # fmt: skip


def wide(**changes: Any) -> torch.nn.Module:
    """A model whose matrices have 8-bit states."""
    return tiny_model(hidden=64, dtype=torch.bfloat16, **changes)


def lora() -> LoraConfig:
    return LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"], modules_to_save=["lm_head"])


def real_weights(run: Any) -> dict[str, Tensor]:
    optimizer = find_compact(run.optimizer)
    return {name: optimizer.read(p, "weight", 0, p.numel()) for name, p in trained_parameters(run.model).items()}


def have_low_bits(real: dict[str, Tensor]) -> bool:
    return any(not torch.equal(values, values.bfloat16().float()) for values in real.values())


def exported(folder: Path, name: str = "model.safetensors") -> dict[str, Tensor]:
    return load_file(folder / name)


# checkpoints


def test_a_checkpoint_brings_the_low_bits_of_modules_beside_an_adapter(tmp_path):
    settings = {**SAVED, "weight_bits": 32, "peft_config": lora()}
    run = trained("GRPO", tmp_path, wide(tied=False), **settings)
    dtypes = {"lora_" in name: p.dtype for name, p in trained_parameters(run.model).items()}
    assert dtypes == {True: torch.float32, False: torch.bfloat16}
    whole = real_weights(run)
    assert have_low_bits({name: values for name, values in whole.items() if "lora_" not in name})
    again = trained("GRPO", tmp_path, wide(tied=False), **settings, resume=tmp_path / "checkpoint-1")
    assert same(real_weights(again), whole)


# the best model


@pytest.mark.parametrize("only_model", [False, True], ids=["with states", "without states"])
def test_the_best_model_under_an_adapter_brings_or_clears_low_bits(tmp_path, only_model):
    whole = {"weight_bits": 32, "save_only_model": only_model, "peft_config": lora()}
    run = make("SFT", tmp_path, wide(tied=False), eval_dataset=DATA["SFT"](), **SAVED, **BEST, **whole)
    run.train()
    assert run.state.best_global_step == 1
    modules = {name: values for name, values in real_weights(run).items() if "lora_" not in name}
    assert have_low_bits(modules) == (not only_model)
    first = exported(tmp_path / "checkpoint-1", "adapter_model.safetensors")["base_model.model.lm_head.weight"]
    assert first.dtype == torch.bfloat16
    assert all(torch.equal(values.bfloat16(), first.flatten()) for values in modules.values())


@pytest.mark.parametrize("only_model", [False, True], ids=["with states", "without states"])
def test_the_best_model_brings_the_critics_weights_and_brings_or_clears_their_low_bits(tmp_path, only_model):
    best = {**BEST, "metric_for_best_model": "reward", "greater_is_better": False, "save_only_model": only_model}
    run = make(
        "PPO", tmp_path, wide(), eval_dataset=make("PPO", tmp_path / "x").train_dataset, **SAVED, **best, weight_bits=32
    )
    kept: dict[int, dict[str, Tensor]] = {}
    write = run.save_extra

    def keep(folder: Path) -> None:
        kept[run.state.global_step] = real_weights(run)
        write(folder)

    run.save_extra = keep
    run.train()
    found, at_best = real_weights(run), kept[run.state.best_global_step]
    assert any("critic" in name for name in found)
    if only_model:
        assert not have_low_bits(found)
        # The optimizer's low bits of a number round to its bf16; ties alone round otherwise.
        assert all(torch.equal(values.bfloat16(), bf16_of(at_best[name])) for name, values in found.items())
    else:
        assert have_low_bits(found)
        assert same(found, at_best)


def bf16_of(values: Tensor) -> Tensor:
    """The bf16 weights that the model runs with; ties are rounded away from zero."""
    return ((values.view(torch.int32) + 0x8000) >> 16).to(torch.int16).view(torch.bfloat16)


# the reference


def test_the_moving_average_is_bf16_leaves_the_policy_and_a_resumed_run_has_its_bits(tmp_path):
    run = {**SAVED, **SYNC, "max_steps": 3, "weight_bits": 32}
    whole = trained("GRPO", tmp_path, wide(), **run)
    again = trained("GRPO", tmp_path, wide(), **run, resume=tmp_path / "checkpoint-2")
    ours, theirs = (dict(each.run.reference.model.named_parameters()) for each in (again, whole))
    assert {p.dtype for p in theirs.values()} == {torch.bfloat16}
    assert same(ours, theirs)
    assert same(real_weights(again), real_weights(whole))
    assert not same(theirs, dict(wide().named_parameters())), "shares of 1 % arrive"
    before = real_weights(whole)
    whole.run.strategy.average(whole.run.reference.model, whole.model, 0.5, "0/reference/9")
    assert same(real_weights(whole), before)


# exports and pushes


@pytest.mark.parametrize(("kind", "weight_bits"), [("GRPO", 32), ("PPO", 24), ("SFT", 16)])
def test_exports_and_pushes_are_the_bf16_weights_that_the_model_runs_on(tmp_path, kind, weight_bits):
    critic = {"critic": "model"} if kind == "PPO" else {}
    run = trained(kind, tmp_path / "run", wide(), weight_bits=weight_bits, max_steps=1, **critic)
    run.save_model(str(tmp_path / "out"))
    policy = {name: values for name, values in weights(run).items() if "critic" not in name}
    assert same(exported(tmp_path / "out"), policy)
    if critic:
        own = {name.split("classifier.")[-1]: values for name, values in weights(run).items() if "critic" in name}
        assert same(exported(tmp_path / "out" / "critic"), own)
    loaded = type(run.model).from_pretrained(tmp_path / "out", dtype="auto")
    assert {p.dtype for p in loaded.parameters()} == {torch.bfloat16}
    for dtype in (None, torch.bfloat16):
        pushed: dict[str, list[Tensor]] = {}
        for piece in run.run.strategy.slices(run.model, 1 << 10, dtype):
            pushed.setdefault(piece.name, []).append(piece.values.clone())
        assert same(
            {name: torch.cat(parts) for name, parts in pushed.items()}, {k: v.flatten() for k, v in policy.items()}
        )


def test_whole_modules_leave_with_an_adapter_and_merged_as_their_bf16_weights(tmp_path):
    run = trained("GRPO", tmp_path / "run", wide(tied=False), weight_bits=32, peft_config=lora(), max_steps=1)
    run.save_model(str(tmp_path / "adapter"))
    run.save_merged_model(str(tmp_path / "merged"))
    (head,) = (values for name, values in weights(run).items() if "modules_to_save" in name)
    assert head.dtype == torch.bfloat16
    of_adapter = exported(tmp_path / "adapter", "adapter_model.safetensors")["base_model.model.lm_head.weight"]
    assert torch.equal(of_adapter, head)
    assert torch.equal(exported(tmp_path / "merged")["lm_head.weight"], head)

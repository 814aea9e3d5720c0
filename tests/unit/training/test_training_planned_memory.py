"""A run's plan of its memory, made by another process, beside what is measured in the journal."""

from __future__ import annotations

import logging
import time
from typing import Any

import pytest
import torch
from peft import LoraConfig
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from lowpeak.memory.usage import Kind
from lowpeak.plan.plan import make_plan
from lowpeak.plan.plan_process import planned_request
from lowpeak.sizes.planned_memory import run_description
from small_runs import journal, make, rows, saved, trained
from tiny_models import tiny_model

pytestmark = pytest.mark.processes
LIMIT = 240  # seconds for a process that imports torch on a busy machine


def planned(trainer: Any, values: dict[str, float] | None = None) -> dict[str, float]:
    """The plan's numbers of a step's row, when its process has ended."""
    plan, stop = trainer.run.planned, time.monotonic() + LIMIT
    while not (row := plan.row(values or {})):
        assert time.monotonic() < stop, "the planning process did not end"
        time.sleep(0.2)
    return row


def test_the_plan_is_of_the_runs_phases_and_a_phase_far_beyond_it_is_named_once(tmp_path, caplog):
    trainer = make("GRPO", tmp_path, plan_memory=True)
    try:
        row = planned(trainer)
        phases = {name.removeprefix("planned_memory/") for name in row} - {"memory_limit"}
        assert phases >= {"sync", "rollout", "train", "optimizer", "save"}
        assert 0 < max(row[f"planned_memory/{phase}"] for phase in phases) < row["memory_limit"]
        with caplog.at_level(logging.WARNING):
            for factor in (1.05, 1.2, 1.3):
                planned(trainer, {"peak_memory/train": factor * row["planned_memory/train"]})
        (message,) = [record.getMessage() for record in caplog.records if "planned" in record.getMessage()]
        assert "train" in message
    finally:
        trainer.run.planned.close()


@pytest.mark.extended
def test_a_quantised_bases_planned_bytes_are_those_of_its_parameters(tmp_path):
    pytest.importorskip("bitsandbytes")
    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.float32)
    model = AutoModelForCausalLM.from_pretrained(
        saved(tmp_path / "base", tiny_model(hidden=64).bfloat16()), quantization_config=config
    )
    lora = LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear")
    trainer = make("GRPO", tmp_path / "run", model, peft_config=lora)
    described = run_description(trainer, trainer.model, trainer.run.strategy, 1 << 30, trainer.run.sizes.as_dict())
    assert described.quantized_bits == 4
    assert getattr(described.config, "quantization_config", None) is None
    frozen = sum(p.nbytes for p in trainer.model.parameters() if not p.requires_grad)
    assert make_plan(planned_request(described)).counts.frozen_bytes == frozen


@pytest.mark.parametrize("kind", ["live", "ema"])
def test_a_teacher_of_the_policys_own_is_planned_as_it_is(tmp_path, kind):
    data = rows().add_column("privileged_context", ["1"] * len(rows()))
    own = {"teacher_model": None, "teacher_model_kind": kind, "data": data}
    trainer = make("Distillation", tmp_path, **own)
    described = run_description(trainer, trainer.model, trainer.run.strategy, 1 << 30, trainer.run.sizes.as_dict())
    frozen = make_plan(planned_request(described)).phases["score"].device.get(Kind.FROZEN, 0)
    weights = 0 if kind == "live" else sum(parameter.nbytes for parameter in trainer.teacher_model.parameters())
    assert frozen == pytest.approx(weights, rel=0.001)


def test_the_planning_process_ends_with_the_run(tmp_path):
    trainer = trained("GRPO", tmp_path, max_steps=2, plan_memory=True)
    assert len(journal(tmp_path)) == 2
    assert trainer.run.planned._process.poll() is not None


def test_a_run_on_a_cpu_is_planned_only_if_it_is_asked_for(tmp_path):
    assert trained("SFT", tmp_path, max_steps=1).run.planned is None

"""Checks of one model family: a GRPO step and generation against plain forwards of each sequence by itself, and LoRA."""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from peft import LoraConfig
from torch import nn
from transformers import AutoModelForCausalLM, TrainerCallback

from lowpeak.arguments.grpo import resolve_grpo
from lowpeak.arguments.sampling import Sampling
from lowpeak.models.lora import expert_parameters
from lowpeak.models.sharded_loading import auto_class
from lowpeak.records import Prompt
from lowpeak.rollout.native.engine import NativeEngine, needs_equal_lengths, unsupported_reason
from model_families import FAMILIES, is_known, make_family
from naive_losses import Row, plain_grpo
from small_runs import TOKENIZER, make, saved, spread

LIMITS = {"score": 1e-5, "sample": 2e-4, "gradient": 5e-5, "greedy": 2e-3, "reload": 0.0}
# What transformers does at loading, not lowpeak.
REMARKS = {"Youtu": ("reload", "yes; transformers loads the padding's row of its tied embedding as zeros")}
PROMPTS = [(2, 3, 4, 5, 6, 7, 8), (9, 9), (4, 5, 6), (11, 10, 9, 8, 7, 6, 5, 4, 3), (7,), (10, 2, 12, 3, 5)]
TEMPERATURE = 0.9
# What transformers before 5.23 does wrong.
GENERATION_FAILS = {"Falcon-H1": "generate() raises on padded prompts"}
TRAINING_FAILS = {**GENERATION_FAILS, "CWM": "its config refuses a tokenizer without a beginning-of-sequence token"}
RUN: dict[str, Any] = {
    "beta": 0.1, "num_iterations": 2, "temperature": TEMPERATURE, "learning_rate": 5e-4, "micro_batch_tokens": 160,
    "max_completion_length": 12, "max_grad_norm": 1e9, "router_aux_loss_coef": 0.0, "reward_funcs": spread,
}  # fmt: skip


@dataclass
class FamilyReport:
    """What a family does: its generation path and layout, the largest errors, and problems and remarks in words."""

    generation: str = ""
    layout: str = ""
    errors: dict[str, float] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    lora: str = ""

    def add(self, name: str, error: float) -> None:
        self.errors[name] = max(self.errors.get(name, 0.0), error if math.isfinite(error) else math.inf)

    def too_large(self) -> list[str]:
        return [f"{name} differs by {error:.1e}" for name, error in self.errors.items() if error > LIMITS[name]]


def skip_unsupported(family: str, fails_before_5_23: Mapping[str, str]) -> None:
    if not is_known(family):
        pytest.skip(f"this transformers has no {FAMILIES[family][0]}")
    if family in fails_before_5_23 and Version(transformers.__version__) < Version("5.23"):
        pytest.skip(fails_before_5_23[family])


def check_family(family: str, folder: Path) -> FamilyReport:
    """Train, generate, save and adapt a random model of the family."""
    report = FamilyReport()
    name = saved(folder / "model", make_family(family))
    comparison = Comparison(name, report)
    trainer = make("GRPO", folder / "run", name, callbacks=[comparison], **RUN)
    comparison.trainer = trainer
    report.layout = trainer.run.sizes.layout_choice.layout
    check_greedy_tokens(comparison.plain_model(), report)
    trainer.train()
    trainer.save_model(str(folder / "saved"))
    again = load(str(folder / "saved"))
    for key, tensor in trainer.model.state_dict().items():
        report.add("reload", float((tensor - again.state_dict()[key]).abs().max()))
    check_adapter(name, folder, report)
    if family in REMARKS:
        number, remark = REMARKS[family]
        assert report.errors.pop(number) > LIMITS[number]
        report.remarks.append(remark)
    report.problems += report.too_large()
    return report


def load(name: str) -> nn.Module:
    from transformers import AutoConfig

    auto = auto_class(AutoModelForCausalLM, AutoConfig.from_pretrained(name))
    return auto.from_pretrained(name, dtype=torch.float32).eval()


def logprobs_alone(model: nn.Module, record: Any) -> torch.Tensor:
    """The log-probs of a record's completion, by a plain forward of its sequence."""
    ids, start = torch.tensor([[*record.prompt_ids, *record.completion.ids.tolist()]]), len(record.prompt_ids)
    logits = model(input_ids=ids, use_cache=False).logits[0, start - 1 : -1].float() / TEMPERATURE
    return logits.log_softmax(-1).gather(-1, ids[0, start:, None])[:, 0]


def balance_alone(model: Any, records: Any) -> torch.Tensor:
    """The model's own load-balancing loss, of the tokens of all sequences from which a token is predicted."""
    layers: list[tuple[torch.Tensor, ...]] = []
    for record in records:
        ids = torch.tensor([[*record.prompt_ids, *record.completion.ids.tolist()]])
        logits = model(input_ids=ids, use_cache=False, output_router_logits=True).router_logits
        layers.append(tuple(layer.flatten(0, -2)[:-1] for layer in logits))
    logits = tuple(torch.cat(parts) for parts in zip(*layers, strict=True))
    loss = sys.modules[type(model).__module__].load_balancing_loss_func
    return loss(logits, logits[0].shape[-1], model.config.get_text_config().num_experts_per_tok)


class Comparison(TrainerCallback):
    """Compares, before each optimizer step, log-probs and gradient with those of plain forwards in eval mode."""

    def __init__(self, name: str, report: FamilyReport) -> None:
        self.name, self.report = name, report
        self.trainer: Any = None

    def plain_model(self) -> nn.Module:
        return load(self.name)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.trainer.steps_used == 1:
            self._compare_logprobs(self.plain_model(), self.trainer.rollout.records)
        _, expected = self.plain_pass(args)
        self.report.add("gradient", distance(gradients(self.trainer.model), expected))

    def plain_pass(self, args: Any, bf16: bool = False) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return the log-probs of all completions by plain forwards with the trainer's weights, and the step's gradients."""
        model, rows = self.plain_model(), []
        model.load_state_dict(self.trainer.model.state_dict())
        for record in self.trainer.rollout.records:
            with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
                logprobs = logprobs_alone(model, record)
            old = logprobs.detach() if record.old is None else record.old
            mask = torch.ones_like(logprobs)
            rows.append(Row(logprobs, None, old, record.reference, mask, float(record.advantages[0])))
        self.expected_loss(model, rows, args).backward()
        return torch.cat([row.logprobs.detach() for row in rows]), gradients(model)

    def expected_loss(self, model: nn.Module, rows: list[Row], args: Any) -> torch.Tensor:
        loss = plain_grpo(resolve_grpo(args, self.trainer.parts.settings), rows)
        if args.router_aux_loss_coef:
            loss = loss + args.router_aux_loss_coef * balance_alone(model, self.trainer.rollout.records)
        return loss

    @torch.no_grad()
    def _compare_logprobs(self, model: nn.Module, records: Any) -> None:
        for record in records:
            logprobs = logprobs_alone(model, record)  # of the policy and of the reference, which are equal so far
            self.report.add("sample", float((record.completion.logprobs - logprobs).abs().max()))
            for scored in (record.old, record.reference):
                self.report.add("score", float((scored - logprobs).abs().max()))


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {key: p.grad for key, p in model.named_parameters() if p.grad is not None}


def distance(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """The norm of a difference, relative to that of what is expected."""
    zero = torch.zeros(())
    difference = sum(
        float((found.get(key, zero) - expected.get(key, zero)).double().square().sum()) for key in {*expected, *found}
    )
    return math.sqrt(difference / sum(float(gradient.double().square().sum()) for gradient in expected.values()))


@torch.no_grad()
def check_greedy_tokens(model: nn.Module, report: FamilyReport) -> None:
    """Compare greedy tokens with plain forwards: how far each token's logit is below the largest."""
    report.generation = "equal" if needs_equal_lengths(model) else "generate"
    if unsupported_reason(model) is None:
        report.generation = "loop"
    engine = NativeEngine(lambda: contextlib.nullcontext(model), TOKENIZER, lambda: 1 << 24)
    engine.load([], 0)
    prompts = [Prompt(i, ids, "") for i, ids in enumerate(PROMPTS)]
    for group in engine.generate(prompts, Sampling(num_generations=2, max_new_tokens=12, temperature=0.0)):
        for completion in group.completions:
            ids = torch.tensor([[*group.prompt.ids, *completion.ids.tolist()]])
            logits = model(input_ids=ids, use_cache=False).logits[0, len(group.prompt.ids) - 1 : -1].float()
            chosen = logits.gather(-1, completion.ids.long()[:, None])[:, 0]
            report.add("greedy", float((logits.amax(-1) - chosen).max()))


def check_adapter(name: str, folder: Path, report: FamilyReport) -> None:
    """Train a LoRA adapter on all linear layers."""
    config = LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM")
    trainer = make("GRPO", folder / "lora", name, peft_config=config, **{**RUN, "beta": 0.0, "max_steps": 1})
    trainer.train()
    moved = [key for key, p in trainer.model.named_parameters() if "lora_B" in key and bool(p.any())]
    report.lora = "without experts" if expert_parameters(trainer.model) else "yes"
    if not moved:
        report.problems.append("no adapter moved")

"""Variants of a family's training: recomputed layers, plain rows, other windows, adapted experts, and PPO with a critic."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Any

import torch
from family_checks import PROMPTS, RUN, Comparison, FamilyReport, check_greedy_tokens, load
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from torch import nn
from transformers import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING, AutoModelForSequenceClassification

from lowpeak.arguments.sampling import Sampling
from lowpeak.models.lora import expert_parameters
from lowpeak.records import Prompt
from lowpeak.rollout.native.cache_bytes import sequence_bytes
from lowpeak.rollout.native.engine import NativeEngine, unsupported_reason
from model_families import make_config, make_family
from small_runs import TOKENIZER, make, saved

ONE_STEP = {**RUN, "max_steps": 1}
NARROW, WIDE = 2, 64  # of windows; the longest text has 21 tokens
VARIANTS: dict[str, tuple[int, dict[str, Any]]] = {
    "recomputed": (NARROW, {"gradient_checkpointing": True}),
    "rows": (WIDE, {"share_prompt": False}),
}


def check_variant(family: str, variant: str, folder: Path) -> FamilyReport:
    """Train and generate with a window of another size if the family has one, and with the loss of its experts' balance."""
    window, settings = VARIANTS[variant]
    has_window = getattr(make_config(family).get_text_config(), "sliding_window", None) is not None
    model, report = make_family(family, **({"sliding_window": window} if has_window else {})), FamilyReport()
    balance = 0.5 if hasattr(sys.modules[type(model).__module__], "load_balancing_loss_func") else 0.0
    train(model, folder, report, **{**ONE_STEP, **settings, "router_aux_loss_coef": balance})
    if has_window or variant == "recomputed":
        check_greedy_tokens(model, report)
        check_few_slots(model, report)
    report.problems += report.too_large()
    return report


def train(model: nn.Module, folder: Path, report: FamilyReport, **settings: Any) -> Any:
    name = saved(folder / "model", model)
    comparison = Comparison(name, report)
    trainer = make("GRPO", folder / "run", name, callbacks=[comparison], **settings)
    comparison.trainer = trainer
    trainer.train()
    report.layout = trainer.run.sizes.layout_choice.layout
    return trainer


@torch.no_grad()
def check_few_slots(model: nn.Module, report: FamilyReport) -> None:
    """Compare greedy tokens with three slots and with slots for all sequences."""
    if unsupported_reason(model) is not None:
        return
    prompts, tokens = [Prompt(i, ids, "") for i, ids in enumerate(PROMPTS)], []
    for kv_cache_bytes in (1 << 24, 3 * sequence_bytes(model, 9 + 12)):
        engine = NativeEngine(lambda: contextlib.nullcontext(model), TOKENIZER, lambda size=kv_cache_bytes: size)
        engine.load([], 0)
        groups = engine.generate(prompts, Sampling(num_generations=2, max_new_tokens=12, temperature=0.0))
        tokens.append([completion.ids.tolist() for group in groups for completion in group.completions])
    if tokens[0] != tokens[1]:
        report.problems.append("few slots give other tokens")


def has_classifier(family: str) -> bool:
    return type(make_config(family)) in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING


class CriticComparison(Comparison):
    """Compares a PPO step with a separate critic, whose values and rewards are plain forwards of classifiers.

    Their differences are relative to the largest value.
    """

    def plain_model(self) -> nn.Module:
        model = super().plain_model()
        model.critic = nn.Module()
        model.critic.classifier = load_classifier(f"{self.name}-classifier")
        return model

    def expected_loss(self, model: Any, rows: Any, args: Any) -> torch.Tensor:
        losses = []
        for record, row in zip(self.trainer.rollout.records, rows, strict=True):
            ratio_T, values_T = (row.logprobs - record.old).exp(), values_alone(model, record)
            clipped_T = record.values + (values_T - record.values).clamp(-0.2, 0.2)
            surrogate_T = torch.minimum(ratio_T * record.advantages, ratio_T.clamp(0.8, 1.2) * record.advantages)
            errors_T = torch.maximum((values_T - record.returns) ** 2, (clipped_T - record.returns) ** 2)
            losses.append(0.5 * errors_T - surrogate_T)
        return torch.cat(losses).mean()

    @torch.no_grad()
    def _compare_logprobs(self, model: Any, records: Any) -> None:
        super()._compare_logprobs(model, records)
        values = [values_alone(model, record) for record in records]
        size = max(1.0, float(torch.cat(values).abs().max()))
        for record, values_T in zip(records, values, strict=True):
            self.report.add("score", float((record.values - values_T).abs().max()) / size)
            text = TOKENIZER.decode([*record.prompt_ids, *record.completion.ids], skip_special_tokens=True)
            reward = model.critic.classifier(input_ids=torch.tensor([TOKENIZER(text)["input_ids"]])).logits[0, 0]
            self.report.add("score", abs(record.reward - float(reward)) / size)


def load_classifier(name: str) -> Any:
    return AutoModelForSequenceClassification.from_pretrained(name, dtype=torch.float32).eval()


def values_alone(model: Any, record: Any) -> torch.Tensor:
    classifier = model.critic.classifier
    ids = torch.tensor([[*record.prompt_ids, *record.completion.ids.tolist()]])
    hidden = classifier.base_model(input_ids=ids, use_cache=False)[0]
    return classifier.score(hidden)[0, len(record.prompt_ids) - 1 : -1, 0]


def check_critic(family: str, folder: Path) -> FamilyReport:
    """Train a step of PPO with a separate critic and a reward model of the family."""
    report, name = FamilyReport(), saved(folder / "model", make_family(family))
    classifier = make_family(family, seed=5, auto=AutoModelForSequenceClassification, num_labels=1)
    saved(Path(f"{name}-classifier"), classifier)
    comparison = CriticComparison(name, report)
    settings = {**ONE_STEP, "vf_coef": 1.0, "epsilon": 0.2, "reward_funcs": f"{name}-classifier"}
    changes = {"critic": "model", "value_model_path": f"{name}-classifier", "callbacks": [comparison]}
    comparison.trainer = make("PPO", folder / "run", name, **settings, **changes)
    report.layout = comparison.trainer.run.sizes.layout_choice.layout
    comparison.trainer.train()
    report.problems += report.too_large()
    return report


class AdapterComparison(Comparison):
    """Compares the gradients of an adapter with those of peft on the plain model."""

    def __init__(self, name: str, report: FamilyReport, config: LoraConfig) -> None:
        super().__init__(name, report)
        self.config = config

    def plain_model(self) -> nn.Module:
        return get_peft_model(load(self.name), self.config).eval()


def check_adapted_experts(family: str, folder: Path) -> FamilyReport:
    """Train an adapter on a mixture's experts, save it, load it, and turn it off."""
    model, report = make_family(family), FamilyReport()
    name = saved(folder / "model", model)
    config = LoraConfig(
        r=2, target_modules=["q_proj"], target_parameters=sorted(expert_parameters(model)), task_type="CAUSAL_LM"
    )
    comparison = AdapterComparison(name, report, config)
    trainer = make(
        "GRPO", folder / "run", name, peft_config=config, callbacks=[comparison], **{**RUN, "learning_rate": 1e-2}
    )
    comparison.trainer = trainer
    trainer.train()
    report.layout = trainer.run.sizes.layout_choice.layout
    trainer.save_model(str(folder / "saved"))
    experts = [p for key, p in trainer.model.named_parameters() if "experts" in key and "lora_B" in key]
    if not experts or not all(parameter.any() for parameter in experts):
        report.problems.append("an expert's adapter did not move")
    again = PeftModel.from_pretrained(load(name), str(folder / "saved")).eval()
    ids, adapted, base = torch.tensor([PROMPTS[0]]), trainer.model.eval(), load(name)
    found = get_peft_model_state_dict(again)
    for key, tensor in get_peft_model_state_dict(adapted).items():
        report.add("reload", float((tensor - found[key]).abs().max()))
    with torch.no_grad(), adapted.disable_adapter():
        report.add("score", float((base(input_ids=ids).logits - adapted(input_ids=ids).logits).abs().max()))
    report.problems += report.too_large()
    return report

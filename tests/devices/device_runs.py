"""Runs of every kind, all on the CPU in one process and all on the second device in another."""

from __future__ import annotations

import asyncio
import hashlib
import importlib
import json
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import second_device
import torch
from accelerate.state import AcceleratorState, PartialState
from datasets import Dataset
from peft import LoraConfig
from torch import nn
from transformers import MistralConfig, MistralForCausalLM

import lowpeak
from preference_data import ScriptedJudge, tiny_classifier
from tiny_models import char_tokenizer, digest, tiny_model, trained_adapter

TOKENIZER = char_tokenizer()
LORA = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "up_proj"])
SMALL: dict[str, Any] = {
    "use_cpu": True, "report_to": "none", "disable_tqdm": True, "learning_rate": 1e-2, "logging_steps": 1, "max_steps": 2,
    "per_device_train_batch_size": 8, "save_strategy": "no", "micro_batch_tokens": 48,
}  # fmt: skip
ONLINE: dict[str, Any] = {"num_generations": 4, "max_completion_length": 5, "kv_cache_bytes": 1 << 20}
CLASSES = {
    "grpo": (lowpeak.GRPOConfig, lowpeak.GRPOTrainer),
    "rloo": (lowpeak.RLOOConfig, lowpeak.RLOOTrainer),
    "ppo": (lowpeak.PPOConfig, lowpeak.PPOTrainer),
    "online_dpo": (lowpeak.OnlineDPOConfig, lowpeak.OnlineDPOTrainer),
    "distillation": (lowpeak.DistillationConfig, lowpeak.DistillationTrainer),
    "sft": (lowpeak.SFTConfig, lowpeak.SFTTrainer),
    "reward": (lowpeak.RewardConfig, lowpeak.RewardTrainer),
}
# What differs between two runs of the same numbers: time and memory.
_MEASURED = (
    "time/", "peak_memory/", "reserved_memory/", "step_time", "tokens_per_second", "train_", "eval_runtime",
    "eval_samples_per", "offload/",
)  # fmt: skip


def spread(completions: list[str], **columns: Any) -> list[float]:
    return [len(set(text)) / 5 + len(text) / 50 for text in completions]


async def waiting(completions: list[str], **columns: Any) -> list[float | None]:
    await asyncio.sleep(0)
    return [None if text.startswith("7") else -0.1 * len(text) for text in completions]


def judge() -> ScriptedJudge:
    return ScriptedJudge(lambda prompt, text: spread([text])[0])


def reward_model() -> dict[str, Any]:
    return {
        "reward_funcs": tiny_classifier(seed=5, hidden_size=128, intermediate_size=256),
        "reward_processing_classes": TOKENIZER,
    }


def sliding(**settings: Any) -> nn.Module:
    """A model whose layers attend to a window."""
    torch.manual_seed(0)
    config = MistralConfig(
        vocab_size=13, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=64, sliding_window=4, initializer_range=0.2, pad_token_id=0, eos_token_id=1, bos_token_id=None,
        max_position_embeddings=128, **settings,
    )  # fmt: skip
    return MistralForCausalLM(config).eval()


def refused() -> nn.Module:
    """A model that packed rows and the decode loop refuse, for a setting that its family does not read."""
    return sliding(attn_temperature_tuning=True)


def wide() -> nn.Module:
    return tiny_model(hidden=128)


def deep() -> nn.Module:
    return tiny_model(hidden=128, layers=4)


def generate(prompts: list[str], trainer: Any) -> dict[str, list[Any]]:
    ids = [[2 + (i * 7 + len(prompt)) % 9, 3, 5, TOKENIZER.eos_token_id] for i, prompt in enumerate(prompts)]
    return {
        "prompt_ids": [TOKENIZER(prompt)["input_ids"] for prompt in prompts],
        "completion_ids": ids,
        "logprobs": [[-1.5] * len(row) for row in ids],
        "env_mask": [[1, 1, 0, 1] for _ in ids],
    }


@dataclass(frozen=True)
class Case:
    """A run: `args` on both devices, `device_args` on the second alone; `parts` makes more arguments of the trainer."""

    trainer: str = "grpo"
    args: Mapping[str, Any] = field(default_factory=dict)
    device_args: Mapping[str, Any] = field(default_factory=dict)
    model: Callable[[], nn.Module] = tiny_model
    parts: Callable[[], dict[str, Any]] = lambda: {}
    by_path: bool = False  # the model is saved first, and loaded as users load theirs
    resumes: bool = False  # from step 3 of 4, in the middle of a rollout
    exports: bool = False  # save_model, and save_merged_model under an adapter

    def settings(self) -> dict[str, Any]:
        online = ONLINE if self.trainer not in ("sft", "reward") else {}
        chunked = {} if self.trainer == "reward" else {"logprob_chunk_size": 16}
        resuming = {"max_steps": 4, "save_strategy": "steps", "save_steps": 3} if self.resumes else {}
        return {**SMALL, **chunked, **online, **resuming, **self.args}


def adapter() -> dict[str, Any]:
    return {"peft_config": LORA}


def teacher() -> dict[str, Any]:
    return {"teacher_model": tiny_model(seed=7)}


def reference() -> dict[str, Any]:
    return {"ref_model": tiny_model(seed=7)}


TWICE = {"num_iterations": 2}
EACH_STEP = {"eval_strategy": "steps", "eval_steps": 1}
KL = {"beta": 0.1, **TWICE}
AWAY = {"offload_during_rollout": True}
FROZEN_AWAY = {"offload_frozen_models": True}
ACTIVATIONS_AWAY = {"activation_offloading": True}
MANY = {"per_device_train_batch_size": 32, "micro_batch_tokens": 512}  # tokens, for activations that are worth a copy
FILTERED = {"top_k": 6, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.1}
FILTERED["generation_kwargs"] = {"stop_strings": ["="]}
ALGORITHMS: dict[str, Case] = {
    "grpo": Case(args={"loss_type": "grpo", "num_generations_eval": 2, **EACH_STEP, **TWICE}),
    "grpo dapo": Case(args={"loss_type": "dapo", **TWICE}),
    "grpo cispo": Case(args={"loss_type": "cispo", "epsilon_high": 5.0, **TWICE}),
    "grpo of sequences (GSPO)": Case(args={"importance_sampling_level": "sequence", **TWICE}),
    "grpo, two-sided, entropy of tokens": Case(args={"delta": 2.0, "top_entropy_quantile": 0.5, **TWICE}),
    "grpo, adaptive entropy bonus": Case(args={"use_adaptive_entropy": True, "entropy_coef": 0.1, **TWICE}),
    "grpo, dynamic sampling": Case(args={"dynamic_sampling_rounds": 1, "mask_truncated_completions": True}),
    "grpo, filtered sampling": Case(args=FILTERED),
    "grpo, rows side by side": Case(args={"padding_free": False, **KL}),
    "grpo, rows one after another": Case(args={"share_prompt": False, **KL}),
    "grpo, prompts shared": Case(args={"share_prompt": True, **KL}),
    "grpo, a sliding window": Case(args=KL, model=sliding),
    "grpo, without checkpointing": Case(args={"gradient_checkpointing": False}),
    "rloo, normalised": Case("rloo", args={"normalize_advantages": True, "beta": 0.0, **TWICE}),
    "ppo, a head": Case("ppo", args={"critic": "head", **EACH_STEP, **KL}),
    "ppo, a model": Case("ppo", args={"critic": "model", **KL}),
    "ppo, an adapter": Case("ppo", args={"critic": "adapter", **KL}, parts=adapter),
    "distillation": Case("distillation", args={"beta": 0.5, "micro_batch_tokens": 24, **EACH_STEP}, parts=teacher),
    "online dpo, ipo": Case("online_dpo", args={"loss_type": "ipo"}),
    "sft": Case("sft", args=EACH_STEP, exports=True),
    "sft, an adapter": Case("sft", parts=adapter, exports=True),
    "reward": Case("reward", args=EACH_STEP, model=tiny_classifier, exports=True),
    "reward, an adapter": Case(
        "reward",
        model=tiny_classifier,
        parts=lambda: {"peft_config": LoraConfig(r=4, target_modules=["q_proj"], task_type="SEQ_CLS")},
    ),
}
PARTS: dict[str, Case] = {
    "a model by its path": Case(args={"model_init_kwargs": {"dtype": "bfloat16"}, **KL}, by_path=True),
    "rewards: two, one async": Case(
        parts=lambda: {"reward_funcs": [spread, waiting]}, args={"reward_weights": [1.0, 0.5]}
    ),
    "rewards: a model": Case(parts=reward_model),
    "rewards: a judge": Case("online_dpo", parts=lambda: {"reward_funcs": None, "judge": judge()}),
    "a function generates": Case(parts=lambda: {"rollout_func": generate}),
    "reference: ref_model": Case(args=KL, parts=reference),
    "reference: the adapter off": Case(args=KL, parts=adapter, exports=True),
    "reference: the trained adapter's copy": Case(
        args=KL, model=lambda: trained_adapter(tiny_model(), LORA), exports=True
    ),
    "reference: a moving average": Case(args={"sync_ref_model": True, "ref_model_sync_steps": 1, **KL}),
}
OFFLOADS: dict[str, Case] = {
    "during the rollout, a reference": Case(args={"beta": 0.1}, device_args=AWAY, model=wide),
    "during the rollout, a reward model": Case(device_args=AWAY, model=wide, parts=reward_model),
    "during the rollout, ppo": Case("ppo", args={"critic": "model", "num_iterations": 1}, device_args=AWAY, model=wide),
    "frozen models, a reference": Case(args=KL, device_args=FROZEN_AWAY, model=deep),
    "frozen models, a teacher": Case("distillation", device_args=FROZEN_AWAY, parts=lambda: {"teacher_model": deep()}),
    "frozen models, a reward model": Case(args=KL, device_args=FROZEN_AWAY, model=deep, parts=reward_model),
    "activations, grpo": Case(args={**KL, **MANY}, device_args=ACTIVATIONS_AWAY, model=wide),
    "activations, all of them": Case(
        args={"gradient_checkpointing": False, **MANY}, device_args=ACTIVATIONS_AWAY, model=wide
    ),
    "activations, sft": Case("sft", args=MANY, device_args=ACTIVATIONS_AWAY, model=wide),
}
# On the CPU gradients are summed in fp32 beside the weights, on the second device in host memory.
FP32_SUMS = {"weight_bits": 32, "gradient_bits": 32, **MANY, "max_grad_norm": 0.01}
OPTIMIZER_AWAY = {"offload_optimizer": True}
OFFLOADS |= {
    "the optimizer, grpo": Case(args={**FP32_SUMS, **KL}, device_args=OPTIMIZER_AWAY, model=wide),
    "the optimizer, grpo with 24 bits": Case(
        args={**FP32_SUMS, "weight_bits": 24, "state_bits": 32}, device_args=OPTIMIZER_AWAY, model=wide
    ),
    "the optimizer, ppo": Case("ppo", args={"critic": "head", **FP32_SUMS}, device_args=OPTIMIZER_AWAY, model=wide),
    "the optimizer, an adapter": Case(
        "sft", args={"state_bits": 32}, device_args=OPTIMIZER_AWAY, parts=adapter, exports=True
    ),
}
RESUMED: dict[str, Case] = {
    "the optimizer in host memory": Case(
        args={**FP32_SUMS, **KL}, device_args=OPTIMIZER_AWAY, model=wide, resumes=True, exports=True
    ),
    "an adapter": Case(args=KL, resumes=True, parts=adapter),
    "a moving average": Case("rloo", args={"sync_ref_model": True, "ref_model_sync_steps": 1, **TWICE}, resumes=True),
    "ppo": Case("ppo", args={"critic": "model", **KL}, resumes=True, exports=True),
}
CASES = {
    f"{kind}: {name}": case
    for kind, cases in {"algorithms": ALGORITHMS, "parts": PARTS, "offloads": OFFLOADS, "resumed": RESUMED}.items()
    for name, case in cases.items()
}


def build(case: Case, folder: Path, device: torch.device | None) -> Any:
    """The trainer of a case on the CPU, or on `device`."""
    AcceleratorState._reset_state(reset_partial_state=True)
    config, trainer = CLASSES[case.trainer]
    settings = case.settings() | (dict(case.device_args) if device is not None else {})
    args = config(output_dir=str(folder), **settings)
    if device is not None:  # accelerate finds no device that it does not know by name
        args.device  # noqa: B018
        PartialState._shared_state["device"] = torch.device(device.type)  # as in a single process, without the index
        args.__dict__["_setup_devices"] = device
    given = {
        "model": _saved(case.model(), folder / "model") if case.by_path else case.model(),
        "args": args,
        "train_dataset": _data(case, 16),
        "processing_class": TOKENIZER,
        **({"reward_funcs": spread} if case.trainer not in ("sft", "reward") else {}),
        **case.parts(),
    }
    if "eval_strategy" in settings:
        given["eval_dataset"] = _data(case, 4)
    return trainer(**given)


def _saved(model: Any, folder: Path) -> str:
    model.save_pretrained(folder)
    return str(folder)


def _data(case: Case, count: int) -> Dataset:
    prompts = [f"{i % 10}{(i * 7) % 10}=" for i in range(count)]
    more = {
        "sft": lambda p: {"completion": p[:2]},
        "reward": lambda p: {"chosen": p[0] * 2, "rejected": p[1]},
    }.get(case.trainer, lambda p: {})
    return Dataset.from_list([{"prompt": prompt, **more(prompt)} for prompt in prompts])


# what a run comes to


def run(case: Case, folder: Path, device: torch.device | None = None) -> dict[str, Any]:
    """Run a case; weights, log, files and, where it resumes, the end of the second run."""
    trainer = build(case, folder, device)
    second_device.ledger.place = lambda: trainer.run.tracker.current_phase
    second_device.ledger.clear()
    trainer.train()
    ledger = second_device.ledger
    crossed = {name: dict(getattr(ledger, name)) for name in ("reads", "lines", "waits", "downloaded", "uploaded")}
    reference = getattr(trainer.run.reference, "model", None)
    found = {
        "weights": digest(trainer.model),
        "reference": None if reference is None else digest(reference),
        "logs": [without_measures(row) for row in trainer.state.log_history],
        "steps": trainer.state.global_step,
        "devices": sorted({p.device.type for p in trainer.model.parameters()}),
        "offloaded": [row["offload/bytes"] for row in trainer.state.log_history if "offload/bytes" in row],
        "crossed": crossed,
    }
    if case.exports:
        found["files"] = exported(trainer, folder / "export")
    if case.resumes:
        again = build(case, folder, device)
        again.train(resume_from_checkpoint=str(folder / "checkpoint-3"))
        found["resumed"] = digest(again.model)
    return found


def run_on_cpu(names: list[str], place: Path) -> None:
    """Run cases on the CPU, without a CPU's bf16 units, whose products no other device has."""
    torch.ops.mkldnn._is_mkldnn_bf16_supported = lambda: False
    _run_all(names, place / "cpu", None)


def run_on_twin(names: list[str], place: Path) -> None:
    _run_all(names, place / "twin", twin())


def _run_all(names: list[str], place: Path, device: torch.device | None) -> None:
    found = {}
    for name in names:
        try:
            found[name] = run(CASES[name], place / name, device)
        except Exception:
            found[name] = {"error": traceback.format_exc()}
    (place / "found.json").write_text(json.dumps(found))


def twin() -> torch.device:
    """The second device, added to this process; several sequences share a row on it the CPU's way."""
    support = importlib.import_module("lowpeak.attention.install")
    support._DEVICES = (*support._DEVICES, second_device.NAME)
    importlib.import_module("lowpeak.optim.host_memory")._PIECE = 4096  # so that tensors have several pieces
    return second_device.register()


def without_measures(row: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in row.items() if not key.startswith(_MEASURED)}


def exported(trainer: Any, folder: Path) -> dict[str, str]:
    """Hashes of the weights that a trainer writes, merged ones too under an adapter."""
    trainer.save_model(str(folder))
    if hasattr(trainer.model, "peft_config"):
        trainer.save_merged_model(str(folder / "merged"))
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*.safetensors"))
    }

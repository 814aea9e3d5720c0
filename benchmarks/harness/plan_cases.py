"""The configurations of benchmarks.plan_accuracy: each changes some arguments or sizes of a run of 34 MB of weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from benchmarks.harness.planned import Case, Shape

_WIDE = Shape(hidden=512, layers=2, intermediate=1_536)
_LARGE_VOCABULARY = Shape(hidden=128, layers=2, vocabulary=32_768, intermediate=512)
_DEEP = Shape(hidden=192, layers=10, vocabulary=4_096, intermediate=768)
_UNTIED = Shape("llama", tied=False)
_SHAPES: Mapping[str, Shape] = {
    "base": Shape(),
    "wide": _WIDE,
    "large vocabulary": _LARGE_VOCABULARY,
    "deep": _DEEP,
    "untied llama": _UNTIED,
    "qwen3": Shape("qwen3"),
    "wide, untied": replace(_WIDE, tied=False),
    "100 MB": Shape(hidden=768, layers=3, vocabulary=8_192, intermediate=2_304),
}
_LENGTHS = {"16 + 16": (16, 16), "200 + 32": (200, 32), "32 + 200": (32, 200), "128 + 128": (128, 128)}
_SIZES: Mapping[str, Mapping[str, Any]] = {
    "groups of 8": {"num_generations": 8},
    "groups of 2": {"num_generations": 2},
    "16 rows": {"per_device_train_batch_size": 16},
    "micro-batches of 128": {"micro_batch_tokens": 128},
    "micro-batches of 2,048": {"micro_batch_tokens": 2_048},
    "chunks of 16": {"logprob_chunk_size": 16},
    "chunks of 256": {"logprob_chunk_size": 256},
    "cache of 2 MiB": {"kv_cache_bytes": 2 << 20},
    "accumulation of 2": {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 4},
}
_STEPS: Mapping[str, Mapping[str, Any]] = {
    "beta": {"beta": 0.04},
    "2 iterations": {"num_iterations": 2, "max_steps": 4, "save_steps": 4},
    "2 steps a rollout": {"steps_per_generation": 2, "max_steps": 4, "save_steps": 4},
    "rows": {"share_prompt": False},
    "padded": {"padding_free": False},
    "no checkpointing": {"gradient_checkpointing": False},
    "no checkpointing, padded": {"gradient_checkpointing": False, "padding_free": False},
    "entropy": {"log_entropy": True, "beta": 0.04},
    "bf16": {"bf16": True},
    "bf16, no checkpointing": {"bf16": True, "gradient_checkpointing": False},
    "bf16, beta": {"bf16": True, "beta": 0.04},
}
_FORMATS: Mapping[str, Mapping[str, Any]] = {
    "32 bits": {"weight_bits": 32},
    "24 bits": {"weight_bits": 24},
    "16 bits": {"weight_bits": 16},
    "32 bits, 32-bit states": {"weight_bits": 32, "state_bits": 32},
    "fp32, 8-bit states": {"state_bits": 8},
    "fp32, 16-bit gradients": {"gradient_bits": 16},
    "16 bits, 32-bit gradients": {"weight_bits": 16, "gradient_bits": 32},
    "16 bits, beta": {"weight_bits": 16, "beta": 0.04},
}
_ALGORITHMS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "RLOO": ("rloo", {}),
    "PPO, head": ("ppo", {"num_iterations": 1}),
    "PPO, model": ("ppo", {"num_iterations": 1, "critic": "model"}),
    "PPO, head, 2 iterations": ("ppo", {"num_iterations": 2, "max_steps": 4, "save_steps": 4}),
    "PPO, no KL": ("ppo", {"num_iterations": 1, "beta": 0.0}),
    "Online DPO": ("online-dpo", {}),
    "SFT": ("sft", {}),
    "SFT, padded": ("sft", {"padding_free": False}),
    "SFT, 16 bits": ("sft", {"weight_bits": 16}),
    "SFT, bf16": ("sft", {"bf16": True}),
    "reward": ("reward", {}),
    "reward, no checkpointing": ("reward", {"gradient_checkpointing": False}),
    "reward, bf16": ("reward", {"bf16": True}),
    "DPO": ("dpo", {}),
    "DPO, padded": ("dpo", {"padding_free": False}),
    "DPO, precomputed": ("dpo", {"precompute_ref_log_probs": True}),
    "KTO": ("kto", {}),
    "KTO, no z0": ("kto", {"loss_type": "apo_zero_unpaired"}),
}
_TEACHER = Shape(hidden=384, layers=6, intermediate=1_536, tied=False)
_LIVE = {"teacher_model_kind": "live"}
_LONGER: Mapping[str, Any] = {"teacher_prompt": 128}  # the teacher's prompts, with a privileged context
# By the teacher's placement: a model of its own, the same in host memory, the policy's base, and the policy itself.
_DISTILLATION: Mapping[str, Mapping[str, Any]] = {
    "own": {"teacher": _TEACHER},
    "own, longer prompt": {"teacher": _TEACHER, **_LONGER},
    "own, small micro-batches": {"teacher": _TEACHER, **_LONGER, "args": {"micro_batch_tokens": 128}},
    "own, dataset's completions": {"teacher": _TEACHER, "args": {"lmbda": 0.0, "num_generations": 1}},
    "own, JSD": {"teacher": _TEACHER, "args": {"beta": 0.5}},
    "own, sampled token": {"teacher": _TEACHER, **_LONGER, "args": {"distillation_mode": "sampled_token"}},
    "own, bf16": {"teacher": _TEACHER, "args": {"bf16": True}},
    "host": {"teacher": _TEACHER, "args": {"offload_frozen_models": True}},
    "LoRA, base": {"lora": 64},
    "live": {**_LONGER, "args": _LIVE},
    "ema": {**_LONGER, "args": {"teacher_model_kind": "ema"}},
}
_LORA: Mapping[str, tuple[str, int, Mapping[str, Any]]] = {
    "LoRA": ("grpo", 8, {}),
    "LoRA, beta": ("grpo", 8, {"beta": 0.04}),
    "LoRA of rank 64": ("grpo", 64, {}),
    "LoRA, no checkpointing": ("grpo", 16, {"gradient_checkpointing": False}),
    "LoRA, padded": ("grpo", 16, {"padding_free": False}),
    "LoRA, bf16": ("grpo", 16, {"bf16": True}),
    "LoRA, 8-bit states": ("grpo", 64, {"state_bits": 8}),
    "LoRA, RLOO": ("rloo", 16, {}),
    "LoRA, PPO, head": ("ppo", 16, {"num_iterations": 1}),
    "LoRA, PPO, adapter": ("ppo", 16, {"num_iterations": 1, "critic": "adapter"}),
    "LoRA, Online DPO": ("online-dpo", 16, {}),
    "LoRA, SFT": ("sft", 16, {}),
    "LoRA, DPO": ("dpo", 16, {}),
    "LoRA, KTO": ("kto", 16, {}),
    "LoRA, reward": ("reward", 16, {}),
}
_ON_RANKS: Mapping[str, Case] = {
    "base": Case("", ""),
    "wide": Case("", "", shape=_WIDE),
    "untied llama": Case("", "", shape=_UNTIED),
    "deep": Case("", "", shape=_DEEP),
    "large vocabulary": Case("", "", shape=_LARGE_VOCABULARY),
    "beta": Case("", "", args={"beta": 0.04}),
    "bf16": Case("", "", args={"bf16": True}),
    "padded": Case("", "", args={"padding_free": False}),
    "no checkpointing": Case("", "", args={"gradient_checkpointing": False}),
    "branches": Case("", "", branches=3),
    "small micro-batches": Case("", "", args={"micro_batch_tokens": 128}),
    "LoRA, beta": Case("", "", lora=16, args={"beta": 0.04}),
    "16 bits": Case("", "", args={"weight_bits": 16}),
    "32 bits, beta": Case("", "", shape=Shape(dtype="bfloat16"), args={"weight_bits": 32, "beta": 0.04}),
    "RLOO": Case("", "", "rloo"),
    "PPO, model": Case("", "", "ppo", args={"num_iterations": 1, "critic": "model"}),
    "Online DPO": Case("", "", "online-dpo"),
    "SFT": Case("", "", "sft"),
    "DPO": Case("", "", "dpo"),
    "KTO": Case("", "", "kto"),
    "distillation, own": Case("", "", "distillation", teacher=_TEACHER),
    "distillation, live": Case("", "", "distillation", args=_LIVE, **_LONGER),
    "reward model": Case("", "", reward=Shape()),
}
# No constant of the plan was fitted to these.
_BRANCHES = (
    Case("branches: base", "steps", branches=3),
    Case("branches: beta", "steps", branches=3, args={"beta": 0.04}),
    Case("branches: padded", "steps", branches=3, args={"padding_free": False}),
    Case("branches: no checkpointing", "steps", branches=3, args={"gradient_checkpointing": False}),
)
_OTHER_STRATEGIES = (
    Case("zero2: base", "others", strategy="zero2"),
    Case("zero2: beta", "others", strategy="zero2", args={"beta": 0.04}),
    Case("zero3: base", "others", strategy="zero3"),
    Case("zero3: beta", "others", strategy="zero3", args={"beta": 0.04}),
    Case("zero3: bf16", "others", strategy="zero3", args={"bf16": True}),
    Case("zero3: four ranks", "others", strategy="zero3", world_size=4),
    Case("hsdp: base", "others", strategy="hsdp", world_size=4),
    Case("hsdp: beta", "others", strategy="hsdp", world_size=4, args={"beta": 0.04}),
    Case("hsdp: 16 bits", "others", strategy="hsdp", world_size=4, args={"weight_bits": 16}),
    Case("tp 2: base", "others", strategy="tp", parallel=2),
    Case("tp 2 x 2: base", "others", strategy="tp", world_size=4, parallel=2),
    Case("tp 2 x 2: 16 bits", "others", strategy="tp", world_size=4, parallel=2, args={"weight_bits": 16}),
)


def _cases() -> Iterator[Case]:
    for name, shape in _SHAPES.items():
        yield Case(f"shape: {name}", "sizes", shape=shape)
        yield Case(f"shape: {name}, beta", "sizes", shape=shape, args={"beta": 0.04})
    for name, (prompt, completion) in _LENGTHS.items():
        yield Case(f"lengths: {name}", "sizes", prompt=prompt, completion=completion)
    for name, args in _SIZES.items():
        yield Case(f"sizes: {name}", "sizes", args=args)
    for name, args in _STEPS.items():
        yield Case(f"step: {name}", "steps", args=args)
    for name, args in _FORMATS.items():
        # A reference has the dtype of its checkpoint.
        shape = replace(_WIDE, dtype="bfloat16") if "beta" in args else _WIDE
        yield Case(f"format: {name}", "formats", shape=shape, args=args)
    for name, (kind, args) in _ALGORITHMS.items():
        yield Case(name, "algorithms", kind, args=args)
    for name, (kind, rank, args) in _LORA.items():
        yield Case(name, "LoRA", kind, lora=rank, args=args)
    kind = "distillation"
    yield from (Case(f"{kind}, {name}", kind, kind, **each) for name, each in _DISTILLATION.items())
    yield Case("reward model", "algorithms", reward=Shape())
    yield Case("reward model, LoRA", "LoRA", reward=Shape("llama", hidden=384), lora=16)
    for strategy in ("ddp", "fsdp2"):
        for name, case in _ON_RANKS.items():
            yield replace(case, name=f"{strategy}: {name}", group=strategy, strategy=strategy)
    yield from (*_BRANCHES, *_OTHER_STRATEGIES)


CASES: tuple[Case, ...] = tuple(_cases())
QUICK: tuple[str, ...] = (
    "shape: base, beta",
    "format: 16 bits",
    "PPO, model",
    "LoRA, beta",
    "fsdp2: base",
)
RESIDENT: tuple[str, ...] = (
    "shape: base",
    "shape: wide, beta",
    "shape: 100 MB",
    "shape: large vocabulary",
    "step: no checkpointing",
    "format: 16 bits",
    "PPO, model",
    "LoRA, beta",
    "SFT",
    "ddp: base",
    "fsdp2: base",
)

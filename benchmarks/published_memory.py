"""Memory figures that other projects have published, with their settings, and lowpeak's plan of the same run.

    python -m benchmarks.published_memory [--quick]

docs/plan.md has the table, the sources, and what explains the differences.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from typing import Any

from peft import LoraConfig
from transformers import LlamaConfig, Qwen2Config

from benchmarks.fit_cases import MODELS, with_layers
from benchmarks.harness.report import print_result, versions
from lowpeak import GRPOConfig, SFTConfig
from lowpeak.plan.hardware import GIB, Machine
from lowpeak.plan.plan import make_plan
from lowpeak.plan.request import PlanRequest

LLAMA_7B = LlamaConfig(dtype="float16")  # transformers' default is LLaMA 7B
LLAMA_31_8B = LlamaConfig(
    vocab_size=128_256, hidden_size=4_096, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8,
    intermediate_size=14_336, max_position_embeddings=131_072, dtype="bfloat16",
)  # fmt: skip
QWEN_7B: Qwen2Config = MODELS["7B"]
LORA = LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM")
LORA_32 = LoraConfig(r=32, target_modules="all-linear", task_type="CAUSAL_LM")


@dataclass(frozen=True)
class Published:
    """A published figure in GB, and the run that it is of."""

    name: str
    figure: float
    request: PlanRequest


def grpo(**settings: Any) -> Any:
    return GRPOConfig(output_dir="unused", use_cpu=True, per_device_train_batch_size=8, num_generations=8, **settings)


def sft(**settings: Any) -> Any:
    common = {"output_dir": "unused", "use_cpu": True, "per_device_train_batch_size": 1, "max_length": 1_024}
    return SFTConfig(**{**common, **settings})


ROOM = Machine(1, 600 * GIB)
TWENTY_THOUSAND = {"max_completion_length": 20_000 - 512, "micro_batch_tokens": 20_000, "kv_cache_bytes": 2_500_000_000}
RUNS = [
    Published(
        "Unsloth, GRPO, Llama 3.1 8B, 4 bits, LoRA, 20,000 tokens, 8 completions", 54.3,
        PlanRequest("grpo", grpo(**TWENTY_THOUSAND), LLAMA_31_8B, ROOM, peft_config=LORA_32, quantized_bits=4),
    ),
    Published(
        "TRL with FlashAttention 2, the same run in 16 bits", 510.8,
        PlanRequest("grpo", grpo(**TWENTY_THOUSAND), LLAMA_31_8B, ROOM, peft_config=LORA_32),
    ),
    Published("LLaMA-Factory, full, 7B, mixed precision", 160.0, PlanRequest("sft", sft(), LLAMA_7B, ROOM)),
    Published("LLaMA-Factory, LoRA, 7B, 16 bits", 16.0, PlanRequest("sft", sft(), LLAMA_7B, ROOM, peft_config=LORA_32)),
    Published(
        "LLaMA-Factory, QLoRA, 7B, 4 bits", 6.0,
        PlanRequest("sft", sft(), LLAMA_7B, ROOM, peft_config=LORA_32, quantized_bits=4),
    ),
    Published(
        "TRL, DPO, Qwen2.5 7B, LoRA 16, 2,048 tokens (here: a pair of rows in supervised training)", 19.1,
        PlanRequest("sft", sft(per_device_train_batch_size=2, max_length=2_048), QWEN_7B, ROOM, peft_config=LORA),
    ),
]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one layer of each model")
    quick = parser.parse_args().quick
    planned: dict[str, int] = {}
    for run in RUNS:
        request = replace(run.request, config=with_layers(run.request.config, 1)) if quick else run.request
        plan = make_plan(request)
        planned[run.name] = plan.peak
        kinds = {
            str(kind): round(value / 1e9, 1)
            for kind, value in plan.phases[plan.peak_phase].device.items()
            if value > 5e7
        }
        print(
            f"{run.name}: published {run.figure} GB, planned {plan.peak / 1e9:.1f} GB in {plan.peak_phase}: {kinds}",
            flush=True,
        )
    print_result({"benchmark": "published_memory", "planned_bytes": planned, "versions": versions()})


if __name__ == "__main__":
    main()

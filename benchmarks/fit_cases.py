"""What `lowpeak plan --fit` chooses for ten models and machines, and on this CPU beside twenty other configurations.

    python -m benchmarks.fit_cases cases fit_cases.json      # minutes; no weights, no GPU
    python -m benchmarks.fit_cases cpu fit_cpu.json          # trains a small model 21 times
    python -m benchmarks.fit_cases --quick                   # a case of one layer, two configurations; no file

The first prints a row per case: the settings, the rehearsed peak against the device, the strategies that were rejected and
why. The second measures the seconds of a step of each configuration in a fresh process, in a random order.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import Qwen2Config, Qwen3MoeConfig

from benchmarks.harness.report import print_result, versions
from lowpeak import GRPOConfig
from lowpeak.plan.fit import Search
from lowpeak.plan.hardware import GIB, Machine, find_card
from lowpeak.plan.request import PlanRequest

BF16 = "bfloat16"


def with_layers(config: Any, layers: int) -> Any:
    """Return the config of the same model with so many layers."""
    return type(config)(**{**config.to_dict(), "num_hidden_layers": layers, "layer_types": None})


def dense(
    hidden: int, layers: int, heads: int, kv_heads: int, mlp: int, tied: bool = False, vocab: int = 151_936
) -> Any:
    """Return the config of a dense model, in the shapes of Qwen 2.5."""
    return Qwen2Config(
        vocab_size=vocab, hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=kv_heads, intermediate_size=mlp, tie_word_embeddings=tied, max_position_embeddings=32_768,
        dtype=BF16,
    )  # fmt: skip


MODELS = {
    "0.5B": dense(896, 24, 14, 2, 4_864, tied=True),
    "3B": dense(2_048, 36, 16, 2, 11_008, tied=True),
    "7B": dense(3_584, 28, 28, 4, 18_944, vocab=152_064),
    "14B": dense(5_120, 48, 40, 8, 13_824, vocab=152_064),
    "32B": dense(5_120, 64, 40, 8, 27_648, vocab=152_064),
    "72B": dense(8_192, 80, 64, 8, 29_568, vocab=152_064),
    "30B-A3B": Qwen3MoeConfig(
        vocab_size=151_936, hidden_size=2_048, num_hidden_layers=48, num_attention_heads=32, num_key_value_heads=4, head_dim=128,
        moe_intermediate_size=768, intermediate_size=6_144, num_experts=128, num_experts_per_tok=8, dtype=BF16,
        max_position_embeddings=32_768,
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A model, a machine, and how it is trained; `batch` is per device."""

    name: str
    model: str
    machine: Machine
    completion: int = 1_024
    batch: int = 8
    adapter: bool = False
    bits: int | None = None


def machine(count: int, card: str, memory: int | None = None, host: int = 1_024) -> Machine:
    """Return devices of a named card."""
    found = find_card(card)
    return Machine(count, found.memory if memory is None else memory * GIB, host * GIB, 8, found)


CASES = [
    Case("0.5B on 8 GB", "0.5B", machine(1, "rtx3090", 8, 32)),
    Case("3B on 24 GB", "3B", machine(1, "rtx4090", host=64)),
    Case("7B on one 24 GiB, 4,096 tokens", "7B", machine(1, "rtx4090", host=128), completion=4_096),
    Case("7B on one 80 GiB, 4,096 tokens", "7B", machine(1, "h100", host=256), completion=4_096),
    Case("14B on 8 of 64 GiB", "14B", machine(8, "mi250x", host=512)),
    Case("32B on 8 of 80 GiB", "32B", machine(8, "h100")),
    Case("72B on 4 hosts of 8", "72B", machine(32, "h100", host=2_048)),
    Case("30B-A3B (MoE) on 8 of 80 GiB", "30B-A3B", machine(8, "h100")),
    Case("7B LoRA on 24 GiB", "7B", machine(1, "rtx4090", host=64), adapter=True),
    Case("14B QLoRA on 24 GiB", "14B", machine(1, "rtx4090", host=64), adapter=True, bits=4),
]
QUICK: dict[str, Any] = {  # what is set leaves few candidates
    "micro_batch_tokens": 2_048, "gradient_checkpointing": True, "per_device_train_batch_size": 8, "max_completion_length": 16,
}  # fmt: skip


def request_of(case: Case, quick: bool) -> PlanRequest:
    """Return the run of a case, in which only batch, groups and lengths are set; a quick one has one layer."""
    from peft import LoraConfig

    sizes: dict[str, Any] = {"per_device_train_batch_size": case.batch, "max_completion_length": case.completion}
    sizes |= QUICK if quick else {}
    args = GRPOConfig(output_dir="unused", use_cpu=True, num_generations=8, **sizes)
    config = with_layers(MODELS[case.model], 1) if quick else MODELS[case.model]
    adapter = LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM") if case.adapter else None
    return PlanRequest("grpo", args, config, case.machine, peft_config=adapter, quantized_bits=case.bits)


def run_cases(path: Path, quick: bool) -> dict[str, Any]:
    """Choose settings for each case, and write what was chosen and why; done cases are kept. Return the peaks."""
    results = json.loads(path.read_text()) if path.exists() else {}
    for case in CASES[-1:] if quick else CASES:
        if case.name in results:
            continue
        start = time.perf_counter()
        fit = Search(request_of(case, quick)).run()
        plan = fit.plan
        results[case.name] = {
            **fit.as_dict(),
            "seconds": time.perf_counter() - start,
            "limit": case.machine.memory,
            **(
                {}
                if plan is None
                else {"peak": plan.peak, "phase": plan.peak_phase, "step": sum(plan.seconds.values())}
            ),
        }
        path.write_text(json.dumps(results, indent=1))
        peak = (
            "-"
            if plan is None
            else f"{plan.peak / GIB:.1f} of {case.machine.memory / GIB:.1f} GiB in {plan.peak_phase}"
        )
        print(
            f"{case.name}: {fit.candidate or fit.smallest_change} | {peak} | {time.perf_counter() - start:.0f} s",
            flush=True,
        )
    return {name: result.get("peak") for name, result in results.items()}


# On this CPU


SMALL: dict[str, Any] = {
    "vocab_size": 8_192, "hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 768,
}  # fmt: skip
RUN: dict[str, Any] = {
    "per_device_train_batch_size": 32,
    "num_generations": 8,
    "max_completion_length": 64,
    "prompt": 96,
}
TRIED = [
    {"micro_batch_tokens": tokens, "gradient_checkpointing": checkpointing, **bits}
    for tokens in (512, 1_024, 2_048, 4_096, 8_192)
    for checkpointing in (False, True)
    for bits in ({}, {"weight_bits": 32})
]


def run_cpu(path: Path, quick: bool) -> dict[str, Any]:
    """Measure a step of the chosen configuration and of twenty others, each in a fresh process; return the seconds."""
    from lowpeak.plan.cost import measure_cpu

    sizes = {name: RUN[name] for name in list(RUN)[:3]} | (QUICK if quick else {})
    args = GRPOConfig(output_dir="unused", use_cpu=True, **sizes)
    cpu = Machine(1, 6 * GIB, None, 1, measure_cpu(), device="cpu")
    request = PlanRequest("grpo", args, Qwen2Config(**SMALL), cpu, prompt_tokens=RUN["prompt"])
    fit = Search(request).run()
    configurations = [dict(fit.arguments), *TRIED]
    if quick:
        configurations = [{**QUICK, **each} for each in configurations[:2]]
    results: list[dict[str, Any]] = [{"settings": each, "seconds": []} for each in configurations]
    for repeat in range(1 if quick else 2):
        order = list(range(len(configurations)))
        random.Random(repeat).shuffle(order)
        for index in order:
            command = [sys.executable, "-m", "benchmarks.fit_cases", "one", json.dumps(configurations[index])]
            output = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300).stdout
            results[index]["seconds"].append(float(output.split()[-1]))
            path.write_text(json.dumps(results, indent=1))
    chosen, *others = [min(each["seconds"]) for each in results]
    print(
        f"chosen {fit.candidate}: {chosen:.3f} s a step, fastest of {len(others)}: {min(others):.3f}, slowest {max(others):.3f}"
    )
    return {"chosen": chosen, "fastest_other": min(others), "slowest_other": max(others)}


def letters() -> Any:
    """Return a tokenizer with a token per letter; no text of the model ends."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {chr(97 + number % 26) * (1 + number // 26): number for number in range(26 * 8)}
    tokenizer = Tokenizer(models.WordLevel({"<pad>": len(vocabulary), **vocabulary}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<pad>")


def run_one(settings: dict[str, Any]) -> None:
    """Train five steps, and print the seconds of the fastest of the last three."""
    from datasets import Dataset
    from transformers import Qwen2ForCausalLM

    from lowpeak import GRPOTrainer

    tokenizer = letters()
    given = {"logprob_chunk_size": 256, **{name: RUN[name] for name in list(RUN)[:3]}, **settings}
    args = GRPOConfig(
        output_dir="/tmp/fit-cpu", use_cpu=True, max_steps=5, save_strategy="no", report_to="none", disable_tqdm=True, seed=0,
        logging_steps=1, **given,
    )  # fmt: skip
    data = Dataset.from_list([{"prompt": "a" * RUN["prompt"]}] * 64)
    trainer = GRPOTrainer(
        model=Qwen2ForCausalLM(Qwen2Config(**SMALL)), args=args, train_dataset=data, processing_class=tokenizer,
        reward_funcs=lambda completions, **columns: [float(len(text) % 7) for text in completions],
    )  # fmt: skip
    trainer.train()
    times = [row["step_time"] for row in trainer.state.log_history if "step_time" in row]
    print(min(times[2:]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", nargs="?", choices=["cases", "cpu", "one"])
    parser.add_argument("argument", nargs="?", help="a file for the results; of `one`, settings (JSON)")
    parser.add_argument("--quick", action="store_true", help="both parts at their smallest, without a file")
    options = parser.parse_args()
    if options.part == "one":
        run_one(json.loads(options.argument))
        return
    if not options.quick and options.argument is None:
        parser.error("name a part and a file for its results, or --quick")
    with tempfile.TemporaryDirectory() as folder:
        parts = {"cases": run_cases, "cpu": run_cpu}
        if options.quick:
            found = {name: run(Path(folder, name), True) for name, run in parts.items()}
        else:
            found = {options.part: parts[options.part](Path(options.argument), False)}
    print_result({"benchmark": "fit_cases", **found, "versions": versions()})


if __name__ == "__main__":
    main()

"""Generation of a sharded model at several gather budgets, and a frozen model's forward.

`python -m benchmarks.sharded_generation [--quick]`

Two gloo ranks, one thread each, a Qwen2 shape of 111M parameters in fp32 (425 MB: 12 layers of 28 MB, a tied embedding of 94 MB),
4 rows a rank, 12 new tokens. Memory is resident memory above what was there before, by the kernel's high-water mark.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from benchmarks.harness.process import resident_bytes
from benchmarks.harness.ranks import prepare, run_ranks
from benchmarks.harness.report import print_result, versions

LAYERS = 12
BUDGETS = ("none", "3 layers", "6 layers", "9 layers", "all")
WAYS = ("by layer (ours)", "one unit")


def run() -> None:
    """Print both tables, and one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=12)
    parser.add_argument("--quick", action="store_true", help="two tokens of a narrow model")
    plan = parser.parse_args()
    request = {"tokens": 2 if plan.quick else plan.tokens, "quick": plan.quick}
    found: dict[str, Any] = {}
    print("| strategy | kept gathered | ms per token | of all gathered | peak extra MB | of the model |")
    print("|---|---|---|---|---|---|")
    for strategy in ("fsdp2", "zero3"):
        result = run_ranks("benchmarks.sharded_generation", {"strategy": strategy, **request})
        found[strategy] = result
        for name, row in result["budgets"].items():
            slower, share = row["ms"] / result["budgets"]["all"]["ms"], row["peak_mb"] / result["model_mb"]
            print(
                f"| {strategy} | {name} | {row['ms']:.0f} | {slower:.2f} | {row['peak_mb']:.0f} | {share:.2f} |",
                flush=True,
            )
    print("\n| frozen, 512 tokens | held MB | with a forward MB | beyond half a model | s |\n|---|---|---|---|---|")
    for strategy, result in found.items():
        for way, row in result["frozen"].items():
            held, peak, share = row["held_mb"], row["peak_mb"], row["peak_mb"] / result["model_mb"] - 0.5
            print(f"| {strategy}, {way} | {held:.0f} | {peak:.0f} | {share:.2f} | {row['s']:.2f} |", flush=True)
    print_result({"benchmark": "sharded_generation", "tokens": request["tokens"], **found, "versions": versions()})


def main(request: dict[str, Any]) -> None:
    """One rank's measurements; rank 0 prints them."""
    torch.set_num_threads(1)
    accelerator, model, strategy = prepare(request["strategy"], make_model(request["quick"]))
    inner = accelerator.unwrap_model(model)
    layer, rest = layer_bytes(inner, strategy)
    answer: dict[str, Any] = {"model_mb": (LAYERS * layer + rest) / 1e6, "budgets": {}, "frozen": {}}
    measured_generation(strategy, model, None, 2)  # what is allocated once is not counted
    for name in BUDGETS:
        kept = {"none": 0, "all": None}.get(name, name)
        budget = (int(kept.split()[0]) + 1) * layer + (1 << 20) if isinstance(kept, str) else kept
        answer["budgets"][name] = measured_generation(strategy, model, budget, request["tokens"])
    for way in WAYS:
        if way == WAYS[0] or request["strategy"] == "fsdp2":
            answer["frozen"][way] = measured_frozen(strategy, way, request["quick"])
    if accelerator.is_main_process:
        print_result(answer)


def measured_generation(strategy: Any, model: nn.Module, budget: int | None, tokens: int) -> dict[str, float]:
    """Milliseconds a token, gathering included, and the most memory above what was there before."""
    from lowpeak.arguments.sampling import Sampling
    from lowpeak.records import Prompt
    from lowpeak.rollout.native.engine import NativeEngine

    prompts = [Prompt(i, tuple(range(5 + i, 21 + i)), "") for i in range(4)]
    engine = NativeEngine(lambda: strategy.gather_for_inference(model, budget), NoEnd(), lambda: 1 << 24)
    engine.load((), 0)
    seconds, peak = watched(lambda: engine.generate(prompts, Sampling(1, tokens)))
    return {"ms": 1e3 * seconds / tokens, "peak_mb": peak}


class NoEnd:
    """A tokenizer without an end: every completion is as long as it may be."""

    eos_token_id = None


def measured_frozen(strategy: Any, way: str, quick: bool) -> dict[str, float]:
    """A second frozen model's forward over 512 tokens for their log-probs; the second one counts."""
    from lowpeak.heads.lm_head import HeadRequest, install_head

    before = resident_bytes() or 0
    model = install_head(make_model(quick))
    if way == WAYS[0]:
        frozen = strategy.prepare_frozen(model, 0, False)
        ready = frozen.ready
    else:
        ready = in_one_unit(model)
    ids = torch.arange(512)[None]
    request = HeadRequest(torch.arange(511), torch.arange(1, 512), temperature=1.0, chunk_size=64)

    def forward() -> None:
        with torch.no_grad(), ready() as prepared:
            prepared(input_ids=ids, head_request=request)

    forward()  # the first keeps what later ones use again: a root unit stays gathered
    held = ((resident_bytes() or 0) - before) / 1e6
    seconds, peak = watched(forward)
    return {"held_mb": held, "peak_mb": held + peak, "s": seconds}


def in_one_unit(model: nn.Module) -> Callable[[], AbstractContextManager[nn.Module]]:
    """The peer's way: `fully_shard` around the whole model, which each forward gathers."""
    from contextlib import nullcontext

    from torch.distributed.fsdp import fully_shard

    fully_shard(model.requires_grad_(False).eval())
    return lambda: nullcontext(model)


def watched(work: Callable[[], Any]) -> tuple[float, float]:
    """Seconds, and the most MB resident above what was there before, in step on all ranks."""
    from pathlib import Path

    torch.distributed.barrier()
    before = resident_bytes() or 0
    Path("/proc/self/clear_refs").write_text("5")
    start = time.perf_counter()
    work()
    seconds = time.perf_counter() - start
    status = Path("/proc/self/status").read_text()
    peak = int(status[status.index("VmHWM:") + 6 :].split(maxsplit=1)[0]) * 1024
    return seconds, (peak - before) / 1e6


def layer_bytes(model: nn.Module, strategy: Any) -> tuple[int, int]:
    """Bytes of a layer and of everything else."""
    from lowpeak.parallel.partial_gather import find_sharded_parameters

    parts = find_sharded_parameters(model, strategy._shard)
    layer = sum(place.shard.nbytes for place in parts.layers[0][1])
    others = {id(p.parameter): p.shard.nbytes for p in (*parts.vocabulary, *parts.rest)}
    return layer, sum(others.values())


def make_model(quick: bool) -> nn.Module:
    """The shape of the measurements with random weights, or a narrow one."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=30_720,
        hidden_size=96 if quick else 768,
        num_hidden_layers=LAYERS,
        num_attention_heads=12,
        num_key_value_heads=4,
        intermediate_size=288 if quick else 2_304,
        tie_word_embeddings=True,
        eos_token_id=None,
        bos_token_id=None,
    )
    return Qwen2ForCausalLM(config)


if __name__ == "__main__":
    run()

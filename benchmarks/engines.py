"""The native engine beside vLLM, colocated and behind a URL: `python -m benchmarks.engines {tokens,curve}` (needs vLLM).

`tokens` are tokens per CPU-second on equal and on skewed (exponential) lengths, the same on both sides, with KV caches for as many
full rows. `curve` trains the learning task (noisy sort) with each engine from the same weights and measures both on the same
held-out prompts.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from benchmarks.harness.process import run_apart
from benchmarks.harness.report import OURS, print_result, ratio, versions
from benchmarks.rollout import GROUP, SHAPES
from lowpeak.rollout.vllm.command import CPU, Server
from lowpeak.rollout.vllm.ports import free_ports
from lowpeak.rollout.vllm.process import served

_SERVER = ("--enforce-eager", "--kv-cache-memory-bytes", str(256 << 20))
ENGINES: dict[str, dict[str, Any]] = {
    "native": {},
    "vllm": {"use_vllm": True, "vllm_mode": "colocate", "vllm_importance_sampling_correction": False},
    "server": {"use_vllm": True, "vllm_mode": "server", "vllm_importance_sampling_correction": False},
}


def main() -> None:
    parser = argparse.ArgumentParser(description="The native engine beside a vLLM in the same process.")
    parser.add_argument("what", choices=["tokens", "curve"])
    parser.add_argument("--shape", choices=list(SHAPES), default="small")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=160)
    found = parser.parse_args(sys.argv[1:])
    result = tokens(found.shape, found.seed) if found.what == "tokens" else curve(found.seed, found.steps)
    print_result({"benchmark": f"engines {found.what}", **result, "versions": versions()})


def tokens(shape: str, seed: int) -> dict[str, Any]:
    """Tokens per CPU-second of both, and their ratio."""
    size = {**SHAPES[shape], **GROUP}
    kinds = {}
    for kind in ("equal", "skewed"):
        request = {**size, "skewed": kind == "skewed", "seed": seed, "library": OURS}
        native = run_apart("benchmarks.harness.counting", request)
        vllm = run_apart("benchmarks.harness.vllm_side", {**request, "lengths": native["lengths"]})
        assert native["tokens"] == vllm["tokens"], "both sides write completions of the same lengths"
        rates = {"native": native["tokens"] / native["cpu_seconds"]}
        rates |= {f"vllm {way}": vllm["tokens"] / seconds for way, seconds in vllm["cpu_seconds"].items()}
        kinds[kind] = {
            "tokens": native["tokens"],
            "num_waves": vllm["num_waves"],
            "tokens_per_cpu_second": {name: round(rate, 1) for name, rate in rates.items()},
            "native over vllm": ratio(rates["native"], rates["vllm engine"]),
        }
        print(f"{kind}: {kinds[kind]}", file=sys.stderr, flush=True)
    return {"shape": shape, **size, **kinds}


def curve(seed: int, steps: int) -> dict[str, Any]:
    """The engines' held-out accuracy by step, from one warm start."""
    marks = sorted({step for step in (60, 100, 160) if step <= steps} | {steps})
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run_apart("benchmarks.harness.warm", {"folder": str(folder / "start"), "seed": seed})
        server = Server(str(folder / "start"), port=free_ports(1)[0], devices=(CPU,), dtype="float32", options=_SERVER)
        took = {}
        for engine, arguments in ENGINES.items():
            reached = {"vllm_server_base_url": server.url, "vllm_server_token": server.token}
            where = reached if engine == "server" else {}
            with served(server, folder / "server.log") if where else nullcontext():
                took[engine] = _train(engine, {**arguments, **where}, folder, seed, steps, marks)
        snapshots = {f"{engine} {step}": str(folder / engine / str(step)) for engine in ENGINES for step in marks}
        start = str(folder / "start")
        measuring = {"tokenizer": start, "held_out": 1024, "snapshots": {"start": start, **snapshots}}
        accuracy = run_apart("benchmarks.harness.accuracy", measuring)
    return {"seed": seed, "steps": steps, "accuracy": accuracy, **took}


def _train(
    engine: str, arguments: Mapping[str, Any], folder: Path, seed: int, steps: int, marks: list[int]
) -> dict[str, Any]:
    request = {
        "library": OURS,
        "algorithm": "grpo",
        "seed": seed,
        "steps": steps,
        "start": str(folder / "start"),
        "folder": str(folder / engine),
        "snapshots": marks,
        "arguments": arguments,
    }
    found = run_apart("benchmarks.harness.side", request)
    print(f"{engine}: {found['cpu_seconds']:.1f} CPU-seconds", file=sys.stderr, flush=True)
    return {name: found[name] for name in ("cpu_seconds", "peak_rss_mb", "journal_seconds")}


if __name__ == "__main__":
    main()

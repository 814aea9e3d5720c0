"""The native engine's decoding beside a bare loop, on a CPU: `python -m benchmarks.decode_speed [--quick] [--steps N]`.

A model of SmolLM2-135M's shape in fp32. The bare loop has its matrix products, writes its keys and values into a cache, and
attends to what the cache has; no norms, rotations, sampling or modules. Both decode the same number of sequences, in turns, at 1
and 32 slots, with one thread and two, each in a fresh process.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.decode_launches import EndlessOutput
from benchmarks.harness.process import run_apart
from benchmarks.harness.report import print_result, versions
from lowpeak.arguments.sampling import Sampling
from lowpeak.attention.install import install_attention
from lowpeak.heads.lm_head import install_head
from lowpeak.records import Prompt
from lowpeak.rollout.native.decode_loop import DecodeLoop
from lowpeak.rollout.native.output import StopStrings
from lowpeak.rollout.native.scheduler import PromptQueue

_PROMPT, _TURNS = 64, 5
_SHAPE = {
    "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
    "num_key_value_heads": 3, "vocab_size": 49_152, "tie_word_embeddings": True,
}  # fmt: skip


class BareLoop:
    """The matrix products and cache reads of a model's decode steps."""

    def __init__(self, model: Any, slots: int, columns: int) -> None:
        config = model.config
        self._width, self._kv = config.head_dim, config.num_key_value_heads
        self._layers = [_weights(layer) for layer in model.model.layers]
        self._head, self._hidden = model.lm_head.weight, torch.randn(slots, config.hidden_size)
        shape = (2, slots, columns, self._kv, self._width)
        self._caches = [torch.randn(shape) for _ in self._layers]
        self.column = _PROMPT

    def step(self) -> None:
        hidden, slots, seen = self._hidden, len(self._hidden), self.column + 1
        for (query, key, value, out, gate, up, down), cache in zip(self._layers, self._caches, strict=True):
            queries = F.linear(hidden, query).view(slots, self._kv, -1, self._width)
            for buffer, weight in zip(cache, (key, value), strict=True):
                buffer[:, self.column] = F.linear(hidden, weight).view(slots, self._kv, self._width)
            keys, values = (buffer[:, :seen].transpose(1, 2) for buffer in cache)
            F.linear(F.scaled_dot_product_attention(queries, keys, values).reshape(slots, -1), out)
            F.linear(hidden, gate)
            F.linear(F.linear(hidden, up), down)
        F.linear(hidden, self._head)
        self.column += 1


def _weights(layer: Any) -> list[torch.Tensor]:
    attention, mlp = layer.self_attn, layer.mlp
    modules = (attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj, mlp.gate_proj, mlp.up_proj)
    return [module.weight for module in (*modules, mlp.down_proj)]


def measure(slots: int, steps: int, layers: int, threads: int) -> dict[str, Any]:
    """Return the milliseconds of a step of both, medians of turns, and the engine's share of the bare loop's speed."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    settings = _SHAPE | {"num_hidden_layers": layers}
    model = LlamaForCausalLM(LlamaConfig(**settings, max_position_embeddings=8192, attn_implementation="sdpa")).eval()
    install_head(model)
    install_attention(model)
    sampling = Sampling(num_generations=1, max_new_tokens=steps * (_TURNS + 1) + 8)
    prompts = [Prompt(i, tuple(3 + (7 * i + j) % 1000 for j in range(_PROMPT)), "") for i in range(slots)]
    output = EndlessOutput(
        slots, sampling.max_new_tokens, frozenset((0,)), StopStrings(None, ()), None, torch.device("cpu")
    )
    queue = PromptQueue([_PROMPT] * slots, 1, sampling.max_new_tokens, lambda tokens: (1 << 30) // tokens)
    with torch.inference_mode():
        loop = DecodeLoop(model, queue, 1 << 40, prompts, sampling, output)
        loop._admit()
        bare = BareLoop(model, slots, _PROMPT + sampling.max_new_tokens)
        seconds = [(_time(loop._step, steps), _time(bare.step, steps)) for _ in range(_TURNS + 1)][1:]
    ours, theirs = (statistics.median(column) for column in zip(*seconds, strict=True))
    share = statistics.median(bare_s / our_s for our_s, bare_s in seconds)
    return {"ms": 1000 * ours / steps, "bare_ms": 1000 * theirs / steps, "share": share}


def _time(step: Callable[[], object], steps: int) -> float:
    began = time.perf_counter()
    for _ in range(steps):
        step()
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="two layers, few steps, one thread")
    parser.add_argument("--steps", type=int, default=24, help="decode steps of a turn")
    options = parser.parse_args()
    threads, steps, layers = ((1,), 2, 2) if options.quick else ((1, 2), options.steps, _SHAPE["num_hidden_layers"])
    found: dict[str, Mapping[str, Any]] = {}
    print("| threads | slots | ms a step | bare loop | share of its speed |\n|---|---|---|---|---|")
    for number in threads:
        for slots in (1, 32):
            request = {"slots": slots, "steps": steps, "layers": layers, "threads": number}
            side = run_apart("benchmarks.decode_speed", request)
            found[f"{number} threads, {slots} slots"] = side
            print(
                f"| {number} | {slots} | {side['ms']:.2f} | {side['bare_ms']:.2f} | {side['share']:.3f} |", flush=True
            )
    print_result({"benchmark": "decode_speed", "aim": 0.9, "found": found, "versions": versions()})


if __name__ == "__main__":
    if sys.argv[1:] and sys.argv[1].startswith("{"):
        print(json.dumps(measure(**json.loads(sys.argv[1]))))
    else:
        main()

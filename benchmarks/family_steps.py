"""A step of other families beside the Llama of its size: `python -m benchmarks.family_steps [--families NAMES] [--peer] [--quick]`.

Eight layers, width 512, a vocabulary of 32,768; four groups of 8, prompts of 256 tokens, completions of exponential lengths up
to 256, fp32, a window of 128. CPU seconds, medians without the first step; each model in a fresh process with one thread.
The Llama is measured first and last, because other processes change what a CPU second does. `--peer`: TRL with the same lengths.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.harness.process import run_apart
from benchmarks.harness.report import OURS, PEER, print_result, ratio, require_peer, versions
from benchmarks.step_table import median_seconds

_S, _F, _L = "sliding_attention", "full_attention", "linear_attention"
_WINDOW = {"head_dim": 64, "sliding_window": 128, "query_pre_attn_scalar": 64}
_SHAPE: dict[str, Any] = {
    "vocab_size": 32_768, "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8,
    "num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 1024, "tie_word_embeddings": True,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"head_dim": 64},
    "gemma2": {**_WINDOW, "layer_types": [_S, _F] * 4},
    "gemma3_text": {
        **_WINDOW, "layer_types": [_S] * 5 + [_F, _S, _F],
        "rope_parameters": {each: {"rope_type": "default", "rope_theta": 1e4} for each in (_S, _F)},
    },
    "gpt_oss": {
        **_WINDOW, "layer_types": [_S, _F] * 4, "num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 768,
    },
    "qwen3_5_text": {
        "head_dim": 64, "layer_types": [_L, _L, _L, _F] * 2, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 64,
        "linear_value_head_dim": 64, "linear_num_key_heads": 8, "linear_num_value_heads": 8,
        "rope_parameters": {
            "rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25, "mrope_section": [3, 3, 2],
            "mrope_interleaved": True,
        },
    },
    "lfm2": {"layer_types": ["conv", "conv", _F] * 2 + ["conv", _F], "block_auto_adjust_ff_dim": False},
    "granitemoehybrid": {
        "layer_types": [_L, _L, _L, _F] * 2, "num_local_experts": 0, "shared_intermediate_size": 1536, "mamba_n_heads": 16,
        "mamba_d_head": 64, "mamba_n_groups": 1, "mamba_d_state": 64, "mamba_d_conv": 4, "mamba_expand": 2,
        "mamba_chunk_size": 64,
    },
}  # fmt: skip
_QUICK = ("llama", "gemma3_text")
_OPTIONS = {"gradient_checkpointing": False, "gradient_accumulation_steps": 1}
_OURS = {"micro_batch_tokens": 4096, "logprob_chunk_size": 512}


def measure(family: str, steps: int, prompts: int, folder: Path, peer: bool) -> dict[str, dict[str, Any]]:
    """Return the CPU seconds of a step by phase and the peak of each side."""
    start = folder / family
    settings = _SHAPE | FAMILIES[family]
    run_apart("benchmarks.harness.shapes", {"folder": str(start), "family": family, "settings": settings})
    request: dict[str, Any] = {
        "shape": "w2", "canned": False, "num_prompts": prompts, "prompt_length": 256, "steps": steps, "beta": 0.0,
        "start": str(start), "lengths": [],
    }  # fmt: skip
    found: dict[str, dict[str, Any]] = {}
    for side in (OURS, PEER) if peer else (OURS,):
        options = _OPTIONS | {"per_device_train_batch_size": 8 * prompts} | (_OURS if side == OURS else {})
        run = run_apart(
            "benchmarks.harness.stepping",
            {**request, "library": side, "folder": str(folder / side), "options": options},
        )
        request["lengths"] = run["lengths"]
        found[side] = {**median_seconds(run["steps"][1:]), "peak_mb": run["peak_rss_mb"]}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--families", default=",".join(FAMILIES), help="names, separated by commas")
    parser.add_argument("--steps", type=int, default=3, help="steps of a run, the first of which is not counted")
    parser.add_argument("--peer", action="store_true", help="TRL's step, too")
    parser.add_argument("--quick", action="store_true", help="two families, two steps of one group")
    options = parser.parse_args()
    families, steps = (list(_QUICK), 2) if options.quick else (options.families.split(","), options.steps)
    prompts = 1 if options.quick else 4
    if options.peer:
        require_peer()
    os.environ["MALLOC_MMAP_THRESHOLD_"] = "65536"
    runs: list[tuple[str, dict[str, dict[str, Any]]]] = []
    with tempfile.TemporaryDirectory() as folder:
        for family in dict.fromkeys(["llama", *families]):
            runs.append((family, measure(family, steps, prompts, Path(folder), options.peer)))
        runs.append(("llama", measure("llama", steps, prompts, Path(folder), peer=False)))
    llama = sum(found[OURS]["total"] for family, found in runs if family == "llama") / 2
    print("| family | rollout, s | rest of the step, s | step, s | of the Llama's | TRL's step, s | of TRL's |")
    print("|---|---|---|---|---|---|---|")
    for family, found in runs:
        ours, theirs = found[OURS], found.get(PEER, {}).get("total")
        cells = (ours["rollout"], ours["total"] - ours["rollout"], ours["total"])
        other = ("", "") if theirs is None else (f"{theirs:.1f}", ratio(ours["total"], theirs))
        print(
            f"| {family} | {' | '.join(f'{x:.2f}' for x in cells)} | {ratio(ours['total'], llama)} | {other[0]} | {other[1]} |"
        )
    print_result({"benchmark": "family_steps", "steps": steps, "runs": runs, "versions": versions()})


if __name__ == "__main__":
    main()

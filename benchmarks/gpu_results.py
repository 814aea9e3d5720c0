"""Makes what the manual says of GPUs from files in docs/results: `python -m benchmarks.gpu_results [--quick] [--folder FOLDER]`.

It writes docs/proved-on.md and the table of recipes in README, and prints the cost model's and the margin's constants as
the files measured them, each as a command that sets it. A file is one of three kinds: the `results.json` of a run, the JSON of
`lowpeak env --selftest --gpu --format json`, or `lowpeak plan --format json` as RECIPE.plan.json.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness.process import ROOT
from benchmarks.harness.report import print_result
from lowpeak.selftest.table import all_rows

RESULTS = ROOT / "docs" / "results"
PAGE = ROOT / "docs" / "proved-on.md"
README = ROOT / "README.md"
RECIPES = sorted(path.stem for path in (ROOT / "examples" / "recipes").glob("*.yaml"))
BEGIN, END = "<!-- recipes: python -m benchmarks.gpu_results -->", "<!-- end of recipes -->"
CPU_ONLY = "CPU only"
_GIB = 1 << 30
_PACKAGES = ("lowpeak", "torch", "transformers", "vllm", "deepspeed")
Result = Mapping[str, Any]


@dataclass(frozen=True)
class Feature:
    """What the page has a row for: rows of the self-test that prove it, and what a run that proves it has."""

    rows: tuple[str, ...] = ()
    is_proved_by: Callable[[Result], bool] = lambda run: False


def _has(**arguments: Any) -> Callable[[Result], bool]:
    return lambda run: all(run["arguments"].get(name) == value for name, value in arguments.items())


def _generates(run: Result) -> bool:
    return run["command"] not in ("sft", "reward")


def _on_servers(run: Result) -> bool:
    return bool(run["arguments"].get("vllm_devices") or run["arguments"].get("vllm_mode") == "server")


FEATURES: dict[str, Feature] = {
    "native engine": Feature(("decode", "GRPO learns"), lambda run: _generates(run) and not _has(use_vllm=True)(run)),
    "vLLM, colocated": Feature(("vLLM colocated",), lambda run: _has(use_vllm=True)(run) and not _on_servers(run)),
    "vLLM on servers": Feature(("vLLM server",), _on_servers),
    "weights sent by NCCL": Feature(("vLLM server on another GPU",)),
    "DDP": Feature(("ddp",), _has(accelerate_config="ddp")),
    "FSDP2": Feature(("fsdp2",), _has(accelerate_config="fsdp2")),
    "ZeRO-3": Feature(("zero3",), _has(accelerate_config="zero3")),
    "tensor parallelism": Feature((), _has(accelerate_config="fsdp2-tp")),
    "LoRA": Feature(("LoRA",), _has(use_peft=True)),
    "4 bits": Feature(("LoRA on 4 bits",), _has(load_in_4bit=True)),
    "storage formats": Feature(("storage formats",), _has(dtype="bfloat16")),
    "activation_offloading": Feature(("activation_offloading",), _has(activation_offloading=True)),
    "offload_optimizer": Feature(("offload_optimizer", "offload_optimizer at 1B"), _has(offload_optimizer=True)),
    "offload_during_rollout": Feature(("offload_during_rollout",), _has(offload_during_rollout=True)),
    "offload_frozen_models": Feature(
        ("offload_frozen_models", "offload_frozen_models at 1B"), _has(offload_frozen_models=True)
    ),
    "recovery from out-of-memory errors": Feature(
        ("out of memory in training", "out of memory in a rollout"),
        lambda run: bool(run["events"].get("out of memory")),
    ),
}

TEXT = """\
# Proved on

Each row names the card on which a feature ran and was right, with versions and date. "CPU only"
means that no GPU has run it: what a CPU can run of it is tested on CPUs. The page is made from the
files in `docs/results` by `python -m benchmarks.gpu_results`.

To add a card, put one of two files into that folder and run the command: what
`lowpeak env --selftest --gpu --format json` printed, or the `results.json` that a run leaves in its
output_dir.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="only try: the pages are not written")
    parser.add_argument("--folder", type=Path, default=RESULTS)
    options = parser.parse_args()
    if not options.folder.is_dir():
        parser.error(f"--folder {options.folder} does not exist: name a folder with results files")
    results = read_results(options.folder)
    readme = README.read_text(encoding="utf-8")
    pages = {PAGE: proved_on(results), README: with_recipes(readme, results)}
    for path, text in pages.items():
        if not options.quick:
            path.write_text(text, encoding="utf-8")
    commands = list(constant_commands(constants(results)))
    print("\n".join(commands))
    print_result(
        {"benchmark": "gpu_results", "files": len(results), "constants": len(commands), "written": not options.quick}
    )


def read_results(folder: Path) -> dict[str, Result]:
    """Return the results by the files' names without `.json`."""
    return {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))}


def proved_on(results: Mapping[str, Result]) -> str:
    """Return the page: a row for each feature, recipe and row of the self-test, and each card that ran it."""
    names = [row.name for row in all_rows()]
    parts: list[tuple[str, Mapping[str, Feature]]] = [
        ("feature", FEATURES),
        ("recipe", {name: Feature((), _is_run(name)) for name in RECIPES}),
        ("row of the self-test", {name: Feature((name,)) for name in names}),
    ]
    tables = [
        f"\n| {title} | card | versions | date |\n| -- | -- | -- | -- |\n"
        + "".join(
            f"| {name} | {' | '.join(cells)} |\n" for name, each in features.items() for cells in _proofs(each, results)
        )
        for title, features in parts
        if features
    ]
    return TEXT + "".join(tables)


def _is_run(name: str) -> Callable[[Result], bool]:
    return lambda run: bool(run["run"] == name)


def _proofs(feature: Feature, results: Mapping[str, Result]) -> list[tuple[str, str, str]]:
    """Return card, versions and date of the newest proof on each card."""
    newest: dict[str, tuple[str, str, str]] = {}
    for result in sorted(results.values(), key=lambda result: result.get("date", "")):
        card = card_of(result)
        if card and _proves(result, feature):
            newest[card] = (card, _versions(result), result.get("date", ""))
    return [*newest.values()] or [(CPU_ONLY, "", "")]


def _proves(result: Result, feature: Feature) -> bool:
    ok = {row["row"] for row in result.get("rows", ()) if row["result"] == "ok"}
    return bool(ok.intersection(feature.rows)) or ("run" in result and feature.is_proved_by(result))


def card_of(result: Result) -> str | None:
    """Return the first card of the machine, such as "NVIDIA H100 80GB HBM3"; None for a plan and a run on CPUs."""
    name = result.get("environment", {}).get("device 0")
    on_gpu = result.get("device", "").startswith("cuda")
    return name.partition(",")[0] if name is not None and on_gpu else None


def _versions(result: Result) -> str:
    environment = result["environment"]
    found = {name: environment.get(name, "not installed") for name in _PACKAGES}
    return ", ".join(f"{name} {version}" for name, version in found.items() if version != "not installed")


# The recipes in README.


def with_recipes(readme: str, results: Mapping[str, Result]) -> str:
    """Return README with the table of recipes between its markers."""
    before, rest = readme.split(BEGIN)
    columns = ("recipe", "card", "seconds a step", "tokens per second", "peak, GiB", "100 steps", "accuracy")
    head = f"| {' | '.join(columns)} |\n|{' -- |' * len(columns)}\n"
    rows = "".join(f"| {row} |\n" for name in RECIPES for row in _recipe_rows(name, results))
    return f"{before}{BEGIN}\n\n{head}{rows}\n{END}{rest.split(END)[1]}"


def _recipe_rows(name: str, results: Mapping[str, Result]) -> Iterator[str]:
    """Yield the plan of a recipe, and its newest run on each card."""
    plan = results.get(f"{name}.plan")
    runs = {card_of(run): run for run in sorted(_runs(results, name), key=lambda run: run["date"]) if card_of(run)}
    if plan is not None:
        price = (
            "" if plan["dollars"] is None else f", ${plan['dollars']:.2f} at ${plan['price_per_hour']:.2f} a GPU hour"
        )
        cost = f"{plan['minutes'] * 100 / plan['steps']:.0f} minutes{price}"
        seconds = sum(plan["seconds_per_step"].values())
        cells = (f"{seconds:.1f}", f"{plan['tokens_per_second']:,.0f}", f"{plan['peak'] / _GIB:.1f}", cost, "")
        yield " | ".join((name, f"plan for {plan['gpu']}{'' if runs else f' ({CPU_ONLY})'}", *cells))
    for card, run in runs.items():
        peak = max({**run["peak_memory"], **run["reserved_memory"]}.values()) / _GIB
        accuracy = run["evaluation"].get("eval_accuracy")
        measured = (f"{run['step_time']:.1f}", f"{run['tokens_per_second']:,.0f}", f"{peak:.1f}")
        minutes = f"{run['step_time'] * 100 / 60:.0f} minutes"
        yield " | ".join(
            (name, f"measured on {card}", *measured, minutes, "" if accuracy is None else f"{accuracy:.2f}")
        )


def _runs(results: Mapping[str, Result], name: str | None = None) -> list[Result]:
    return [each for each in results.values() if "run" in each and name in (None, each["run"])]


# The plan's constants.

# The text before each constant's value.
_CONSTANT_PATTERNS = {
    "FLOPS_SHARE": r"^FLOPS_SHARE = ",
    "BANDWIDTH_SHARE": r"^BANDWIDTH_SHARE = ",
    "LAYER_LATENCY": r'^_LAYER_LATENCY = \{"cuda": ',
    "FRAGMENTATION": r"^FRAGMENTATION = ",
    "CONTEXT_BYTES": r"^_?CONTEXT_BYTES = ",
    "NCCL_BYTES": r"^_?NCCL_BYTES = ",
}


def constants(results: Mapping[str, Result]) -> dict[str, float]:
    """Return the constants of the plan as files measured them; those that no file has measured are left out.

    Shares of the data sheet are planned over measured seconds, for the tokens that were generated and trained on, if each step
    had its own rollout. Fragmentation is the excess of the reserved peak over the allocated one.
    """
    found: dict[str, list[float]] = {}
    for run in filter(card_of, _runs(results)):
        peaks, reserved = run["peak_memory"], run["reserved_memory"]
        found.setdefault("FRAGMENTATION", []).append(max(reserved.values()) / max(peaks.values()) - 1)
        plan = results.get(f"{run['run']}.plan")
        if plan is not None:
            for name, ratio in _speeds(run, plan).items():
                found.setdefault(name, []).append(find_constant(name)[2] * ratio)
        if not run["arguments"].get("use_vllm"):  # whose memory would count
            found.setdefault("CONTEXT_BYTES" if run["devices"] == 1 else "CONTEXT_AND_NCCL_BYTES", []).append(
                run["outside_bytes"]
            )
    for row in (row for result in results.values() if card_of(result) for row in result.get("rows", ())):
        if row["row"] == "decode" and row["result"] == "ok":
            ratio = row["numbers"]["again_ms_per_step"] / row["numbers"]["planned_ms_per_step"]
            found.setdefault("LAYER_LATENCY", []).append(find_constant("LAYER_LATENCY")[2] * ratio)
    values = {name: statistics.median(numbers) for name, numbers in found.items()}
    both, context = values.pop("CONTEXT_AND_NCCL_BYTES", None), values.get("CONTEXT_BYTES")
    return values if both is None or context is None else {**values, "NCCL_BYTES": both - context}


def _speeds(run: Result, plan: Result) -> dict[str, float]:
    """Return planned over measured seconds of training and of a native rollout, for the run's tokens."""
    planned, measured = plan["seconds_per_step"], run["seconds"]
    planned_tokens = plan["tokens_per_second"] * sum(planned.values())
    share = run["tokens_per_second"] * run["step_time"] / planned_tokens
    speeds = {"FLOPS_SHARE": share * planned["train"] / measured["train"]}
    if not run["arguments"].get("use_vllm") and run["arguments"].get("num_iterations", 1) == 1:
        speeds["BANDWIDTH_SHARE"] = share * planned["rollout"] / measured["rollout"]
    return speeds


def find_constant(name: str) -> tuple[Path, int, float, str]:
    """Return where a constant is: file, line, value, and the value's text."""
    pattern = re.compile(_CONSTANT_PATTERNS[name] + r"([^,}#\n]*[^,}#\s])")
    for path in sorted((ROOT / "src" / "lowpeak").rglob("*.py")):
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
            found = pattern.match(line)
            if found:
                text = found.group(1)
                factors = re.findall(r"\d[\d_]*(?:\.\d+)?(?:e-?\d+)?", text)
                return path, number, float(factors[0]) * (1e9 if "GB" in text else 1), text
    raise LookupError(f"src/lowpeak has no line that matches {_CONSTANT_PATTERNS[name]}")


def constant_commands(values: Mapping[str, float]) -> Iterator[str]:
    """Yield a command of sed for each constant, with the old and the new value."""
    for name, value in values.items():
        path, number, _, text = find_constant(name)
        new = f"{round(value, -7):.0f}" if name.endswith("BYTES") else f"{value:.2g}"
        old = re.sub(r"[][.*^$/\\]", r"\\\g<0>", text)
        yield f"sed -i '{number}s/= \\(.*\\){old}/= \\1{new}/' {path.relative_to(ROOT)}  # {name}: {text} -> {new}"


if __name__ == "__main__":
    main()

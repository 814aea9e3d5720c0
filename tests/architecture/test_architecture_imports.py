"""Who may import what: the layers of docs/architecture.md, walked over the imports of every file."""

from __future__ import annotations

import ast
import graphlib
from dataclasses import dataclass

import pytest

from architecture.sources import Import, all_imports, imports_in, is_under_any, modules

PROTOCOLS = (
    *("lowpeak.parallel.strategy", "lowpeak.rewards.reward"),
    *("lowpeak.rollout.engine", "lowpeak.rollout.pending"),
)
CONFIGS = "lowpeak.trainers.configs"  # the classes over TrainingArguments, which are loaded on first use
LAYER_0 = ("lowpeak.errors", "lowpeak.arguments", "lowpeak.memory.phases", "lowpeak.exports", "lowpeak.records")


PIPELINE = ("training", "trainers", "setup")


@dataclass(frozen=True)
class Rule:
    """`who` may not import `what`, `but` what is excepted; `only_at_start` allows it inside of functions."""

    who: tuple[str, ...]
    what: tuple[str, ...]
    but: tuple[str, ...] = PROTOCOLS
    not_who: tuple[str, ...] = ()
    only_at_start: bool = False

    def breaks(self, found: Import) -> bool:
        return (
            is_under_any(found.module, self.who)
            and not is_under_any(found.module, self.not_who)
            and is_under_any(found.target, self.what)
            and not is_under_any(found.target, (*self.but, found.module))
            and not (self.only_at_start and found.when != "start")
        )


def _rooms(*names: str) -> tuple[str, ...]:
    return tuple(f"lowpeak.{name}" for name in names)


RULES = {
    "errors, arguments and phases need nothing": Rule(
        LAYER_0[:4], ("torch", "transformers", "accelerate", "lowpeak"), but=LAYER_0, not_who=(CONFIGS,)
    ),
    "unwrapping needs nothing": Rule(("lowpeak.heads.unwrap",), ("torch", "transformers", "accelerate", "lowpeak")),
    "records need only torch": Rule(("lowpeak.records",), ("transformers", "accelerate", "lowpeak")),
    "pure functions know no processes and no engines": Rule(
        _rooms("algorithms", "attention", "batching", "optim", "models.value_heads", "models.experts", "logprobs"),
        ("torch.distributed", "accelerate", CONFIGS, *_rooms("ranks", "parallel", "rollout", "vllm", *PIPELINE)),
    ),
    "ranks and protocols stand on records, errors and settings": Rule(
        ("lowpeak.ranks", *PROTOCOLS), ("lowpeak",), but=(*LAYER_0, "lowpeak.ranks", *PROTOCOLS)
    ),
    "the watchdog stands on ranks alone": Rule(
        _rooms("watchdog", "setup.elastic_restart"), ("lowpeak",), but=(*LAYER_0, "lowpeak.ranks", "lowpeak.watchdog")
    ),
    "models and strategies know no algorithm, engine or reward": Rule(
        _rooms("parallel", "models"), _rooms("algorithms", "rollout", "vllm", "rewards", *PIPELINE)
    ),
    "rewards, data, memory's measurements and the journal know no trainer": Rule(
        _rooms(
            "rewards",
            "data",
            "memory.device_memory",
            "memory.tracker",
            "memory.activation_offload",
            "memory.rollout_offload",
            "journal",
        ),
        _rooms("parallel", "rollout", "vllm", "algorithms", *PIPELINE),
    ),
    "engines know no algorithm, trainer or named strategy": Rule(
        _rooms("rollout", "vllm"), _rooms("algorithms", "parallel", *PIPELINE)
    ),
    "checkpoints know no engine and no algorithm": Rule(
        _rooms("checkpoint"), _rooms("rollout", "vllm", "algorithms", *PIPELINE), but=()
    ),
    "the step sees protocols only": Rule(
        _rooms("training.step"),
        (
            "transformers.Trainer",
            "transformers.trainer",
            "vllm",
            "deepspeed",
            "torch.distributed",
            *_rooms("parallel", "rollout", "vllm", "rewards", "trainers", "checkpoint"),
        ),
    ),
    "planning calls the step, not the trainer": Rule(
        _rooms("memory.rehearsal", "training.run_sizes"), _rooms("trainers", "vllm")
    ),
    "the pipeline knows no trainer": Rule(_rooms("training", "setup"), _rooms("trainers")),
    "only the command line knows the command line": Rule(
        ("lowpeak",), ("lowpeak.cli",), not_who=("lowpeak.cli", "lowpeak.__main__")
    ),
    "only the command line knows the self-test": Rule(
        ("lowpeak",), _rooms("selftest"), not_who=("lowpeak.cli", "lowpeak.selftest")
    ),
    "only the command line knows the report": Rule(
        ("lowpeak",), (*_rooms("report"), "plotly"), not_who=("lowpeak.cli", "lowpeak.report", "lowpeak.plan.output")
    ),
    "a report needs journals alone": Rule(
        _rooms("report"),
        ("lowpeak", "torch", "transformers", "numpy"),
        but=("lowpeak.errors", "lowpeak.exports", "lowpeak.journal", "lowpeak.report"),
    ),
    "the command line starts without the heavy packages": Rule(
        ("lowpeak.cli", "lowpeak.__main__"),
        (
            "torch",
            "transformers",
            "datasets",
            "accelerate",
            "numpy",
            *_rooms("training", "trainers", "data", "rewards", "selftest"),
        ),
        not_who=("lowpeak.cli.parser",),  # which a command imports that trains
        only_at_start=True,
    ),
    "process groups are named by ranks and strategies alone": Rule(
        ("lowpeak",),
        ("torch.distributed",),
        but=("torch.distributed.elastic",),  # torchrun's agent: it starts processes and has no group
        not_who=("lowpeak.ranks", "lowpeak.setup.elastic_restart", "lowpeak.parallel"),
    ),
    "optional packages are imported where they are used": Rule(
        ("lowpeak",), ("peft", "bitsandbytes", "vllm", "deepspeed"), only_at_start=True
    ),
    "no other library of the kind is needed": Rule(("lowpeak",), ("trl", "verl", "openrlhf")),
}


@pytest.mark.parametrize("name", RULES)
def test_imports_keep_to_the_layers(name):
    broken = [f"{found.module} imports {found.target}" for found in all_imports() if RULES[name].breaks(found)]
    assert broken == []


def test_modules_do_not_import_each_other_in_a_circle():
    graph: dict[str, set[str]] = {module: set() for module in modules()}
    for found in all_imports():
        if found.when == "start" and found.target in graph and found.target != found.module:
            graph[found.module].add(found.target)
    graphlib.TopologicalSorter(graph).prepare()


STEP = "the step sees protocols only"
PURE = "pure functions know no processes and no engines"
FORBIDDEN = [
    ("lowpeak.arguments.new", "import torch", "errors, arguments and phases need nothing"),
    ("lowpeak.algorithms.new", "from lowpeak.training import step", PURE),
    ("lowpeak.training.step", "def f():\n    from transformers import Trainer", STEP),
    ("lowpeak.training.step", "import lowpeak.rollout.native.engine", STEP),
    ("lowpeak.vllm.new", "import vllm", "optional packages are imported where they are used"),
    ("lowpeak.report.new", "from lowpeak.training import Run", "a report needs journals alone"),
    ("lowpeak.training.new", "def f():\n    import plotly", "only the command line knows the report"),
    ("lowpeak.journal", "import torch.distributed", "process groups are named by ranks and strategies alone"),
]


@pytest.mark.parametrize(("module", "source", "rule"), FORBIDDEN)
def test_a_forbidden_import_is_found(module, source, rule):
    found = list(imports_in(module, ast.parse(source), modules() | {"lowpeak.training.step"}))
    assert any(RULES[rule].breaks(each) for each in found)


def test_a_protocol_may_be_imported_from_anywhere():
    tree = ast.parse("from lowpeak.rollout.engine import RolloutEngine")
    found = list(imports_in("lowpeak.data.new", tree, modules()))
    assert not any(rule.breaks(each) for each in found for rule in RULES.values())


def test_an_import_inside_a_function_is_not_one_at_start_up():
    tree = ast.parse("import a\ndef f():\n    import b")
    assert {each.target: each.when for each in imports_in("m", tree, modules())} == {"a": "start", "b": "call"}

"""Who may import what: the layers of docs/architecture.md, walked over the imports of every file."""

from __future__ import annotations

import ast
import graphlib
from dataclasses import dataclass

import pytest

from architecture.sources import (
    LAYERS,
    Import,
    all_imports,
    files,
    imports_in,
    is_under_any,
    module_of,
    modules,
    tree_of,
)

PROTOCOLS = (
    *("lowpeak.parallel.strategy", "lowpeak.rollout.engine", "lowpeak.rollout.pending", "lowpeak.rollout.turns"),
    "lowpeak.rewards.reward",
)
GROUND = ("lowpeak.errors", "lowpeak.arguments", "lowpeak.exports", "lowpeak.records")


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
    "errors, arguments and phases need no library": Rule(
        _rooms("errors", "exports", "arguments", "memory.phases"), ("torch", "transformers", "accelerate")
    ),
    "unwrapping needs nothing": Rule(("lowpeak.heads.unwrap",), ("torch", "transformers", "accelerate", "lowpeak")),
    "records need only torch": Rule(("lowpeak.records",), ("transformers", "accelerate")),
    "pure functions know no processes": Rule(
        _rooms("algorithms", "attention", "batching", "heads", "logprobs", "optim"),
        ("torch.distributed", "accelerate", "lowpeak.ranks"),
    ),
    "ranks and protocols stand on records, errors and settings": Rule(
        ("lowpeak.ranks", *PROTOCOLS), ("lowpeak",), but=(*GROUND, "lowpeak.ranks", *PROTOCOLS)
    ),
    "the watchdog stands on ranks alone": Rule(
        _rooms("watchdog", "setup.elastic_restart"), ("lowpeak",), but=(*GROUND, "lowpeak.ranks", "lowpeak.watchdog")
    ),
    "only the pipeline and what plans or tests it know algorithms": Rule(
        ("lowpeak",),
        ("lowpeak.algorithms",),
        not_who=_rooms("algorithms", "training", "setup", "plan", "trainers", "selftest", "cli"),
    ),
    "engines know no named strategy": Rule(_rooms("rollout", "vllm"), ("lowpeak.parallel",)),
    "checkpoints and the journal know no engine": Rule(
        _rooms("checkpoint", "journal"), _rooms("rollout", "vllm"), but=()
    ),
    "the step sees protocols only": Rule(
        _rooms("training.step"),
        (
            "transformers.Trainer",
            "transformers.trainer",
            "vllm",
            "deepspeed",
            "torch.distributed",
            *_rooms("parallel", "rollout", "vllm", "rewards", "checkpoint"),
        ),
    ),
    "plans call no engine of vLLM": Rule(_rooms("plan", "sizes"), ("lowpeak.vllm",)),
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
        but=(*PROTOCOLS, "lowpeak.selftest.checks"),  # which needs errors alone
        not_who=("lowpeak.cli.parser", "lowpeak.cli.trl_scripts"),  # imported by commands and scripts that train
        only_at_start=True,
    ),
    "process groups are named by ranks, strategies and rehearsed ranks alone": Rule(
        ("lowpeak",),
        ("torch.distributed",),
        but=("torch.distributed.elastic",),  # torchrun's agent: it starts processes and has no group
        not_who=_rooms("ranks", "setup.elastic_restart", "parallel", "plan.rehearsal"),
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


def test_a_package_imports_only_from_layers_below_its_own():
    """Imports inside of functions count; those for type checkers alone do not. So packages form no cycle."""
    level = {name: number for number, layer in enumerate(LAYERS) for name in layer}
    upward = []
    for found in all_imports():
        user, used = found.module.split(".")[1:2], found.target.split(".")[1:2]
        if found.target.startswith("lowpeak.") and user and user != used and found.when != "typing":
            upward += [f"{found.module} imports {found.target}"] * (level[used[0]] >= level[user[0]])
    assert upward == []


def test_no_module_of_another_package_is_named_in_a_string():
    """A name in a string is an import that no rule sees. vLLM's hooks and rewards are named so, in their own packages."""
    found = {
        (module_of(path).split(".")[1], node.value)
        for path in files()
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in modules() - {"lowpeak"}
    }
    assert {name for user, name in found if name.split(".")[1] != user} == set()


def test_modules_do_not_import_each_other_in_a_circle():
    graph: dict[str, set[str]] = {module: set() for module in modules()}
    for found in all_imports():
        if found.when == "start" and found.target in graph and found.target != found.module:
            graph[found.module].add(found.target)
    graphlib.TopologicalSorter(graph).prepare()


STEP = "the step sees protocols only"
PURE = "pure functions know no processes"
FORBIDDEN = [
    ("lowpeak.arguments.new", "import torch", "errors, arguments and phases need no library"),
    ("lowpeak.algorithms.new", "from torch import distributed", PURE),
    ("lowpeak.training.step", "def f():\n    from transformers import Trainer", STEP),
    ("lowpeak.training.step", "import lowpeak.rollout.native.engine", STEP),
    ("lowpeak.vllm.new", "import vllm", "optional packages are imported where they are used"),
    ("lowpeak.report.new", "from lowpeak.training import Run", "a report needs journals alone"),
    ("lowpeak.training.new", "def f():\n    import plotly", "only the command line knows the report"),
    (
        "lowpeak.journal",
        "import torch.distributed",
        "process groups are named by ranks, strategies and rehearsed ranks alone",
    ),
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

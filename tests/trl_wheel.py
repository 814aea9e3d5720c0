"""TRL's pinned wheel, unpacked in the environment by the Makefile: text and modules to test against, never a dependency."""

from __future__ import annotations

import ast
import os
import sys
from pathlib import Path

import pytest

FOLDER = Path(os.environ.get("LOWPEAK_TRL") or Path(sys.prefix) / "trl")
needs_trl = pytest.mark.skipif(not (FOLDER / "trl").is_dir(), reason="TRL's wheel is not unpacked: run `make test`")
_TRAINERS = {
    **{
        kind: f"trainer/{kind.lower()}_trainer.py"
        for kind in ("GRPO", "RLOO", "Distillation", "SFT", "Reward", "DPO", "KTO")
    },
    "OnlineDPO": "experimental/online_dpo/online_dpo_trainer.py",
}


def text_of(path: str) -> str:
    """The text of a file of TRL, such as scripts/grpo.py."""
    return (FOLDER / "trl" / path).read_text(encoding="utf-8")


def methods_of(kind: str) -> set[str]:
    """The names of the methods and properties of TRL's trainer of this kind."""
    classes = [node for node in ast.parse(text_of(_TRAINERS[kind])).body if isinstance(node, ast.ClassDef)]
    (trainer,) = (node for node in classes if node.name == f"{kind}Trainer")
    return {node.name for node in trainer.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}

"""List the files that a completion passes on its way to the loss, and weights on their way into vLLM.

Both are traced in a run of a tiny model, so that the lists are those of the code: `python tests/architecture/call_paths.py` writes
them into docs/architecture.md.
"""

from __future__ import annotations

import re
import sys
import tempfile
from pathlib import Path
from types import FrameType
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

from architecture.sources import PACKAGE, ROOT, modules
from fused import FusedModel, FusedVllm, slices, weights
from small_runs import make

PAGE = ROOT / "docs" / "architecture.md"
CARRIERS = {"Completion", "Group", "Record", "Rollout", "MicroBatch", "TokenBatch"}  # the records that hold a completion's tokens
# Inside these a completion passes more files, which a reader of the main line need not open.
INTERNALS = ("rollout/native/", "batching/", "logprobs/", "attention/")


def carries(value: Any, depth: int = 2) -> bool:
    """Return whether a value is, or holds as an item or a field, a record of completions."""
    if type(value).__name__ in CARRIERS:
        return True
    if depth and isinstance(value, list | tuple) and value:
        return carries(value[0], depth - 1)
    fields = getattr(type(value), "__dataclass_fields__", ())
    return bool(depth) and any(carries(getattr(value, name, None), depth - 1) for name in fields)


class Trace:
    """Files of lowpeak in the order in which their functions are first given a completion, each with the first such function."""

    def __init__(self) -> None:
        self.found: dict[str, str] = {}

    def __call__(self, frame: FrameType, event: str, returned: Any) -> None:
        code = frame.f_code
        if event not in ("call", "return") or not code.co_filename.startswith(str(PACKAGE)):
            return
        path = str(Path(code.co_filename).relative_to(PACKAGE))
        if path in self.found or code.co_name.startswith("<"):
            return
        given = [frame.f_locals.get(name) for name in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]]
        if any(map(carries, given)) or (event == "return" and carries(returned)):
            self.found[path] = code.co_qualname


def completion_path() -> dict[str, str]:
    """Return the files that a completion passes in a GRPO step, with a function of each; internals of packages left out."""
    with tempfile.TemporaryDirectory() as folder:
        trainer = make("GRPO", Path(folder), max_steps=1)
        trace = Trace()
        sys.setprofile(trace)
        try:
            trainer.train()
        finally:
            sys.setprofile(None)
    return {path: name for path, name in trace.found.items() if not path.startswith(INTERNALS)}

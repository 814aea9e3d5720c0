"""List the files that a completion passes on its way to the loss, weights into vLLM, and an out-of-memory error to its retry.

All are traced in a run of a tiny model, so that the lists are those of the code: `python tests/architecture/call_paths.py` writes
them into docs/architecture.md.
"""

from __future__ import annotations

import re
import sys
import tempfile
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from torch import Tensor, nn

from architecture.sources import PACKAGE, ROOT
from fake_vllm import engine_over
from fused_model import FusedWorker
from lowpeak.vllm.colocated import ColocatedVllm
from lowpeak.vllm.protocol import EngineInfo
from small_runs import make, spread
from tiny_models import tiny_model

PAGE = ROOT / "docs" / "architecture.md"
MARKS = ("<!-- call paths -->", "<!-- end of call paths -->")
# Records that have a completion's tokens.
COMPLETIONS = ("Completion", "Group", "Record", "Rollout", "MicroBatch", "TokenBatch")
# What weights are in on their way, and what sends and receives them in a process.
WEIGHTS = (
    *("ExportParam", "FlatShard", "Parameter", "Tensor", "WeightSlice"),
    *("Bucket", "Piece", "ProcessSender", "ProcessReceiver"),
)
# The error of a failed pass, and what it becomes until the pass runs again.
FAILURES = ("OutOfMemoryError", "LocalMemoryError", "AgreedMemoryError", "Attempt", "Demand", "GuardedPasses", "Sizes")
# Packages whose inside a reader of the main line need not open: decoding, packing and the head. Nothing else is left out.
OFF_THE_LINE = ("rollout/native/", "batching/", "logprobs/")

Function = tuple[str, str]  # its file and its name


def carries(value: Any, types: Collection[str], depth: int = 3) -> bool:
    """Return whether a value is of one of these types, or has one as an item or a field."""
    if type(value).__name__ in types:
        return True
    if depth and isinstance(value, list | tuple | dict) and value:
        return carries(next(iter(value.values() if isinstance(value, dict) else value)), types, depth - 1)
    fields = getattr(type(value), "__dataclass_fields__", ())
    return bool(depth) and any(carries(getattr(value, name, None), types, depth - 1) for name in fields)


class Trace:
    """Files of lowpeak in the order in which one of their functions is first given, or returns, a value of these types.

    With `below`, a file and a function, only calls that this function makes are traced, and the callers between are listed too:
    a function that is given only a generator, or a function to call, passes the values on. The trace ends once `until` returned.
    """

    def __init__(self, types: Collection[str], below: Function | None = None, until: Function | None = None) -> None:
        self.types, self.below, self.until = types, below, until
        self.functions: dict[str, str] = {}

    def __call__(self, frame: FrameType, event: str, returned: Any) -> None:
        code = frame.f_code
        path = _path(code.co_filename)
        if event == "return" and (path, code.co_qualname) == self.until:
            sys.setprofile(None)
        if event not in ("call", "return") or path is None or path in self.functions or code.co_name.startswith("<"):
            return
        given = [frame.f_locals.get(name) for name in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]]
        if any(carries(value, self.types) for value in (*given, returned if event == "return" else None)):
            for caller, function in _callers(frame, self.below):
                self.functions.setdefault(caller, function)


def _callers(frame: FrameType, below: Function | None) -> list[Function]:
    """Return files and functions on the call stack, from `below` to this frame (None: this frame alone)."""
    stack: list[Function] = []
    caller: FrameType | None = frame
    while caller is not None:
        path, name = _path(caller.f_code.co_filename), caller.f_code.co_qualname.replace("<locals>.", "")
        if path is not None:
            stack.insert(0, (path, name))
        if below is None or (path, name) == below:
            return stack
        caller = caller.f_back
    return []


def _path(filename: str) -> str | None:
    path = Path(filename)
    return str(path.relative_to(PACKAGE)) if path.is_relative_to(PACKAGE) else None


def completion_path(folder: Path) -> dict[str, str]:
    """Return the files that a completion passes in a GRPO step until the first loss, each with a function."""
    trainer = make("GRPO", folder, max_steps=1, reward_funcs=spread, beta=0.04, num_iterations=2)
    with traced(Trace(COMPLETIONS, until=("algorithms/grpo.py", "grpo_loss"))) as trace:
        trainer.train()
    return on_the_line(trace.functions)


@contextmanager
def traced(trace: Trace) -> Iterator[Trace]:
    """Trace the calls in the block."""
    sys.setprofile(trace)
    try:
        yield trace
    finally:
        sys.setprofile(None)


def on_the_line(functions: Mapping[str, str]) -> dict[str, str]:
    """Return the files of the main line."""
    return {path: name for path, name in functions.items() if not path.startswith(OFF_THE_LINE)}


class LoadsWeights(nn.Module):
    """A model of a vLLM worker."""

    tp, rank = 1, 0

    def __init__(self) -> None:
        super().__init__()
        self.model = tiny_model()

    def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
        return self.model.named_parameters(*args, **kwargs)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        parameters = dict(self.named_parameters())
        for name, tensor in weights:
            parameters[name].data.copy_(tensor)


class WeightsVllm(ColocatedVllm):
    """A vLLM of this process over a worker with that model, as far as weights need one."""

    def __init__(self) -> None:
        worker: Any = FusedWorker(LoadsWeights())
        worker.model_runner.sampler = SimpleNamespace(
            logprobs_mode="raw_logprobs",
            compute_logprobs=lambda logits: logits,
            forward=lambda logits, metadata: logits,
        )
        self.llm = SimpleNamespace(collective_rpc=lambda method, kwargs: [getattr(worker, method)(**kwargs)])

    def info(self, wait_seconds: float | None = None) -> EngineInfo:
        return EngineInfo("0.32.0", "tiny", "", "float32", 128, 256, 1 << 14, in_process=True)

    @contextmanager
    def paused(self) -> Iterator[None]:
        yield
        raise SystemExit  # the weights are there, which is all

    def close(self) -> None:
        pass


def weights_path(folder: Path) -> dict[str, str]:
    """Return the files that weights pass from the push of the policy's to a worker's `load_weights`, each with a function."""
    trainer = make("GRPO", folder, max_steps=1)
    trainer.collector.engine = engine_over(WeightsVllm(), load=False)
    below = ("training/weight_sync.py", "WeightSync.sync_weights")
    with traced(Trace(WEIGHTS, below)) as trace, suppress(SystemExit):
        trainer.train()
    return on_the_line(trace.functions)


def recovery_path(folder: Path) -> dict[str, str]:
    """Return the files that an out-of-memory error passes from a failed forward to the next one, each with a function."""
    trainer = make("GRPO", folder, max_steps=1, reward_funcs=spread)
    trace, forward = Trace(FAILURES), trainer.model.forward

    def fail_first(*args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled() and not trace.functions:
            sys.setprofile(trace)
            raise torch.OutOfMemoryError("no room")
        sys.setprofile(None)
        return forward(*args, **kwargs)

    trainer.model.forward = fail_first
    try:
        trainer.train()
    finally:
        sys.setprofile(None)
    return on_the_line(trace.functions)


def tables() -> str:
    """Return all lists as Markdown."""
    with tempfile.TemporaryDirectory() as folder:
        paths = {
            "A completion, from the engine to the loss": completion_path(Path(folder) / "completion"),
            "Weights, from the policy to `load_weights` of a vLLM worker": weights_path(Path(folder) / "weights"),
            "An out-of-memory error, from the failed pass to its retry": recovery_path(Path(folder) / "recovery"),
        }
    parts = []
    for title, functions in paths.items():
        rows = [f"| {number} | `{path}` | `{name}` |" for number, (path, name) in enumerate(functions.items(), 1)]
        parts.append(
            "\n".join(
                [f"**{title}: {len(functions)} files.**", "", "| # | file | function |", "| -- | -- | -- |", *rows]
            )
        )
    return "\n\n".join(parts)


def listed(page: str) -> str:
    """Return what a page has between the marks."""
    found = re.search(rf"{MARKS[0]}\n(.*)\n{MARKS[1]}", page, re.DOTALL)
    assert found is not None, f"{PAGE.name} has no {MARKS[0]}"
    return found[1].strip()


if __name__ == "__main__":
    text = PAGE.read_text(encoding="utf-8")
    start, end = text.index(MARKS[0]) + len(MARKS[0]), text.index(MARKS[1])
    PAGE.write_text(f"{text[:start]}\n\n{tables()}\n\n{text[end:]}", encoding="utf-8")

"""List the files that a completion passes on its way to the loss, and weights on their way into vLLM.

Both are traced in a run of a tiny model, so that the lists are those of the code: `python tests/architecture/call_paths.py` writes
them into docs/architecture.md.
"""

from __future__ import annotations

import re
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

from torch import Tensor, nn

from architecture.sources import PACKAGE, ROOT
from fused import FusedVllm
from lowpeak.vllm import EngineInfo
from small_runs import make
from tiny import tiny_model
from vllms import engine_over

PAGE = ROOT / "docs" / "architecture.md"
MARKS = ("<!-- call paths -->", "<!-- end of call paths -->")
COMPLETIONS = {
    "Completion",
    "Group",
    "Record",
    "Rollout",
    "MicroBatch",
    "TokenBatch",
}  # records with a completion's tokens
# Packages whose inside a reader of the main line need not open, the types themselves, and what only measures or checks.
OFF_THE_LINE = (
    *("rollout/native/", "batching/", "logprobs/", "attention/"),
    *("records.py", "training/rollout_report.py", "algorithms/metrics.py", "algorithms/result_checks.py"),
    "vllm/weight_sync/checksum.py",
)


def carries(value: Any, types: set[str], depth: int = 2) -> bool:
    """Return whether a value is of one of these types, or has one as an item or a field."""
    if type(value).__name__ in types:
        return True
    if depth and isinstance(value, list | tuple) and value:
        return carries(value[0], types, depth - 1)
    fields = getattr(type(value), "__dataclass_fields__", ())
    return bool(depth) and any(carries(getattr(value, name, None), types, depth - 1) for name in fields)


class Trace:
    """Files of lowpeak in the order in which one of their functions is first given, or returns, a value of these types."""

    def __init__(self, types: set[str]) -> None:
        self.types = types
        self.functions: dict[str, str] = {}

    def __call__(self, frame: FrameType, event: str, returned: Any) -> None:
        code = frame.f_code
        path = _path(code.co_filename)
        if event not in ("call", "return") or path is None or path in self.functions or code.co_name.startswith("<"):
            return
        given = [frame.f_locals.get(name) for name in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]]
        if any(carries(value, self.types) for value in (*given, returned if event == "return" else None)):
            self.functions[path] = code.co_qualname.replace("<locals>.", "")


def _path(filename: str) -> str | None:
    path = Path(filename)
    return str(path.relative_to(PACKAGE)) if path.is_relative_to(PACKAGE) else None


def completion_path(folder: Path) -> dict[str, str]:
    """Return the files that a completion passes in a GRPO step, each with a function, without the internals of packages."""
    trainer = make("GRPO", folder, max_steps=1)
    with traced(COMPLETIONS) as trace:
        trainer.train()
    return on_the_line(trace.functions)


@contextmanager
def traced(types: set[str]) -> Iterator[Trace]:
    """Trace the calls in the block."""
    trace = Trace(types)
    sys.setprofile(trace)
    try:
        yield trace
    finally:
        sys.setprofile(None)


def on_the_line(functions: Mapping[str, str]) -> dict[str, str]:
    """Return the files of the main line."""
    return {path: name for path, name in functions.items() if not path.startswith(OFF_THE_LINE)}


class LoadsWeights(nn.Module):
    """A model of a vLLM worker that notes the call stack when it is given weights."""

    tp, rank = 1, 0

    def __init__(self) -> None:
        super().__init__()
        self.model, self.stack = tiny_model(), dict[str, str]()

    def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
        return self.model.named_parameters(*args, **kwargs)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        frame: FrameType | None = sys._getframe(1)
        if not self.stack:
            while frame is not None:
                path = _path(frame.f_code.co_filename)
                if path is not None:
                    self.stack[path] = frame.f_code.co_qualname.replace("<locals>.", "")
                frame = frame.f_back
        parameters = dict(self.named_parameters())
        for name, tensor in weights:
            parameters[name].data.copy_(tensor)


class WeightsVllm(FusedVllm):
    """A vLLM over that model, as far as weights need one."""

    def call(self, method: str, arguments: Mapping[str, Any], timeout: float | None = None) -> list[Any]:
        return [{}] if method == "lowpeak_score_at_temperature" else super().call(method, arguments, timeout)

    def engine_info(self) -> EngineInfo:
        return EngineInfo("0.32.0", "tiny", "", "float32", 128, 256, 1 << 14, 1)

    def complete(self, requests: Any, timeout: float | None = None) -> Any:
        raise SystemExit  # the weights are there, which is all

    def pause(self) -> None:
        pass

    resume = sleep = close = pause

    def wait(self, seconds: float) -> None:
        pass

    def wake(self) -> bool:
        return True


def weights_path(folder: Path) -> dict[str, str]:
    """Return the files that get slices of the weights, and those on the call stack of a worker's `load_weights`."""
    model = LoadsWeights()
    trainer = make("GRPO", folder, max_steps=1)
    trainer.collector.engine = engine_over(WeightsVllm(model), load=False)
    with traced({"WeightSlice"}) as trace, suppress(SystemExit):
        trainer.train()
    stack = dict(reversed(model.stack.items()))
    start = list(stack).index("training/weight_sync.py")
    after = dict(list(stack.items())[start:])
    return on_the_line({"training/weight_sync.py": after["training/weight_sync.py"], **trace.functions, **after})


def tables() -> str:
    """Return both lists as Markdown."""
    with tempfile.TemporaryDirectory() as folder:
        paths = {
            "A completion, from the engine to the loss": completion_path(Path(folder) / "completion"),
            "Weights, from the policy to `load_weights` of a vLLM worker": weights_path(Path(folder) / "weights"),
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

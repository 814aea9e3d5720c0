"""The console of a run: one aligned line of at most eight numbers per log, and a progress bar on terminals only."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

from transformers.trainer_callback import PrinterCallback, ProgressCallback, TrainerCallback

# What a person watches, most telling first: the label, and its metrics, of which a run has one.
_WATCHED = (
    ("reward", ("reward",)),
    ("greedy", ("greedy_accuracy",)),
    ("loss", ("loss",)),
    ("accuracy", ("accuracy", "rewards/accuracies", "mean_token_accuracy")),
    ("margin", ("rewards/margins",)),
    ("kl", ("kl", "objective/kl")),
    ("length", ("completions/mean_length",)),
    ("truncated", ("completions/clipped_ratio",)),
    ("entropy", ("entropy", "policy/entropy_avg")),
    ("grad norm", ("grad_norm",)),
)
# In place of all but the first, in a run whose rollouts are generated ahead.
_WATCHED_AHEAD = (
    ("staleness", ("staleness/max",)),
    ("sample size", ("sampling/effective_sample_size",)),
    ("idle servers", ("idle/servers",)),
    ("idle trainer", ("idle/trainer",)),
)
_NUM_WATCHED = 5  # besides seconds, memory and the time left
_MIN_WIDTH = 5  # of most numbers with three digits
_BYTES = ("peak_memory/", "reserved_memory/", "planned_memory/")


class _Console(TrainerCallback):
    """The lines of one run; columns keep their widths from line to line. `log_all`: every number of a log."""

    def __init__(self, log_all: bool) -> None:
        super().__init__()
        self._log_all = log_all
        self._widths: dict[str, int] = {}
        self._began = (0.0, 0)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._began = (time.monotonic(), state.global_step)
        super().on_train_begin(args, state, control, **kwargs)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if state.is_world_process_zero and logs:
            self.write(self.line(logs, state))

    def write(self, line: str) -> None:
        raise AssertionError("a console writes lines")

    def line(self, logs: Mapping[str, Any], state: Any) -> str:
        """Return the line of a log: of steps, of an evaluation, of the end of a run, or of the user's own numbers."""
        number = str(state.global_step).rjust(len(str(state.max_steps)))
        start = f"step {number}/{state.max_steps}" if state.max_steps > 0 else f"step {number}"
        if self._log_all:
            return "  ".join([start, *(f"{name} {_shown(name, value)}" for name, value in logs.items())])
        if "train_runtime" in logs:
            ended = f"done in {timedelta(seconds=round(logs['train_runtime']))}"
            columns = [*self._watched(logs, _NUM_WATCHED), *_best(state)]
            return "  ".join([start, ended, *(f"{label} {text}" for label, text in columns)])
        if "learning_rate" in logs:
            columns = [*self._watched(logs, _NUM_WATCHED), *self._costs(logs, state)]
            return "  ".join([start, *(self._aligned(*column) for column in columns)])
        return "  ".join([start, *self._other_numbers(logs)])

    def _other_numbers(self, logs: Mapping[str, Any]) -> list[str]:
        """Return the words of an evaluation, or of the user's logs."""
        # Names of an evaluation share a prefix, such as eval_ or eval_math_: that of its seconds.
        names = [name for name in logs if name != "epoch"]
        prefix = next((name.removesuffix("_runtime") for name in names if name.endswith("_runtime")), "")
        own = {name.removeprefix(f"{prefix}_"): logs[name] for name in names}
        chosen = [*self._watched(own, 8)] or [(name, _shown(name, value)) for name, value in [*own.items()][:8]]
        return [*filter(None, [prefix]), *(f"{label} {text}" for label, text in chosen)]

    def _watched(self, logs: Mapping[str, Any], most: int) -> list[tuple[str, str]]:
        watched = (_WATCHED[0], *_WATCHED_AHEAD, *_WATCHED[1:]) if "staleness/max" in logs else _WATCHED
        found = [
            (label, _shown(name, logs[name]))
            for label, names in watched
            if (name := next((name for name in names if name in logs), None)) is not None
            # The loss of a policy gradient says nothing about progress.
            and not (name == "loss" and "reward" in logs)
        ]
        return found[:most]

    def _costs(self, logs: Mapping[str, Any], state: Any) -> Iterator[tuple[str, str]]:
        if "step_time" in logs:
            yield "s/step", _short(logs["step_time"])
        peak = max((value for name, value in logs.items() if name.startswith("peak_memory/")), default=None)
        if peak is not None:
            yield "GiB", _short(peak / 2**30)
        start, first = self._began
        if state.global_step > first:
            left = (state.max_steps - state.global_step) * (time.monotonic() - start) / (state.global_step - first)
            yield "left", str(timedelta(seconds=round(left)))

    def _aligned(self, label: str, text: str) -> str:
        width = self._widths[label] = max(len(text), self._widths.get(label, _MIN_WIDTH))
        return f"{label} {text:>{width}}"


class ConsoleLines(_Console, PrinterCallback):
    """A callback that prints a line for each log, where there is no bar."""

    def write(self, line: str) -> None:
        print(line, flush=True)


class ConsoleBar(_Console, ProgressCallback):
    """A progress bar with the phase and the time left, under the same lines."""

    def write(self, line: str) -> None:
        if self.training_bar is None:  # outside of training
            print(line, flush=True)
        else:
            self.training_bar.write(line)


def shorten_console(callbacks: list[Any], log_all: bool) -> None:
    """Replace transformers' callback of the console, or of a notebook, in place; a user's own stay."""
    for index, callback in enumerate(callbacks):
        # The class of a notebook's callback is defined only where IPython is installed.
        if (
            type(callback) in (ProgressCallback, PrinterCallback)
            or type(callback).__name__ == "NotebookProgressCallback"
        ):
            has_bar = type(callback) is ProgressCallback and sys.stderr.isatty()
            callbacks[index] = (ConsoleBar if has_bar else ConsoleLines)(log_all)


def _best(state: Any) -> Iterator[tuple[str, str]]:
    """Yield the best checkpoint and its metric, which a run with load_best_model_at_end ends with."""
    if state.best_model_checkpoint is not None:
        yield "best", f"{Path(state.best_model_checkpoint).name} ({_short(state.best_metric)})"


def _shown(name: str, value: Any) -> str:
    if name.startswith(_BYTES):
        return f"{_short(value / 2**30)}GiB"
    return _short(value) if type(value) is float else str(value)


def _short(value: float) -> str:
    """Return a number with three significant digits, and all digits of its integer part."""
    return f"{value:.0f}" if value == 0 or abs(value) >= 99.95 else f"{value:#.3g}"

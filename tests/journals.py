"""Journals of runs that never were, for tests of their report."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from lowpeak.journal import Journal

MARKUP = "</script><script>alert(1)</script><img src=http://a.invalid onerror=alert(2)><!-- &lt; <b>"


def online_run(folder: Path, num_steps: int = 4, per_step: int = 4, **changes: Any) -> Path:
    """A run whose completions have their number as reward, and token values at the first of each rollout."""
    journal = Journal(folder / "journal")
    for step in range(1, num_steps + 1):
        numbers = range((step - 1) * per_step, step * per_step)
        rows = [
            {"prompt": f"prompt {step}", "completion": f"text {i}", "reward": float(i), "advantage": float(-i)}
            | {"rollout": step - 1, "group": 0, "policy_version": step - 1, "num_tokens": 3, "finish_reason": "stop"}
            | {"rewards": {"my_reward": float(i)}, "columns": {"answer": f"{i}"}}
            | changes
            for i in numbers
        ]
        journal.write_rollout(step, rows)
        journal.write_tokens(step, [token_row(0, ["te", "xt ", str(numbers[0])])])
        phases = {"time/rollout": 1.0, "time/train": 3.0, "peak_memory/rollout": 2.0**30, "peak_memory/train": 2.0**31}
        metrics = {"reward": step / 10, "kl": 0.1, "entropy": 1.0, "learning_rate": 1e-3, "step_time": 4.0}
        journal.write_step(step, {**metrics, **phases, "completions/mean_length": 3.0, "odd metric": 1.0})
    return folder


def conversation(result: str) -> dict[str, Any]:
    """The columns of a completion with one call of a tool, which has this result."""
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}}
    return {
        "completion": [
            {"role": "assistant", "content": "let me see", "tool_calls": [call]},
            {"role": "tool", "name": "add", "content": result},
            {"role": "assistant", "content": "so 3"},
        ],
        "turns": [
            {"policy_version": 0, "first_token": 0, "num_tokens": 1, "seconds": 0.25, "reward": 0.5},
            {"policy_version": 0, "first_token": 2, "num_tokens": 1, "seconds": 0.0},
        ],
    }


def token_row(row: int, pieces: list[str]) -> dict[str, Any]:
    """Token values that grow along a completion; the second token is not in the loss."""
    count = len(pieces)
    values = {
        "logprobs": [-float(i) for i in range(count)],
        "entropy": [0.5 * i for i in range(count)],
        "mismatch": [0.1 * i for i in range(count)],
        "loss_mask": [int(i != 1) for i in range(count)],
    }
    return {"row": row, "pieces": pieces, **values}


def data_of(page: Path) -> dict[str, Any]:
    """The data in a report's page."""
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page.read_text(), re.DOTALL)
    assert found is not None
    return json.loads(found[1])

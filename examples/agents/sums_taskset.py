"""An environment of verifiers: sums to be answered with a calculator, which is a server that all episodes share.

PYTHONPATH=examples/agents lowpeak grpo --model Qwen/Qwen3-0.6B --environment verifiers:sums_taskset --output_dir out
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import verifiers.v1 as vf

__all__ = ["Sums"]


class Sum(vf.TaskData):
    """A sum, and its result."""

    answer: str


class Calculator(vf.Toolset[vf.SharedToolsetConfig, vf.State]):
    """The tools of the policy."""

    TOOL_PREFIX = None

    @vf.tool
    async def add(self, a: int, b: int) -> str:
        """Add two integers."""
        return str(a + b)


class SumTask(vf.Task[Sum, vf.State, vf.TaskConfig]):
    """A task, and its reward."""

    @vf.reward(weight=1.0)
    async def correct(self, trace: vf.Trace) -> float:
        return float(trace.branches[-1].messages[-1].content == self.data.answer)


class SumsConfig(vf.TasksetConfig):
    """How many sums there are."""

    size: int = 90


class Sums(vf.Taskset[SumTask, SumsConfig]):
    """The tasks of the environment."""

    @classmethod
    def toolsets(cls, config: SumsConfig) -> list[Any]:
        return [Calculator(vf.SharedToolsetConfig())]

    def load(self) -> Iterator[SumTask]:
        for a in range(10, 10 + self.config.size):
            b = 7 * a % 90 + 10
            yield SumTask(Sum(prompt=f"{a}+{b}", answer=str(a + b)), self.config.task)


if __name__ == "__main__":
    Calculator.run()

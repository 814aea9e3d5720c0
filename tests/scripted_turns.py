"""Conversations with tools for tests: over an engine whose turns are written in advance, or by a tiny model that calls them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from datasets import Dataset

from lowpeak.arguments import Sampling, ToolSettings
from lowpeak.data import PromptReader
from lowpeak.environments.engine import EnvironmentEngine
from lowpeak.environments.toolset import Toolset
from lowpeak.records import Group, Metric, Prompt
from lowpeak.rollout import SliceForm, TurnQueue, TurnRequest
from lowpeak.rollout.turns import SampledTurn
from tiny_models import tiny_model, tool_tokenizer


class ScriptedTurns:
    """A TurnEngine that answers turn t of completion c with the text `script[c][t]`; a text without `<eos>` was cut off."""

    policy_version = 0
    slice_form = SliceForm()

    def __init__(self, tokenizer: Any, script: Sequence[Sequence[str]]) -> None:
        self.tokenizer, self.script = tokenizer, script
        self.requests: list[TurnRequest] = []

    def sample_turns(self, queue: TurnQueue, sampling: Sampling) -> None:
        turns = Counter[tuple[int, int]]()
        with queue.answering():
            while True:
                arrivals = queue.take(wait=True)
                for request in arrivals.requests:
                    self.requests.append(request)
                    text = self.script[request.conversation[1]][turns[request.conversation]]
                    turns[request.conversation] += 1
                    request.answer.set_result(self.turn(text))
                if arrivals.is_closed:
                    return

    def turn(self, text: str) -> SampledTurn:
        ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return SampledTurn(ids, [-1.0] * len(ids), "stop" if ids[-1] == self.tokenizer.eos_token_id else "length")

    def _nothing(self, *args: Any) -> None:
        pass

    load = sleep = wake = close = _nothing


def call(name: str, **arguments: Any) -> str:
    """A tool call as the tokenizer's template writes it."""
    body = ", ".join(f'"{key}": {value!r}' for key, value in arguments.items()).replace("'", '"')
    return f'<tool_call>{{"name": "{name}", "arguments": {{{body}}}}}</tool_call>'


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return a + b


class Score:
    """An environment with a tool and a reward of its own."""

    def reset(self, **row: object) -> str:
        self.total, self.row = 0, row
        return " go"

    def increase(self, by: int) -> int:
        """Add to the total.

        Args:
            by: How much.
        """
        self.total += by
        return self.total

    def get_reward(self) -> float:
        return float(self.total)

    def close(self) -> None:
        self.is_closed = True


def questions(count: int = 8) -> Dataset:
    """Prompts in chat form with an answer each."""
    return Dataset.from_list(
        [{"prompt": [{"role": "user", "content": f"{i}+1"}], "answer": str(i)} for i in range(count)]
    )


def calling_model() -> tuple[Any, Any]:
    """Return a tiny model that calls `add` or `increase` in most turns, and its tokenizer; a call is one token, and ends a turn."""
    tokenizer = tool_tokenizer()
    num_others = len(tokenizer)
    tokenizer.add_tokens([call("add", a=i, b=i % 3) for i in range(30)] + [call("increase", by=i) for i in range(30)])
    model = tiny_model(len(tokenizer), context=512)
    model.generation_config.eos_token_id = [tokenizer.eos_token_id, *range(num_others, len(tokenizer))]
    return model, tokenizer


class Talk:
    """Conversations of one prompt with tools or environments over a scripted engine."""

    def __init__(
        self,
        script: Sequence[Sequence[str]],
        tools: Iterable[Callable[..., Any]] = (),
        environment: Any = None,
        *,
        max_tokens: int = 300,
        max_iterations: int | None = None,
        timeout: float | None = 10.0,
        max_branches: int = 1,
    ) -> None:
        self.tokenizer = tool_tokenizer()
        self.turns = ScriptedTurns(self.tokenizer, script)
        self.toolset = Toolset([*tools], environment, ToolSettings(max_iterations, timeout, max_branches=max_branches))
        self.metrics: dict[str, Metric] = {}
        self.sampling = Sampling(num_generations=len(script), max_new_tokens=max_tokens, seed=1)
        self.engine = EnvironmentEngine(
            self.turns, self.tokenizer, self.toolset, {}, PromptReader,
            lambda sampling: {self.tokenizer.eos_token_id}, self.metrics.update,
        )  # fmt: skip

    def prompt(self, content: str, **columns: Any) -> Prompt:
        row = {"prompt": [{"role": "user", "content": content}], **columns}
        prompt = PromptReader(self.tokenizer, chat_template_kwargs={}).read(row, 7)
        assert prompt is not None
        return prompt

    def run(self, content: str = "1+2", **columns: Any) -> Group:
        return self.engine.generate([self.prompt(content, **columns)], self.sampling)[0]

    def texts(self, group: Group) -> list[str]:
        return [self.tokenizer.decode(each.ids) for each in group.completions]

    def sampled(self, group: Group) -> list[str]:
        """The texts of the tokens that the policy wrote."""
        return [self.tokenizer.decode(each.ids[each.loss_mask]) for each in group.completions]

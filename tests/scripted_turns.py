"""An engine whose turns are written in advance, and the conversations that tests build on it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from lowpeak.arguments import Sampling, ToolSettings
from lowpeak.data import PromptReader
from lowpeak.environments.engine import EnvironmentEngine
from lowpeak.environments.tools import Toolset
from lowpeak.records import Group, Metric
from lowpeak.rollout import SliceForm, TurnQueue, TurnRequest
from lowpeak.rollout.turns import SampledTurn
from tiny_models import tool_tokenizer


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
    ) -> None:
        self.tokenizer = tool_tokenizer()
        self.turns = ScriptedTurns(self.tokenizer, script)
        self.toolset = Toolset([*tools], environment, ToolSettings(max_iterations, timeout))
        self.metrics: dict[str, Metric] = {}
        self.sampling = Sampling(num_generations=len(script), max_new_tokens=max_tokens, seed=1)
        self.engine = EnvironmentEngine(
            self.turns, self.tokenizer, self.toolset, {}, self._reader,
            lambda sampling: {self.tokenizer.eos_token_id}, self.metrics.update,
        )  # fmt: skip

    def _reader(self, options: Mapping[str, Any]) -> PromptReader:
        return PromptReader(self.tokenizer, chat_template_kwargs=options)

    def run(self, content: str = "1+2", **columns: Any) -> Group:
        prompt = self._reader({}).read({"prompt": [{"role": "user", "content": content}], **columns}, 7)
        assert prompt is not None
        return self.engine.generate([prompt], self.sampling)[0]

    def texts(self, group: Group) -> list[str]:
        return [self.tokenizer.decode(each.ids) for each in group.completions]

    def sampled(self, group: Group) -> list[str]:
        """The texts of the tokens that the policy wrote."""
        return [self.tokenizer.decode(each.ids[each.loss_mask]) for each in group.completions]

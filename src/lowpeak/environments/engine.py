"""An engine whose completions are conversations with tools or environments, over an engine that samples their turns."""

from __future__ import annotations

import asyncio
import copy
import hashlib
import json
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from lowpeak.arguments import Sampling
from lowpeak.data import PromptReader, template_options
from lowpeak.environments.append import TurnAppender, render_call, tool_call
from lowpeak.environments.calls import CallParser
from lowpeak.environments.conversation import ConversationRun, TurnFormat, warn_of_failure
from lowpeak.environments.environment import Environment, Opening
from lowpeak.environments.tool_runner import ToolRunner, call_method
from lowpeak.errors import LostEngineError
from lowpeak.records import Group, Metric, Prompt
from lowpeak.rewards import BackgroundLoop
from lowpeak.rollout import GeneratedOnResult, Pending, SliceForm, TurnEngine, TurnQueue

Row = Mapping[str, Any]


@dataclass(eq=False, repr=False)
class EnvironmentEngine:
    """Engine whose groups are conversations: `engine` samples their turns, an environment replies to each.

    start           returns each row's environment, with the row that its `reset` gets; a prompt's row is repeated
    template        the run's arguments of the chat template
    new_reader      returns a reader of prompts with these arguments
    end_ids         returns the tokens that end a turn
    counts          what the environments count; `add_metrics` receives the metrics of each call
    """

    engine: TurnEngine
    tokenizer: Any
    start: Callable[[Sequence[Row]], Sequence[tuple[Environment, Row]]]
    runner: ToolRunner
    template: Mapping[str, Any]
    new_reader: Callable[[Mapping[str, Any]], PromptReader]
    end_ids: Callable[[Sampling], Collection[int]]
    counts: Counter[str]
    add_metrics: Callable[[dict[str, Metric]], None]
    _formats: dict[str, TurnFormat] = field(default_factory=dict)
    _unfinished: tuple[Sequence[Prompt], Sampling, list[ConversationRun]] | None = None

    def __post_init__(self) -> None:
        engine = self.engine
        self.load, self.sleep, self.wake, self.close = engine.load, engine.sleep, engine.wake, engine.close
        self._loop = BackgroundLoop()
        # Tokenizing changes a fast tokenizer's state, and the engine's thread uses the run's.
        self._own_tokenizer = copy.deepcopy(self.tokenizer)

    @property
    def policy_version(self) -> int | None:
        return self.engine.policy_version

    @property
    def slice_form(self) -> SliceForm:
        return self.engine.slice_form

    def submit(self, prompts: Sequence[Prompt], sampling: Sampling) -> Pending:
        return GeneratedOnResult(partial(self.generate, prompts, sampling))

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling) -> list[Group]:
        """Return the conversations of each prompt; after a lost engine, those of the same prompts go on."""
        unfinished, self._unfinished = self._unfinished, None
        if unfinished is not None and (unfinished[0], unfinished[1]) == (prompts, sampling):
            runs = unfinished[2]
        else:
            self.counts.clear()
            runs = self._loop.run(self._open(prompts, sampling))
        queue = TurnQueue(len(runs))
        conversations = self._loop.submit(self._converse(runs, queue))
        try:
            self.engine.sample_turns(queue, sampling)
        except LostEngineError:
            conversations.exception()
            self._unfinished = prompts, sampling, runs
            raise
        conversations.result()
        self.add_metrics(self._metrics(len(runs)))
        size = sampling.num_generations
        return [_group(prompt, runs[i * size : (i + 1) * size]) for i, prompt in enumerate(prompts)]

    async def _converse(self, runs: Sequence[ConversationRun], queue: TurnQueue) -> None:
        """Take all conversations to their ends, then close the queue; the first error ends all."""
        try:
            async with asyncio.TaskGroup() as tasks:
                for run in runs:
                    tasks.create_task(run.run(queue, self.runner))
        except* Exception as errors:
            raise errors.exceptions[0] from None
        finally:
            queue.close()

    async def _open(self, prompts: Sequence[Prompt], sampling: Sampling) -> list[ConversationRun]:
        """Return a conversation for each completion, with its environment reset."""
        owners = [prompt for prompt in prompts for _ in range(sampling.num_generations)]
        rows = [{"prompt": copy.deepcopy(prompt.source), **prompt.columns} for prompt in owners]
        started = self.start(rows)
        resets = [
            self._reset(environment, _reset_seed(sampling, prompt), row)
            for prompt, (environment, row) in zip(owners, started, strict=True)
        ]
        openings = await asyncio.gather(*resets)
        opened: dict[tuple[int, str, str], Prompt] = {}
        runs = []
        for index, (prompt, (environment, _), opening) in enumerate(zip(owners, started, openings, strict=True)):
            # The completions of a prompt mostly have equal openings.
            key = (prompt.serial, "" if opening is None else opening.text, json.dumps(list(_tools(opening))))
            if key not in opened:
                opened[key] = self._opened_prompt(prompt, opening)
            number = sampling.first_completion + index % sampling.num_generations
            run = ConversationRun(
                (prompt.serial, number),
                opened[key],
                environment,
                self._turn_format(prompt, _tools(opening), sampling),
                sampling.max_new_tokens,
                self.counts,
                has_failed=opening is None,
            )
            runs.append(run)
        return runs

    async def _reset(self, environment: Environment, seed: int, row: Row) -> Opening | None:
        """Return the opening of an environment; None if it failed."""
        try:
            opening: Opening = await call_method(environment.reset, self.runner, seed=seed, row=row)
            return opening
        except Exception as error:
            self.counts["environment_failures"] += 1
            warn_of_failure(environment, "reset", error)
            return None

    def example(self, prompt: Prompt) -> str:
        """Return a conversation as the chat template writes it: the prompt, a call of the first tool, its result."""
        environment, row = self.start([{"prompt": copy.deepcopy(prompt.source), **prompt.columns}])[0]
        opening = self._loop.run(self._reset(environment, 0, row))
        opened, tools = self._opened_prompt(prompt, opening), list(_tools(opening))
        if not tools:
            return str(self.tokenizer.decode(opened.ids))
        function = tools[0]["function"]
        arguments = {name: each.get("type") for name, each in function["parameters"].get("properties", {}).items()}
        result = {"role": "tool", "name": function["name"], "content": "the result"}
        call, options = tool_call(function["name"], arguments), {**self.template, "tools": tools}
        return render_call(self.tokenizer, list(opened.source), call, [result], options)  # type: ignore[arg-type]

    def _opened_prompt(self, prompt: Prompt, opening: Opening | None) -> Prompt:
        """Return the prompt with the opening's text in its last message, rendered with the opening's tools."""
        messages = [dict(message) for message in prompt.source if not isinstance(message, str)]
        if opening is not None and opening.text:
            messages[-1]["content"] = _with_text(messages[-1].get("content"), opening.text)
        reader = self.new_reader({**self.template, "tools": _tools(opening)})
        read = reader.read({**prompt.columns, "prompt": messages}, prompt.serial)
        assert read is not None, "this reader drops no prompt"
        return read

    def _turn_format(self, prompt: Prompt, tools: Sequence[Mapping[str, Any]], sampling: Sampling) -> TurnFormat:
        options = template_options(prompt.columns, {**self.template, "tools": list(tools)}, f"prompt {prompt.serial}")
        end_ids = self.end_ids(sampling)
        key = json.dumps([options, sorted(end_ids)])
        if key not in self._formats:
            tokenizer = self._own_tokenizer
            parser = CallParser(tokenizer, end_ids, options) if tools else None
            decode = partial(tokenizer.decode, skip_special_tokens=True)
            self._formats[key] = TurnFormat(TurnAppender(tokenizer, end_ids, options), parser, decode)
        return self._formats[key]

    def _metrics(self, num_conversations: int) -> dict[str, Metric]:
        counts, per = self.counts, float(num_conversations)
        shares = {
            "tools/call_frequency": Metric(counts["calls"], per),
            "tools/malformed_frequency": Metric(counts["malformed"], per),
        }
        if counts["calls"]:
            shares["tools/failure_frequency"] = Metric(counts["failures"], counts["calls"])
        totals = {
            "tools/timeouts": counts["timeouts"],
            "tools/abandoned": self.runner.num_abandoned,
            "environments/failures": counts["environment_failures"],
        }
        return shares | {name: Metric(count, 1.0, "sum") for name, count in totals.items() if count}


def _tools(opening: Opening | None) -> Sequence[Mapping[str, Any]]:
    return () if opening is None else opening.tools


def _with_text(content: Any, text: str) -> Any:
    return [*content, {"type": "text", "text": text}] if isinstance(content, list) else (content or "") + text


def _reset_seed(sampling: Sampling, prompt: Prompt) -> int:
    """Return 31 bits of a hash of the seed, the rollout and the prompt."""
    name = f"{sampling.seed}/{sampling.rollout}/{prompt.serial}".encode()
    return int.from_bytes(hashlib.blake2b(name, digest_size=4).digest(), "big") >> 1


def _group(prompt: Prompt, runs: Sequence[ConversationRun]) -> Group:
    """Return the conversations of a prompt; a prompt that all of them changed alike replaces it."""
    if all(run.prompt is runs[0].prompt for run in runs):
        return Group(runs[0].prompt, tuple(run.completion() for run in runs))
    return Group(prompt, tuple(run.completion(run.prompt.ids) for run in runs))

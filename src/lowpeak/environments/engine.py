"""An engine whose completions are conversations with tools or environments, over an engine that samples their turns."""

from __future__ import annotations

import asyncio
import copy
import hashlib
import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from lowpeak.arguments import Sampling
from lowpeak.data import PromptReader, template_options
from lowpeak.environments.append import TurnAppender, render_call, tool_call
from lowpeak.environments.calls import CallParser
from lowpeak.environments.conversation import ConversationRun, TurnFormat
from lowpeak.environments.tool_results import ToolResults
from lowpeak.environments.tools import ToolEnvironment, warn_of_failure
from lowpeak.environments.toolset import Toolset
from lowpeak.errors import DataError, EngineError, StoppedError
from lowpeak.ranks import Ranks
from lowpeak.records import Group, Metric, Prompt
from lowpeak.rollout import GeneratedOnResult, GroupQueue, Pending, SliceForm, TurnEngine, TurnQueue

Row = Mapping[str, Any]


@dataclass(eq=False, repr=False)
class EnvironmentEngine:
    """Engine whose groups are conversations: `engine` samples their turns, an environment replies to each.

    template           the run's arguments of the chat template
    new_reader         returns a reader of prompts with these arguments
    end_ids            returns the tokens that end a turn
    add_metrics        receives the metrics of each call
    add_prompts        receives the prompts as environments have changed them
    max_prompt_tokens  of these; None: no limit
    processes          of a tensor parallel group, of which the first has the conversations; None: there is one
    results            keeps the results of functions, so that no call runs twice
    """

    engine: TurnEngine
    tokenizer: Any
    toolset: Toolset
    template: Mapping[str, Any]
    new_reader: Callable[[Mapping[str, Any]], PromptReader]
    end_ids: Callable[[Sampling], Collection[int]]
    add_metrics: Callable[[dict[str, Metric]], None]
    add_prompts: Callable[[Iterable[Prompt]], None] = lambda prompts: None
    max_prompt_tokens: int | None = None
    processes: Ranks | None = None
    results: ToolResults = field(default_factory=ToolResults)
    _formats: dict[str, TurnFormat] = field(default_factory=dict)
    _unfinished: tuple[object, list[ConversationRun]] | None = None

    def __post_init__(self) -> None:
        engine = self.engine
        self.load, self.sleep, self.wake, self.close = engine.load, engine.sleep, engine.wake, engine.close
        self._loop, self.toolset.add_metrics = self.toolset.loop, self.add_metrics
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
        """Return the conversations of each prompt; after an error of the engine, those of the same prompts go on.

        Without conversations, in a process that only samples their turns with others, there are no groups.
        """
        size, rollout = sampling.num_generations, (prompts, sampling, self.policy_version)
        (previous, runs), self._unfinished = self._unfinished or (None, []), None
        num_conversations = len(prompts) * size
        queue = TurnQueue(num_conversations)
        if self.processes is not None:
            queue = GroupQueue(num_conversations, self.processes)
            if self.processes.rank > 0:
                self.engine.sample_turns(queue, sampling)
                return []
        unfinished = runs if previous == rollout else None
        self.results.begin(f"{self.policy_version}/{sampling.rollout}")
        conversations = self._loop.submit(self._converse(prompts, sampling, unfinished, queue))
        try:
            self.engine.sample_turns(queue, sampling)
        except StoppedError:
            raise
        except Exception:
            # Another attempt may use the same environments, so it waits for the tools' calls under way.
            if conversations.exception() is None:
                self._unfinished = rollout, conversations.result()
            raise
        runs = conversations.result()
        self.add_metrics(self._metrics(len(runs)))
        self.toolset.counts.clear()
        return [_group(prompt, runs[i * size : (i + 1) * size]) for i, prompt in enumerate(prompts)]

    async def _converse(
        self, prompts: Sequence[Prompt], sampling: Sampling, unfinished: list[ConversationRun] | None, queue: TurnQueue
    ) -> list[ConversationRun]:
        """Take all conversations to their ends, then close the queue; the first error ends all."""
        try:
            runs = unfinished or await self._open(prompts, sampling)
            async with asyncio.TaskGroup() as tasks:
                for run in runs:
                    tasks.create_task(run.run(queue))
            return runs
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        finally:
            queue.close()

    async def _reset_all(
        self, owners: Sequence[Prompt], sampling: Sampling
    ) -> list[tuple[ToolEnvironment, str | None]]:
        """Return an environment for each prompt, and what its `reset` adds to the prompt; None if it failed."""
        rows = [{"prompt": copy.deepcopy(prompt.source), **prompt.columns} for prompt in owners]
        await self.toolset.make_environments(rows)
        started = self.toolset.start(rows, self.results)
        resets = [
            self._reset(environment, _reset_seed(sampling, prompt), row)
            for prompt, (environment, row) in zip(owners, started, strict=True)
        ]
        texts = await asyncio.gather(*resets)
        return [(environment, text) for (environment, _), text in zip(started, texts, strict=True)]

    async def _open(self, prompts: Sequence[Prompt], sampling: Sampling) -> list[ConversationRun]:
        """Return a conversation for each completion, with its environment reset."""
        owners = [prompt for prompt in prompts for _ in range(sampling.num_generations)]
        reset = await self._reset_all(owners, sampling)
        opened: dict[tuple[int, str | None, int], tuple[Prompt, TurnFormat]] = {}
        runs = []
        for index, (prompt, (environment, text)) in enumerate(zip(owners, reset, strict=True)):
            # The completions of a prompt mostly open alike.
            key = (prompt.serial, text, id(environment.schemas))
            if key not in opened:
                turn_format = self._turn_format(prompt, environment.schemas, sampling)
                opened[key] = self._opened_prompt(prompt, text or "", environment.schemas), turn_format
            fits = self._fits(opened[key][0], environment)
            number = sampling.first_completion + index % sampling.num_generations
            runs.append(
                ConversationRun(
                    *((prompt.serial, number), opened[key][0] if fits else prompt, environment, opened[key][1]),
                    max_tokens=sampling.max_new_tokens,
                    counts=self.toolset.counts,
                    has_failed=text is None or not fits,
                )
            )
        self.add_prompts(run.prompt for run in runs)
        return runs

    def _fits(self, opened: Prompt, environment: ToolEnvironment) -> bool:
        """Return whether the model's context has room for a prompt with the text of `reset`; count a failure if not."""
        if self.max_prompt_tokens is None or len(opened.ids) <= self.max_prompt_tokens:
            return True
        length = f"the prompt with its text has {len(opened.ids)} tokens"
        self._count_failure(environment, DataError(f"{length}, and the context leaves {self.max_prompt_tokens}"))
        return False

    async def _reset(self, environment: ToolEnvironment, seed: int, row: Row) -> str | None:
        """Return what an environment adds to the prompt; None if it failed."""
        try:
            return await environment.reset(seed, row)
        except EngineError:
            raise
        except Exception as error:
            self._count_failure(environment, error)
            return None

    def _count_failure(self, environment: ToolEnvironment, error: Exception) -> None:
        self.toolset.counts["environment_failures"] += 1
        warn_of_failure(environment.instance, "reset", error)

    def example(self, prompt: Prompt) -> str:
        """Return a conversation as the chat template writes it: the prompt, a call of the first tool, its result."""
        environment, row = self.toolset.start(
            [{"prompt": copy.deepcopy(prompt.source), **prompt.columns}], self.results
        )[0]
        text = self._loop.run(self._reset(environment, 0, row))
        opened = self._opened_prompt(prompt, text or "", environment.schemas)
        if not environment.schemas:
            return str(self.tokenizer.decode(opened.ids))
        function = environment.schemas[0]["function"]
        arguments = {name: each.get("type") for name, each in function["parameters"].get("properties", {}).items()}
        result = {"role": "tool", "name": function["name"], "content": "the result"}
        call, options = tool_call(function["name"], arguments), {**self.template, "tools": list(environment.schemas)}
        return render_call(self.tokenizer, list(opened.source), call, [result], options)  # type: ignore[arg-type]

    def _opened_prompt(self, prompt: Prompt, text: str, schemas: Sequence[Row]) -> Prompt:
        """Return the prompt with `text` in its last message, rendered with the tools."""
        messages = [dict(message) for message in prompt.source if not isinstance(message, str)]
        if text:
            messages[-1]["content"] = _with_text(messages[-1].get("content"), text)
        read = self.new_reader({**self.template, "tools": schemas}).read(
            {**prompt.columns, "prompt": messages}, prompt.serial
        )
        assert read is not None, "this reader drops no prompt"
        return read

    def _turn_format(self, prompt: Prompt, tools: Sequence[Row], sampling: Sampling) -> TurnFormat:
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
        counts, per = self.toolset.counts, float(num_conversations)
        shares = {
            "tools/call_frequency": Metric(counts["calls"], per),
            "tools/malformed_frequency": Metric(counts["malformed"], per),
        }
        if counts["calls"]:
            shares["tools/failure_frequency"] = Metric(counts["failures"], counts["calls"])
        totals = {"tools/timeouts": counts["timeouts"], "environments/failures": counts["environment_failures"]}
        sums = {name: Metric(count, 1.0, "sum") for name, count in totals.items() if count}
        abandoned = self.toolset.runner.num_abandoned
        return shares | sums | ({"tools/abandoned": Metric(abandoned, 1.0, "max")} if abandoned else {})


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

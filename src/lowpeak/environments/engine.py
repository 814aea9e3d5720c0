"""An engine whose completions are conversations with tools or environments, over an engine that samples their turns."""

from __future__ import annotations

import asyncio
import copy
import hashlib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from lowpeak.arguments import Sampling
from lowpeak.data import PromptReader, template_options
from lowpeak.environments.append import Message, render_call, tool_call
from lowpeak.environments.chat import ChatHistory
from lowpeak.environments.conversation import ConversationRun
from lowpeak.environments.pending import ConversationsPending, WaveConversations
from lowpeak.environments.program import ProgramRun
from lowpeak.environments.tool_results import ResultRow, ToolResults
from lowpeak.environments.tools import ToolEnvironment, drives, warn_of_failure
from lowpeak.environments.toolset import Toolset
from lowpeak.environments.turn_format import TurnFormats
from lowpeak.environments.turn_limits import TurnLimits
from lowpeak.errors import DataError, EngineError, StoppedError
from lowpeak.ranks import Ranks
from lowpeak.records import Group, Metric, Prompt
from lowpeak.rollout import (
    BackgroundTurnEngine,
    GeneratedOnResult,
    GroupQueue,
    Key,
    Pending,
    SliceForm,
    TurnEngine,
    TurnQueue,
)

Row = Mapping[str, Any]


@dataclass(eq=False, repr=False)
class EnvironmentEngine:
    """Engine whose groups are conversations: `engine` samples their turns, an environment replies to each.

    template           the run's arguments of the chat template
    new_reader         returns a reader of prompts by a tokenizer, with these arguments of the chat template
    end_ids            returns the tokens that end a turn
    add_metrics        receives the metrics of each call
    add_prompts        receives the prompts as environments have changed them
    max_prompt_tokens  of these; None: no limit
    vocabulary_size    of the model; None: the tokenizer's
    processes          of a tensor parallel group, of which the first has the conversations; None: there is one
    results            keeps the results of functions, so that no call runs twice
    """

    engine: TurnEngine
    tokenizer: Any
    toolset: Toolset
    template: Mapping[str, Any]
    new_reader: Callable[..., PromptReader]
    end_ids: Callable[[Sampling], Collection[int]]
    add_metrics: Callable[[dict[str, Metric]], None]
    add_prompts: Callable[[Iterable[Prompt]], None] = lambda prompts: None
    max_prompt_tokens: int | None = None
    processes: Ranks | None = None
    results: ToolResults = field(default_factory=ToolResults)
    vocabulary_size: int | None = None
    _unfinished: tuple[object, WaveConversations] | None = None

    def __post_init__(self) -> None:
        engine = self.engine
        self.load, self.sleep, self.wake, self.close = engine.load, engine.sleep, engine.wake, engine.close
        self._loop, self.toolset.add_metrics = self.toolset.loop, self.add_metrics
        # Tokenizing changes a fast tokenizer's state, and the threads of engine and trainer use the run's.
        self._programs_tokenizer = copy.deepcopy(self.tokenizer) if self.toolset.has_programs else None
        self._formats, self._chat_formats = (
            TurnFormats(copy.deepcopy(self.tokenizer), self.template, self.new_reader, self.end_ids) for _ in range(2)
        )

    @property
    def policy_version(self) -> int | None:
        return self.engine.policy_version

    @property
    def slice_form(self) -> SliceForm:
        return self.engine.slice_form

    def submit(self, prompts: Sequence[Prompt], sampling: Sampling) -> Pending:
        if isinstance(self.engine, BackgroundTurnEngine) and self.engine.in_background:
            return ConversationsPending(self, self.engine, self._reserve(prompts, sampling))
        return GeneratedOnResult(partial(self.generate, prompts, sampling))

    def replay(
        self,
        prompts: Sequence[Prompt],
        sampling: Sampling,
        finished: Mapping[int, Group],
        results: MutableMapping[str, ResultRow],
    ) -> Pending:
        """Submit prompts whose finished conversations take their recorded turns; environments are reset and called again."""
        assert isinstance(self.engine, BackgroundTurnEngine), "only rollouts ahead are saved unrewarded"
        wave = self._reserve(prompts, sampling, finished)
        wave.results.rows = results
        return ConversationsPending(self, self.engine, wave)

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling) -> list[Group]:
        """Return the conversations of each prompt; after an error of the engine, those of the same prompts go on.

        Without conversations, in a process that only samples their turns with others, there are no groups.
        """
        rollout = (prompts, sampling, self.policy_version)
        (previous, wave), self._unfinished = self._unfinished or (None, None), None
        num_conversations = len(prompts) * sampling.num_generations
        queue = TurnQueue(num_conversations)
        if self.processes is not None:
            queue = GroupQueue(num_conversations, self.processes)
            if self.processes.rank > 0:
                self.engine.sample_turns(queue, sampling)
                return []
        if previous != rollout or wave is None:
            if wave is not None:
                self._loop.run(wave.stop())
            self.toolset.set_current(None)
            wave = self._reserve(prompts, sampling)
            self.toolset.set_current(wave.environments)
        conversations = self._loop.submit(self.converse(wave, queue))
        try:
            self.engine.sample_turns(queue, sampling)
        except StoppedError:
            self._loop.run(wave.stop())
            raise
        except Exception:
            # Another attempt may use the same environments, so it waits for the tools' calls under way.
            if conversations.exception() is None:
                self._unfinished = rollout, wave
            raise
        conversations.result()
        return self.end(wave)

    def _reserve(
        self, prompts: Sequence[Prompt], sampling: Sampling, finished: Mapping[int, Group] | None = None
    ) -> WaveConversations:
        """Return the conversations of a wave, with slots for their environments."""
        owners = [prompt for prompt in prompts for _ in range(sampling.num_generations)]
        environments = self.toolset.reserve([{"prompt": copy.deepcopy(each.source), **each.columns} for each in owners])
        results = self.results.begin(f"{self.policy_version}/{sampling.rollout}")
        return WaveConversations(prompts, sampling, environments, results, finished or {})

    def end(self, wave: WaveConversations) -> list[Group]:
        """Return the groups of a wave whose conversations are over; rewards read its environments from now on."""
        self.toolset.set_current(wave.environments)
        self.add_metrics(self._metrics(wave))
        return wave.groups()

    async def converse(self, wave: WaveConversations, queue: TurnQueue) -> None:
        """Take all conversations to their ends, then close the queue; the first error ends all."""
        try:
            wave.runs = wave.runs or await self._open(wave)
            async with asyncio.TaskGroup() as tasks:
                for run in wave.runs:
                    tasks.create_task(run.run(queue))
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        finally:
            queue.close()

    async def _reset_all(self, wave: WaveConversations) -> list[tuple[Prompt, ToolEnvironment, str | None]]:
        """Return each prompt's environment, and its `reset`'s addition to the prompt; None if it failed."""
        await self.toolset.make_environments(wave.environments)
        owners = [prompt for prompt in wave.prompts for _ in range(wave.sampling.num_generations)]
        started = self.toolset.tool_environments(wave.environments, wave.results, wave.counts)
        resets = [
            self._reset(environment, _reset_seed(wave.sampling, prompt), row, wave.counts)
            for prompt, (environment, row) in zip(owners, started, strict=True)
        ]
        texts = await asyncio.gather(*resets)
        return [(prompt, each, text) for prompt, (each, _), text in zip(owners, started, texts, strict=True)]

    async def _open(self, wave: WaveConversations) -> list[ConversationRun | ProgramRun]:
        """Return a conversation for each completion, with its environment reset."""
        sampling = wave.sampling
        opened: dict[tuple[int, str | None, int], Prompt] = {}
        runs = list[ConversationRun | ProgramRun]()
        for index, (prompt, environment, text) in enumerate(await self._reset_all(wave)):
            # The completions of a prompt mostly open alike.
            key = (prompt.serial, text, id(environment.schemas))
            number = sampling.first_completion + index % sampling.num_generations
            name = (prompt.serial, number)
            if text is not None and drives(environment.instance):
                forget = partial(setattr, wave.environments.slots[index], "instance", None)
                runs.append(self._program_run(wave, name, prompt, environment, forget))
                continue
            if key not in opened:
                opened[key] = self._opened_prompt(prompt, text or "", environment.schemas)
            fits = self._fits(opened[key], environment, wave.counts)
            runs.append(
                ConversationRun(
                    *(name, opened[key] if fits else prompt, environment),
                    self._formats.of(prompt, environment.schemas, sampling),
                    max_tokens=sampling.max_new_tokens,
                    counts=wave.counts,
                    has_failed=text is None or not fits,
                    recorded=wave.recorded(prompt, number),
                )
            )
        self.add_prompts(run.prompt for run in runs)
        return runs

    def _program_run(
        self,
        wave: WaveConversations,
        name: Key,
        prompt: Prompt,
        environment: ToolEnvironment,
        forget: Callable[[], object],
    ) -> ProgramRun:
        formats, sampling = self._chat_formats, wave.sampling
        template = template_options(prompt.columns, self.template, f"prompt {prompt.serial}")

        def render(messages: Sequence[Message], tools: Sequence[Row]) -> tuple[int, ...]:
            return formats.with_messages(prompt, messages, tools).ids

        limits = TurnLimits(
            self.max_prompt_tokens,
            sampling.max_new_tokens,
            self.toolset.max_branches,
            self.toolset.max_turns,
            self.toolset.timeout,
            self.vocabulary_size or len(self.tokenizer),
        )
        return ProgramRun(
            *(name, prompt, environment),
            ChatHistory(lambda tools: formats.of(prompt, tools, sampling), render),
            self.end_ids(sampling),
            sampling,
            limits,
            wave.counts,
            self.toolset.routes,
            {"tokenizer": self._programs_tokenizer, "template": template},
            forget,
            lambda ids: self.add_prompts([replace(prompt, ids=tuple(ids))]),
            wave.recorded(prompt, name[1]),
        )

    def _fits(self, opened: Prompt, environment: ToolEnvironment, counts: Counter[str]) -> bool:
        """Return whether the model's context has room for a prompt with the text of `reset`; count a failure if not."""
        if self.max_prompt_tokens is None or len(opened.ids) <= self.max_prompt_tokens:
            return True
        length = f"the prompt with its text has {len(opened.ids)} tokens"
        error = DataError(f"{length}, and the context leaves {self.max_prompt_tokens}")
        _count_failure(environment, error, counts)
        return False

    async def _reset(self, environment: ToolEnvironment, seed: int, row: Row, counts: Counter[str]) -> str | None:
        """Return an environment's addition to the prompt; None if it failed."""
        try:
            text = await environment.reset(seed, row)
            if text and drives(environment.instance):
                raise TypeError("reset returned a text, which a program with run does not get: keep it in self")
            return text
        except EngineError:
            raise
        except Exception as error:
            _count_failure(environment, error, counts)
            return None

    def example(self, prompt: Prompt) -> str:
        """Return a conversation as the chat template writes it: the prompt, a call of the first tool, its result."""
        wave = self._reserve([prompt], Sampling(num_generations=1, max_new_tokens=1))
        ((_, environment, text),) = self._loop.run(self._reset_all(wave))
        self.toolset.free(wave.environments)
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
        return self._formats.with_messages(prompt, messages, schemas)

    def _metrics(self, wave: WaveConversations) -> dict[str, Metric]:
        counts, per = wave.counts, float(len(wave.runs))
        shares = {
            "tools/call_frequency": Metric(counts["calls"], per),
            "tools/malformed_frequency": Metric(counts["malformed"], per),
        }
        if counts["calls"]:
            shares["tools/failure_frequency"] = Metric(counts["failures"], counts["calls"])
        if counts["programs"]:
            names = ("turns", "branches")
            shares |= {f"programs/{name}": Metric(counts[name], counts["programs"]) for name in names}
        totals = {
            **{"tools/timeouts": counts["timeouts"], "environments/failures": counts["environment_failures"]},
            **{f"programs/{name}": counts[name] for name in ("refused", "disconnected", "dropped_turns")},
        }
        sums = {name: Metric(count, 1.0, "sum") for name, count in totals.items() if count}
        abandoned = self.toolset.runner.num_abandoned
        return shares | sums | ({"tools/abandoned": Metric(abandoned, 1.0, "max")} if abandoned else {})


def _with_text(content: Any, text: str) -> Any:
    return [*content, {"type": "text", "text": text}] if isinstance(content, list) else (content or "") + text


def _reset_seed(sampling: Sampling, prompt: Prompt) -> int:
    """Return 31 bits of a hash of the seed, the rollout and the prompt."""
    name = f"{sampling.seed}/{sampling.rollout}/{prompt.serial}".encode()
    return int.from_bytes(hashlib.blake2b(name, digest_size=4).digest(), "big") >> 1


def _count_failure(environment: ToolEnvironment, error: Exception, counts: Counter[str]) -> None:
    counts["environment_failures"] += 1
    warn_of_failure(environment.instance, "reset", error)

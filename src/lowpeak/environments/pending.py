"""The conversations of a wave, and those that go on in the background while the policy trains."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from lowpeak.arguments import Sampling
from lowpeak.environments.conversation import ConversationRun
from lowpeak.environments.program import ProgramRun
from lowpeak.environments.tool_results import ResultRow, RolloutResults
from lowpeak.environments.toolset import Toolset, WaveEnvironments
from lowpeak.errors import LostEngineError
from lowpeak.records import Completion, Group, Prompt
from lowpeak.rollout import BackgroundTurnEngine, BackgroundWork, TurnQueue, TurnWork

_SAVED = ("result", "error", "is_late")  # what a checkpoint has of a function's result


@dataclass(eq=False)
class WaveConversations:
    """The conversations of a wave; `runs` are empty until they are opened.

    `known` are groups of a checkpoint by their prompts' serials, whose recorded turns are taken again.
    """

    prompts: Sequence[Prompt]
    sampling: Sampling
    environments: WaveEnvironments
    results: RolloutResults
    known: Mapping[int, Group] = field(default_factory=dict)
    runs: list[ConversationRun | ProgramRun] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)

    def recorded(self, prompt: Prompt, number: int) -> Completion | None:
        """Return the completion of a checkpoint, with the prompt that its environment may have changed."""
        group = self.known.get(prompt.serial)
        if group is None:
            return None
        completion = group.completions[number]
        return completion if completion.prompt_ids else replace(completion, prompt_ids=group.prompt.ids)

    def groups(self) -> list[Group]:
        """Return the groups whose conversations are over."""
        size = self.sampling.num_generations
        of_prompts = [(prompt, self.runs[i * size : (i + 1) * size]) for i, prompt in enumerate(self.prompts)]
        return [_group(prompt, runs) for prompt, runs in of_prompts if runs and all(run.is_over for run in runs)]

    async def stop(self) -> None:
        """End the programs that no engine will answer any more."""
        await asyncio.gather(*(run.stop() for run in self.runs if isinstance(run, ProgramRun)))


def _group(prompt: Prompt, runs: Sequence[ConversationRun | ProgramRun]) -> Group:
    """Return the conversations of a prompt; a prompt that all of them changed alike replaces it."""
    completions = [run.completion for run in runs if run.completion is not None]
    if all(run.prompt.ids == runs[0].prompt.ids for run in runs):
        return Group(runs[0].prompt, tuple(completions))
    pairs = zip(runs, completions, strict=True)
    return Group(prompt, tuple(replace(completion, prompt_ids=run.prompt.ids) for run, completion in pairs))


class ConversationEngine(Protocol):
    """The part of an engine of conversations that a wave in the background uses."""

    toolset: Toolset

    def converse(self, wave: WaveConversations, queue: TurnQueue) -> Coroutine[Any, Any, None]: ...

    def end(self, wave: WaveConversations) -> list[Group]: ...


class ConversationsPending:
    """Conversations that go on from `submit` on: a thread samples their turns, and the tools' event loop runs the calls.

    After the whole engine was lost they go on from their last whole turns, with the weights of the next `load`.
    """

    def __init__(self, engine: ConversationEngine, turns: BackgroundTurnEngine, wave: WaveConversations) -> None:
        self._engine, self._turns, self._wave = engine, turns, wave
        self._work = BackgroundWork(turns)
        self._queue = TurnQueue()
        self._sampling: TurnWork | None = None
        self._conversations: Future[None] | None = None
        self._groups: list[Group] | None = None
        self._work.start(self._prepare)

    def _prepare(self) -> Callable[[], LostEngineError | None]:
        queue = self._queue = TurnQueue(len(self._wave.environments.rows))
        self._sampling, self._conversations = None, None
        sampling = self._sampling = self._turns.prepare_turns(queue, self._wave.sampling)
        conversations = self._conversations = self._engine.toolset.loop.submit(self._engine.converse(self._wave, queue))

        def run() -> LostEngineError | None:
            try:
                with queue.answering():
                    return sampling.run()
            finally:
                # The calls under way end first: conversations may go on in the same environments.
                with suppress(CancelledError):
                    conversations.exception()

        return run

    def result(self) -> list[Group]:
        if self._groups is None:
            if not self._work.is_started:
                self._work.start(self._prepare)
            self.wait()
            if self._conversations is not None and (error := self._conversations.exception()) is not None:
                raise error
            self._work.raise_error()
            assert self._sampling is not None, "an engine that is lost before it samples raises"
            self._turns.note_turns(self._sampling.lengths)
            self._groups = self._engine.end(self._wave)
        return self._groups

    def abort(self) -> None:
        self.stop()
        self._work.discard_result()
        if self._groups is None:
            self._engine.toolset.free(self._wave.environments)

    @property
    def seconds(self) -> float:
        return self._work.seconds

    @property
    def results(self) -> Mapping[str, ResultRow]:
        """The results so far, without arguments, which need not be JSON."""
        rows = dict(self._wave.results.rows)  # the loop adds others
        return {name: {key: row[key] for key in _SAVED if key in row} for name, row in rows.items()}

    @property
    def is_running(self) -> bool:
        return self._work.is_running

    def wait(self) -> None:
        self._work.wait()

    def stop(self) -> None:
        """End the conversations within seconds; calls of tools that take longer are left to themselves."""
        if self.is_running:
            self._queue.close()
            self._work.stop()
        if self._conversations is not None:
            self._conversations.cancel()

    def finished(self) -> list[Group]:
        return self._wave.groups()

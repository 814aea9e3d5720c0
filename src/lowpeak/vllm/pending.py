"""A wave that vLLMs answer: its requests in parts that fit the caches, and the valid answers so far.

In the background a thread runs the parts from `submit` on. It speaks HTTP and adds answers, and changes nothing of the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import torch

from lowpeak.arguments import Sampling
from lowpeak.errors import EngineError, LostEngineError
from lowpeak.records import Completion, Group, Prompt
from lowpeak.rollout import BackgroundEngine, BackgroundWork
from lowpeak.vllm.protocol import Adapter, Vllm, call_concurrently
from lowpeak.vllm.requests import PartialAnswers, SequenceRequest, check_answers, split_wave

_AddressedVllm = tuple[Vllm, Adapter | None]  # with the adapter that its requests name


@dataclass(frozen=True)
class WaveRequests:
    """The parts of a wave, for vLLMs with weights of one version; errors are those of `VllmEngine.answer`."""

    vllms: Sequence[_AddressedVllm]
    waves: Sequence[Sequence[SequenceRequest]]
    answers: PartialAnswers
    version: int
    timeout: float | None
    num_tokens: int | None

    def run(self) -> None:
        """Request the parts one after another."""
        for wave in self.waves:
            lost = self._answer(wave, self.vllms)
            if lost:
                raise next(iter(lost.values()))

    def run_on_survivors(self) -> LostEngineError | None:
        """Request the parts, and what a lost vLLM leaves of the others, with the same weights; return its error."""
        vllms, error = list(self.vllms), None
        for wave in self.waves:
            while missing := self.answers.missing(wave):
                lost = self._answer(missing, vllms)
                error = next(iter(lost.values()), error)
                vllms = [vllm for i, vllm in enumerate(vllms) if i not in lost]
                if error is not None and not vllms:
                    raise error
        return error

    def _answer(self, wave: Sequence[SequenceRequest], vllms: Sequence[_AddressedVllm]) -> dict[int, LostEngineError]:
        """Request a part of all vLLMs at once and add the valid answers; return the errors of those that were lost."""
        shares = [[wave[i] for i in indices] for indices in split_wave(wave, len(vllms))]
        busy = [i for i, share in enumerate(shares) if share]
        results = call_concurrently([partial(self._complete, *vllms[i], shares[i]) for i in busy])
        failures = {i: failure for i, failure in zip(busy, results, strict=True) if failure is not None}
        lost = {i: failure for i, failure in failures.items() if isinstance(failure, LostEngineError)}
        if len(lost) < len(failures):
            raise next(failure for i, failure in failures.items() if i not in lost)
        return lost

    def _complete(
        self, vllm: Vllm, adapter: Adapter | None, sequences: Sequence[SequenceRequest]
    ) -> EngineError | None:
        """Keep one vLLM's valid answers; return its error, after which other engines' answers are still kept."""
        failure: EngineError | None = None
        try:
            requests = [replace(sequence.request, adapter=adapter) for sequence in sequences]
            completed = vllm.complete(requests, self.timeout)
            valid = dict(enumerate(check_answers(sequences, completed, self.version, self.num_tokens)))
        except LostEngineError as lost:
            valid = {i: answer for i, answer in lost.finished.items() if not answer.policy_versions - {self.version}}
            failure = lost
        except EngineError as error:
            valid, failure = {}, error
        self.answers.add(sequences, valid, self.version)
        return failure


class WaveEngine(BackgroundEngine, Protocol):
    """The part of an engine that a wave uses."""

    def answer(self, sequences: Sequence[SequenceRequest], answers: PartialAnswers) -> None: ...

    def prepare_requests(self, sequences: Sequence[SequenceRequest], answers: PartialAnswers) -> WaveRequests: ...

    def note_lengths(self, sequences: Sequence[SequenceRequest], answers: PartialAnswers) -> None: ...


class VllmPending:
    """Groups of an engine over vLLMs, and the valid answers so far: another `result` requests only the others.

    `own` are this rank's requests of the `sequences`, those of all ranks that an engine is sharded over. `version` is that of the
    engine's weights.
    """

    def __init__(
        self,
        engine: WaveEngine,
        prompts: Sequence[Prompt],
        sampling: Sampling,
        own: Sequence[SequenceRequest],
        sequences: Sequence[SequenceRequest],
        version: int,
    ) -> None:
        self._engine, self._prompts, self._sampling = engine, prompts, sampling
        self._requests, self._sequences = own, sequences
        self._answers = PartialAnswers()
        self._groups: list[Group] | None = None
        self._work = BackgroundWork(engine)
        self._version = version
        if engine.in_background:
            self._work.start(self._prepare)

    def result(self) -> list[Group]:
        if self._groups is None:
            if self._engine.in_background:
                if not self._work.is_started:
                    self._work.start(self._prepare)
                self.wait()
                self._work.raise_error()
                self._engine.note_lengths(self._sequences, self._answers)
            else:
                self._engine.answer(self._sequences, self._answers)
            groups = self.finished()
            assert len(groups) == len(self._prompts), "an engine that answers without an error answers every request"
            self._groups = groups
        return self._groups

    def abort(self) -> None:
        self.stop()
        self._work.discard_result()
        self._answers, self._groups = PartialAnswers(), None

    @property
    def seconds(self) -> float:
        return self._work.seconds

    @property
    def results(self) -> Mapping[str, Mapping[str, Any]]:
        return {}

    @property
    def awaited_version(self) -> int | None:
        """The version of the weights that the background needs until `result`; None without it."""
        return self._version if self._work.is_started else None

    @property
    def is_running(self) -> bool:
        return self._work.is_running

    def wait(self) -> None:
        self._work.wait()

    def stop(self) -> None:
        self._work.stop()

    def finished(self) -> list[Group]:
        """Return the groups whose completions have all been generated."""
        size, groups = self._sampling.num_generations, []
        for i, prompt in enumerate(self._prompts):
            requests = self._requests[i * size : (i + 1) * size]
            if not self._answers.missing(requests):
                completions = [self._with_version(*each) for each in self._answers.of(requests)]
                groups.append(Group(prompt, tuple(completions)))
        return groups

    def _with_version(self, completion: Completion, version: int) -> Completion:
        if not self._engine.in_background:
            return completion
        return replace(completion, policy_versions=torch.full_like(completion.ids, version))

    def _prepare(self) -> Callable[[], LostEngineError | None]:
        work = self._engine.prepare_requests(self._sequences, self._answers)
        self._version = work.version
        return work.run_on_survivors

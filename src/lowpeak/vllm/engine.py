"""Rollout engine over one or more vLLMs: sends prompts in waves and the policy's weights in buckets."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from weakref import WeakSet

import torch

from lowpeak.arguments import ColocateSettings, Sampling, ServerSettings, VllmSettings
from lowpeak.errors import EngineError, LostEngineError
from lowpeak.ranks import Ranks
from lowpeak.records import SLICE_BYTES, Group, Prompt, Weights, WeightSlice
from lowpeak.rollout import Pending, SliceForm, TurnQueue, TurnRequest, check_lengths
from lowpeak.vllm.engine_args import option_name
from lowpeak.vllm.pending import VllmPending, WaveRequests
from lowpeak.vllm.protocol import Adapter, Answer, EngineInfo, Vllm, call_workers
from lowpeak.vllm.pushes import Pushes, base_names
from lowpeak.vllm.requests import (
    CompletionLengths,
    PartialAnswers,
    SequenceRequest,
    check_answers,
    form_waves,
    sequence_requests,
    wave_capacity,
)
from lowpeak.vllm.turns import TurnLoop
from lowpeak.vllm.weight_sync import PushReport, exhaust_slices, verify_unchanged

logger = logging.getLogger(__name__)

_CALL_SECONDS = 60.0  # for calls that a worker answers at once


@dataclass(frozen=True)
class PolicyFacts:
    """Properties of the policy that the engine needs.

    `end_ids` returns the tokens that end a completion, `num_tokens` is the vocabulary size, `adapter` the LoRA configuration;
    `unchanged` names the tensors that training does not change.
    """

    end_ids: Callable[[Sampling], Iterable[int]]
    num_tokens: int | None
    adapter: Mapping[str, Any] | None = None
    unchanged: Collection[str] = ()


@dataclass(frozen=True)
class EngineSharing:
    """Ranks that use the same vLLMs.

    `engine_ranks` are the ranks that one engine is sharded over, which generate the same sequences together. `num_callers`
    ranks share the vLLMs, each with separate prompts; `pushes` is true on the rank that sends the weights.
    """

    engine_ranks: Ranks
    num_callers: int = 1
    pushes: bool = True


@dataclass(frozen=True)
class LoadedWeights:
    """Weights that all vLLMs have committed and verified.

    `policy_version` is None until then. `has_base` means that the vLLMs have an adapter's base weights. `identities` are those of
    the workers in the first call after the load.
    """

    policy_version: int | None = None
    has_base: bool = False
    identities: Any = None

    @property
    def adapters(self) -> list[Adapter | None]:
        """The adapters of the last push, one per vLLM, which requests name."""
        found = [workers[0]["adapter"] for workers in self.identities]
        return [None if adapter is None else Adapter(**adapter) for adapter in found]


@dataclass(eq=False, repr=False)
class VllmEngine:
    """Rollout engine over vLLMs, which `connect()` returns at the first `wake` and at the first after `close`.

    `on_push` receives each push's report; `bucket_limit()` bounds the bytes of its buckets. `in_background`: the vLLMs are
    servers, and a thread waits for the answers of a wave from `submit` on; at the time `deadline()` a wait for it ends.
    """

    connect: Callable[[], Sequence[Vllm]]
    settings: VllmSettings
    policy: PolicyFacts
    sharing: EngineSharing
    on_push: Callable[[PushReport], None] = lambda report: None
    bucket_limit: Callable[[], float] = lambda: math.inf
    in_background: bool = False
    deadline: Callable[[], float] = lambda: math.inf

    def __post_init__(self) -> None:
        self._vllms: Sequence[Vllm] = ()
        self._engine_infos: list[EngineInfo] = []
        self._weights = LoadedWeights()
        self._pending: WeakSet[VllmPending | TurnLoop] = WeakSet()
        self._asleep = False
        self._lengths = CompletionLengths()
        policy = self.policy
        self._pushes = Pushes(self.settings, policy.adapter, policy.unchanged, self.on_push, self.bucket_limit)

    @property
    def policy_version(self) -> int | None:
        return self._weights.policy_version

    @property
    def slice_form(self) -> SliceForm:
        dtypes = {info.dtype for info in self._engine_infos}
        if len(dtypes) != 1:
            raise EngineError(
                f"The vLLM engines have different dtypes ({', '.join(sorted(dtypes))}): start all with the same --dtype."
            )
        weights: Weights = "merged"
        if self._serves_adapter():
            weights = "adapter" if self._weights.has_base else "base"
        return SliceForm(min(SLICE_BYTES, self.settings.bucket_bytes), getattr(torch, dtypes.pop()), weights)

    def submit(self, prompts: Sequence[Prompt], sampling: Sampling) -> Pending:
        """Return the groups to be; raise EngineError for a sequence that cannot fit."""
        with self.sharing.engine_ranks.propagate_errors():
            version = self._known_version()
            self._check_lengths(prompts, sampling)
            self._check_speculation(sampling)
        settings, end_ids = self.settings, self.policy.end_ids(sampling)
        own = sequence_requests(prompts, sampling, end_ids, settings.structured_regex, settings.sampling_kwargs)
        # The ranks that an engine is sharded over generate the same sequences together.
        sequences = [each for rank in self.sharing.engine_ranks.gather(own) for each in rank]
        pending = VllmPending(self, prompts, sampling, own, sequences, version)
        self._pending.add(pending)
        return pending

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling) -> list[Group]:
        """Return the groups of a wave that is waited for."""
        return self.submit(prompts, sampling).result()

    def answer(self, sequences: Sequence[SequenceRequest], answers: PartialAnswers) -> None:
        """Request the sequences that have no answer yet in waves, all engines at once, and add their valid answers.

        Raise LostEngineError if a vLLM died, restarted or has other weights, EngineError before the first `load` and for invalid
        answers. Completed answers are added before an error is raised.
        """
        with self._forgotten_if_lost():
            work = self.prepare_requests(sequences, answers)
            work.run()
        self.note_lengths([sequence for wave in work.waves for sequence in wave], answers)

    def prepare_requests(self, sequences: Sequence[SequenceRequest], answers: PartialAnswers) -> WaveRequests:
        """Return the waves of the sequences without an answer, after a check of the vLLMs; errors are those of `answer`.

        Answers by weights of another version are dropped, unless the completions tell their versions.
        """
        version = self._known_version()
        self._check_identities()
        if not self.in_background:
            answers.drop_other_versions(version)
        missing = answers.missing(sequences)
        size = len(missing)
        if missing:
            size = self._capacity(missing) if not self._limits_to_cache else self.settings.batch_size or size
        waves = form_waves(missing, size) if missing else []
        vllms = tuple(zip(self._vllms, self._weights.adapters, strict=True))
        return WaveRequests(vllms, waves, answers, version, self.settings.wave_timeout, self.policy.num_tokens)

    def note_lengths(self, sequences: Sequence[SequenceRequest], answers: PartialAnswers) -> None:
        """Expect later completions to be about as long as these."""
        self._lengths.add([len(completion) for completion, _ in answers.of(sequences)])

    @contextmanager
    def _forgotten_if_lost(self) -> Iterator[None]:
        try:
            yield
        except LostEngineError:
            self.forget_weights()
            raise

    def forget_weights(self) -> None:
        """Forget the vLLMs' weights, so that the next push replaces them."""
        self._weights = LoadedWeights()

    def interrupt(self) -> None:
        """Abort all requests that run on the vLLMs, as far as these answer."""
        for vllm in self._vllms:
            with suppress(EngineError), vllm.paused():
                pass

    def sample_turns(self, queue: TurnQueue, sampling: Sampling) -> None:
        with queue.answering(), self._forgotten_if_lost():
            loop = self.prepare_turns(queue, sampling)
            loop.run()
            self._lengths.add(loop.lengths)

    def prepare_turns(self, queue: TurnQueue, sampling: Sampling) -> TurnLoop:
        version = self._known_version()
        self._check_speculation(sampling)
        self._check_identities()
        vllms = list(zip(self._vllms, self._weights.adapters, strict=True))
        loop = TurnLoop(
            *(queue, self.sharing.engine_ranks, vllms, self._limits_to_cache),
            make=partial(self._turn_sequence, sampling),
            capacity=self._capacity,
            check=partial(self._check, version, self._weights.identities),
            timeout=self.settings.wave_timeout,
            version=version if self.in_background else None,
        )
        self._pending.add(loop)
        return loop

    def note_turns(self, lengths: Sequence[int]) -> None:
        self._lengths.add(lengths)

    def _known_version(self) -> int:
        if self.policy_version is None:
            raise EngineError("The engine has no known weights yet: call load() before it generates.")
        return self.policy_version

    def load(self, slices: Iterable[WeightSlice], policy_version: int, weights: Weights = "merged") -> None:
        """Wait for the vLLMs, push the slices and verify them.

        A base goes to the vLLMs that lack it. An adapter touches neither running requests nor adapters that these need. A rank
        that does not push still consumes its slices.
        """
        self.forget_weights()
        remaining = iter(slices)
        try:
            if self.sharing.pushes:
                self._prepare_vllms()
                vllms = {vllm: info.in_process for vllm, info in zip(self._vllms, self._engine_infos, strict=True)}
                # Ranks submit and collect together, so a version that is awaited on any of them is awaited here.
                awaited = {pending.awaited_version for pending in self._pending}
                self._pushes.push(remaining, vllms, policy_version, weights, awaited)
        except Exception:
            # Slices are broadcast: the other ranks wait for this one to take them.
            exhaust_slices(remaining)
            raise
        exhaust_slices(remaining)
        self._weights = LoadedWeights(None if weights == "base" else policy_version, weights != "merged")

    def sleep(self) -> None:
        where = self.settings.where
        if self._vllms and isinstance(where, ColocateSettings) and where.sleeps and not self._asleep:
            self._asleep = True
            for vllm in self._vllms:
                vllm.sleep()

    def wake(self) -> None:
        """Connect on first use; otherwise reallocate memory.

        Drops the weights' version if they did not survive the sleep, and always with an adapter: base and adapter are pushed again,
        the base without tensors that did not change.
        """
        if not self._vllms:
            vllms = tuple(self.connect())
            self._vllms, self._engine_infos = vllms, [vllm.info() for vllm in vllms]
        if not self._asleep:
            return
        for vllm in self._vllms:
            vllm.wake()
        self._asleep = False
        has_base = self._weights.has_base
        # Base weights are checked too: a worker that finds its tensors changed requests them again in the next push.
        survived = (self.policy_version is not None or has_base) and self._weights_survived()
        if has_base or not survived:
            self._weights = LoadedWeights()
            self._pushes.forget_bases()

    def close(self) -> None:
        """Free the vLLMs of this process; servers keep running."""
        vllms, self._vllms, self._engine_infos = self._vllms, (), []
        self._weights, self._asleep = LoadedWeights(), False
        self._pushes.leave(vllms)
        for vllm in vllms:
            vllm.close()

    def _prepare_vllms(self) -> None:
        """Wait for each vLLM within the settings' timeout and patch its log-probs, which a restart undoes."""
        where = self.settings.where
        for vllm in self._vllms:
            vllm.info(where.timeout if isinstance(where, ServerSettings) else None)
        call_workers(self._vllms, "lowpeak_score_at_temperature", {}, _CALL_SECONDS)

    def _serves_adapter(self) -> bool:
        """Return whether every engine can serve the policy's LoRA adapter."""
        wanted = self.settings.adapters and self.policy.adapter is not None
        return wanted and all(info.max_loras > 0 for info in self._engine_infos)

    def _weights_survived(self) -> bool:
        """Return whether the weights are unchanged, by the same checksums as after a push."""
        if not self.settings.verify:
            return False
        try:
            verify_unchanged(self._vllms)
        except EngineError as error:
            logger.info("vLLM's weights did not survive its sleep and will be sent again: %s", error)
            return False
        return True

    def _check_identities(self) -> None:
        """Raise LostEngineError if a vLLM restarted since the load, or if another client loaded weights."""
        identities = call_workers(self._vllms, "lowpeak_identity", {}, _CALL_SECONDS)
        versions = {worker["policy_version"] for workers in identities for worker in workers}
        if versions != {self.policy_version} or (self._weights.identities or identities) != identities:
            names = ", ".join("none" if version is None else str(version) for version in versions)
            raise LostEngineError(
                f"vLLM has weights of version {names} instead of {self.policy_version}: it was restarted, or another client loaded "
                "weights into it."
            )
        if self._weights.identities is None:
            # The first call after a load: a restarted vLLM may have other properties.
            self._engine_infos = [vllm.info() for vllm in self._vllms]
        self._weights = replace(self._weights, identities=identities)

    def _capacity(self, sequences: Sequence[SequenceRequest]) -> int:
        """Return how many of these sequences may run at once; raise EngineError for one that can never fit."""
        requests, callers = [sequence.request for sequence in sequences], self.sharing.num_callers
        capacity = wave_capacity(self._engine_infos, requests, self._lengths, callers, self.settings.where)
        size = self.settings.batch_size or capacity
        return min(size, capacity) if self._limits_to_cache else size

    @property
    def _limits_to_cache(self) -> bool:
        return all(info.limits_to_cache for info in self._engine_infos)

    def _turn_sequence(self, sampling: Sampling, turn: TurnRequest) -> SequenceRequest:
        """Return the request for a turn, drawn as completion `key[1]` of prompt `key[0]`."""
        sampling = replace(sampling, num_generations=1, first_completion=turn.key[1], max_new_tokens=turn.max_tokens)
        settings, prompt = self.settings, Prompt(turn.conversation[0], tuple(turn.ids), "")
        self._check_lengths([prompt], sampling)
        prompt, end_ids = replace(prompt, serial=turn.key[0]), self.policy.end_ids(sampling)
        (sequence,) = sequence_requests(
            [prompt], sampling, end_ids, settings.structured_regex, settings.sampling_kwargs
        )
        return replace(sequence, serial=turn.conversation[0], number=turn.conversation[1])

    def _check(
        self, version: int, known: Any, index: int, sequences: Sequence[SequenceRequest], answers: Sequence[Answer]
    ) -> list[Answer]:
        """Return the answers of a vLLM if they are valid and it has not restarted since its identity was `known`."""
        if not self._limits_to_cache:
            identities = call_workers([self._vllms[index]], "lowpeak_identity", {}, _CALL_SECONDS)
            if base_names(identities) != base_names([known[index]]):
                raise LostEngineError("vLLM was restarted, or loaded by another client, in mid-conversation.")
        return check_answers(sequences, answers, version, self.policy.num_tokens)

    def _check_lengths(self, prompts: Sequence[Prompt], sampling: Sampling) -> None:
        context, where = min(info.max_model_len for info in self._engine_infos), self.settings.where
        remedy = f"raise {option_name(where, 'max_model_length')} or shorten completions"
        if isinstance(where, ServerSettings):
            remedy += f", or set vllm_max_model_length={context}, which rejects such prompts at the start"
        check_lengths(prompts, sampling, context, "vLLM's", remedy)

    def _check_speculation(self, sampling: Sampling) -> None:
        """Raise EngineError for speculative decoding at a temperature other than 0 or 1."""
        if sampling.temperature not in (0.0, 1.0) and any(info.speculates for info in self._engine_infos):
            raise EngineError(
                f"vLLM's speculative decoding returns log-probs at temperature 1, but temperature={sampling.temperature}: start "
                "vLLM without speculative_config, or sample at temperature 1."
            )

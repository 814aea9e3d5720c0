"""The rollout engine over one or more vLLMs: prompts go out in waves, the policy's weights in buckets, tokens come back."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from lowpeak.arguments import ColocateSettings, Sampling, ServerSettings, VllmSettings
from lowpeak.errors import EngineError, LostEngineError
from lowpeak.ranks import Ranks
from lowpeak.records import Group, Prompt, Weights, WeightSlice
from lowpeak.rollout import SLICE_BYTES, SliceForm, check_lengths
from lowpeak.vllm.memory_errors import option
from lowpeak.vllm.protocol import Adapter, Answer, Facts, Vllm, ask, call_together
from lowpeak.vllm.requests import Key, Row, checked, completion_of, form_waves, rows_of, rows_that_fit, share
from lowpeak.vllm.weight_sync import PushReport, exhaust
from lowpeak.vllm.weight_sync import prove as prove_weights
from lowpeak.vllm.weight_sync import push_weights as push_weights

logger = logging.getLogger(__name__)

_SECONDS = 60.0  # for what a worker answers at once


@dataclass(frozen=True)
class PolicyFacts:
    """What the engine must know of the policy.

    `end_ids` are the tokens that end a completion, `num_tokens` how many tokens there are, `adapter` its adapter's settings,
    `unchanging` the tensors that training does not change.
    """

    end_ids: Callable[[Sampling], Iterable[int]]
    num_tokens: int | None
    adapter: Mapping[str, Any] | None = None
    unchanging: Collection[str] = ()


@dataclass(frozen=True)
class Callers:
    """Which ranks use the same vLLMs.

    `team` are the ranks of one tensor-parallel engine, which generate the same rows together; `num_callers` ranks share
    the vLLMs, each with rows of its own, and `pushes` says whether this one sends them the weights.
    """

    team: Ranks
    num_callers: int = 1
    pushes: bool = True


@dataclass(eq=False, repr=False)
class VllmEngine:
    """A rollout engine over vLLMs, which `connect()` gives when they are first needed and after `close`.

    `generate` keeps the completions of waves that were answered when an engine is lost in a later one, so that the same
    call after the next `load` of the same version asks for the others alone. `on_push` hears what each push reports.
    """

    connect: Callable[[], Sequence[Vllm]]
    settings: VllmSettings
    policy: PolicyFacts
    callers: Callers
    on_push: Callable[[PushReport], None] = lambda report: None
    push: Callable[..., PushReport] = push_weights
    prove: Callable[[Sequence[Vllm]], Any] = prove_weights
    # The version that all vLLMs have committed and proved; None after one of them was lost or slept its weights away.
    policy_version: int | None = field(default=None, init=False)
    cuts_groups = True

    def __post_init__(self) -> None:
        self._vllms: Sequence[Vllm] = ()
        self._facts: list[Facts] = []
        self._identities: list[Any] | None = None
        self._kept: dict[Key, Answer] = {}
        self._kept_for: tuple[int, Sampling] | None = None
        self._asleep = False
        self._has_base = False
        self._adapters: Sequence[Adapter | None] = ()

    @property
    def slice_form(self) -> SliceForm:
        """The engines' dtype, in slices that no bucket is too small for; of an adapter that they serve, its base once."""
        dtypes = {facts.dtype for facts in self._facts}
        if len(dtypes) != 1:
            raise EngineError(
                f"The vLLM engines have different dtypes ({', '.join(sorted(dtypes))}): start them alike."
            )
        weights: Weights = "merged"
        if self._serves_adapter():
            weights = "adapter" if self._has_base else "base"
        return SliceForm(min(SLICE_BYTES, self.settings.bucket_bytes), getattr(torch, dtypes.pop()), weights)

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling) -> list[Group]:
        """One group per prompt, in order; LostEngineError where an engine died, restarted or holds other weights.

        EngineError before the first `load`, where a row cannot fit, or for answers that cannot be used.
        """
        if self.policy_version is None:
            raise EngineError("The engine holds no known weights yet: call load() before generate().")
        team = self.callers.team
        with team.together():
            self._check_lengths(prompts, sampling)
        told = self.settings
        mine = rows_of(prompts, sampling, self.policy.end_ids(sampling), told.structured_regex, told.sampling_kwargs)
        rows = [row for rows in team.gather(mine) for row in rows]
        self._keep_for(self.policy_version, sampling)
        try:
            self._check_held()
            self._answer([row for row in rows if row.key not in self._kept], self.policy_version)
        except LostEngineError:
            self.policy_version, self._has_base = None, False
            raise
        completions = [completion_of(self._kept[row.key]) for row in mine]
        self._kept = {}
        size = sampling.num_generations
        return [Group(prompt, tuple(completions[i * size : (i + 1) * size])) for i, prompt in enumerate(prompts)]

    def load(self, slices: Iterable[WeightSlice], policy_version: int, weights: Weights = "merged") -> None:
        """Wait for the vLLMs, push the slices and prove them; a rank that does not push reads them all the same."""
        self.policy_version = self._identities = None
        self._adapters = (None,) * len(self._vllms)
        self._has_base = self._has_base and weights == "adapter"
        config = self.policy.adapter if weights == "adapter" else None
        pieces = iter(slices)
        try:
            if self.callers.pushes:
                self._give(pieces, policy_version, config)
        except Exception:
            exhaust(pieces)  # they are broadcast: other ranks wait for this one
            raise
        exhaust(pieces)
        self._has_base = weights != "merged"
        self.policy_version = None if weights == "base" else policy_version

    def sleep(self) -> None:
        where = self.settings.where
        if self._vllms and isinstance(where, ColocateSettings) and where.sleeps and not self._asleep:
            self._asleep = True
            for vllm in self._vllms:
                vllm.sleep()

    def wake(self) -> None:
        """Connect, or have the memory again; weights that did not survive the sleep are held no more."""
        if not self._vllms:
            found = tuple(self.connect())
            self._vllms, self._facts = found, [vllm.facts() for vllm in found]
        if not self._asleep:
            return
        for vllm in self._vllms:
            vllm.wake()
        self._asleep = False
        holds = self.policy_version is not None or self._has_base
        survived = holds and self._survived()  # asked of a base too: what it finds lost has to come again
        if self._has_base or not survived:
            self.policy_version, self._has_base = None, False

    def close(self) -> None:
        """Let go of the vLLMs: those of this process are freed, servers go on."""
        vllms, self._vllms, self._facts = self._vllms, (), []
        self.policy_version = self._identities = None
        self._kept, self._asleep, self._has_base = {}, False, False
        for vllm in vllms:
            vllm.close()

    def _give(self, pieces: Iterable[WeightSlice], policy_version: int, config: Mapping[str, Any] | None) -> None:
        """Push to vLLMs that write nothing meanwhile; none is left paused, and one that was not pushed to holds no version."""
        self._make_ready()
        try:
            for vllm in self._vllms:
                vllm.pause()
            report = self.push(
                pieces,
                self._vllms,
                self.settings,
                policy_version,
                unchanging=self.policy.unchanging,
                adapter=config,
            )
        except Exception:
            with suppress(EngineError):  # it may be what failed
                self._resume()
            raise
        self._resume()
        if config is not None:
            self._adapters = report.adapters
        self.on_push(report)

    def _resume(self) -> None:
        failures = []
        for vllm in self._vllms:
            try:
                vllm.resume()
            except EngineError as error:
                failures.append(error)
        if failures:
            raise failures[0]

    def _make_ready(self) -> None:
        """Wait for each vLLM, as long as the settings say; it may have been started again since, with what it was not told."""
        where = self.settings.where
        for vllm in self._vllms:
            vllm.wait(where.timeout if isinstance(where, ServerSettings) else 0.0)
        ask(self._vllms, "lowpeak_score_at_temperature", [{}] * len(self._vllms), _SECONDS)

    def _serves_adapter(self) -> bool:
        """Whether the policy has an adapter that the vLLMs can put on its base; where ranks share them, only one is told which."""
        wanted = self.settings.adapters and self.policy.adapter is not None and self.callers.num_callers == 1
        return wanted and all(facts.serves_adapters for facts in self._facts)

    def _survived(self) -> bool:
        """Whether the weights are still the policy's, by the same proof as after a push."""
        if not self.settings.verify:
            return False
        try:
            self.prove(self._vllms)
        except EngineError as error:
            logger.info("The engine's weights did not survive its sleep and are sent again: %s", error)
            return False
        return True

    def _keep_for(self, version: int, sampling: Sampling) -> None:
        """Forget completions that were kept for another question."""
        asked = version, replace(sampling, num_generations=0, first_completion=0)
        if asked != self._kept_for:
            self._kept, self._kept_for = {}, asked

    def _check_held(self) -> None:
        """LostEngineError where a vLLM is not the one that was loaded, or has been loaded by somebody else."""
        identities = ask(self._vllms, "lowpeak_identity", [{}] * len(self._vllms), _SECONDS)
        held = {worker["policy_version"] for workers in identities for worker in workers}
        if held != {self.policy_version} or (self._identities or identities) != identities:
            found = ", ".join("none" if version is None else str(version) for version in held)
            raise LostEngineError(
                f"vLLM holds weights of version {found} where {self.policy_version} was loaded: it was started again, or "
                "somebody else loads it."
            )
        if self._identities is None:  # the first time after a load: the vLLMs may be others than before it
            self._facts = [vllm.facts() for vllm in self._vllms]
        self._identities = identities

    def _answer(self, rows: Sequence[Row], version: int) -> None:
        if not rows:
            return
        fitting = self._wave_size(rows)  # asked in any case: it tells of a row that cannot fit at all
        for wave in form_waves(rows, self.settings.batch_size or fitting):
            shares = [[wave[i] for i in mine] for mine in share(wave, len(self._vllms))]
            asked = zip(self._vllms, self._adapters, shares, strict=True)
            ended = call_together([partial(self._ask, *each, version) for each in asked if each[2]])
            failures = [failure for failure in ended if failure is not None]
            if failures:
                raise next((error for error in failures if not isinstance(error, LostEngineError)), failures[0])

    def _wave_size(self, rows: Sequence[Row]) -> int:
        """How many rows fit the engines' caches at their longest; all where the engines keep to them by themselves."""
        if all(facts.keeps_to_cache for facts in self._facts):
            return len(rows)
        longest = max(len(row.request.prompt_ids) + int(row.request.params["max_tokens"]) for row in rows)
        return rows_that_fit(self._facts, longest, self.callers.num_callers, self.settings.where)

    def _ask(self, vllm: Vllm, adapter: Adapter | None, rows: Sequence[Row], version: int) -> EngineError | None:
        """Keep one vLLM's answers; its error, which carries those that came before it, is returned."""
        failure: EngineError | None = None
        try:
            requests = [replace(row.request, adapter=adapter) for row in rows]
            answers = vllm.complete(requests, self.settings.wave_timeout)
            good = dict(enumerate(checked(rows, answers, version, self.policy.num_tokens)))
        except LostEngineError as lost:
            good, failure = {i: a for i, a in lost.finished.items() if not a.policy_versions - {version}}, lost
        except EngineError as error:
            good, failure = {}, error
        self._kept.update({rows[i].key: answer for i, answer in good.items()})
        return failure

    def _check_lengths(self, prompts: Sequence[Prompt], sampling: Sampling) -> None:
        context, where = min(facts.max_model_len for facts in self._facts), self.settings.where
        remedy = f"raise {option(where, 'max_model_length')} or shorten completions"
        if isinstance(where, ServerSettings):
            remedy += f", or set vllm_max_model_length={context}, with which such prompts are found at the start"
        check_lengths(prompts, sampling, context, "vLLM's", remedy)

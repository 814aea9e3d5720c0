"""Stages 2 and 3: the policy's weights are pushed to the engine; a lost engine is awaited and gets them again."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import TracebackType

from lowpeak.errors import LostEngineError
from lowpeak.memory import Phase
from lowpeak.rollout import RolloutEngine
from lowpeak.training.recovery import attempts
from lowpeak.training.run import RunContext

logger = logging.getLogger(__name__)

MAX_RECONNECTS = 3  # of a lost engine, within one call


class Connection:
    """A `with` block that ends quietly after a LostEngineError; the last one lets the error pass.

    `error_text` is the error's text.
    """

    def __init__(self, is_last: bool) -> None:
        self._is_last = is_last
        self.error_text: str | None = None

    def __enter__(self) -> Connection:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        if not isinstance(error, LostEngineError) or self._is_last:
            return False
        self.error_text = str(error)
        return True


@dataclass
class WeightSync:
    """The version of the weights that the engine must have, and the push that brings it there.

    policy_version      the version for the engine; None before the first `sync_weights`
    weights_changed     the policy's weights were loaded from a file: a step's number does not show that
    """

    context: RunContext
    policy_version: int | None = None
    weights_changed: bool = False

    def sync_weights(self, engine: RolloutEngine, policy_version: int, restart_engine: Callable[[], None]) -> None:
        """Push the policy's weights to the engine, unless the engine of every rank has them already."""
        self.policy_version = policy_version
        next(self.connections(engine, restart_engine))

    def connections(
        self, engine: RolloutEngine, restart_engine: Callable[[], None], *, under_way: bool = False
    ) -> Iterator[Connection]:
        """Yield connections to the engine, each with current weights in it, until none is lost in its block.

        for connection in weight_sync.connections(engine, restart_engine):
            with connection:
                groups = ranks.call_on_all(pending.result)

        While a wave is `under_way` the engine gets weights only after it was lost: a push would abort the requests.
        """
        for reconnects in range(MAX_RECONNECTS + 1):
            connection = Connection(is_last=reconnects == MAX_RECONNECTS)
            with connection:
                if reconnects or not under_way:
                    self._push_in_fitting_buckets(engine, restart_engine)
            if connection.error_text is None:
                yield connection
            if connection.error_text is None:
                return
            self.context.run.journal.write_event(self.policy_version or 0, "engine lost", error=connection.error_text)
            text = "%s Waiting for it; weights will be sent again and missing completions generated."
            logger.warning(text, connection.error_text)

    def _push_in_fitting_buckets(self, engine: RolloutEngine, restart_engine: Callable[[], None]) -> None:
        """Push, in smaller buckets to a restarted engine if memory runs out."""
        for attempt in attempts(self.context, Phase.SYNC):
            if attempt.is_retry:
                restart_engine()
            with attempt:
                self._push_if_stale(engine)

    def _push_if_stale(self, engine: RolloutEngine) -> None:
        """Push on all ranks together if the engine of any rank has another version."""
        strategy, version = self.context.run.strategy, self.policy_version
        assert version is not None, "sync_weights comes first"
        for _ in range(2):  # an adapter is a second push, after its base
            is_stale = self.weights_changed or engine.policy_version != version
            if not strategy.ranks.max([float(is_stale)])[0]:
                return
            forms = strategy.ranks.call_on_all(lambda: engine.slice_form)
            form = next((form for form in forms if form.weights == "base"), forms[0])
            with strategy.ranks.propagate_errors(), self.context.run.tracker.phase(Phase.SYNC):
                max_bytes = min(form.max_bytes, self.context.run.sizes.sync_bytes)
                slices = strategy.slices(self.context.model_wrapped, max_bytes, form.dtype, form.weights)
                engine.load(slices, version, form.weights)
            self.weights_changed = False

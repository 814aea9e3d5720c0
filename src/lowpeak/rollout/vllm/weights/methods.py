"""The methods that vLLM's workers get: identity, and one update after the other, from its first bucket to its proof.

An error is an answer (`{"error": sentence}`): an exception may end vLLM's engine, and loses its class on the way to the trainer.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any

from lowpeak.errors import LowpeakError
from lowpeak.rollout.vllm.facts import facts_of
from lowpeak.rollout.vllm.weights.buckets import Piece
from lowpeak.rollout.vllm.weights.sampling import score_at_temperature
from lowpeak.rollout.vllm.weights.transports.choose import look, open_inlet
from lowpeak.rollout.vllm.weights.worker import Work, open_work


def answering(method: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """A method whose errors are answers."""

    @wraps(method)
    def answered(self: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        try:
            return method(self, *args, **kwargs)
        except LowpeakError as error:
            return {"error": str(error)}
        except Exception as error:
            return {"error": f"vLLM's worker failed in {method.__name__}: {type(error).__name__}: {error}"[:500]}

    return answered


class Methods:
    """Methods that vLLM's worker has beside its own; each is called on all workers, and answers what JSON can hold."""

    @answering
    def lowpeak_identity(self) -> dict[str, Any]:
        """Which worker this is, and the version that it holds: another incarnation is one that restarted."""
        work = _work(self)
        return {"incarnation": work.incarnation, "policy_version": work.receiver.policy_version}

    @answering
    def lowpeak_facts(self) -> dict[str, Any]:
        """What this vLLM is, as the fields of `Facts`."""
        return facts_of(self.vllm_config)  # type: ignore[attr-defined]

    @answering
    def lowpeak_look(self) -> dict[str, Any]:
        """On which network and device this worker is."""
        return look(_work(self).device)

    @answering
    def lowpeak_begin(
        self, invitation: Mapping[str, Any], summing: bool, adapter: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """Begin an update, of an adapter alone where one is given: no version from here on.

        The names of tensors that need not come again.
        """
        work = _work(self)
        known = work.begin(summing, adapter)
        work.inlet = open_inlet(invitation, work.device, work.rank)
        return {"known": list(known)}

    @answering
    def lowpeak_take(self, pieces: Sequence[Mapping[str, Any]], **where: Any) -> dict[str, Any]:
        """Read a bucket and load what it makes whole."""
        work = _work(self)
        try:
            bucket = work.open_inlet().read(where)
            work.receiver.take([Piece.from_json(piece) for piece in pieces], bucket)
            work.synchronize()  # the bucket may be filled again when this has answered
        except BaseException:
            work.close_inlet()
            raise
        return {}

    @answering
    def lowpeak_verify(self, sent: Mapping[str, str], counts: Mapping[str, int]) -> dict[str, Any]:
        """Prove that the model holds what was sent."""
        work = _work(self)
        work.close_inlet()
        return {"lacking": work.receiver.verify(sent, counts)}

    @answering
    def lowpeak_commit(self, policy_version: int) -> dict[str, Any]:
        """The update is whole, everywhere. The adapter that requests name, where it was one."""
        receiver = _work(self).receiver
        receiver.commit(policy_version)
        return {"adapter": receiver.adapter()}

    @answering
    def lowpeak_abort(self) -> dict[str, Any]:
        """Give the update up, or forget the version of weights that were lost."""
        work = _work(self)
        work.close_inlet()
        work.receiver.abort()
        return {}

    @answering
    def lowpeak_prove(self) -> dict[str, Any]:
        """Prove that nothing changed since the weights were verified."""
        _work(self).prove()
        return {}

    @answering
    def lowpeak_score_at_temperature(self) -> dict[str, Any]:
        """Sampled log-probs of the full softmax at the sampling temperature; a second call changes nothing."""
        score_at_temperature(self.model_runner.sampler)  # type: ignore[attr-defined]
        return {}


def _work(worker: Any) -> Work:
    """What the extension keeps beside a worker."""
    if not hasattr(worker, "_lowpeak_work"):
        worker._lowpeak_work = open_work(worker, secrets.token_hex(8))
    work: Work = worker._lowpeak_work
    return work

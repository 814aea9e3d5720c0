"""Whether engines still hold what they were proved to hold: asked after each wake, without the trainer's weights."""

from __future__ import annotations

from collections.abc import Sequence

from lowpeak.rollout.vllm.vllm import Vllm, ask


def prove(vllms: Sequence[Vllm], timeout: float | None = 600.0) -> None:
    """Each worker sums its parameters again; EngineError with the tensors' names where they changed, and no version then.

    A worker that was pushed to without proof (`verify=False`), or that holds no version, proves nothing: EngineError.
    """
    if vllms:
        ask(vllms, "lowpeak_prove", [{}] * len(vllms), timeout)


def held_version(vllms: Sequence[Vllm], timeout: float | None = 60.0) -> int | None:
    """The policy version that every worker of every engine holds; None where one holds none, or they differ."""
    answers = [answer for each in ask(vllms, "lowpeak_identity", [{}] * len(vllms), timeout) for answer in each]
    versions = {answer["policy_version"] for answer in answers}
    return versions.pop() if len(versions) == 1 else None

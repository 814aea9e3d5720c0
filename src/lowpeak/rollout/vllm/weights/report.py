"""What an update of the engines' weights took."""

from __future__ import annotations

from dataclasses import dataclass

from lowpeak.rollout.vllm.vllm import Adapter


@dataclass(frozen=True)
class PushReport:
    """What an update took: tensors, bytes sent and bytes held back because they were there, seconds and the proof's of them.

    `adapters` is, for each engine, what requests have to name to be answered with these weights (`Request.adapter`).
    """

    num_tensors: int = 0
    num_bytes: int = 0
    num_bytes_held_back: int = 0
    seconds: float = 0.0
    proof_seconds: float = 0.0
    transport: str = ""
    adapters: tuple[Adapter | None, ...] = ()

"""What the engine asks of one vLLM, in this process or behind a URL; who holds its weights, and who answers prompts.

Both implementations (`colocated.py`, `server.py`) and the tests' fake have these members and no others, so that
waves, weights, proof and faults are written once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, TypeVar, runtime_checkable

from lowpeak.errors import EngineError

Item = TypeVar("Item")


@dataclass(frozen=True)
class Adapter:
    """A LoRA adapter that a vLLM holds: vLLM's `LoRARequest(name, number, folder)`, the folder being on its host."""

    name: str
    number: int
    folder: str


@dataclass(frozen=True)
class Request:
    """One completion to be written: token ids in, and vLLM's sampling parameters by name (one completion: no `n`).

    With an `adapter` it is written by the base model with that adapter, which is what the last push gave.
    """

    prompt_ids: tuple[int, ...]
    params: Mapping[str, Any] = field(default_factory=dict)
    adapter: Adapter | None = None


@dataclass(frozen=True)
class Answer:
    """The tokens that came back, the end-of-sequence token included, and the log-prob of each.

    `finish_reason` is vLLM's: "stop", "length", or "abort" where the request was given up before its end. `policy_versions`
    are the versions of the weights that wrote it, where vLLM tells them.
    """

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: str
    policy_versions: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Facts:
    """What a vLLM says of itself: what it was built from, and how much it can hold.

    `model` is the name or path that it loaded, `fingerprint` a hash of its configuration's sizes and of its tokenizer's
    vocabulary, `dtype` torch's name of its weights' dtype, `kv_tokens` how many tokens its KV cache holds.
    With `keeps_to_cache` it starts no more rows of a wave than that holds at their full length, the next as one ends: then a
    wave may be of any size.
    """

    version: str
    model: str
    fingerprint: str
    dtype: str
    max_model_len: int
    max_num_seqs: int
    kv_tokens: int
    num_workers: int
    serves_adapters: bool = False
    keeps_to_cache: bool = False


@runtime_checkable
class Vllm(Protocol):
    """One vLLM engine; its workers hold its weights, and each has the methods of `weights/extension.py`.

    What an implementation has no need of does nothing here: one in this process is always there, a server keeps its memory.
    """

    @property
    def in_process(self) -> bool:
        """Whether its workers live in this process, so that a call's arguments may be tensors; else they are JSON."""

    def call(self, method: str, arguments: Mapping[str, Any], timeout: float) -> list[Any]:
        """What each worker's method returns, in rank order; LostEngineError when one is gone."""

    def facts(self) -> Facts:
        """What it is; asked once it is there, and again after a restart."""

    def complete(self, requests: Sequence[Request], timeout: float | None = None) -> list[Answer]:
        """One wave: an answer for each request, in order. LostEngineError when it dies or does not answer in time."""

    def pause(self) -> None:
        """Give up what is being written and start nothing until `resume`: weights are about to change."""
        return

    def resume(self) -> None:
        """Forget cached keys and values of the old weights, and answer again."""

    def wait(self, seconds: float) -> None:
        """Return when it answers, within `seconds`; EngineError says what was waited for."""
        return

    def sleep(self) -> None:
        """Give its memory back, as far as it can; weights may be lost."""
        return

    def wake(self) -> None:
        """Have its memory again."""
        return

    def close(self) -> None:
        """Let go of it: an engine of this process is freed, a server is left running."""
        return


def call_workers(
    vllms: Sequence[Vllm], method: str, arguments: Sequence[Mapping[str, Any]], timeout: float
) -> list[list[dict[str, Any]]]:
    """Return what each worker of each engine answers, all engines at once; EngineError with the first complaint."""

    def one(vllm: Vllm, given: Mapping[str, Any]) -> list[dict[str, Any]]:
        answers: list[dict[str, Any]] = vllm.call(method, given, timeout)
        for answer in answers:
            if "error" in answer:
                raise EngineError(answer["error"])
        return answers

    return call_concurrently([partial(one, vllm, given) for vllm, given in zip(vllms, arguments, strict=True)])


def call_concurrently(calls: Sequence[Callable[[], Item]]) -> list[Item]:
    """Make the calls at once; return what they return when all have ended, or raise the first one's error.

    A single call is made in this thread, since its engine may be in this process. Others get threads that end with the process:
    an executor's would be waited for after Ctrl-C.
    """
    if len(calls) == 1:
        return [calls[0]()]
    futures = [start_thread(call) for call in calls]
    wait(futures)
    return [future.result() for future in futures]


def start_thread(call: Callable[[], Item]) -> Future[Item]:
    """Make the call in a thread that ends with the process."""
    future: Future[Item] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="lowpeak-vllm", daemon=True).start()
    return future

"""Protocol of one vLLM, in the training process or behind a URL, and calls to its workers.

`colocated.py`, `server.py` and the tests' fake implement it, so that waves, weight updates, verification and fault
handling exist once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, TypeVar, runtime_checkable

from lowpeak.errors import EngineError

Item = TypeVar("Item")


@dataclass(frozen=True)
class Adapter:
    """LoRA adapter loaded in a vLLM: vLLM's `LoRARequest(name, number, folder)`; the folder is on vLLM's host.

    `incarnation` is that of the worker which loaded it.
    """

    name: str
    number: int
    folder: str
    incarnation: str = ""


@dataclass(frozen=True)
class Request:
    """Request for one completion: prompt ids and vLLM's sampling parameters by name (without `n`).

    `adapter` is one of the last pushes, which is applied to the base model; None: no adapter.
    """

    prompt_ids: tuple[int, ...]
    params: Mapping[str, Any] = field(default_factory=dict)
    adapter: Adapter | None = None


@dataclass(frozen=True)
class Answer:
    """Completion from vLLM: its tokens, including the end-of-sequence token, and their log-probs.

    `finish_reason` is vLLM's: "stop", "length", or "abort" if the request was aborted. `policy_versions` are the
    versions of the weights that generated it, if vLLM reports them.
    """

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: str
    policy_versions: frozenset[int] = frozenset()


@dataclass(frozen=True)
class EngineInfo:
    """Properties of a vLLM: the model that it loaded and its capacity.

    `model` is the name or path that vLLM loaded, `fingerprint` a hash of the configuration's sizes and of the
    tokenizer's vocabulary, `dtype` torch's name of the weights' dtype, `kv_tokens` the KV cache's capacity. With
    `limits_to_cache` vLLM starts no more sequences than its cache is expected to hold, so a wave may have any size.
    `max_loras` is how many LoRA adapters it serves at once. `speculates` means speculative decoding, `serves_tokens` a server with
    the route of `serving/token_route.py`. With `in_process` the workers run in this process, so that arguments of calls may be
    tensors; otherwise they are JSON.
    """

    version: str
    model: str
    fingerprint: str
    dtype: str
    max_model_len: int
    max_num_seqs: int
    kv_tokens: int
    max_loras: int = 0
    limits_to_cache: bool = False
    speculates: bool = False
    serves_tokens: bool = False
    in_process: bool = False


class RequestRunner(Protocol):
    """A vLLM that takes single requests at any time."""

    def start(self, request: Request, timeout: float | None = None) -> Future[Answer]:
        """Start a request and return its answer, or LostEngineError if vLLM dies or is late; `cancel` aborts it."""

    def step(self) -> None:
        """Compute one step of all requests; a server does so by itself."""
        return


@runtime_checkable
class Vllm(RequestRunner, Protocol):
    """One vLLM engine whose workers have the methods of `weight_sync/worker.py`.

    Methods that an implementation does not need do nothing: a server keeps its memory.
    """

    def call(self, method: str, arguments: Mapping[str, Any], timeout: float) -> list[Any]:
        """Call a method of all workers and return the results in rank order.

        Raise EngineError with the first error that a worker returned, LostEngineError if one is gone.
        """

    def info(self, wait_seconds: float | None = None) -> EngineInfo:
        """Return the properties, which may change with a restart.

        Wait until vLLM is ready; raise EngineError after `wait_seconds`. With None it must be ready: LostEngineError otherwise.
        """

    def complete(self, requests: Sequence[Request], timeout: float | None = None) -> list[Answer]:
        """Complete one wave and return the answers in order.

        Raise LostEngineError if vLLM dies or exceeds the timeout.
        """

    def paused(self) -> AbstractContextManager[None]:
        """Abort running requests and start none during the block, in which the weights change.

        After it keys and values of the old weights are dropped, and requests accepted again, also after an error.
        """

    def sleep(self) -> None:
        """Release memory, as far as possible; the weights may be lost."""
        return

    def wake(self) -> None:
        """Reallocate the memory."""
        return

    def close(self) -> None:
        """Free an engine of this process; leave a server running."""
        return


@contextmanager
def resumed_after(pause: Callable[[], None], resume: Callable[[], None]) -> Iterator[None]:
    """Pause a vLLM for the block and resume it, also after an error, which an error of `resume` does not replace."""
    try:
        pause()
        yield
    except Exception:
        # A vLLM that fails to resume may be the one that caused the error.
        with suppress(EngineError):
            resume()
        raise
    resume()


def check_worker_answers(answers: Sequence[Any]) -> list[Any]:
    """Return the workers' answers; raise EngineError with the first error among them."""
    for answer in answers:
        if isinstance(answer, Mapping) and "error" in answer:
            raise EngineError(answer["error"])
    return list(answers)


def call_workers(
    vllms: Sequence[Vllm], method: str, arguments: Mapping[str, Any], timeout: float
) -> list[list[dict[str, Any]]]:
    """Call a method on the workers of all engines concurrently; return their answers per engine."""
    return call_concurrently([partial(vllm.call, method, arguments, timeout) for vllm in vllms])


def call_concurrently(calls: Sequence[Callable[[], Item]]) -> list[Item]:
    """Make the calls concurrently and, once all have ended, return their results or raise the first error."""
    # A single call runs in this thread, since its engine may be in this process. The others run in daemon threads: an
    # executor would wait for its threads after Ctrl-C.
    if len(calls) == 1:
        return [calls[0]()]
    futures = [start_thread(call) for call in calls]
    wait(futures)
    return [future.result() for future in futures]


def start_thread(call: Callable[[], Item]) -> Future[Item]:
    """Run the call in a daemon thread and return its future."""
    future: Future[Item] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="lowpeak-vllm", daemon=True).start()
    return future

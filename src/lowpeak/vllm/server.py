"""Client of a vLLM server that `lowpeak serve` started.

Every request has a time limit or a socket that detects a lost host. The workers choose an incarnation id when they
start: an answer from another incarnation was generated with the checkpoint's weights and is rejected.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from contextlib import AbstractContextManager
from dataclasses import asdict
from typing import Any

from lowpeak.arguments import ServerSettings
from lowpeak.errors import ArgumentError, EngineError, LostEngineError, first_line
from lowpeak.vllm.http_client import Http, NoRouteError, deadline, run_on_loop, start_on_loop
from lowpeak.vllm.protocol import Adapter, Answer, EngineInfo, Request, Vllm, check_worker_answers, resumed_after
from lowpeak.vllm.requests import COMPLETIONS, GENERATE, TOKENS, Route, parse_answer, request_body
from lowpeak.vllm.serving import ADAPTER_ROUTE

logger = logging.getLogger(__name__)

_CALL_SECONDS = 60.0
_POLL_SECONDS = 0.5
_LOG_SECONDS = 30.0
_RESET_ATTEMPTS = 20


def connect_servers(settings: ServerSettings, stopping: Callable[[], bool] = lambda: False) -> tuple[ServerVllm, ...]:
    """Return a client for each server address, once all servers answer.

    Raise EngineError if a server does not answer in time, ArgumentError if two addresses are the same server, which
    would receive every weight twice. Waiting, now or later, ends with StoppedError when `stopping()` is true.
    """
    vllms = tuple(ServerVllm(url, settings.token, stopping) for url in settings.base_urls)
    until = time.monotonic() + settings.timeout
    for vllm in vllms:
        vllm.wait(max(0.0, until - time.monotonic()))
    first: dict[str, ServerVllm] = {}
    for vllm in vllms if len(vllms) > 1 else ():
        other = first.setdefault(vllm.read_incarnation(), vllm)
        if other is not vllm:
            raise ArgumentError(f"vllm_server_base_url: {other.url} and {vllm.url} are the same server: list it once.")
    return vllms


class ServerVllm(Vllm):
    """One vLLM over HTTP; `stopping` ends its `wait`."""

    def __init__(self, base_url: str, token: str | None = None, stopping: Callable[[], bool] = lambda: False) -> None:
        self._http = Http(base_url, token)
        self.url = self._http.url
        self._stopping = stopping
        self._route: Route | None = None
        self._incarnation: str | None = None
        self._registered: set[Adapter] = set()

    def call(self, method: str, arguments: Mapping[str, Any], timeout: float) -> list[Any]:
        """Call the method through vLLM's `/collective_rpc`, which returns mappings, lists and None as JSON, other
        results as text.
        """
        body = {"method": method, "kwargs": dict(arguments), "timeout": timeout}
        # The server's limit ends first, so that its error is the one that is raised.
        answer = self._http.post("/collective_rpc", body, timeout + 5.0)
        if not isinstance(answer, dict) or not isinstance(answer.get("results"), list) or not answer["results"]:
            raise EngineError(f"the server at {self.url} returned nothing for {method}: {str(answer)[:200]}.")
        return check_worker_answers(answer["results"])

    def read_incarnation(self) -> str:
        """Return the incarnation ids of the server's workers."""
        identities = self.call("lowpeak_identity", {}, _CALL_SECONDS)
        for identity in identities:
            if not isinstance(identity, dict):
                raise EngineError(
                    f"a worker of the server at {self.url} does not answer lowpeak_identity: {str(identity)[:500]}"
                )
        return "/".join(str(identity.get("incarnation")) for identity in identities)

    def info(self, wait_seconds: float | None = None) -> EngineInfo:
        if wait_seconds is not None:
            self.wait(wait_seconds)
        self._route, self._registered = None, set()
        self._incarnation = self.read_incarnation()
        properties = self.call("lowpeak_engine_info", {}, _CALL_SECONDS)[0]
        try:
            info = EngineInfo(**properties)
        except TypeError as error:
            raise EngineError(
                f"the server at {self.url} returned properties that this lowpeak does not know ({error}): install the same "
                "version of lowpeak on both hosts."
            ) from None
        self._route = TOKENS if info.serves_tokens else None
        return info

    def complete(self, requests: Sequence[Request], timeout: float | None = None) -> list[Answer]:
        """Complete one wave, all requests concurrently; a LostEngineError has the finished answers."""
        if not requests:
            return []
        self._check_incarnation(requests)
        futures = [self.start(request, timeout) for request in requests]
        try:
            wait(futures, return_when=FIRST_EXCEPTION)
        finally:
            for future in futures:
                future.cancel()
        completed = {i: future for i, future in enumerate(futures) if not future.cancelled()}
        finished = {i: future.result() for i, future in completed.items() if future.exception() is None}
        for future in completed.values():
            if isinstance(error := future.exception(), LostEngineError):
                error.finished = finished
            if error is not None:
                raise error
        self._check_incarnation(requests)
        return list(finished.values())

    def start(self, request: Request, timeout: float | None = None) -> Future[Answer]:
        self._register(request.adapter)
        return start_on_loop(self._answer(request, deadline(timeout)))

    def paused(self) -> AbstractContextManager[None]:
        return resumed_after(self._pause, self._resume)

    def _pause(self) -> None:
        """Abort running requests, which end with the reason "abort".

        New requests wait, or fail as with a lost engine (vLLM 0.33).
        """
        self._http.post("/pause?mode=abort&clear_cache=true", None, _CALL_SECONDS)

    def _resume(self) -> None:
        """Empty the prefix cache, then resume; retry the reset while vLLM refuses it because blocks are in use."""
        for _ in range(_RESET_ATTEMPTS):
            if self._http.post("/reset_prefix_cache", None, _CALL_SECONDS)["success"]:
                break
            time.sleep(0.1)
        else:
            raise EngineError(
                f"the server at {self.url} does not reset its prefix cache, which has keys and values of the old weights."
            )
        self._http.post("/resume", None, _CALL_SECONDS)

    def wait(self, seconds: float) -> None:
        """Poll `/health` until the server is healthy; log at once and every half minute.

        Raise StoppedError within a second if the run stops meanwhile.
        """
        began, logged, until = time.monotonic(), 0.0, time.monotonic() + seconds
        while True:
            try:
                self._http.get("/health", min(5.0, max(0.1, until - time.monotonic())), self._stopping)
                return
            except LostEngineError as error:
                reason = first_line(error)
            now = time.monotonic()
            if now >= until:
                raise EngineError(
                    f"no vLLM was ready at {self.url} within {seconds:.0f} s ({reason}). Start one with `lowpeak serve "
                    "--model ...`, or raise vllm_server_timeout."
                )
            if not logged or now - logged >= _LOG_SECONDS:
                logged = now
                logger.warning(
                    "waiting for vLLM at %s, %.0f s of %.0f so far: %s.", self.url, now - began, seconds, reason
                )
            run_on_loop(asyncio.sleep(min(_POLL_SECONDS, until - now)), self._stopping)

    async def _answer(self, request: Request, until: float | None) -> Answer:
        """Return the answer by the route of arrays or the one with weight versions, if the server has them."""
        route = self._route or GENERATE
        try:
            answer = await self._http.generate(route, request_body(request, route), until, as_bytes=route == TOKENS)
        except NoRouteError:
            if route != GENERATE:
                raise
            self._route = COMPLETIONS
            return await self._answer(request, until)
        parsed = parse_answer(answer, route, self.url)
        if parsed.finish_reason == "abort":
            raise LostEngineError(f"the server at {self.url} aborted a request.")
        return parsed

    def _register(self, adapter: Adapter | None) -> None:
        """Register an adapter that requests may name; the workers loaded it in a push."""
        if adapter is not None and adapter not in self._registered:
            self._http.post(ADAPTER_ROUTE, asdict(adapter), _CALL_SECONDS)
            self._registered.add(adapter)

    def _check_incarnation(self, requests: Sequence[Request]) -> None:
        """Raise LostEngineError if the server restarted since `info` was called, or since it got the requests' adapters."""
        if self._incarnation is None:
            return
        incarnation = self.read_incarnation()
        with_adapters = {request.adapter.incarnation for request in requests if request.adapter is not None}
        if incarnation != self._incarnation or with_adapters - set(incarnation.split("/")):
            raise LostEngineError(f"the server at {self.url} was restarted and has the checkpoint's weights.")

"""A vLLM behind a URL, as `lowpeak serve` starts it.

Every request has a time limit or a socket that notices when the other host is gone. A server is known by its incarnation, which
its workers choose when they start: an answer of another incarnation was written by the checkpoint's weights, and is none.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

from lowpeak.arguments import ServerSettings
from lowpeak.errors import ArgumentError, EngineError, LostEngineError
from lowpeak.vllm.http_client import Http, NoRouteError, deadline, run_on_loop
from lowpeak.vllm.protocol import Adapter, Answer, Facts, Request, Vllm
from lowpeak.vllm.requests import COMPLETIONS, GENERATE, Route, parse_answer, request_body
from lowpeak.vllm.serving import ADAPTER_ROUTE

logger = logging.getLogger(__name__)

_ASK_SECONDS = 60.0
_POLL_SECONDS = 0.5
_TOLD_EVERY = 30.0
_RESETS = 20


def connect(settings: ServerSettings, stopping: Callable[[], bool] = lambda: False) -> tuple[ServerVllm, ...]:
    """A `Vllm` for each of the servers' addresses, once all of them answer; EngineError where one does not in time.

    ArgumentError where two addresses are one server's, which would get every weight twice.
    Who waits for them, now or later, gives up with StoppedError when `stopping()` says so.
    """
    found = tuple(ServerVllm(url, settings.token, stopping) for url in settings.base_urls)
    until = time.monotonic() + settings.timeout
    for each in found:
        each.wait(max(0.0, until - time.monotonic()))
    first: dict[str, ServerVllm] = {}
    for each in found if len(found) > 1 else ():
        other = first.setdefault(each.asked_incarnation(), each)
        if other is not each:
            raise ArgumentError(
                f"vllm_server_base_url: {other.url} and {each.url} are the same server: name it once, by one address."
            )
    return found


class ServerVllm(Vllm):
    """One vLLM over HTTP; see the protocol `Vllm` for what its methods promise. `stopping` ends its `wait`."""

    in_process = False

    def __init__(self, base_url: str, token: str | None = None, stopping: Callable[[], bool] = lambda: False) -> None:
        self._http = Http(base_url, token)
        self.url = self._http.url
        self._stopping = stopping
        self._route: Route | None = None
        self._incarnation: str | None = None
        self._adapter: Adapter | None = None

    def call(self, method: str, arguments: Mapping[str, Any], timeout: float) -> list[Any]:
        """Call the method by vLLM's `/collective_rpc`: it hands on as JSON a mapping, a list or None, anything else as text."""
        body = {"method": method, "kwargs": dict(arguments), "timeout": timeout}
        answer = self._http.post("/collective_rpc", body, timeout + 5.0)  # the server's own limit speaks first
        if not isinstance(answer, dict) or not isinstance(answer.get("results"), list) or not answer["results"]:
            raise EngineError(f"the server at {self.url} returned nothing for {method}: {str(answer)[:200]}.")
        return list(answer["results"])

    def asked_incarnation(self) -> str:
        """Which life of which server its workers say that it is."""
        told = self.call("lowpeak_identity", {}, _ASK_SECONDS)
        for each in told:
            if not isinstance(each, dict) or "error" in each:
                raise EngineError(
                    f"a worker of the server at {self.url} does not answer lowpeak_identity: {str(each)[:500]}"
                )
        return "/".join(str(each.get("incarnation")) for each in told)

    def facts(self) -> Facts:
        self._route = self._adapter = None
        self._incarnation = self.asked_incarnation()
        told = self.call("lowpeak_facts", {}, _ASK_SECONDS)[0]
        try:
            return Facts(**told)
        except TypeError as error:
            raise EngineError(
                f"the server at {self.url} tells other facts than this lowpeak asks for ({error}): install the same version of "
                "lowpeak on both hosts."
            ) from None

    def complete(self, requests: Sequence[Request], timeout: float | None = None) -> list[Answer]:
        """One wave, all requests at once; LostEngineError carries the answers that had come."""
        if not requests:
            return []
        self._check_incarnation()
        self._register(next((each.adapter for each in requests if each.adapter is not None), None))
        answers, failed = self._gathered(requests, deadline(timeout))
        if isinstance(failed, LostEngineError):
            failed.finished = {i: answer for i, answer in enumerate(answers) if answer is not None}
        if failed is not None:
            raise failed
        self._check_incarnation()
        return [answer for answer in answers if answer is not None]

    def pause(self) -> None:
        """Requests under way end with the reason "abort"; new ones wait, or are refused as from a lost engine (vLLM 0.33)."""
        self._http.post("/pause?mode=abort&clear_cache=true", None, _ASK_SECONDS)

    def resume(self) -> None:
        """The cache of keys and values is emptied first: vLLM says no while blocks are still held, and is asked again."""
        for _ in range(_RESETS):
            if self._http.post("/reset_prefix_cache", None, _ASK_SECONDS)["success"]:
                break
            time.sleep(0.1)
        else:
            raise EngineError(
                f"the server at {self.url} does not empty its prefix cache, which the old weights filled."
            )
        self._http.post("/resume", None, _ASK_SECONDS)

    def wait(self, seconds: float) -> None:
        """Poll `/health` until it is well; the log says what is waited for, at once and every half minute.

        StoppedError within a second when the run is to stop and it is not well.
        """
        began, told, until = time.monotonic(), 0.0, time.monotonic() + seconds
        while True:
            try:
                self._http.get("/health", min(5.0, max(0.1, until - time.monotonic())), self._stopping)
                return
            except LostEngineError as error:
                reason = str(error)
            now = time.monotonic()
            if now >= until:
                raise EngineError(
                    f"no vLLM was ready at {self.url} within {seconds:.0f} s ({reason}) Start one with `lowpeak serve "
                    "--model ...`, or give it longer with vllm_server_timeout."
                )
            if not told or now - told >= _TOLD_EVERY:
                told = now
                logger.warning(
                    "waiting for vLLM at %s, %.0f s of %.0f so far: %s", self.url, now - began, seconds, reason
                )
            run_on_loop(asyncio.sleep(min(_POLL_SECONDS, until - now)), self._stopping)

    def _gathered(
        self, requests: Sequence[Request], until: float | None
    ) -> tuple[list[Answer | None], BaseException | None]:
        """Answers and what went wrong; by the route that tells the weights' version, where the server has it."""
        route = self._route or GENERATE
        answers, failed = self._http.post_each(
            route, [request_body(request, route) for request in requests], until, partial(self._read, route)
        )
        if self._route is None and isinstance(failed, NoRouteError):
            self._route = COMPLETIONS
            return self._gathered(requests, until)
        return answers, failed

    def _read(self, route: Route, answer: Any) -> Answer:
        found = parse_answer(answer, route, self.url)
        if found.finish_reason == "abort":
            raise LostEngineError(f"the server at {self.url} gave a request up before its end.")
        return found

    def _register(self, adapter: Adapter | None) -> None:
        """Tell the server which adapter requests may name; its workers hold it since the last push."""
        if adapter is not None and adapter != self._adapter:
            self._http.post(ADAPTER_ROUTE, asdict(adapter), _ASK_SECONDS)
            self._adapter = adapter

    def _check_incarnation(self) -> None:
        """LostEngineError where it was restarted since its facts were asked."""
        if self._incarnation is not None and self.asked_incarnation() != self._incarnation:
            raise LostEngineError(f"the server at {self.url} was restarted: it holds the checkpoint's weights.")

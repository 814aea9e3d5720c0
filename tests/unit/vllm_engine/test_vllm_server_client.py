"""A vLLM over HTTP, against a server that misbehaves in every way that vLLM was seen to, and some more."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import threading
import time
from dataclasses import asdict, replace
from types import SimpleNamespace

import pytest

from fake_server import DROP, GENERATE, FakeServer, error, generated, serving, slow
from lowpeak.arguments.vllm import ServerSettings
from lowpeak.errors import ArgumentError, EngineError, LostEngineError
from lowpeak.vllm.colocated import ColocatedVllm
from lowpeak.vllm.protocol import Adapter, Answer, Request, Vllm, call_concurrently
from lowpeak.vllm.server import ServerVllm, connect_servers
from lowpeak.vllm.serving.command import ServerSpec
from lowpeak.vllm.serving.process import ServerProcess
from lowpeak.vllm.serving.token_route import TOKEN_ROUTE
from vllm_servers import free_port


@pytest.fixture
def fake():
    with serving(FakeServer()) as server:
        yield server


def requests(*firsts):
    return [Request((first, 5), {"max_tokens": 4, "seed": first}) for first in firsts]


def lost(vllm, *firsts, timeout=5.0):
    with pytest.raises(LostEngineError) as found:
        vllm.complete(requests(*firsts), timeout)
    return found.value


# what goes well


def test_a_client_asks_for_facts_and_passes_calls_with_their_limit_on_to_the_workers(fake):
    vllm = ServerVllm(fake.url)
    assert isinstance(vllm, Vllm)
    assert vllm.info() == fake.facts
    fake.answers["/collective_rpc"] = lambda body: (200, {"results": [body, None]})
    reply = vllm.call("lowpeak_receive", {"pieces": [1]}, 7.0)
    assert reply == [{"method": "lowpeak_receive", "kwargs": {"pieces": [1]}, "timeout": 7.0}, None]


class InProcess(ColocatedVllm):
    """A colocated vLLM whose workers answer `results`."""

    def __init__(self, results):
        self.llm = SimpleNamespace(collective_rpc=lambda method, kwargs: results)


def test_a_call_raises_the_error_that_any_worker_answered_with(fake):
    results = [{}, {"error": "a complaint"}]
    fake.answers["/collective_rpc"] = lambda body: (200, {"results": results})
    for vllm in (ServerVllm(fake.url), InProcess(results)):
        with pytest.raises(EngineError, match="complaint"):
            vllm.call("lowpeak_score_at_temperature", {}, 7.0)


def test_token_ids_go_in_and_come_back_in_the_order_of_the_requests(fake):
    vllm = ServerVllm(fake.url)
    assert vllm.complete([]) == []
    assert fake.calls == []
    answers = vllm.complete(requests(*range(2, 12)))
    assert answers == [Answer((first, 1), (-0.5, -0.25), "stop", frozenset({3})) for first in range(2, 12)]
    sent = next(body for path, body in fake.calls if path == GENERATE)
    own = {"max_tokens": 4, "seed": sent["token_ids"][0]}
    assert sent["sampling_params"] == {"logprobs": 0, "detokenize": False} | own
    vllm.complete([Request((2,), {"stop": ["7"]})])
    assert fake.calls[-1][1]["sampling_params"]["detokenize"] is True
    fake.answers[GENERATE] = lambda body: (200, generated([7], [-0.5], version="default"))  # the checkpoint's own
    assert vllm.complete(requests(2))[0].policy_versions == frozenset()
    del fake.answers[GENERATE]
    with serving(FakeServer(serves_tokens=True)) as lean:
        of_arrays = ServerVllm(lean.url)
        of_arrays.info()
        assert of_arrays.complete(requests(*range(2, 12))) == answers
        found = next(body for path, body in lean.calls if path == TOKEN_ROUTE)
        assert found.keys() == sent.keys()
        assert GENERATE not in {path for path, _ in lean.calls}


def test_a_server_without_the_route_for_tokens_is_asked_by_the_one_for_completions():
    with serving(FakeServer(scale_out=False)) as fake:
        (answer,) = ServerVllm(fake.url).complete(requests(2))
        assert answer == Answer((7, 1), (-0.5, -0.25), "stop")
        sent = fake.calls[-1][1]
    assert (sent["prompt"], sent["return_token_ids"], sent["logprobs"], sent["seed"]) == ([2, 5], True, 0, 2)


def test_requests_of_a_wave_run_together_also_inside_a_running_event_loop(fake):
    meeting = threading.Barrier(8)

    def together(body):
        meeting.wait(10)
        return fake.generate(body)

    async def notebook():
        return ServerVllm(fake.url).complete(requests(*range(2, 10)), 20)

    fake.answers[GENERATE] = together
    assert len(asyncio.run(notebook())) == 8


def test_an_adapter_is_registered_once_and_named_by_its_requests(fake):
    adapter = Adapter("lowpeak-7", 7, "folder", fake.incarnation)
    vllm = ServerVllm(fake.url)
    vllm.info()
    for _ in range(2):
        vllm.complete([Request((2,), {}, adapter)])
    known = [body for path, body in fake.calls if path == "/lowpeak_adapter"]
    assert known == [asdict(adapter)]
    assert [body["model"] for path, body in fake.calls if path == GENERATE] == ["lowpeak-7"] * 2
    fake.incarnation = "second"
    vllm.info()
    with pytest.raises(LostEngineError, match="restarted"):
        vllm.complete([Request((2,), {}, adapter)])
    vllm.complete([Request((2,), {}, replace(adapter, incarnation="second"))])
    assert len([path for path, _ in fake.calls if path == "/lowpeak_adapter"]) == 2


def test_a_pause_gives_up_requests_and_a_resume_empties_the_cache_first(fake):
    refusals = [False, False, True]
    fake.answers["/reset_prefix_cache"] = lambda body: (200, {"success": refusals.pop(0)})
    vllm = ServerVllm(fake.url)
    with vllm.paused():
        assert [path for path, _ in fake.calls] == ["/pause?mode=abort&clear_cache=true"]
    assert [path for path, _ in fake.calls[1:]] == [*["/reset_prefix_cache"] * 3, "/resume"]
    fake.answers["/reset_prefix_cache"] = lambda body: (200, {"success": False})
    with pytest.raises(EngineError, match=fake.url), vllm.paused():
        pass


def test_a_token_is_sent_and_appears_in_no_error():
    with serving(FakeServer(token="secret")) as fake:
        assert ServerVllm(fake.url, "secret").info() == fake.facts
        with pytest.raises(EngineError, match=r"vllm_server_token.*LOWPEAK_SERVER_TOKEN") as found:
            ServerVllm(fake.url, "a wrong one").info()
    assert "a wrong one" not in str(found.value)


# what is lost


def test_a_server_that_is_not_there_is_lost():
    url = f"http://127.0.0.1:{free_port()}"
    assert url in str(lost(ServerVllm(url), 2))


def test_answers_that_came_before_the_loss_are_kept(fake):
    def half(body):
        if body["token_ids"][0] < 4:
            return fake.generate(body)
        time.sleep(0.5)
        return 200, DROP

    fake.answers[GENERATE] = half
    found = lost(ServerVllm(fake.url), 2, 3, 4, 5)
    assert {place: answer.ids for place, answer in found.finished.items()} == {0: (2, 1), 1: (3, 1)}


def test_a_500_is_a_loss_if_the_engine_is_dead_and_a_refusal_if_it_lives(fake):
    fake.answers[GENERATE] = lambda body: (500, error("EngineCore encountered an issue."))
    with pytest.raises(EngineError, match=r"\(500\): EngineCore") as found:
        ServerVllm(fake.url).complete(requests(2))
    assert not isinstance(found.value, LostEngineError)
    fake.answers["/health"] = lambda body: (503, None)
    assert "(500)" in str(lost(ServerVllm(fake.url), 2))


@contextlib.contextmanager
def generating_slowly(fake):
    """Requests whose answers begin after the block, and are so long that only a client that left ends them early."""
    arrived, released = threading.Event(), threading.Event()

    def answer(body):
        arrived.set()
        released.wait(60)
        return 200, b" " * (1 << 24)

    fake.answers[GENERATE] = answer
    began = time.monotonic()
    yield arrived
    assert time.monotonic() - began < 20
    released.set()
    assert fake.gone.wait(5)


def test_a_server_that_is_too_slow_is_lost_at_the_limit_and_its_requests_are_cancelled(fake):
    with generating_slowly(fake):
        assert GENERATE in str(lost(ServerVllm(fake.url), 2, 3, timeout=0.3))


def test_the_limit_holds_for_an_answer_that_trickles_in():
    """A socket's own limit begins anew with every byte."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def trickle():
            connection, _ = listening.accept()
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n")
            try:
                for _ in range(100):
                    time.sleep(0.05)
                    connection.sendall(b" ")
            except OSError:
                connection.close()

        threading.Thread(target=trickle, daemon=True).start()
        began = time.monotonic()
        with pytest.raises(LostEngineError):
            ServerVllm(f"http://127.0.0.1:{listening.getsockname()[1]}").call("m", {}, -4.5)
        assert time.monotonic() - began < 4


def test_a_restart_since_the_facts_were_asked_or_during_a_wave_is_a_loss(fake):
    def restart(body):
        fake.incarnation = "third"
        return fake.generate(body)

    vllm = ServerVllm(fake.url)
    vllm.info()
    fake.incarnation = "second"
    assert fake.url in str(lost(vllm, 2))
    vllm.info()
    assert vllm.complete(requests(2))
    fake.answers[GENERATE] = restart
    assert fake.url in str(lost(vllm, 2))


def test_ctrl_c_ends_a_wave_at_once_and_cancels_its_requests(fake):
    with generating_slowly(fake) as arrived, pytest.raises(KeyboardInterrupt), interrupted_after(arrived):
        ServerVllm(fake.url).complete(requests(2, 3))


# what is wrong


LOSSES = [(503, error("paused")), (200, generated([7], [-0.5], "abort")), (200, DROP)]


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        *zip(LOSSES, (r"\(503\): paused", "", GENERATE), strict=True),
        ((200, b"<html>hello</html>"), "<html>hello"),
        ((200, b"[" * 100_000), r"\[\["),
        ((400, b"[" * 100_000), r"\(400\)"),
        ((200, {"choices": []}), "ValueError"),
        ((200, {"answer": 42}), "choices"),
        ((200, generated([7.5], [-0.5])), ""),
        ((400, error("Token id 99")), r"\(400\): Token id 99"),
        ((422, b"no good"), r"\(422\)"),
        ((302, None), r"\(302\)"),
    ],
)
def test_a_malformed_or_refusing_answer_is_an_error_with_the_servers_words_and_a_dying_server_is_lost(
    fake, answer, words
):
    fake.answers[GENERATE] = lambda body: answer
    with pytest.raises(EngineError, match=f"{fake.url}.*{words}") as found:
        ServerVllm(fake.url).complete(requests(2))
    assert isinstance(found.value, LostEngineError) == (answer in LOSSES)
    assert not str(found.value).endswith("..")


HEADER = b'[{"count": 2, "finish_reason": "stop"}]'


@pytest.mark.parametrize(
    ("status", "content"),
    [
        *((200, content) for content in (b"", b"[]\n", b"{}\n", HEADER, HEADER + b"\n" + b"0" * 15)),
        *((200, content) for content in (HEADER + b"\n" + b"0" * 17, b'[{"count": -1}]\n', b"[" * 100_000 + b"\n")),
        (404, error("no such adapter")),
        (503, error("paused")),
    ],
)
def test_a_malformed_answer_of_arrays_is_an_error_and_no_reason_to_ask_by_another_route(fake, status, content):
    fake.facts = replace(fake.facts, serves_tokens=True)
    fake.answers[TOKEN_ROUTE] = lambda body: (status, content)
    vllm = ServerVllm(fake.url)
    vllm.info()
    with pytest.raises(EngineError, match=f"{fake.url}.*{TOKEN_ROUTE}|paused") as found:
        vllm.complete(requests(2))
    assert isinstance(found.value, LostEngineError) == (status == 503)
    assert GENERATE not in {path for path, _ in fake.calls}


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ((404, error("Not Found")), "/collective_rpc.*404"),
        ((200, {"results": []}), "lowpeak_identity"),
        ((200, {"results": [{"error": "a complaint"}]}), "complaint"),
        ((200, {"results": ["text"]}), "lowpeak_identity"),
        ((200, {"results": [{"colour": "red"}]}), "colour"),
    ],
)
def test_a_server_that_this_lowpeak_did_not_start_is_refused(fake, answer, words):
    fake.answers["/collective_rpc"] = lambda body: answer
    with pytest.raises(EngineError, match=words):
        ServerVllm(fake.url).info()


# waiting


def test_a_server_that_comes_up_late_is_waited_for_and_the_log_says_so(caplog):
    port, fake, done = free_port(), FakeServer(), threading.Event()
    ill = [503, 503, 200]
    fake.answers["/health"] = lambda body: (ill.pop(0), None)

    def later():
        time.sleep(0.8)
        with serving(fake, port):
            done.wait(10)

    thread = threading.Thread(target=later)
    thread.start()
    try:
        with caplog.at_level(logging.WARNING):
            (vllm,) = connect_servers(ServerSettings((f"http://127.0.0.1:{port}",), timeout=10))
        assert vllm.info() == fake.facts
    finally:
        done.set()
        thread.join()
    assert ill == []
    assert f"http://127.0.0.1:{port}, 0 s of 10" in caplog.text


def test_a_server_that_does_not_come_is_an_error_that_says_where_and_what_to_do():
    url = f"http://127.0.0.1:{free_port()}"
    began = time.monotonic()
    with pytest.raises(EngineError, match=f"{url}.*vllm_server_timeout"):
        connect_servers(ServerSettings((url,), timeout=1.0))
    assert time.monotonic() - began < 10


def test_one_server_under_two_addresses_is_refused_with_both(fake):
    urls = (fake.url, fake.url.replace("127.0.0.1", "localhost"))
    with pytest.raises(ArgumentError, match=f"{urls[0]}.*{urls[1]}"):
        connect_servers(ServerSettings(urls, timeout=5.0))
    with serving(FakeServer()) as other:
        assert len(connect_servers(ServerSettings((fake.url, other.url), timeout=5.0))) == 2


# a server of ours


def test_a_server_that_refuses_to_give_its_requests_up_is_ended_all_the_same():
    fake = FakeServer()
    fake.answers = {"/pause": lambda body: (500, error("dead")), "/health": slow(4.0)}
    with serving(fake):
        process = ServerProcess(ServerSpec("m", port=fake.port), os.environ, command=lambda server: ["sleep", "60"])
        process.start()
        began = time.monotonic()
        process.stop()
        assert time.monotonic() - began < 3
        assert process.status() is not None
        assert [path for path, body in fake.calls] == ["/pause?mode=abort"]


# several engines


def test_calls_run_together_and_answer_in_order_and_a_single_one_in_the_callers_thread():
    meeting = threading.Barrier(2, timeout=10)

    def call(number):
        meeting.wait()
        return number

    assert call_concurrently([lambda: call(1), lambda: call(2)]) == [1, 2]
    assert call_concurrently([]) == []
    assert call_concurrently([threading.current_thread]) == [threading.current_thread()]


def test_the_first_error_is_raised_when_all_calls_have_ended():
    ended = threading.Event()

    def late():
        time.sleep(0.05)
        ended.set()
        raise ValueError

    def early():
        raise KeyError

    with pytest.raises(KeyError):
        call_concurrently([early, late])
    assert ended.is_set()


def test_ctrl_c_does_not_wait_for_calls_that_hang():
    called, hanging = threading.Event(), threading.Event()
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt), interrupted_after(called):
        call_concurrently([called.set, lambda: hanging.wait(10)])
    hanging.set()
    assert time.monotonic() - began < 5


@contextlib.contextmanager
def interrupted_after(event):
    """Ctrl-C in this thread a moment after the event."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a background process ignores it
    own = threading.get_ident()

    def interrupt():
        event.wait(10)
        time.sleep(0.1)
        signal.pthread_kill(own, signal.SIGINT)

    threading.Thread(target=interrupt).start()
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)

"""A vLLM over HTTP, against a server that misbehaves in every way that vLLM was seen to, and some more."""

from __future__ import annotations

import logging
import socket
import threading
import time

import pytest

from fake_server import DROP, GENERATE, FakeServer, completion, error, generated, serving, slow
from lowpeak.config.vllm import ServerSettings
from lowpeak.errors import ArgumentError, EngineError, LostEngineError
from lowpeak.rollout.vllm.answers import checked
from lowpeak.rollout.vllm.requests import Row
from lowpeak.rollout.vllm.server import ServerVllm, connect
from lowpeak.rollout.vllm.vllm import Adapter, Answer, Request, Vllm, Workers


@pytest.fixture
def fake():
    with serving(FakeServer()) as server:
        yield server


def requests(*firsts):
    return [Request((first, 5), {"max_tokens": 4, "seed": first}) for first in firsts]


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def lost(vllm, *firsts, timeout=5.0):
    with pytest.raises(LostEngineError) as found:
        vllm.complete(requests(*firsts), timeout)
    return found.value


# what goes well


def test_it_is_a_vllm_whose_workers_are_elsewhere(fake):
    vllm = ServerVllm(fake.url)
    assert isinstance(vllm, Vllm)
    assert isinstance(vllm.workers, Workers)
    assert not vllm.workers.in_process


def test_token_ids_go_in_and_come_back_in_the_order_of_the_requests(fake):
    answers = ServerVllm(fake.url).complete(requests(*range(2, 12)))
    expected = [Answer((first, 1), (-0.5, -0.25), "stop", frozenset({3})) for first in range(2, 12)]
    assert answers == expected
    sent = next(body for path, body in fake.calls if path == GENERATE)
    assert sent["sampling_params"] == {
        "logprobs": 0,
        "max_tokens": 4,
        "seed": sent["token_ids"][0],
        "detokenize": False,
    }


def test_text_is_made_only_where_a_stop_string_needs_it(fake):
    ServerVllm(fake.url).complete([Request((2,), {"stop": ["7"]})])
    assert fake.calls[-1][1]["sampling_params"]["detokenize"] is True


def test_a_server_without_the_route_for_tokens_is_asked_by_the_one_for_completions():
    with serving(FakeServer(scale_out=False)) as fake:
        (answer,) = ServerVllm(fake.url).complete(requests(2))
        assert answer == Answer((7, 1), (-0.5, -0.25), "stop")
        sent = fake.calls[-1][1]
    assert (sent["prompt"], sent["return_token_ids"], sent["logprobs"], sent["seed"]) == ([2, 5], True, 0, 2)


def test_the_checkpoints_own_weights_are_no_policy_version(fake):
    fake.answers[GENERATE] = lambda body: (200, generated([7], [-0.5], version="default"))
    assert ServerVllm(fake.url).complete(requests(2))[0].policy_versions == frozenset()


def test_requests_of_a_wave_are_under_way_together(fake):
    meeting = threading.Barrier(8)

    def together(body):
        meeting.wait(10)
        return fake.generate(body)

    fake.answers[GENERATE] = together
    assert len(ServerVllm(fake.url).complete(requests(*range(2, 10)), 20)) == 8


def test_an_adapter_is_made_known_once_and_named_by_its_requests(fake):
    adapter = Adapter("lowpeak-7", 7, "folder")
    vllm = ServerVllm(fake.url)
    for _ in range(2):
        vllm.complete([Request((2,), {}, adapter)])
    known = [body for path, body in fake.calls if path == "/lowpeak_adapter"]
    assert known == [{"name": "lowpeak-7", "number": 7, "folder": "folder"}]
    assert [body["model"] for path, body in fake.calls if path == GENERATE] == ["lowpeak-7"] * 2
    fake.incarnation = "second"
    vllm.facts()
    vllm.complete([Request((2,), {}, adapter)])
    assert len([path for path, _ in fake.calls if path == "/lowpeak_adapter"]) == 2


def test_a_wave_of_none_asks_nothing(fake):
    assert ServerVllm(fake.url).complete([]) == []
    assert fake.calls == []


def test_facts_are_what_the_workers_tell(fake):
    assert ServerVllm(fake.url).facts() == fake.facts


def test_a_workers_method_gets_its_arguments_and_a_limit(fake):
    fake.answers["/collective_rpc"] = lambda body: (200, {"results": [body, None]})
    told = ServerVllm(fake.url).workers.call("lowpeak_take", {"pieces": [1]}, 7.0)
    assert told == [{"method": "lowpeak_take", "kwargs": {"pieces": [1]}, "timeout": 7.0}, None]


def test_before_it_answers_again_the_cache_of_the_old_weights_is_emptied(fake):
    refusals = [False, True]
    fake.answers["/reset_prefix_cache"] = lambda body: (200, {"success": refusals.pop(0)})
    vllm = ServerVllm(fake.url)
    vllm.pause()
    vllm.resume()
    paths = [path for path, _ in fake.calls]
    assert paths == ["/pause?mode=abort&clear_cache=true", "/reset_prefix_cache", "/reset_prefix_cache", "/resume"]


def test_a_server_that_sleeps_wakes_or_closes_does_nothing(fake):
    vllm = ServerVllm(fake.url)
    vllm.sleep()
    vllm.wake()
    vllm.close()
    assert fake.calls == []


# what is lost


def test_a_server_that_is_not_there_is_lost():
    error_ = lost(ServerVllm(f"http://127.0.0.1:{free_port()}"), 2)
    assert "no server answers at http://127.0.0.1" in str(error_)
    assert "refused" in str(error_)


def test_answers_that_came_before_the_loss_are_kept(fake):
    def half(body):
        if body["token_ids"][0] < 4:
            return fake.generate(body)
        time.sleep(0.5)
        return 200, DROP

    fake.answers[GENERATE] = half
    found = lost(ServerVllm(fake.url), 2, 3, 4, 5)
    assert {place: answer.ids for place, answer in found.finished.items()} == {0: (2, 1), 1: (3, 1)}
    assert "was lost at" in str(found)


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ((503, error("paused")), "is not answering now (503): paused"),
        ((200, generated([7], [-0.5], "abort")), "gave a request up before its end"),
        ((200, DROP), "was lost at /inference/v1/generate"),
    ],
    ids=["503", "abort", "dropped"],
)
def test_what_a_dying_or_paused_server_says_is_a_loss(fake, answer, said):
    fake.answers[GENERATE] = lambda body: answer
    assert said in str(lost(ServerVllm(fake.url), 2))


def test_a_500_is_a_loss_where_the_engine_is_dead_and_a_refusal_where_it_lives(fake):
    fake.answers[GENERATE] = lambda body: (500, error("EngineCore encountered an issue."))
    with pytest.raises(EngineError, match=r"refused .* \(500\): EngineCore encountered an issue") as found:
        ServerVllm(fake.url).complete(requests(2))
    assert not isinstance(found.value, LostEngineError)
    fake.answers["/health"] = lambda body: (503, None)
    assert "has lost its engine (500)" in str(lost(ServerVllm(fake.url), 2))


def test_a_server_that_is_too_slow_is_lost_at_the_limit_and_its_requests_are_given_up(fake):
    fake.answers[GENERATE] = lambda body: slow(2, fake.generate(body))(body)
    began = time.monotonic()
    assert "did not answer /inference/v1/generate in time" in str(lost(ServerVllm(fake.url), 2, 3, timeout=0.5))
    assert time.monotonic() - began < 1.5
    assert fake.gone.wait(5)


def test_an_answer_that_trickles_in_is_held_to_the_same_limit(fake):
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
        with pytest.raises(LostEngineError, match="in time"):
            ServerVllm(f"127.0.0.1:{listening.getsockname()[1]}").workers.call("m", {}, -4.5)
        assert time.monotonic() - began < 2


def test_a_server_that_was_restarted_since_its_facts_were_asked_is_lost(fake):
    vllm = ServerVllm(fake.url)
    vllm.facts()
    fake.incarnation = "second"
    assert "was restarted" in str(lost(vllm, 2))
    vllm.facts()
    assert vllm.complete(requests(2))


def test_a_restart_while_a_wave_was_under_way_is_a_loss_too(fake):
    def restart(body):
        fake.incarnation = "second"
        return fake.generate(body)

    vllm = ServerVllm(fake.url)
    vllm.facts()
    vllm.complete(requests(2))
    fake.answers[GENERATE] = restart
    assert "was restarted" in str(lost(vllm, 2))


# what is wrong


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ((200, b"<html>hello</html>"), "with something that is no JSON"),
        ((200, {"choices": []}), "in a form that vLLM does not"),
        ((200, {"answer": 42}), "in a form that vLLM does not"),
        ((200, generated([7.5], [-0.5])), "tokens that are no ids"),
        ((400, error("Token id 99 is out of vocabulary")), "(400): Token id 99 is out of vocabulary"),
        ((422, b"no good"), "(422): no good"),
        ((302, None), "(302): it gave no reason"),
    ],
)
def test_a_malformed_or_refusing_answer_is_an_error_with_the_servers_words(fake, answer, said):
    fake.answers[GENERATE] = lambda body: answer
    with pytest.raises(EngineError) as found:
        ServerVllm(fake.url).complete(requests(2))
    assert said in str(found.value)
    assert not isinstance(found.value, LostEngineError)


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (generated([7, 8], [-0.5]), "2 tokens and 1 log-probs"),
        (generated([7], [-0.5, -0.5]), "1 tokens and 2 log-probs"),
        (generated([], []), "0 tokens and 0 log-probs"),
        (generated([7], [-0.5], None), "ended with 'None'"),
        (generated([7], [float("nan")]), "NaN or infinite"),
    ],
)
def test_what_has_the_form_of_an_answer_and_is_none_is_told_from_it_as_any_engines_is(fake, answer, said):
    fake.answers[GENERATE] = lambda body: (200, answer)
    rows = [Row(0, 0, request) for request in requests(2)]
    with pytest.raises(EngineError, match=said):
        checked(rows, ServerVllm(fake.url).complete([row.request for row in rows]), 3, None)


def test_completions_with_fewer_tokens_than_logprobs_are_refused_too():
    with serving(FakeServer(scale_out=False)) as fake:
        fake.answers["/v1/completions"] = lambda body: (200, completion([7], [-0.5, -0.1]))
        rows = [Row(0, 0, request) for request in requests(2)]
        with pytest.raises(EngineError, match="1 tokens and 2 log-probs"):
            checked(rows, ServerVllm(fake.url).complete([row.request for row in rows]), 3, None)


def test_a_token_is_demanded_and_given():
    with serving(FakeServer(token="secret")) as fake:
        with pytest.raises(EngineError, match=r"demands a token.*LOWPEAK_SERVER_TOKEN"):
            ServerVllm(fake.url).facts()
        assert ServerVllm(fake.url, "secret").facts() == fake.facts


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ((404, error("Not Found")), "has no /collective_rpc .*lowpeak serve"),
        ((200, {"results": []}), "returned nothing for lowpeak_identity"),
        ((200, {"results": [{"error": "no such thing"}]}), "no such thing"),
        ((200, {"results": ["text"]}), "does not answer lowpeak_identity"),
    ],
)
def test_a_server_that_lowpeak_did_not_start_is_told_from_one_that_it_did(fake, answer, said):
    fake.answers["/collective_rpc"] = lambda body: answer
    with pytest.raises(EngineError, match=said):
        ServerVllm(fake.url).facts()


def test_facts_of_another_lowpeak_are_refused(fake):
    fake.answers["/collective_rpc"] = lambda body: (200, {"results": [{"colour": "red"}]})
    with pytest.raises(EngineError, match="tells other facts"):
        ServerVllm(fake.url).facts()


def test_a_cache_that_is_never_emptied_is_an_error(fake):
    fake.answers["/reset_prefix_cache"] = lambda body: (200, {"success": False})
    with pytest.raises(EngineError, match="does not empty its prefix cache"):
        ServerVllm(fake.url).resume()


@pytest.mark.parametrize("url", ["ftp://host", "http://", "://"])
def test_an_address_that_is_none_is_refused(url):
    with pytest.raises(ArgumentError, match="is no address of a server"):
        ServerVllm(url)


# waiting


def test_a_server_that_comes_up_late_is_waited_for_and_the_log_says_so(caplog):
    port = free_port()
    fake = FakeServer()

    def later():
        time.sleep(0.8)
        with serving(fake, port):
            done.wait(10)

    done = threading.Event()
    thread = threading.Thread(target=later)
    thread.start()
    try:
        with caplog.at_level(logging.WARNING):
            (vllm,) = connect(ServerSettings((f"http://127.0.0.1:{port}",), timeout=10))
        assert vllm.facts() == fake.facts
    finally:
        done.set()
        thread.join()
    assert f"waiting for vLLM at http://127.0.0.1:{port}, 0 s of 10 so far" in caplog.text


def test_a_server_that_does_not_come_is_an_error_that_says_where_and_what_to_do():
    url = f"http://127.0.0.1:{free_port()}"
    began = time.monotonic()
    with pytest.raises(
        EngineError, match=rf"no vLLM was ready at {url} within 1 s .*lowpeak serve.*vllm_server_timeout"
    ):
        connect(ServerSettings((url,), timeout=1.0))
    assert time.monotonic() - began < 3


def test_one_server_under_two_addresses_is_refused_with_both(fake):
    urls = (fake.url, fake.url.replace("127.0.0.1", "localhost"))
    with pytest.raises(ArgumentError, match=f"{urls[0]} and {urls[1]} are the same server: name it once"):
        connect(ServerSettings(urls, timeout=5.0))
    with serving(FakeServer()) as other:
        assert len(connect(ServerSettings((fake.url, other.url), timeout=5.0))) == 2


def test_a_server_that_is_there_and_not_well_is_waited_for(fake):
    ill = [503, 503, 200]
    fake.answers["/health"] = lambda body: (ill.pop(0), None)
    ServerVllm(fake.url).wait(10)
    assert ill == []

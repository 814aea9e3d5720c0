"""Turns of conversations over scripted vLLMs: what is requested, where, in which order, and what a lost vLLM costs."""

from __future__ import annotations

import threading
import time
from collections import Counter
from dataclasses import replace

import pytest

from fake_server import DROP, GENERATE, FakeServer, generated, serving
from fake_vllm import END, SAMPLING, ScriptedVllm, answer_of, engine_over, facts, prompts, scripted, slices
from lowpeak.errors import EngineError, LostEngineError
from lowpeak.rollout.engine import TurnEngine
from lowpeak.rollout.turns import TurnQueue, TurnRequest, turn_key
from lowpeak.vllm.protocol import Answer
from lowpeak.vllm.requests import completion_seed
from lowpeak.vllm.server import ServerVllm
from scripted_turns import Talk, call
from turn_programs import REPLY, converse

KINDS = {"in process": {"limits_to_cache": True}, "server": {}}


@pytest.fixture(params=KINDS.values(), ids=KINDS)
def kind(request):
    return request.param


def test_a_conversation_of_one_turn_is_an_ordinary_completion(kind):
    waves, turns = scripted(), scripted(**kind)
    engine = engine_over(turns)
    assert isinstance(engine, TurnEngine)
    groups = engine_over(waves).generate(prompts(), SAMPLING)
    found = converse(engine, prompts(), SAMPLING, num_turns=1)
    sampled = [turns[0][1] for turns in found.values()]
    completions = [one for group in groups for one in group.completions]
    assert [turn.ids for turn in sampled] == [one.ids.tolist() for one in completions]
    assert [turn.finish_reason for turn in sampled] == [one.finish_reason for one in completions]
    key = lambda request: request.params["seed"]  # noqa: E731
    assert sorted(turns.started, key=key) == sorted(waves.waves[0], key=key)


def slow(conversation, turn):
    return 0.004 * ((sum(conversation) + turn) % 3)


@pytest.mark.parametrize("settings", [{}, {"batch_size": 2}])
def test_a_turn_depends_on_its_own_history_alone(kind, settings):
    expected = converse(engine_over(scripted(limits_to_cache=True)), prompts(), SAMPLING)
    vllms = [scripted(**kind) for _ in range(1 if kind else 2)]
    found = converse(engine_over(*vllms, **settings), prompts(), SAMPLING, delay=slow)
    assert found == expected
    for conversation, turns in found.items():
        for ids, turn in turns:
            prompt = prompts()[conversation[0]].ids
            seed = completion_seed(SAMPLING, *turn_key(conversation, ids[len(prompt) :]))
            assert turn.ids == [prompt[0], 2 + seed % 7, END if seed % 2 else 3][: len(turn.ids)]
        assert turns[1][0] == (*turns[0][0], *turns[0][1].ids, *REPLY)


def test_conversations_stay_on_their_vllm_and_are_spread_evenly():
    vllms = [scripted(), scripted(), scripted()]
    converse(engine_over(*vllms), prompts(9), replace(SAMPLING, num_generations=1), delay=slow)
    served = [Counter(request.prompt_ids[0] for request in vllm.started) for vllm in vllms]
    assert [sorted(each.values()) for each in served] == [[3, 3, 3]] * 3
    assert len(set().union(*served)) == 9


def chained(engine, prompts, num_turns, sampling=SAMPLING, delivered=None):
    """A queue of conversations that request their next turn at once, and the errors that they will get."""
    queue, errors, live = TurnQueue(), [], set()

    def ask(prompt, ids, turn):
        key = (prompt.serial, 0)
        live.add(key)

        def answered(future):
            if future.exception() is not None:
                errors.append(future.exception())
            elif delivered is not None:
                delivered.append(key)
            if future.exception() is None and turn + 1 < num_turns:
                return ask(prompt, (*ids, *future.result().ids), turn + 1)
            live.discard(key)
            queue.end(key)
            if not live:
                queue.close()

        request = TurnRequest(key, ids, sampling.max_new_tokens, turn_key(key, ids[len(prompt.ids) :]))
        queue.submit(request).add_done_callback(answered)

    for prompt in prompts:
        ask(prompt, prompt.ids, 0)
    return queue, errors


def test_at_most_as_many_turns_run_as_fit_those_of_the_oldest_conversations_first():
    at_once = []

    class Watched(ScriptedVllm):
        def start(self, request, timeout=None):
            future = super().start(request, timeout)
            at_once.append(len(self._running))
            return future

    vllm = Watched(answer_of, facts(limits_to_cache=True))
    engine = engine_over(vllm, batch_size=2)
    queue, errors = chained(engine, prompts(4), 3)
    engine.sample_turns(queue, SAMPLING)
    assert not errors
    assert max(at_once) == 2
    assert [request.prompt_ids[0] for request in vllm.started] == [2, 3, 2, 3, 2, 3, 4, 5, 4, 5, 4, 5]


def test_short_turns_let_more_run_in_the_next_rollout():
    sampling = replace(SAMPLING, num_generations=2, max_new_tokens=50)
    vllm = scripted(lambda request: [4, END], kv_tokens=120, limits_to_cache=True)
    engine = engine_over(vllm)
    found = []
    for _ in range(2):
        queue, _ = chained(engine, prompts(6), 1, sampling)
        start, vllm.most = vllm.start, 0

        def watched(request, timeout=None, start=start):
            future = start(request, timeout)
            vllm.most = max(vllm.most, len(vllm._running))
            return future

        vllm.start = watched
        engine.sample_turns(queue, sampling)
        found.append(vllm.most)
    assert found == [2, 6]


def test_the_last_turns_may_be_shorter_than_min_new_tokens():
    vllm = scripted(limits_to_cache=True)
    queue, _ = chained(engine := engine_over(vllm), prompts(1), 1)
    engine.sample_turns(queue, replace(SAMPLING, min_new_tokens=50))
    assert (vllm.started[0].params["min_tokens"], vllm.started[0].params["max_tokens"]) == (3, 3)


def answer(ids=(3, 1), logprobs=None, finish_reason="stop", versions=()):
    return Answer(ids, (0.0,) * len(ids) if logprobs is None else logprobs, finish_reason, frozenset(versions))


@pytest.mark.parametrize(
    ("script", "settings", "match"),
    [
        (answer_of, {"max_model_len": 6}, r" 0 .* 4 .* 3 .* 6: .*vllm_max_model_length"),
        (answer_of, {"kv_tokens": 6}, r"8 tokens.* 6 "),
        (lambda request: answer(logprobs=(0.0, float("nan"))), {}, "completion 0 of prompt 0.*NaN"),
        (lambda request: answer(ids=(3,) * 4), {}, r"4 tokens.*3\."),
    ],
)
def test_what_cannot_fit_or_be_right_is_one_sentence_for_every_unanswered_request(kind, script, settings, match):
    queue, errors = chained(engine := engine_over(scripted(script, **kind | settings)), prompts(2), 1)
    with pytest.raises(EngineError, match=match) as caught:
        engine.sample_turns(queue, SAMPLING)
    assert errors == [caught.value] * 2


@pytest.mark.parametrize(
    ("behind", "match"),
    [("hold", "mid-conversation"), ("abort", "aborted 1 of"), ("versions", r"\[7\]")],
)
def test_turns_by_other_weights_are_not_delivered(behind, match):
    def script(request):
        if len(vllm.started) < 5:
            return answer_of(request)
        vllm.restart()
        vllm.hold(0)
        return {"hold": answer_of(request), "abort": answer(finish_reason="abort"), "versions": answer(versions=[7])}[
            behind
        ]

    vllm = scripted(script)
    if behind != "hold":
        vllm.restart = vllm.hold = lambda *_: None
    engine = engine_over(vllm)
    queue, errors = chained(engine, prompts(1), 8)
    with pytest.raises(LostEngineError, match=match) as caught:
        engine.sample_turns(queue, SAMPLING)
    assert len(vllm.started) == 5
    assert errors == [caught.value]
    assert engine.policy_version is None


def test_turns_of_other_vllms_are_answered_before_a_lost_one_is_reported_and_none_begins():
    first, second = scripted(), scripted()
    first.dies_after, second.seconds = 0, 0.2
    engine = engine_over(first, second)
    delivered = []
    queue, errors = chained(engine, prompts(2), 3, delivered=delivered)
    with pytest.raises(LostEngineError, match="died"):
        engine.sample_turns(queue, SAMPLING)
    assert (len(first.started), len(second.started)) == (1, 1)
    assert delivered == [(1, 0)]
    # The second conversation's next request came after the loss.
    assert len(errors) == 2
    assert all(isinstance(error, LostEngineError) for error in errors)


class OverHttp(ScriptedVllm):
    """A vLLM whose turns are answered over HTTP; its weights are scripted."""

    def __init__(self, server, **changes):
        super().__init__(None, facts(**changes))
        self._server, self._client = server, ServerVllm(server.url)

    def start(self, request, timeout=None):
        return self._client.start(request, timeout)


class Calling(FakeServer):
    """A server whose model calls `note` in its first two turns; it is killed at these requests, with all that are under way."""

    def __init__(self, tokenizer, kills=()):
        super().__init__()
        self.tokenizer, self.kills = tokenizer, kills
        self.count, self.is_dead, self.vllm = 0, False, None
        self.lock = threading.Lock()

    def generate(self, body):
        ids, seed = body["token_ids"], body["sampling_params"]["seed"]
        with self.lock:
            self.count += 1
            if self.count in self.kills:
                self.is_dead = True
                self.vllm.restart()
        time.sleep(0.005 * (seed % 4))
        if self.is_dead:
            return 200, DROP
        turn = ids.count(self.tokenizer.convert_tokens_to_ids("<tool>"))
        text = call("note", number=seed % 97) if turn < 2 else f"{seed % 97}"
        ids = self.tokenizer(text + "<eos>", add_special_tokens=False)["input_ids"]
        return 200, generated(ids, [-0.5] * len(ids), version="0")


def test_a_server_that_is_killed_in_mid_conversation_costs_no_turn_and_runs_no_tool_twice():
    found, ran = {}, {}
    for kills in ((), (3, 12, 30)):
        noted = []

        def note(number: int) -> str:
            """Note.

            Args:
                number: What.
            """
            time.sleep(0.02 * (number % 3))
            noted.append(number)  # noqa: B023
            return "ok"

        talk = Talk([[]] * 8, [note], max_tokens=400)
        with serving(Calling(talk.tokenizer, kills)) as server:
            server.vllm = OverHttp(server, max_model_len=1024)
            engine = talk.engine.engine = engine_over(server.vllm, num_tokens=None)
            prompt = talk.prompt("1")
            pending, losses = talk.engine.submit([prompt], talk.sampling), 0
            while True:
                try:
                    (group,) = pending.result()
                    break
                except LostEngineError:
                    losses, server.is_dead = losses + 1, False
                    engine.load(slices(), 0)
            assert losses == len(kills)
        found[kills], ran[kills] = talk.texts(group), noted
    calm, shaken = found.values()
    assert shaken == calm
    assert [text.count("<tool>") for text in calm] == [2] * 8
    first, second = ran.values()
    assert sorted(second) == sorted(first)
    assert len(second) == 16


def test_turns_are_requested_at_once_from_a_server():
    meeting = threading.Barrier(6)

    def together(body):
        meeting.wait(10)
        return 200, generated([body["token_ids"][0], END], [-0.5, -0.25], version="0")

    with serving(FakeServer()) as server:
        server.answers[GENERATE] = together
        engine = engine_over(OverHttp(server))
        found = converse(engine, prompts(6), replace(SAMPLING, num_generations=1), num_turns=2)
    assert len(found) == 6


def test_ctrl_c_ends_the_turns_as_an_error_that_event_loops_survive():
    def interrupted(request):
        raise KeyboardInterrupt

    queue, errors = chained(engine := engine_over(scripted(interrupted, limits_to_cache=True)), prompts(2), 1)
    with pytest.raises(KeyboardInterrupt):
        engine.sample_turns(queue, SAMPLING)
    assert [type(error) for error in errors] == [EngineError] * 2

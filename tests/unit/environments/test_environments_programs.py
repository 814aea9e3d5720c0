"""Programs drive conversations by HTTP: their requests become turns, and what they edit becomes branches."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import random
import re
import socket
import threading
import time

import httpx2
import psutil
import pytest
import torch

from agent_programs import ChatCalculator, RefusedHttp, agent, connect
from lowpeak.environments.chat import ChatHistory
from lowpeak.environments.token_tree import TokenTree, TurnMessages, recorded_turns
from lowpeak.environments.tools import tool_schemas
from lowpeak.errors import ArgumentError, EngineError
from lowpeak.records import Conversation
from lowpeak.rollout import SampledTurn
from scripted_turns import ScriptedTurns, Talk, add, call

EOS = "<eos>"


def ids_of(talk, text):
    return talk.tokenizer(text, add_special_tokens=False)["input_ids"]


def test_a_chat_program_has_the_tokens_and_random_numbers_of_the_same_tools():
    script = [[call("add", a=1, b=2) + EOS, call("add", a=3, b=4) + EOS, "7" + EOS], ["3" + EOS]]
    chat, tools = Talk(script, environment=ChatCalculator), Talk(script, tools=[add])
    (by_chat, by_tools) = (talk.run() for talk in (chat, tools))
    assert by_chat.prompt.ids == by_tools.prompt.ids
    for one, other in zip(by_chat.completions, by_tools.completions, strict=True):
        assert torch.equal(one.ids, other.ids)
        assert torch.equal(one.loss_mask, other.loss_mask)
        assert torch.equal(one.logprobs, other.logprobs)
        assert (one.finish_reason, one.branches) == (other.finish_reason, ())
    keys = [{(request.key, tuple(request.ids)) for request in talk.turns.requests} for talk in (chat, tools)]
    assert keys[0] == keys[1]
    assert [len(each.conversation.messages) for each in by_chat.completions] == [5, 1]
    assert chat.metrics["programs/turns"].value() == 2.0
    chat.toolset.close()


def test_a_token_program_continues_by_exact_tokens_and_names_its_own_prompt():
    async def run(client, row):
        history = [5, 6, 7]
        for context in ([8, 9], [10]):
            history += await client.turn(history) + context
        assert (await client.client.get("/models")).json()["data"][0]["max_model_len"] == 3 + 300
        return len(await client.turn(history, max_tokens=2))

    talk, prompts = Talk([["12<eos>", "3<eos>", "4567<eos>"]], environment=agent(run)), []
    talk.engine.add_prompts = lambda added: prompts.extend(prompt.ids for prompt in added)
    group = talk.run()
    assert prompts[-1] == (5, 6, 7), "the memory of a rollout is that of its longest prompt"
    (completion,) = group.completions
    assert group.prompt.ids == (5, 6, 7)
    assert talk.sampled(group) == ["12<eos>3<eos>45"]
    assert completion.loss_mask.tolist() == [*[True] * 3, False, False, *[True] * 2, False, True, True]
    assert completion.finish_reason == "length"
    assert [turn.last for turn in completion.conversation.turns] == [2, 6, 9]
    talk.toolset.close()


def test_a_token_program_renders_with_the_runs_tokenizer_and_template():
    class Rendering:
        def reset(self, prompt, **row):
            self.prompt = prompt

        async def run(self, endpoint):
            self.template, options = endpoint.template, {"add_generation_prompt": True, "return_dict": False}
            ids = endpoint.tokenizer.apply_chat_template(self.prompt, **endpoint.template, **options)
            async with connect(endpoint) as client:
                self.is_ended = (await client.turn(ids))[-1] in endpoint.end_ids

    talk = Talk([["3<eos>"]], environment=Rendering)
    group = talk.run(chat_template_kwargs={"enable_thinking": False})
    (environment,) = talk.toolset.environments
    assert group.prompt.ids == talk.prompt("1+2").ids
    assert (environment.is_ended, environment.template) == (True, {"enable_thinking": False})
    talk.engine.close()


def test_a_turns_message_is_told_from_those_that_a_program_wrote_as_the_assistants():
    async def run(client, row):
        messages = [{"role": "user", "content": "1"}]
        messages += [await client.chat(messages), {"role": "user", "content": "2"}]
        await client.chat(messages)
        edited = [messages[0], {"role": "assistant", "content": "edited"}, {"role": "user", "content": "3"}]
        await client.chat(edited)

    talk = Talk([["7<eos>", "8<eos>", "9<eos>"]], environment=agent(run), max_branches=2)
    (completion,) = talk.run().completions
    messages, turns = completion.conversation.messages, completion.conversation.turns
    assert [each["content"] for each in messages if each["role"] == "assistant"] == ["7", "8", "edited", "9"]
    assert [messages[turn.message]["content"] for turn in turns] == ["7", "8", "9"]
    talk.toolset.close()


def test_compaction_and_subagents_become_branches_within_the_limit():
    async def run(client, row):
        prompt = [5, 6, 7]
        first = await client.turn(prompt)
        subagent = await client.turn([20, 21])
        compacted = await client.turn([*prompt, 30])
        with pytest.raises(RefusedHttp, match="max_branches=3"):
            await client.turn([9, 9])
        await client.turn([5, 6, 7, 30, *compacted, 8])
        return len(first) + len(subagent)

    talk = Talk([["1<eos>", "2<eos>", "3<eos>", "4<eos>"]], environment=agent(run), max_branches=3)
    group = talk.run()
    (completion,) = group.completions
    end = talk.tokenizer.eos_token_id
    one, two, three, four = (ids_of(talk, each)[0] for each in "1234")
    assert completion.ids.tolist() == [one, end, 30, three, end, 8, four, end, 20, 21, two, end]
    assert [(each.start, each.after) for each in completion.branches] == [(2, 2), (8, -1)]
    assert completion.loss_mask.tolist() == [
        *[True] * 2,
        False,
        *[True] * 2,
        False,
        *[True] * 2,
        *[False] * 2,
        *[True] * 2,
    ]
    assert talk.metrics["programs/branches"].value() == 3.0
    assert talk.metrics["programs/refused"].value() == 1.0
    talk.toolset.close()


def test_flat_tokens_of_random_trees_are_those_of_every_branch():
    for seed in range(30):
        draw, tree = random.Random(seed), TokenTree()
        histories, served = [[draw.randrange(50) for _ in range(draw.randrange(1, 6))]], []
        for _ in range(draw.randrange(1, 9)):
            base = draw.choice(histories)
            kept = base if not served or draw.random() < 0.5 else base[: draw.randrange(len(base) + 1)]
            ids = [*kept, *(draw.randrange(50) for _ in range(draw.randrange(0 if kept else 1, 4)))]
            turn = SampledTurn([draw.randrange(50) for _ in range(draw.randrange(1, 5))], [], "stop", 3)
            turn = turn._replace(logprobs=[-0.5] * len(turn.ids))
            tree.add(ids, turn, TurnMessages((), {"role": "assistant", "content": ""}))
            histories.append([*ids, *turn.ids])
            served.append((tuple(ids), turn.ids))
        completion = tree.completion("stop", Conversation((), ()))
        prompt = list(tree.prompt)
        flat = [*prompt, *completion.ids.tolist()]
        before = {len(prompt) + each.start: each.after for each in completion.branches}

        def path(position, flat=flat, before=before):
            positions = []
            while position >= 0:
                positions.append(position)
                position = before.get(position, position - 1)
            return [flat[each] for each in reversed(positions)]

        paths = [path(position) for position in range(len(flat))]
        assert len({tuple(each) for each in paths}) == len(flat) == len(prompt) + tree.num_tokens
        assert all(history in paths for history in histories[1:])
        # Depth first: a fork follows a token whose subtree is still open.
        open_ = []
        for position in range(len(flat)):
            while open_ and open_[-1] != before.get(position, position - 1):
                open_.pop()
            assert open_ or before.get(position, position - 1) == -1
            open_.append(position)
        sampled = {tuple(ids + each.ids) for ids, turns in _lists(recorded_turns(prompt, completion)) for each in turns}
        assert {(*ids, *answer) for ids, answer in served} <= {
            whole[:n] for whole in sampled for n in range(len(whole) + 1)
        }


def _lists(turns):
    return [(list(ids), each) for ids, each in turns.items()]


class HeldTurns(ScriptedTurns):
    """An engine that answers what is left of its requests when the program says so."""

    def sample_turns(self, queue, sampling):
        with queue.answering():
            while not (arrivals := queue.take(wait=True, seconds=0.01)).is_closed:
                self.requests += arrivals.requests
                if self.is_released:
                    for request in self.requests:
                        request.answer.done() or request.resolve(self.turn("1<eos>"))


def held(run, **changes):
    talk = Talk([["1<eos>"]], environment=agent(run), **changes)
    engine = talk.engine.engine = HeldTurns(talk.tokenizer, [])
    engine.is_released = False
    return talk, engine


async def until(condition):
    while not condition():
        await asyncio.sleep(0.005)


def test_of_equal_requests_the_last_is_withdrawn_when_a_client_leaves():
    async def run(client, row):
        lost = asyncio.ensure_future(client.turn([5, 6]))
        await until(lambda: len(engine.requests) == 1)
        other = asyncio.ensure_future(client.turn([5, 6]))
        await until(lambda: len(engine.requests) == 2)
        lost.cancel()
        await until(lambda: engine.requests[1].is_cancelled)
        engine.is_released = True
        await other

    talk, engine = held(run)
    (completion,) = talk.run().completions
    assert (len(completion), completion.branches) == (2, ())
    assert not engine.requests[0].is_cancelled
    assert engine.requests[0].key == (7, 0)
    assert talk.metrics["programs/disconnected"].value() == 1.0
    talk.toolset.close()


def test_a_first_request_that_was_withdrawn_leaves_no_trace():
    async def run(client, row):
        lost = asyncio.ensure_future(client.turn([5]))
        await until(lambda: len(engine.requests) == 1)
        lost.cancel()
        await until(lambda: engine.requests[0].is_cancelled)
        engine.is_released = True
        await client.turn([8] * 25)

    talk, engine = held(run, max_tokens=20)
    group = talk.run()
    assert group.prompt.ids == (8,) * 25
    assert engine.requests[1].key == (7, 0)
    assert group.completions[0].finish_reason == "stop"
    talk.toolset.close()


def test_messages_after_a_result_are_appended_to_the_tokens_that_were_sampled():
    sampled = (
        '<tool_call>{"name":  "add", "arguments":  {"a": 1, "b": 2}}</tool_call><eos>'  # not as the template writes it
    )

    async def run(client, row):
        messages = list(row["prompt"])
        messages.append(await client.chat(messages, tools=tool_schemas({"add": add})))
        result = {"role": "tool", "tool_call_id": messages[-1]["tool_calls"][0]["id"], "content": "3"}
        messages += [result, {"role": "user", "content": "one more"}]
        await client.chat(messages, tools=tool_schemas({"add": add}))

    talk = Talk([[sampled, "3<eos>"]], environment=agent(run))
    group = talk.run()
    assert not group.completions[0].conversation.has_failed
    assert talk.sampled(group) == [sampled + "3<eos>"]
    assert "<tool>3<eos>" in talk.texts(group)[0]
    (_, result, _, _) = group.completions[0].conversation.messages
    assert result["name"] == "add"
    talk.toolset.close()


def test_equal_histories_of_other_tokens_are_served_apart():
    """Two samples may have the same text, and reasoning is dropped by clients: the later one does not change the earlier."""
    history = ChatHistory(lambda tools: None, lambda messages, tools: [1, 2])
    user, turn = {"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}
    history.add([user, turn], (), [1, 2, 7, 7, 7])
    history.add([user, turn, user, turn], (), [1, 2, 7, 7, 7, 9, 100])
    history.add([user, turn], (), [1, 2, 8])
    served = {tuple(each.all_ids()) for each in history._served.values()}
    assert served == {(1, 2, 8), (1, 2, 7, 7, 7, 9, 100)}


def test_equal_requests_draw_anew():
    async def run(client, row):
        await asyncio.gather(client.turn([5, 6]), client.turn([5, 6]))

    talk = Talk([["1<eos>", "2<eos>"]], environment=agent(run), max_branches=2)
    (completion,) = talk.run().completions
    first, second = talk.turns.requests
    assert first.key != second.key
    assert [(each.start, each.after) for each in completion.branches] == [(2, 1)]
    talk.toolset.close()


def test_a_program_that_fails_has_no_reward_and_one_cut_off_has_its_own(caplog):
    async def fails(client, row):
        await client.turn([5])
        raise ValueError("broken program\nwith a second line")

    async def asks_for_ever(client, row):
        history = [5]
        while True:
            history += await client.turn(history)

    talk = Talk([["1<eos>"], ["2<eos>"]], environment=agent(fails))
    group = talk.run()
    assert all(each.conversation.has_failed for each in group.completions)
    assert re.search(
        r"Agent.run raised ValueError: broken program \(.*agent_programs.py, line \d+\)$", caplog.text, re.M
    )
    talk.toolset.close()

    talk = Talk([["12345<eos>"] * 9], environment=agent(asks_for_ever), max_tokens=15)
    (completion,) = talk.run().completions
    assert not completion.conversation.has_failed
    assert (len(completion), completion.finish_reason) == (15, "length")
    talk.toolset.close()

    talk = Talk([["1<eos>"] * 9], environment=agent(asks_for_ever), max_iterations=2)
    (completion,) = talk.run().completions
    assert (completion.num_written, completion.finish_reason) == (6, "stop")
    talk.toolset.close()

    async def fails_after_it_was_refused(client, row):
        with contextlib.suppress(RefusedHttp):
            await asks_for_ever(client, row)
        await client.turn([7], max_tokens=1)
        raise ValueError

    talk = Talk([["12345<eos>"] * 9], environment=agent(fails_after_it_was_refused), max_tokens=15, max_branches=2)
    (completion,) = talk.run().completions
    assert completion.conversation.has_failed
    talk.toolset.close()


def test_a_program_without_a_turn_or_without_an_end_fails_alone():
    async def returns(client, row):
        return 1.0

    async def sleeps(client, row):
        await client.turn([5])
        await asyncio.sleep(60)

    talk = Talk([["1<eos>"]], environment=agent(returns))
    (completion,) = talk.run().completions
    assert completion.loss_mask.tolist() == [False]
    assert completion.conversation.has_failed
    talk.toolset.close()

    talk = Talk([["1<eos>"]], environment=agent(sleeps), timeout=0.2)
    (completion,) = talk.run().completions
    assert completion.conversation.has_failed
    assert talk.metrics["tools/timeouts"].value() == 1.0
    talk.toolset.close()


def test_a_program_that_blocks_its_thread_does_not_block_the_routes():
    class Blocking:
        def reset(self, **row):
            pass

        async def run(self, endpoint):
            headers = {"Authorization": f"Bearer {endpoint.api_key}"}
            body = {"token_ids": [5]}
            httpx2.post(f"{endpoint.base_url}/inference/v1/generate", json=body, headers=headers).raise_for_status()

    talk = Talk([["1<eos>"]], environment=Blocking)
    assert talk.sampled(talk.run()) == ["1<eos>"]
    talk.toolset.close()


class Sandbox:
    """An environment whose tool is called `run`."""

    def reset(self, **row):
        pass

    def run(self, code: str) -> str:
        """Run code.

        Args:
            code: What to run.
        """
        return code


class Yields(Sandbox):
    """A generator in place of a program."""

    async def run(self, endpoint):
        yield 1


class Alone(Sandbox):
    """A program without its endpoint."""

    def run(self):
        pass


def test_what_is_no_program_is_refused():
    with pytest.raises(ArgumentError, match="tools"):
        Talk([["1<eos>"]], tools=[add], environment=ChatCalculator)
    for kind in (Sandbox, Yields, Alone):
        with pytest.raises(ArgumentError, match="endpoint"):
            Talk([["1<eos>"]], environment=kind)


class FailingOnce:
    """The engine of a Talk, which is lost at its second request, once."""

    def __init__(self, engine):
        self.engine, self.has_failed = engine, False
        self.load = self.sleep = self.wake = self.close = engine.load
        self.policy_version, self.slice_form = 0, engine.slice_form

    def sample_turns(self, queue, sampling):
        with queue.answering():
            for text in self.engine.script[0]:
                arrivals = queue.take(wait=True)
                if arrivals.is_closed:
                    return
                if text == "2<eos>" and not self.has_failed:
                    self.has_failed = True
                    raise EngineError("the engine is lost")
                for request in arrivals.requests:
                    request.resolve(self.engine.turn(text))
            queue.take(wait=True)


def test_a_program_does_not_notice_that_its_engine_was_replaced():
    starts = []

    async def run(client, row):
        starts.append(1)
        history = [5]
        for _ in range(2):
            history += await client.turn(history)
        return 1.0

    talk = Talk([["1<eos>", "2<eos>"]], environment=agent(run))
    talk.engine.engine = FailingOnce(talk.turns)
    prompts = [talk.prompt("1+2")]
    with pytest.raises(EngineError, match="lost"):
        talk.engine.generate(prompts, talk.sampling)
    talk.turns.script = [["2<eos>"]]
    (group,) = talk.engine.generate(prompts, talk.sampling)
    assert talk.sampled(group) == ["1<eos>2<eos>"]
    assert starts == [1]
    talk.toolset.close()


_TOKENS = [
    *("[]", '"5"', "[-1]", "[1.5]", "[true]", "[999999999]", "[" + "9" * 5000 + "]", "[[5]]", "NaN", "{}"),
    *('[5], "sampling_params": []', '[5], "stream": true', '[5], "sampling_params": {"stop_token_ids": 5}'),
    *(
        f'[5], "sampling_params": {{{each}}}'
        for each in ('"temperature": 0', '"n": 2', '"max_tokens": 0', '"top_p": NaN')
    ),
    *(f'[5], "sampling_params": {{{each}}}' for each in ('"max_tokens": "x"', '"stop": "x"', '"ignore_eos": true')),
]
_USER = '[{"role": "user", "content": "x"}]'
_MESSAGES = [
    *("5", "[]", '[{"role": 5}]', '[{"role": "user", "content": [1]}]', '[{"role": "user", "tool_calls": "x"}]'),
    *('[{"role": "nobody", "tool_calls": [5]}]', f'{_USER}, "tools": 7', f'{_USER}, "tools": [{{}}]'),
    *(f'{_USER}, "temperature": 0.1', f'{_USER}, "tool_choice": "required"', f'{_USER}, "max_tokens": -1'),
    '[{"role": "assistant", "tool_calls": [{"function": {"name": "x", "arguments": "{"}}]}]',
]
HOSTILE = [
    *(b"", b"{", b"[]", b"null", b"7", b'"x"', b"\xff\xfe", b"[" * 100_000, b'{"a": ' * 5000),
    *(f'{{"token_ids": {each}}}'.encode() for each in _TOKENS),
    *(f'{{"messages": {each}}}'.encode() for each in _MESSAGES),
]


def hostile_bodies(count):
    """Each body of `HOSTILE`, then cut-off and overwritten ones."""
    draw, whole = random.Random(0), json.dumps({"token_ids": [5] * 20, "sampling_params": {"max_tokens": 3}}).encode()
    yield from HOSTILE
    for _ in range(count - len(HOSTILE)):
        body = bytearray(draw.choice(HOSTILE)[:2000] or whole)[: draw.randrange(2000)]
        body = body or bytearray(whole[: draw.randrange(1, len(whole))])
        body[draw.randrange(len(body))] = draw.choice(b"\x00\xff")
        yield bytes(body)


PATHS = ("/inference/v1/generate", "/chat/completions")
COUNTS = [0, pytest.param(10_000, marks=pytest.mark.release)]


@pytest.mark.parametrize("count", COUNTS)
def test_hostile_requests_act_on_nothing(caplog, count):
    statuses = set()

    async def run(client, row):
        base, key = str(client.client.base_url).rstrip("/"), client.client.headers["authorization"]
        own = {"authorization": key}
        async with httpx2.AsyncClient(timeout=30) as other:
            for i, body in enumerate(hostile_bodies(count)):
                for path in PATHS if i < len(HOSTILE) else (PATHS[i % 2],):
                    response = await other.post(base + path, content=body, headers=own)
                    assert "message" in response.json()["error"]
                    statuses.add(response.status_code)
            keys = [None, "Bearer ²\xe9".encode("latin-1"), key.replace("Bearer", "Basic"), key + "x"]
            headers = [[("authorization", each)] if each else [] for each in keys] + [[("authorization", key)] * 2]
            assert {(await other.get(base + "/models", headers=each)).status_code for each in headers} == {401}
            ways = [("DELETE", "/inference/v1/generate"), ("GET", "/collective_rpc"), ("POST", "/../models")]
            found = [(await other.request(way, base + path, headers=own)).status_code for way, path in ways]
            assert found == [405, 404, 404]
            large = await other.post(base + "/chat/completions", content=b" " * (9 << 20), headers=own)
            assert large.status_code == 413
        port = int(base.split(":")[2].split("/")[0])
        for half in (b"", b"POST /v1/chat", b"GET / HTTP/9.9\r\n\r\n", b"\x16\x03\x01" * 50, b"A" * 100_000):
            with socket.create_connection(("127.0.0.1", port)) as raw:
                raw.sendall(half)
        return len(await client.turn([5]))

    talk = Talk([["1<eos>"]], environment=agent(run), timeout=None)
    group = talk.run()
    assert statuses == {400}
    assert len(talk.turns.requests) == 1, "no hostile request reached the engine"
    assert talk.sampled(group) == ["1<eos>"]
    assert not group.completions[0].conversation.has_failed
    assert "Traceback" not in caplog.text
    talk.toolset.close()


@pytest.mark.parametrize("num_rounds", [3, pytest.param(32, marks=pytest.mark.release)])
def test_after_a_soak_no_thread_socket_or_key_is_left(num_rounds):
    """64 conversations at once, of which every eighth loses a client in the middle of a request."""

    async def run(client, row):
        history = [5]
        if next(number) % 8 == 0:
            lost = asyncio.ensure_future(client.turn([6]))
            await asyncio.sleep(0.002)
            lost.cancel()
        for _ in range(3):
            history += [*await client.turn(history), 6]

    number = itertools.count()
    talk = Talk([["1<eos>"] * 4] * 64, environment=agent(run), max_branches=2, timeout=None)
    process = psutil.Process()
    talk.run()
    talk.run()
    threads, sockets, resident = threading.active_count(), _num_sockets(process), process.memory_info().rss
    for _ in range(num_rounds):
        group = talk.run()
        assert not any(each.conversation.has_failed for each in group.completions)
        talk.turns.requests.clear()
    assert threading.active_count() <= threads
    assert process.memory_info().rss - resident < 32 << 20
    assert talk.toolset.routes._conversations == {}
    talk.toolset.close()
    deadline = time.monotonic() + 10
    while _num_sockets(process) > sockets and time.monotonic() < deadline:
        time.sleep(0.05)
    assert _num_sockets(process) <= sockets


def _num_sockets(process):
    return len(process.net_connections("inet"))


def test_an_ended_conversations_key_is_dead():
    kept = []

    class Keeps:
        def reset(self, **row):
            pass

        async def run(self, endpoint):
            kept.append(endpoint)
            async with connect(endpoint) as client:
                await client.turn([5])

    talk = Talk([["1<eos>"]], environment=Keeps)
    talk.run()
    headers = {"Authorization": f"Bearer {kept[0].api_key}"}
    response = httpx2.post(f"{kept[0].base_url}/inference/v1/generate", json={"token_ids": [5]}, headers=headers)
    assert response.status_code == 401
    assert json.loads(response.content)["error"]["message"].startswith("no conversation has this API key")
    talk.toolset.close()

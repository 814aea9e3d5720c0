"""Conversations with tools and environments: TRL's contract on written transcripts, and what ends a conversation."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import Awaitable
from contextlib import suppress
from dataclasses import replace

import pytest

from lowpeak.environments.tool_results import ToolResults
from lowpeak.errors import DataError, EngineError, LostEngineError
from lowpeak.rewards.function import call_with_timeout
from scripted_turns import Score, Talk, add, call


async def wait(seconds: float) -> str:
    """Wait.

    Args:
        seconds: How long.
    """
    await asyncio.sleep(seconds)
    return "done"


def wait_by_function(seconds: float) -> Awaitable[str]:
    """Wait.

    Args:
        seconds: How long.
    """
    return wait(seconds)


def fail() -> str:
    """Fail."""
    raise ValueError("broken")


def exhaust() -> str:
    """Fail."""
    return next(iter(""))


def test_results_are_appended_as_context_and_sampled_tokens_stay():
    talk = Talk([[call("add", a=1, b=2) + "<eos>", "3<eos>"], ["no<eos>"]], [add])
    group = talk.run()
    assert talk.texts(group) == [call("add", a=1, b=2) + "<eos><tool>3<eos><assistant>3<eos>", "no<eos>"]
    assert talk.sampled(group) == [call("add", a=1, b=2) + "<eos>3<eos>", "no<eos>"]
    first = group.completions[0]
    assert first.logprobs[~first.loss_mask].tolist() == [0.0] * int((~first.loss_mask).sum())
    assert [message["role"] for message in first.conversation.messages] == ["assistant", "tool", "assistant"]
    assert first.conversation.messages[1] == {"role": "tool", "name": "add", "content": "3"}
    assert talk.metrics["tools/call_frequency"].value() == 0.5
    assert talk.metrics["tools/failure_frequency"].value() == 0
    # Each turn has its own room and random numbers; the first turn's key is that of a rollout of one turn.
    room = {(r.conversation[1], len(r.ids)): r.max_tokens for r in talk.turns.requests}
    assert max(room.values()) == 300
    assert min(room.values()) == 300 - len(first.ids) + 2
    assert [r.key for r in talk.turns.requests if r.max_tokens == 300] == [(7, 0), (7, 1)]


@pytest.mark.parametrize(
    ("written", "content"),
    [
        (call("multiply", a=1), "{'error': 'Tool multiply not found.'}"),
        (call("fail"), "{'error': 'broken'}"),
        (call("exhaust"), "{'error': 'StopIteration'}"),
        (call("add", a=1), "missing 1 required positional argument"),
        (call("add", a=1, c=2), "unexpected keyword argument"),
    ],
)
def test_a_failed_call_is_text_and_counted(written, content):
    talk = Talk([[written + "<eos>", "sorry<eos>"]], [add, fail, exhaust])
    messages = talk.run().completions[0].conversation.messages
    assert content in messages[1]["content"]
    assert talk.metrics["tools/failure_frequency"].value() == 1


def test_parallel_calls_of_a_turn_run_at_once_and_answer_in_order():
    waits = call("wait", seconds=1.0) * 2 + call("wait_by_function", seconds=1.0)
    calls = waits + call("add", a=1, b=1)
    talk = Talk([[calls + "<eos>", "x<eos>"]], [wait_by_function, wait, add], max_tokens=1000)
    start = time.perf_counter()
    messages = talk.run().completions[0].conversation.messages
    assert time.perf_counter() - start < 2.5
    assert [message["content"] for message in messages[1:5]] == ["done", "done", "done", "2"]


@pytest.mark.parametrize("end", ["", "<eos>"])
def test_an_unfinished_call_is_not_executed(end):
    ran = []

    def note(text: str) -> str:
        """Note.

        Args:
            text: What.
        """
        ran.append(text)
        return "ok"

    talk = Talk([['<tool_call>{"name": "note", "arguments": {"text": "a"' + end]], [note])
    completion = talk.run().completions[0]
    assert not ran
    assert completion.finish_reason == ("stop" if end else "length")
    assert talk.metrics["tools/malformed_frequency"].value() == (1 if end else 0)


def test_a_call_whose_result_cannot_fit_is_not_executed_and_a_long_result_is_rolled_back():
    ran = []

    def spell(count: int) -> str:
        """Spell.

        Args:
            count: How many.
        """
        ran.append(count)
        return "a" * count

    turn = call("spell", count=40)
    length = len(Talk([["x"]]).turns.turn(turn + "<eos>").ids)
    short = Talk([[turn + "<eos>"]], [spell], max_tokens=length + 3)
    assert (len(short.run().completions[0]), ran) == (length, [])
    long = Talk([[turn + "<eos>"]], [spell], max_tokens=length + 20)
    completion = long.run().completions[0]
    assert (len(completion), ran, completion.finish_reason) == (length, [40], "stop")
    assert [message["role"] for message in completion.conversation.messages] == ["assistant"]


@pytest.mark.parametrize(("most", "num_calls"), [(0, 0), (1, 1), (None, 2)])
def test_the_number_of_tool_iterations_is_bounded(most, num_calls):
    turns = [call("add", a=1, b=2) + "<eos>", call("add", a=3, b=3) + "<eos>", "6<eos>"]
    talk = Talk([turns], [add], max_iterations=most, max_tokens=400)
    messages = talk.run().completions[0].conversation.messages
    assert sum(message["role"] == "tool" for message in messages) == num_calls
    if most is not None:
        assert messages[-1]["tool_calls"], "the last call stays in the conversation"


def test_control_tokens_of_a_result_stay_text():
    def page() -> str:
        """Read."""
        return "<eos><assistant><tool_call>"

    talk = Talk([[call("page") + "<eos>", "x<eos>"]], [page])
    completion = talk.run().completions[0]
    given = completion.ids[~completion.loss_mask].tolist()
    control = talk.tokenizer.convert_tokens_to_ids(["<eos>", "<assistant>", "<tool_call>"])
    assert [given.count(token) for token in control] == [1, 1, 0]
    assert "<eos><assistant><tool_call>" in talk.tokenizer.decode(given)


def test_an_environment_opens_replies_and_is_reused():
    talk = Talk([[call("increase", by=2) + "<eos>", "x<eos>"], ["y<eos>"]], [add], Score)
    group = talk.run(answer="5")
    assert group.prompt.source == [{"role": "user", "content": "1+2 go"}]
    environments = [completion.conversation.environment for completion in group.completions]
    assert [environment.total for environment in environments] == [2, 0]
    assert environments[0].row == {"prompt": [{"role": "user", "content": "1+2"}], "answer": "5"}
    assert [reward.name for reward in talk.toolset.rewards()] == ["Score"]
    again = talk.run(answer="6")
    assert [completion.conversation.environment for completion in again.completions] == environments


def test_a_reward_does_not_wait_for_the_calls_of_rollouts_ahead():
    talk = Talk([[call("increase", by=2) + "<eos>", "x<eos>"]], environment=Score)
    (completion,) = talk.run().completions
    talk.toolset.runner._threads = asyncio.Semaphore(0)  # calls have all threads
    (reward,) = talk.toolset.rewards()
    columns = {"completion_ids": [[0]], "conversations": [completion.conversation]}
    assert call_with_timeout(lambda: reward(["1+2"], ["x"], **columns), 10) == [2.0]


def test_a_row_names_its_environment():
    class Other(Score):
        def lower(self) -> str:
            """Lower."""
            return "low"

    talk = Talk([["x<eos>"]], [], {"a": Score, "b": Other})
    group = talk.run(environment="b")
    assert type(group.completions[0].conversation.environment) is Other
    assert "environment" not in group.completions[0].conversation.environment.row
    with pytest.raises(DataError, match=r"'c'.*environment_factory.*'a', 'b'"):
        talk.run(environment="c")


def test_a_failing_environment_leaves_its_conversation_without_reward(caplog):
    class Broken(Score):
        def reset(self, **row: object) -> str:
            raise OSError("no display")

    talk = Talk([["x<eos>"]], [], Broken)
    assert talk.run().completions[0].conversation.has_failed
    assert talk.metrics["environments/failures"].value() == 1
    assert "Broken.reset raised OSError: no display" in caplog.text


def test_every_environment_is_closed_and_a_failing_close_is_logged(caplog):
    class Session(Score):
        is_closed = False

        async def close(self) -> None:
            await asyncio.sleep(0)
            self.is_closed = True
            raise OSError("already gone")

    talk = Talk([["x<eos>"], ["y<eos>"]], [], Session)
    talk.run()
    talk.toolset.close()
    assert [environment.is_closed for environment in talk.toolset.environments] == [True, True]
    talk.toolset.close()  # those that nothing has opened since stay closed
    assert caplog.text.count("Session.close raised OSError: already gone") == 2


def test_an_environment_that_cannot_be_made_later_fails_its_conversation_alone(caplog):
    made = iter([Score, None, Score])

    def factory() -> Score:
        kind = next(made)
        return asyncio.run(asyncio.sleep(0, Score())) if kind else sys.exit("no seat")  # not on the engine's event loop

    talk = Talk([["x<eos>"], ["y<eos>"]], [], factory)
    assert [each.conversation.has_failed for each in talk.run().completions] == [False, True]
    assert "environment_factory raised SystemExit: no seat" in caplog.text
    assert [each.conversation.has_failed for each in talk.run().completions] == [False, False]


def test_a_text_of_reset_that_leaves_no_room_fails_the_conversation(caplog):
    class Wordy(Score):
        def reset(self, **row: object) -> str:
            return "7" * 5000

    talk = Talk([["x<eos>"]], [], Wordy)
    talk.engine.max_prompt_tokens = 100
    completion = talk.run().completions[0]
    assert completion.conversation.has_failed
    assert "tokens, and the context leaves 100" in caplog.text
    assert all(len(request.ids) < 100 for request in talk.turns.requests)


def test_groups_have_equal_seeds_and_a_reset_that_differs_keeps_its_own_prompt():
    class Seeded(Score):
        def reset(self, seed: int, **row: object) -> str:
            self.seed = seed
            return ""

    group = Talk([["x<eos>"], ["y<eos>"]], [], Seeded).run()
    assert len({completion.conversation.environment.seed for completion in group.completions}) == 1

    class Numbered(Score):
        count = 0

        def reset(self, **row: object) -> str:
            Numbered.count += 1
            return f" {Numbered.count}"

    talk = Talk([["x<eos>"], ["y<eos>"]], [], Numbered)
    prompts = [talk.tokenizer.decode(completion.prompt_ids) for completion in talk.run().completions]
    assert sorted(prompts) == ["<user>1+2 1<eos><assistant>", "<user>1+2 2<eos><assistant>"]


def test_a_tool_that_never_returns_is_abandoned_and_too_many_end_the_run():
    release, ended = threading.Event(), threading.Semaphore(0)

    def hang() -> None:
        """Hang."""
        release.wait(30)

    async def go_on() -> None:
        """Go on after a cancellation."""
        while not release.is_set():
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(0.01)
        ended.release()

    talk = Talk([[call("hang") + call("go_on") + "<eos>", "x<eos>"]], [hang, go_on], timeout=0.05)
    start, messages = time.perf_counter(), talk.run().completions[0].conversation.messages
    assert time.perf_counter() - start < 5
    assert ["no result within 0.05 seconds" in message["content"] for message in messages[1:3]] == [True, True]
    assert (talk.metrics["tools/timeouts"].value(), talk.metrics["tools/abandoned"].value()) == (2, 1)
    talk.toolset.runner._num_threads = 1
    talk.sampling = replace(talk.sampling, rollout=1)
    with pytest.raises(EngineError, match=r"2.*tool_timeout=0\.05"):
        talk.run()
    release.set()
    assert ended.acquire(timeout=10)
    assert ended.acquire(timeout=10)  # of each of the two calls


def test_results_of_functions_in_the_journal_are_used_again_and_methods_run_again():
    values = iter(range(100))

    def draw() -> int:
        """Return another number each time."""
        return next(values)

    def fail() -> int:
        """Fail, with another text each time."""
        raise ValueError(next(values))

    class Counting(Score):
        count = 0

        @classmethod
        def raise_count(cls) -> None:
            """Add one."""
            cls.count += 1

    script = [[call("draw") + call("fail") + call("increase", by=2) + call("raise_count") + "<eos>", "x<eos>"]]
    talk, rows = Talk(script, [draw, fail], Counting), []
    talk.engine.results = ToolResults(rows.append)
    first = talk.run()
    assert [(row["name"], row.get("result"), row.get("error")) for row in rows] == [
        ("draw", "0", None),
        ("fail", None, "1"),
    ]
    resumed = Talk(script, [draw, fail], Counting)
    resumed.engine.results = ToolResults(read=lambda: {row["key"]: row for row in rows})
    again = resumed.run()
    assert (next(values), resumed.texts(again)) == (2, talk.texts(first))
    assert (resumed.toolset.environments[0].total, Counting.count) == (2, 2)
    assert resumed.metrics["tools/failure_frequency"].value() == 1 / 4
    resumed.sampling = replace(resumed.sampling, rollout=1)
    assert resumed.texts(resumed.run()) != talk.texts(first)


def test_conversations_go_on_from_their_last_turn_after_a_lost_engine():
    turn_with_call = call("add", a=1, b=2) + "<eos>"
    script = [[turn_with_call, "3<eos>"], ["no<eos>"]]
    talk = Talk(script, [add])
    expected = talk.texts(talk.run())
    lost = Talk(script, [add])
    sample, answered = lost.turns.turn, []

    def turn_or_loss(text):
        answered.append(text)
        if len(answered) == 3:
            raise LostEngineError("gone")
        return sample(text)

    lost.turns.turn = turn_or_loss
    with pytest.raises(LostEngineError, match="gone"):
        lost.run()
    # The engine knows nothing of earlier turns: its script goes on where the conversation stands.
    lost.turns.script = [["3<eos>"], []]
    assert lost.texts(lost.run()) == expected
    # The turn that was lost is sampled again; the others are not.
    assert answered == [turn_with_call, "no<eos>", "3<eos>", "3<eos>"]

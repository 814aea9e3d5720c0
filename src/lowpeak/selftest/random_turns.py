"""Random turns of conversations, with which `lowpeak check` tries tools and environments."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from lowpeak.arguments import Sampling
from lowpeak.data import common_prefix_length
from lowpeak.environments import USER, EnvironmentEngine, Message, render, render_call, tool_call
from lowpeak.records import Completion
from lowpeak.rollout import Key, SliceForm, TurnQueue, TurnRequest, answer_in_rounds

_NUM_CALLS = 3  # of a conversation


class RandomTurns:
    """A TurnEngine whose turns are random calls, then a text; with `are_equal` alike in all completions of a prompt.

    `rows` are those of the prompt with each serial number. Without tools turns are samples of the environment's `action_space`, or
    random words.
    """

    policy_version, slice_form = 0, SliceForm()

    def __init__(self, engine: EnvironmentEngine, rows: Sequence[Mapping[str, Any]]) -> None:
        self.tokenizer, self.template = engine.tokenizer, engine.template
        self.schemas = [engine.toolset.schemas_of(row) for row in rows]
        self.environments = [engine.toolset.first_of(row) for row in rows]
        self.end_ids = engine.end_ids(Sampling(1, 1))
        self.are_equal, self.num_drawn = False, 0

    def sample_turns(self, queue: TurnQueue, sampling: Sampling) -> None:
        turns = Counter[Key]()
        with queue.answering():
            answer_in_rounds(queue, lambda requests: [self._turn(each, turns) for each in requests])

    def _turn(self, request: TurnRequest, turns: Counter[Key]) -> Completion:
        turns[request.conversation] += 1
        (serial, completion), number = request.conversation, turns[request.conversation]
        draw = random.Random(f"{serial} {0 if self.are_equal else completion} {number}")
        words = re.findall(r"\w+", self.tokenizer.decode(request.ids, skip_special_tokens=True))
        if number <= _NUM_CALLS and self.schemas[serial]:
            self.num_drawn += 1
            function = draw.choice(self.schemas[serial])["function"]
            call = tool_call(function["name"], _random_value(function["parameters"], draw, words))
            whole = self.ids(serial, call, [])
            ids = whole[common_prefix_length(self.ids(serial, None, []), whole) :]
        else:
            text = "done" if self.schemas[serial] else self._random_text(serial, draw, words)
            ids = self.tokenizer(text, add_special_tokens=False)["input_ids"] + sorted(self.end_ids)[:1]
        end = next((i for i, token in enumerate(ids) if token in self.end_ids), len(ids))
        turn = torch.tensor(ids[: end + 1], dtype=torch.int32)
        return Completion(turn, torch.zeros(len(turn)), turn >= 0, "stop")

    def _random_text(self, serial: int, draw: random.Random, words: Sequence[str]) -> str:
        space = getattr(self.environments[serial], "action_space", None)
        if space is None:
            return draw.choice([*words, "a"])
        space.seed(draw.getrandbits(31))
        return str(space.sample())

    def ids(self, serial: int, call: Message | None, others: Sequence[Message]) -> list[int]:
        """Return the ids of a user's message, a call and other messages, as the template writes them."""
        options = {**self.template, "tools": self.schemas[serial], "add_generation_prompt": True}
        if call is None:
            text = render(self.tokenizer, [USER, *others], options)
        else:
            text = render_call(self.tokenizer, [USER], call, others, options)
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])


def _random_value(schema: Mapping[str, Any], draw: random.Random, words: Sequence[str]) -> Any:
    """Return a value of a JSON schema, with texts and numbers from `words`, at times without an optional property."""
    value = partial(_random_value, draw=draw, words=words)
    kinds = schema.get("type", "string")
    kind = kinds[0] if isinstance(kinds, list) else kinds
    if "enum" in schema:
        return draw.choice(schema["enum"])
    if kind == "object":
        required, properties = schema.get("required", ()), schema.get("properties", {})
        return {name: value(each) for name, each in properties.items() if name in required or draw.random() < 0.5}
    if kind == "array":
        return [value(each) for each in schema.get("prefixItems") or [schema.get("items", {})] * draw.randint(1, 3)]
    seen = [int(word) for word in words if re.fullmatch("[0-9]{1,9}", word)]
    number = draw.choice([*seen, *range(10)])
    return {"integer": number, "number": number / 2, "boolean": number % 2 == 0}.get(kind, draw.choice([*words, "a"]))

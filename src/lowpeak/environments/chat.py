"""Chat histories as token ids: the ids that were served stand, though the client writes their messages again."""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from lowpeak.environments.append import Message, can_append
from lowpeak.environments.turn_format import Schemas, TurnFormat
from lowpeak.errors import DataError


class _Served(NamedTuple):
    """The tokens of a history that follow those of another one."""

    before: _Served | None
    ids: array[int]

    def all_ids(self) -> list[int]:
        parts: list[array[int]] = []
        each: _Served | None = self
        while each is not None:
            parts.append(each.ids)
            each = each.before
        return [token for part in reversed(parts) for token in part]


class RenderedHistory(NamedTuple):
    """The token ids of a request's messages, and those of its messages that no earlier turn of the conversation has."""

    ids: list[int]
    new: list[Message]


@dataclass(eq=False)
class ChatHistory:
    """The histories of one conversation that were served, by a hash of their messages and tools.

    turn_format  returns the format of turns with these tools
    render       returns the ids of messages with these tools, as the chat template writes them
    """

    turn_format: Callable[[Schemas], TurnFormat]
    render: Callable[[Sequence[Message], Schemas], Sequence[int]]
    _served: dict[bytes, _Served] = field(default_factory=dict)

    def rendered(self, messages: Sequence[Message], tools: Schemas) -> RenderedHistory:
        """Return the ids of a history: a served one with the messages after it appended, or else all of them rendered.

        Raises DataError if the template renders no such messages.
        """
        for count, digest in reversed(list(enumerate(_digests(messages, tools), 1))):
            new = list(messages[count:])
            if digest in self._served:
                if (ids := self._appended(self._served[digest].all_ids(), new, tools)) is not None:
                    return RenderedHistory(ids, new)
                return RenderedHistory(list(self.render(messages, tools)), new)
        return RenderedHistory(list(self.render(messages, tools)), list(messages))

    def _appended(self, ids: list[int], new: Sequence[Message], tools: Schemas) -> list[int] | None:
        """Return the ids with the messages after them; None if the template writes none such after a served turn."""
        if not can_append(new):
            return None
        try:
            return [*ids, *self.turn_format(tools).appender.append(ids[-1], new)]
        except DataError:
            return None

    def add(self, messages: Sequence[Message], tools: Schemas, ids: Sequence[int]) -> None:
        """Note that these tokens were served as these messages, the last of which is the policy's."""
        *earlier, digest = _digests(messages, tools)
        known = [self._served[each] for each in reversed(earlier) if each in self._served]
        before = next((each for each in known if _begins_with(ids, each.all_ids())), None)
        length = 0 if before is None else len(before.all_ids())
        self._served[digest] = _Served(before, array("i", ids[length:]))


def _begins_with(ids: Sequence[int], beginning: Sequence[int]) -> bool:
    return list(ids[: len(beginning)]) == beginning


def _digests(messages: Sequence[Message], tools: Schemas) -> list[bytes]:
    """Return the hash of the first message, of the first two, and so on."""
    digests, state = list[bytes](), hashlib.blake2b(json.dumps(tools, sort_keys=True).encode(), digest_size=16)
    for message in messages:
        state.update(json.dumps(_canonical(message), sort_keys=True).encode())
        digests.append(state.digest())
    return digests


def _canonical(message: Mapping[str, Any]) -> list[Any]:
    """Return role, content and calls of a message: clients drop reasoning and ids of calls when they send it again."""
    functions = [call["function"] for call in message.get("tool_calls") or ()]
    return [message["role"], message.get("content") or "", [[each["name"], each["arguments"]] for each in functions]]

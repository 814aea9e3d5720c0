"""The text of a chat template around the turns of a conversation, for its tools and options."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from lowpeak.arguments import Sampling
from lowpeak.data import PromptReader, template_options
from lowpeak.environments.append import Message, TurnAppender
from lowpeak.environments.calls import CallParser, ParsedTurn
from lowpeak.records import Prompt

Schemas = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class TurnFormat:
    """A chat template's text around turns; `parser` is None without tools."""

    appender: TurnAppender
    parser: CallParser | None
    decode: Callable[[Sequence[int]], str]

    @classmethod
    def of(cls, tokenizer: Any, end_ids: Collection[int], options: Mapping[str, Any]) -> TurnFormat:
        """Return the format of a template with these options; DataError if it writes no calls that can be read."""
        parser = CallParser(tokenizer, end_ids, options) if options.get("tools") else None
        return cls(
            TurnAppender(tokenizer, end_ids, options), parser, partial(tokenizer.decode, skip_special_tokens=True)
        )

    def parse(self, ids: Sequence[int], previous_role: str) -> ParsedTurn:
        if self.parser is not None:
            return self.parser.parse(ids, previous_role)
        return ParsedTurn({"role": "assistant", "content": self.decode(ids)})


@dataclass(eq=False)
class TurnFormats:
    """The formats of a run's conversations, by their tools and options.

    A tokenizer changes as it tokenizes, so each thread has formats of its own. The other fields are those of `EnvironmentEngine`.
    """

    tokenizer: Any
    template: Mapping[str, Any]
    new_reader: Callable[..., PromptReader]
    end_ids: Callable[[Sampling], Collection[int]]
    _last: tuple[Prompt, str, Prompt] | None = None
    _known: dict[str, TurnFormat] = field(default_factory=dict)

    def of(self, prompt: Prompt, tools: Schemas, sampling: Sampling) -> TurnFormat:
        """Return the format of a prompt's conversation with these tools."""
        options = template_options(prompt.columns, {**self.template, "tools": list(tools)}, f"prompt {prompt.serial}")
        end_ids = self.end_ids(sampling)
        key = json.dumps([options, sorted(end_ids)])
        if key not in self._known:
            self._known[key] = TurnFormat.of(self.tokenizer, end_ids, options)
        return self._known[key]

    def with_messages(self, prompt: Prompt, messages: Sequence[Message], tools: Schemas) -> Prompt:
        """Return the prompt with these messages, rendered with the tools.

        The last one is kept, since the conversations of a prompt mostly open alike.
        """
        key = json.dumps([messages, tools], default=str)
        if self._last is None or self._last[0] is not prompt or self._last[1] != key:
            reader = self.new_reader(self.tokenizer, chat_template_kwargs={**self.template, "tools": list(tools)})
            read = reader.read({**prompt.columns, "prompt": list(messages)}, prompt.serial)
            assert read is not None, "this reader drops no prompt"
            self._last = prompt, key, read
        return self._last[2]

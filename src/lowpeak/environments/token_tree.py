"""The turns of a conversation whose program may edit its history, as one completion with branches.

A radix tree of tokens: a turn's request extends a path of the tree, or leaves it where their common prefix ends.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lowpeak.data import common_prefix_length
from lowpeak.environments.append import Message
from lowpeak.records import Branch, Completion, Conversation, FinishReason, Turn
from lowpeak.rollout import SampledTurn


@dataclass
class TurnMessages:
    """The messages of a turn, those before it as `context`, and the seconds until the program's next request."""

    context: tuple[Message, ...]
    message: Message
    seconds: float = 0.0


@dataclass(eq=False)
class _Node:
    """Tokens after the last one of the parent, sampled or context; `turn` is the one that ends here."""

    ids: list[int]
    logprobs: list[float]
    is_sampled: bool
    version: int | None
    turn: TurnMessages | None = None
    children: list[_Node] = field(default_factory=list)

    def split(self, length: int) -> None:
        """Keep the first tokens, and give the others to a child, with all that followed."""
        rest = replace(self, ids=self.ids[length:], logprobs=self.logprobs[length:])
        self.ids, self.logprobs, self.turn = self.ids[:length], self.logprobs[:length], None
        self.children = [rest]


class Match(NamedTuple):
    """The number of a request's tokens that are in the tree, the nodes with them, and whether no other token follows these."""

    length: int
    path: list[_Node]
    ends_at_leaf: bool


class TokenTree:
    """The distinct tokens of a conversation; the first request's are its prompt.

    tree = TokenTree()
    tree.add(request_ids, sampled, turn)  # in the order of delivery
    completion = tree.completion("stop", conversation)
    """

    def __init__(self) -> None:
        self.prompt: tuple[int, ...] = ()
        self._root = _Node([], [], False, None)

    @property
    def num_tokens(self) -> int:
        """The distinct tokens, without those of the prompt."""
        return sum(len(node.ids) for node, *_ in self._flat()) - len(self.prompt)

    @property
    def num_branches(self) -> int:
        return sum(bool(node.ids) and not node.children for node, *_ in self._flat())

    def match(self, ids: Sequence[int]) -> Match:
        """Return the longest path of the tree that these tokens begin with."""
        ids, path, length = list(ids), [self._root], 0
        while child := next((each for each in path[-1].children if ids[length : length + 1] == each.ids[:1]), None):
            shared = common_prefix_length(child.ids, ids[length : length + len(child.ids)])
            path.append(child)
            length += shared
            if shared < len(child.ids):
                return Match(length, path, False)
        return Match(length, path, not path[-1].children)

    def note_reply(self, match: Match, seconds: float) -> None:
        """Note how long the program took from the last turn that a request follows."""
        is_whole = match.length == sum(len(node.ids) for node in match.path)
        path = match.path if is_whole else match.path[:-1]
        turn = next((node.turn for node in reversed(path) if node.turn is not None), None)
        if turn is not None and not turn.seconds:
            turn.seconds = seconds

    def add(self, ids: Sequence[int], sampled: SampledTurn, turn: TurnMessages) -> None:
        """Add a turn that followed `ids`; tokens that another turn has at the same place occur once."""
        if not self._root.children:
            self.prompt = tuple(ids)
        version, zeros = sampled.policy_version, [0.0] * len(ids)
        self._extend(list(ids), zeros, False, version)
        last = self._extend([*ids, *sampled.ids], [*zeros, *sampled.logprobs], True, version)
        last.turn = last.turn or turn

    def _extend(self, ids: list[int], logprobs: list[float], is_sampled: bool, version: int | None) -> _Node:
        """Return the last node of the path `ids`, after adding a node for the tokens that the tree lacks."""
        length, path, _ = self.match(ids)
        last = path[-1]
        if (inside := length - sum(len(node.ids) for node in path[:-1])) < len(last.ids):
            last.split(inside)
        if length < len(ids):
            last.children.append(_Node(ids[length:], logprobs[length:], is_sampled, version))
            return last.children[-1]
        return last

    def _flat(self) -> Iterator[tuple[_Node, int, int]]:
        """Yield the nodes in depth-first order, the prompt's first: each with its first position and the one it follows."""
        prompt_nodes = self.match(self.prompt).path
        stack, position = [(self._root, -1)], 0
        while stack:
            node, after = stack.pop()
            yield node, position, after
            position += len(node.ids)
            last = position - 1 if node.ids else after
            # The last of the stack comes next.
            stack += [(each, last) for each in sorted(reversed(node.children), key=lambda each: each in prompt_nodes)]

    def completion(self, finish_reason: FinishReason, conversation: Conversation) -> Completion:
        """Return all tokens after the prompt, with the turns and messages in the same order."""
        start = len(self.prompt)
        flat = [each for each in self._flat() if each[1] >= start and each[0].ids]
        nodes = [node for node, *_ in flat]
        lengths = torch.tensor([len(node.ids) for node in nodes])
        versions = [node.version for node in nodes]
        return Completion(
            ids=_int32(_joined([node.ids for node in nodes])),
            logprobs=torch.tensor(_joined([node.logprobs for node in nodes]), dtype=torch.float32),
            loss_mask=torch.tensor([node.is_sampled for node in nodes]).repeat_interleave(lengths),
            finish_reason=finish_reason,
            policy_versions=None if None in versions else _int32(versions).repeat_interleave(lengths),
            conversation=_with_turns(conversation, flat, start),
            branches=_branches(flat, start),
        )


def _branches(flat: Sequence[tuple[_Node, int, int]], start: int) -> tuple[Branch, ...]:
    return tuple(Branch(position - start, after) for _, position, after in flat if after != position - 1)


def _with_turns(conversation: Conversation, flat: Sequence[tuple[_Node, int, int]], start: int) -> Conversation:
    ended = [(node.turn, position - start + len(node.ids) - 1) for node, position, _ in flat if node.turn]
    messages = _joined([[*turn.context, turn.message] for turn, _ in ended])
    counts = itertools.accumulate(len(turn.context) + 1 for turn, _ in ended)
    turns = tuple(Turn(last, None, turn.seconds, count - 1) for (turn, last), count in zip(ended, counts, strict=True))
    return replace(conversation, messages=tuple(messages), turns=turns)


def _int32(values: Sequence[Any]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def _joined(parts: Sequence[Sequence[Any]]) -> list[Any]:
    return list(itertools.chain.from_iterable(parts))


def recorded_turns(prompt: Sequence[int], completion: Completion) -> dict[tuple[int, ...], list[SampledTurn]]:
    """Return the turns of a completion by the tokens of their requests, in order; turns without context between them are one."""
    ids, is_sampled = [*prompt, *completion.ids.tolist()], [*[False] * len(prompt), *completion.loss_mask.tolist()]
    turns: dict[tuple[int, ...], list[SampledTurn]] = {}
    for path in _paths(len(prompt), completion):
        edges = [k for k in range(1, len(path)) if is_sampled[path[k]] != is_sampled[path[k - 1]]]
        for begin, end in itertools.zip_longest(edges[::2], edges[1::2], fillvalue=len(path)):
            turn = _sampled_turn(completion, [position - len(prompt) for position in path[begin:end]], end < len(path))
            known = turns.setdefault(tuple(ids[position] for position in path[:begin]), [])
            known += [turn] if turn.ids not in [each.ids for each in known] else []
    return turns


def _paths(num_prompt: int, completion: Completion) -> Iterator[list[int]]:
    """Yield the positions in prompt + completion of each branch."""
    before = {num_prompt + branch.start: branch.after for branch in completion.branches}
    positions = range(num_prompt, num_prompt + len(completion))
    followed = {before.get(position, position - 1) for position in positions}
    for leaf in (each for each in positions if each not in followed):
        path, position = list[int](), leaf
        while position >= 0:
            path.append(position)
            position = before.get(position, position - 1)
        yield path[::-1]


def _sampled_turn(completion: Completion, positions: list[int], is_ended: bool) -> SampledTurn:
    versions = completion.policy_versions
    return SampledTurn(
        completion.ids[positions].tolist(),
        completion.logprobs[positions].tolist(),
        "stop" if is_ended else completion.finish_reason,
        None if versions is None else int(versions[positions[0]]),
    )

"""Tool calls in sampled text: formats of model families, and the choice of the format that a chat template writes.

A model's format is found by probing: its own template renders a call, and the format that reads the call back is the right one.
So an edited template works, and no model is known by name.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from lowpeak.data import TEMPLATE_ERRORS, common_prefix_length
from lowpeak.environments.append import USER, render, tool_call
from lowpeak.errors import DataError

# Errors of a malformed call.
_MALFORMED = (ValueError, LookupError, TypeError, AttributeError, SyntaxError, RecursionError)


@dataclass(frozen=True)
class Call:
    """A tool call that a model wrote."""

    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True)
class ParsedTurn:
    """A sampled turn as a message, with its complete calls.

    `num_malformed` counts calls that cannot be read, or that the model did not close before it ended the turn.
    """

    message: dict[str, Any]
    calls: tuple[Call, ...] = ()
    num_malformed: int = 0


@dataclass(frozen=True)
class CallFormat:
    """How a family writes calls: patterns around each region of calls, and the reader of the text between them.

    Named groups of `opening` are passed to `read`, which returns (name, arguments) of each call in the region.
    """

    opening: str
    closing: str
    read: Callable[[str, Mapping[str, str]], Iterator[tuple[str, Any]]]


def _json_calls(text: str, groups: Mapping[str, str]) -> Iterator[tuple[str, Any]]:
    """Read an object, or a list of objects, with a name and arguments (or parameters)."""
    value = json.loads(text)
    for each in value if isinstance(value, list) else [value]:
        yield each["name"], each["arguments"] if "arguments" in each else each["parameters"]


def _json_arguments(text: str, groups: Mapping[str, str]) -> Iterator[tuple[str, Any]]:
    yield groups["name"], json.loads(text)


def _tagged_arguments(pattern: str) -> Callable[[str, Mapping[str, str]], Iterator[tuple[str, Any]]]:
    """Return a reader of arguments between tags; `pattern` has the groups key and value."""

    def read(text: str, groups: Mapping[str, str]) -> Iterator[tuple[str, Any]]:
        yield groups["name"], {found["key"]: found["value"] for found in re.finditer(pattern, text, re.DOTALL)}

    return read


def _python_calls(text: str, groups: Mapping[str, str]) -> Iterator[tuple[str, Any]]:
    """Read a list of Python calls with keyword arguments: [add(a=1, b=2)]."""
    words = {"true": True, "false": False, "null": None}
    for call in ast.parse(text.strip(), mode="eval").body.elts:  # type: ignore[attr-defined]
        values = {
            keyword.arg: words[keyword.value.id]
            if isinstance(keyword.value, ast.Name)
            else ast.literal_eval(keyword.value)
            for keyword in call.keywords
        }
        yield ast.unparse(call.func), values


def _unquoted_json(text: str, groups: Mapping[str, str]) -> Iterator[tuple[str, Any]]:
    """Read arguments of Gemma 4: keys without quotes, strings between `<|"|>`."""
    strings: list[str] = []

    def keep(found: re.Match[str]) -> str:
        strings.append(found[1])
        return f'"{len(strings) - 1}"'

    plain = re.sub(r'<\|"\|>(.*?)<\|"\|>', keep, text, flags=re.DOTALL)
    quoted = re.sub(r"(?<=[{,])\s*(\w+)\s*:", r'"\1":', plain)
    yield groups["name"], _restore(json.loads(quoted), strings)


def _restore(value: Any, strings: Sequence[str]) -> Any:
    if isinstance(value, str):
        return strings[int(value)]
    if isinstance(value, list):
        return [_restore(each, strings) for each in value]
    return {key: _restore(each, strings) for key, each in value.items()} if isinstance(value, dict) else value


# Tried in this order.
FORMATS = (
    CallFormat(r"<tool_call>\s*(?=[\[{])", r"</tool_call>", _json_calls),  # Qwen 2.5 and 3, Hermes
    CallFormat(  # Qwen 3.5, Nemotron 3
        r"<tool_call>\s*<function=(?P<name>[^>\n]+)>",
        r"</function>\s*</tool_call>",
        _tagged_arguments(r"<parameter=(?P<key>[^>\n]+)>\n?(?P<value>.*?)\n?</parameter>"),
    ),
    CallFormat(  # GLM 4.5
        r"<tool_call>(?P<name>[^\s<]+)\s*",
        r"</tool_call>",
        _tagged_arguments(r"<arg_key>(?P<key>.*?)</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>"),
    ),
    CallFormat(r'(?=\{"name": *"[^"]+", *"parameters":)', r"<\|eo[tm]_id\|>", _json_calls),  # Llama 3
    CallFormat(  # gpt-oss: as its template writes calls, and as the model does
        r"(?:<\|channel\|>commentary )?to=functions\.(?P<name>[\w.-]+)\s*(?:<\|channel\|>commentary\s*)?"
        r"(?:<\|constrain\|>)?json<\|message\|>",
        r"<\|call\|>",
        _json_arguments,
    ),
    CallFormat(r"<\|tool_call>call:(?P<name>\w+)", r"<tool_call\|>", _unquoted_json),  # Gemma 4
    CallFormat(r"<\|tool_call_start\|>", r"<\|tool_call_end\|>", _python_calls),  # LFM 2.5
    CallFormat(  # DeepSeek V3, V3.1
        r"<｜tool▁call▁begin｜>(?:function<｜tool▁sep｜>(?P<name>[^\n<]+)\n```json\n)",
        r"\n```<｜tool▁call▁end｜>",
        _json_arguments,
    ),
    CallFormat(r"<｜tool▁call▁begin｜>(?P<name>[^\n<]+)<｜tool▁sep｜>", r"<｜tool▁call▁end｜>", _json_arguments),
    CallFormat(r"\[TOOL_CALLS\]\s*(?=\[)", r"</s>", _json_calls),  # Mistral
    CallFormat(r"\[TOOL_CALLS\](?P<name>[\w.-]+)(?:\[ARGS\])?(?=\{)", r"(?=\[TOOL_CALLS\]|</s>)", _json_arguments),
    CallFormat(r"<tool_calls>", r"</tool_calls>", _json_calls),  # Jamba
)
# Patterns around thinking: of most families, gpt-oss, Gemma 4.
_THINKING = (
    (r"<think>", r"</think>"),
    (r"<\|channel\|>analysis<\|message\|>", r"<\|end\|>"),
    (r"<\|channel>thought", r"<channel\|>"),
)
# What templates write around content and calls: headers of gpt-oss, brackets of DeepSeek.
_WRAPPERS = re.compile(
    r"<\|start\|>assistant|<\|channel\|>(?:final|commentary)<\|message\|>|<｜tool▁calls▁(?:begin|end)｜>"
)
_PROBE_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "find_rooms",
        "description": "Find rooms.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "description": "A city."},
                "days": {"type": "integer", "description": "Days."},
                "tags": {"type": "array", "items": {"type": "string"}, "description": "Words."},
            },
            "required": ["city", "days", "tags"],
        },
    },
}
_PROBE_CALL = Call("find_rooms", {"city": "Paris, France", "days": 3, "tags": ["a", "b"]})


class CallParser:
    """The reader of sampled turns, for one tokenizer and one set of template options.

    `options["tools"]` has the schemas of the tools, by which arguments that a format writes as text get their types. A
    `response_template` of the tokenizer replaces the probed format. Raises DataError if no format reads the template's calls.
    """

    def __init__(self, tokenizer: Any, end_ids: Collection[int], options: Mapping[str, Any]) -> None:
        self._tokenizer, self._end_ids = tokenizer, frozenset(end_ids)
        self._schemas = {each["function"]["name"]: each["function"] for each in options.get("tools") or ()}
        self._openings = {role: _turn_opening(tokenizer, role, options) for role in ("user", "tool")}
        has_template = getattr(tokenizer, "response_template", None) is not None
        self._format = None if has_template else find_call_format(tokenizer, options)

    def parse(self, ids: Sequence[int], previous_role: str = "user") -> ParsedTurn:
        """Return a sampled turn that follows a message of `previous_role`.

        A call that is not closed counts as malformed if the model ended the turn itself, else as cut off.
        """
        opening = self._openings["tool" if previous_role == "tool" else "user"]
        if self._format is None:
            return self._parse_by_template(ids, opening)
        is_ended = bool(ids) and ids[-1] in self._end_ids
        end = self._decode(ids[-1:]) if is_ended else ""
        turn = read_turn(self._decode(ids), self._format, _thinking_opening(opening), end)
        calls = tuple(Call(each.name, _typed_arguments(each, self._schemas.get(each.name, {}))) for each in turn.calls)
        return replace(turn, message=_with_calls(turn.message, calls), calls=calls)

    def _parse_by_template(self, ids: Sequence[int], opening: str) -> ParsedTurn:
        schemas = [{"type": "function", "function": schema} for schema in self._schemas.values()]
        try:
            message = dict(self._tokenizer.parse_response(list(ids), prefix=opening, tools=schemas))
            functions = [call["function"] for call in message.get("tool_calls") or ()]
            return ParsedTurn(message, tuple(Call(each["name"], each["arguments"]) for each in functions))
        except _MALFORMED:
            text = self._tokenizer.decode(list(ids), skip_special_tokens=True)
            return ParsedTurn({"role": "assistant", "content": text}, num_malformed=1)

    def _decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))


def read_turn(text: str, call_format: CallFormat, thinking: str = "", end: str = "") -> ParsedTurn:
    """Return a turn as a message; the template opened it with `thinking`, and the text ends with the end token `end`."""
    content, reasoning, calls = "", "", list[Call]()
    num_malformed = 0
    for region in _regions(_with_opening(text, thinking), call_format):
        if region.kind == "thinking":
            reasoning += region.inside
        elif region.kind == "call" and region.is_closed:
            try:
                calls += [_checked_call(*each) for each in call_format.read(region.inside, region.groups)]
            except _MALFORMED:
                num_malformed += 1
                content += region.whole
        else:
            num_malformed += region.kind == "call" and bool(end)
            content += region.whole
    message: dict[str, Any] = {"role": "assistant", "content": _WRAPPERS.sub("", content.removesuffix(end)).strip()}
    if reasoning.strip():
        message["reasoning_content"] = reasoning.strip()
    return ParsedTurn(message, tuple(calls), num_malformed)


def _with_opening(text: str, thinking: str) -> str:
    """Return a turn with the mark that the template opened its thinking with, if the turn closes it."""
    closes = thinking and any(re.match(start, thinking) and re.search(close, text) for start, close in _THINKING)
    return thinking + text if closes else text


class _Region(NamedTuple):
    """A part of a turn: plain text, thinking or calls; `whole` has its marks, `inside` is between them."""

    kind: Literal["text", "thinking", "call"]
    whole: str
    inside: str
    is_closed: bool = True
    groups: Mapping[str, str] = {}


def _regions(text: str, call_format: CallFormat) -> Iterator[_Region]:
    """Yield the parts of a turn in order; an open one is the last."""
    alternatives = [(call_format.opening, call_format.closing), *_THINKING]
    opening = re.compile("|".join(f"(?P<region_{i}>{start})" for i, (start, _) in enumerate(alternatives)))
    position = 0
    while found := opening.search(text, position):
        index = next(i for i in range(len(alternatives)) if found[f"region_{i}"] is not None)
        closed = re.compile(alternatives[index][1]).search(text, found.end())
        yield _Region("text", text[position : found.start()], "")
        position = closed.end() if closed else len(text)
        inside = text[found.end() : closed.start() if closed else len(text)]
        kind: Literal["thinking", "call"] = "thinking" if index else "call"
        yield _Region(kind, text[found.start() : position], inside, closed is not None, found.groupdict())
    yield _Region("text", text[position:], "")


def _checked_call(name: Any, arguments: Any) -> Call:
    """Return the call; ValueError unless it has a name and a mapping of arguments (or its JSON text)."""
    if isinstance(arguments, str):
        arguments = json.loads(arguments)
    if not isinstance(name, str) or not isinstance(arguments, dict):
        raise ValueError("a call needs a name and arguments")
    return Call(name, arguments)


def _with_calls(message: dict[str, Any], calls: Sequence[Call]) -> dict[str, Any]:
    entries = [{"type": "function", "function": {"name": call.name, "arguments": call.arguments}} for call in calls]
    return {**message, "tool_calls": entries} if entries else message


def _typed_arguments(call: Call, schema: Mapping[str, Any]) -> dict[str, Any]:
    properties = schema.get("parameters", {}).get("properties", {})
    return {name: _typed(value, properties.get(name, {})) for name, value in call.arguments.items()}


def _typed(value: Any, schema: Mapping[str, Any]) -> Any:
    """Return an argument that was written as text in the type of its schema; unchanged if the text does not fit."""
    kind = schema.get("type")
    if not isinstance(value, str) or kind in (None, "string"):
        return value
    try:
        return json.loads(value.lower() if kind == "boolean" else value)
    except ValueError:
        return value


def find_call_format(tokenizer: Any, options: Mapping[str, Any]) -> CallFormat:
    """Return the format that reads back a call which the chat template renders; DataError if there is none."""
    options = {**options, "tools": [_PROBE_TOOL]}
    for arguments in (dict(_PROBE_CALL.arguments), json.dumps(_PROBE_CALL.arguments)):
        turn = {"role": "assistant", "content": "", "tool_calls": [tool_call(_PROBE_CALL.name, arguments)]}
        try:
            prompt, rendered = (render(tokenizer, messages, options) for messages in ([USER], [USER, turn]))
        except TEMPLATE_ERRORS:
            continue
        text = rendered[common_prefix_length(prompt, rendered) :]
        for call_format in FORMATS:
            calls = read_turn(text, call_format).calls
            typed = [_typed_arguments(call, _PROBE_TOOL["function"]) for call in calls]
            if [call.name for call in calls] == [_PROBE_CALL.name] and typed == [_PROBE_CALL.arguments]:
                return call_format
    raise DataError(
        "the chat template writes tool calls in a form that lowpeak does not read, or none: set tokenizer.response_template "
        "(see transformers' docs on response parsing), or use a model whose template writes tool calls."
    )


def _turn_opening(tokenizer: Any, previous_role: str, options: Mapping[str, Any]) -> str:
    """Return the template's opening of an assistant's turn after a message of `previous_role`."""
    messages = [USER]
    if previous_role == "tool":
        call = tool_call(_PROBE_CALL.name, dict(_PROBE_CALL.arguments))
        messages += [{"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "tool", "content": "x"}]
    try:
        closed, opened = (
            render(tokenizer, messages, {**options, "add_generation_prompt": opens}) for opens in (False, True)
        )
    except TEMPLATE_ERRORS:
        return _turn_opening(tokenizer, "user", options)
    return opened[common_prefix_length(closed, opened) :]


def _thinking_opening(opening: str) -> str:
    """Return the end of a turn's opening that opens thinking; empty if it opens none."""
    found = (re.search(rf"(?:{start})\s*$", opening) for start, _ in _THINKING)
    return next((match[0] for match in found if match), "")

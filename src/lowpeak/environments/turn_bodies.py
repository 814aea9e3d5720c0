"""The JSON of requests for turns and of their answers: vLLM's token route, and OpenAI's chat completions."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lowpeak.arguments import Sampling
from lowpeak.environments.append import Message
from lowpeak.environments.calls import ParsedTurn
from lowpeak.environments.routes import MODEL, RefusedError
from lowpeak.rollout import SampledTurn

_MOST_STOPS = 64
# Parameters by which a turn would be of another distribution than the run's, with the value that changes nothing.
_NEUTRAL = {
    **{"presence_penalty": 0.0, "frequency_penalty": 0.0, "logit_bias": None, "n": 1, "best_of": 1, "min_tokens": 0},
    **{"ignore_eos": False, "stream": False, "response_format": None, "structured_outputs": None, "bad_words": None},
    **{"allowed_token_ids": None, "stop": None, "functions": None, "use_beam_search": False},
    **{"chat_template_kwargs": None, "continue_final_message": False, "add_generation_prompt": True},
    **{"parallel_tool_calls": True, "reasoning_effort": None},
}
_RUN_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


@dataclass(frozen=True)
class TokenRequest:
    """A request of the token route: at most `max_tokens` after `ids` (None: what is left), up to the first of `stop_ids`."""

    ids: list[int]
    max_tokens: int | None
    stop_ids: frozenset[int]


def read_token_request(body: Mapping[str, Any], sampling: Sampling, num_tokens: int) -> TokenRequest:
    """Return the request of a body `{"token_ids": ..., "sampling_params": {...}}`."""
    ids, params = body.get("token_ids"), body.get("sampling_params")
    params = {} if params is None else params
    if not isinstance(params, dict):
        raise RefusedError(400, "sampling_params is no object.")
    if not isinstance(ids, list) or not ids:
        raise RefusedError(400, "token_ids is no list of at least one token.")
    check_sampling({**params, "stream": body.get("stream")}, sampling)
    stop_ids = [] if params.get("stop_token_ids") is None else params["stop_token_ids"]
    if not isinstance(stop_ids, list) or len(stop_ids) > _MOST_STOPS:
        raise RefusedError(400, f"stop_token_ids is no list of at most {_MOST_STOPS} tokens.")
    _check_tokens([*ids, *stop_ids], num_tokens)
    return TokenRequest(ids, _max_tokens(params, "max_tokens"), frozenset(stop_ids))


def _check_tokens(ids: Sequence[Any], num_tokens: int) -> None:
    if not all(type(each) is int and 0 <= each < num_tokens for each in ids):
        raise RefusedError(400, f"tokens are integers from 0 to {num_tokens - 1}.")


def check_sampling(params: Mapping[str, Any], sampling: Sampling) -> None:
    """Raise RefusedError for a parameter that differs from the run's."""
    for name in _RUN_SAMPLING:
        value, own = params.get(name), getattr(sampling, name)
        off = -1 if name == "top_k" and own == 0 else own  # vLLM's way to write it
        if value is not None and value not in (own, off):
            raise RefusedError(400, f"{name} {value!r:.40} is not the run's, {own}: omit it.")
    for name, neutral in _NEUTRAL.items():
        value = params.get(name)
        if value is not None and value != neutral and value not in ([], {}, {"type": "text"}):
            raise RefusedError(400, f"{name} {value!r:.40} is not supported: omit it.")


def _max_tokens(params: Mapping[str, Any], *names: str) -> int | None:
    value = next((params[name] for name in names if params.get(name) is not None), None)
    if value is not None and (type(value) is not int or value < 1):
        raise RefusedError(400, f"{' or '.join(names)} {value!r:.40} is no positive integer.")
    return value


@dataclass(frozen=True)
class ChatRequest:
    """A request of the chat route: the turn follows `messages` with `tools`, and has at most `max_tokens` (None: what is left)."""

    messages: list[Message]
    tools: list[dict[str, Any]]
    max_tokens: int | None


def read_chat_request(body: Mapping[str, Any], sampling: Sampling) -> ChatRequest:
    """Return the request of OpenAI's body; parts of text are joined, and arguments of calls become mappings."""
    messages, tools = body.get("messages"), body.get("tools")
    tools = [] if tools is None else tools
    if not isinstance(messages, list) or not messages or not all(map(_is_message, messages)):
        raise RefusedError(400, "messages is no list of messages with a role and a text.")
    if not isinstance(tools, list) or not all(map(_is_schema, tools)):
        raise RefusedError(400, "tools is no list of functions' schemas.")
    check_sampling(body, sampling)
    if body.get("stop_token_ids"):
        raise RefusedError(400, "stop_token_ids is of the token route: omit it.")
    choice = body.get("tool_choice")
    if choice not in (None, "auto"):
        raise RefusedError(400, f"tool_choice {choice!r:.40} is not supported: omit it.")
    return ChatRequest(
        _with_names([_read_message(message) for message in messages]),
        tools,
        _max_tokens(body, "max_completion_tokens", "max_tokens"),
    )


def _is_message(value: Any) -> bool:
    if not isinstance(value, dict) or not isinstance(value.get("role"), str):
        return False
    content, calls = value.get("content") or "", value.get("tool_calls") or []
    parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
    return all(map(_is_text, parts)) and isinstance(calls, list) and all(map(_is_schema, calls))


def _is_text(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)


def _is_schema(value: Any) -> bool:
    function = value.get("function") if isinstance(value, dict) else None
    return isinstance(function, dict) and isinstance(function.get("name"), str)


def _with_names(messages: Sequence[Message]) -> list[Message]:
    """Return the messages, where results of tools have the names of their calls, which some templates write."""
    calls = [call for message in messages for call in message.get("tool_calls") or ()]
    names = {call.get("id"): call["function"]["name"] for call in calls}
    return [
        {"name": names[message["tool_call_id"]], **message} if message.get("tool_call_id") in names else message
        for message in messages
    ]


def _read_message(message: Mapping[str, Any]) -> Message:
    content = message.get("content") or ""
    text = content if isinstance(content, str) else "".join(part["text"] for part in content)
    read = {**message, "content": text}
    if message.get("tool_calls"):
        read["tool_calls"] = [_read_call(call) for call in message["tool_calls"]]
    return {name: value for name, value in read.items() if value is not None}


def _read_call(call: Mapping[str, Any]) -> dict[str, Any]:
    arguments = call["function"].get("arguments") or {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            arguments = None
    if not isinstance(arguments, dict):
        raise RefusedError(400, f"the arguments {call['function']['arguments']!r:.80} of a call are no JSON object.")
    return {**call, "type": "function", "function": {"name": call["function"]["name"], "arguments": arguments}}


def token_response(name: str, prompt_ids: Sequence[int], turn: SampledTurn) -> dict[str, Any]:
    """Return the body of a token route's answer; `name` is the turn's, the same in each try of a run."""
    choice = {"index": 0, "token_ids": turn.ids, "logprobs": _logprobs(turn), "finish_reason": turn.finish_reason}
    return {"request_id": name, "choices": [choice], "prompt_token_ids": list(prompt_ids)}


def chat_response(name: str, prompt_ids: Sequence[int], turn: SampledTurn, parsed: ParsedTurn) -> dict[str, Any]:
    """Return the body of a chat completion, with the token ids of the prompt and of the turn; `name` is as above."""
    message: Message = {**parsed.message, "content": parsed.message.get("content") or None}
    if parsed.calls:
        functions = [{"name": call.name, "arguments": json.dumps(call.arguments)} for call in parsed.calls]
        message["tool_calls"] = [
            {"id": f"call_{name}{i}", "type": "function", "function": each} for i, each in enumerate(functions)
        ]
    reason = "tool_calls" if parsed.calls and turn.finish_reason == "stop" else turn.finish_reason
    choice = {
        "index": 0,
        "message": message,
        "logprobs": _logprobs(turn),
        "finish_reason": reason,
        "token_ids": turn.ids,
    }
    count, new = len(prompt_ids), len(turn.ids)
    return {
        **{"id": f"chatcmpl-{name}", "object": "chat.completion", "created": 0, "model": MODEL},
        "choices": [choice],
        "usage": {"prompt_tokens": count, "completion_tokens": new, "total_tokens": count + new},
        "prompt_token_ids": list(prompt_ids),
    }


def _logprobs(turn: SampledTurn) -> dict[str, Any]:
    # Clients of vLLM read the id from `token` or from `token_id`, by its version.
    pairs = zip(turn.ids, turn.logprobs, strict=True)
    content: list[dict[str, Any]] = [
        {"token": f"token_id:{token}", "token_id": token, "logprob": value, "bytes": None, "top_logprobs": []}
        for token, value in pairs
    ]
    return {"content": content}

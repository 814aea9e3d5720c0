"""Environments of an OpenEnv server: one session of its websocket for each conversation."""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Mapping
from functools import partial
from typing import Any

import httpx2

from lowpeak.environments.append import after_prompt
from lowpeak.errors import ArgumentError, first_line

_TYPES = {"string": str, "integer": int, "number": float, "boolean": bool, "array": list, "object": dict}
_SECONDS = 10.0
_BASE_FIELDS = ("metadata",)  # of every action


class OpenEnvEnvironment:
    """An environment of an OpenEnv server, as `environment_factory` makes it.

    The policy acts by the text of its turn (`respond`) or by a tool (`step`): `openenv_factory` adds the one that the server's
    actions ask for. `client` is a GenericEnvClient. The actions of a turn run one after the other, and their rewards add up. After
    the end of an episode a step tells the policy so, and changes nothing.
    """

    def __init__(self, client: Any) -> None:
        self._client, self._lock = client, asyncio.Lock()
        self._reward: float | None = None
        self._is_done = False

    async def reset(self, seed: int, **row: Any) -> str:
        """Return the first observation; the server's `reset` gets the row as keywords, but for its prompt."""
        self._reward, self._is_done = None, False
        columns = {name: value for name, value in row.items() if name != "prompt"}
        return after_prompt(row, _text_of((await self._client.reset(seed=seed, **columns)).observation))

    async def get_turn_reward(self) -> float | None:
        """Return the sum of the rewards since the last call; None if there was none."""
        reward, self._reward = self._reward, None
        return reward

    async def close(self) -> None:
        """End the session."""
        await self._client.close()

    async def _act(self, action: Mapping[str, Any]) -> Any:
        async with self._lock:  # a session answers one message at a time
            if self._is_done:
                raise RuntimeError("the episode is over.")
            result = await self._client.step(dict(action))
            self._is_done = result.done
            if result.reward is not None:
                self._reward = (self._reward or 0.0) + float(result.reward)
            return result


def openenv_factory(url: str, new_client: Any) -> Any:
    """Return the factory of the environments at a server; `new_client(base_url=url)` opens a session.

    Raises ArgumentError if the server does not answer.
    """
    try:
        answer = httpx2.get(f"{url.rstrip('/')}/schema", timeout=_SECONDS)
        answer.raise_for_status()
        action = answer.json()["action"]
    except (httpx2.HTTPError, httpx2.InvalidURL, ValueError, KeyError, TypeError) as error:
        raise ArgumentError(
            f"openenv:{url} has no schema of its actions ({type(error).__name__}: {first_line(error)}): start the server, and "
            "check the address."
        ) from error
    fields = {name: each for name, each in action.get("properties", {}).items() if name not in _BASE_FIELDS}
    types = {name: _type_of(name, each) for name, each in fields.items()}
    methods = _text_method(*fields) if [*types.values()] == [str] else _tool(action, fields, types)
    kind = type("OpenEnvEnvironment", (OpenEnvEnvironment,), methods)
    return lambda: kind(new_client(base_url=url))


def _text_method(field: str) -> dict[str, Any]:
    async def respond(self: OpenEnvEnvironment, text: str) -> str | None:
        result = await self._act({field: text})
        return None if result.done else _text_of(result.observation)

    return {"respond": respond}


def _tool(
    action: Mapping[str, Any], fields: Mapping[str, Mapping[str, Any]], types: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the tool `step`, with the signature and the docstring of the action's JSON schema."""

    async def step(self: OpenEnvEnvironment, **arguments: Any) -> str:
        return _text_of((await self._act(arguments)).observation)

    parameter = partial(inspect.Parameter, kind=inspect.Parameter.KEYWORD_ONLY)
    parameters = [
        parameter(name=name, default=each.get("default", inspect.Parameter.empty), annotation=types[name])
        for name, each in fields.items()
    ]
    own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    described = "".join(f"    {name}: {each.get('description', name)}\n" for name, each in fields.items())
    first = (action.get("description") or "Act in the environment.").split("\n\n")[0]
    step.__doc__ = f"{first}\n\nArgs:\n{described}" if fields else first
    step.__annotations__ = {each.name: each.annotation for each in parameters}
    step.__signature__ = inspect.Signature([own, *parameters])  # type: ignore[attr-defined]
    return {"step": step}


def _type_of(name: str, schema: Mapping[str, Any]) -> Any:
    """Return the type of a field, also of one that may be null; ArgumentError for other unions."""
    kinds = [each.get("type") for each in schema["anyOf"]] if "anyOf" in schema else schema.get("type", "string")
    kinds = [kind for kind in (kinds if isinstance(kinds, list) else [kinds]) if kind != "null"]
    if len(kinds) != 1 or kinds[0] not in _TYPES:
        raise ArgumentError(
            f"the field {name!r} of OpenEnv's action has types {kinds}: wrap the server's action so that it has one."
        )
    return _TYPES[kinds[0]]


def _text_of(observation: Any) -> str:
    """Return an observation's only text, or its JSON."""
    texts = [value for value in observation.values() if isinstance(value, str)] if isinstance(observation, dict) else []
    if len(texts) == 1 and all(value in (None, {}, texts[0]) for value in observation.values()):
        return texts[0]
    return observation if isinstance(observation, str) else json.dumps(observation)

"""A route that names the adapter of the last push, so that requests can ask for it: `POST /lowpeak_adapter`.

vLLM's own `/v1/load_lora_adapter` would read the adapter's files again, under another number: a second copy, which nothing has
proved. Here the server only learns the number that its workers store. It is an ASGI middleware for vLLM's `--middleware`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from lowpeak.rollout.vllm.token import App, Receive, Scope, Send

ROUTE = "/lowpeak_adapter"
_PREFIX = "lowpeak-"  # of the names that `weights/adapters.py` gives


class AdapterMiddleware:
    """Registers an adapter that the workers hold in place of the former one; other requests pass."""

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] != ROUTE:
            await self._app(scope, receive, send)
            return
        register(scope["app"].state.openai_serving_models, json.loads(await _body(receive)))
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"application/json")]})
        await send({"type": "http.response.body", "body": b"{}"})


def register(models: Any, adapter: Mapping[str, Any]) -> None:
    """Let the server's requests name `adapter`, and none that came before it."""
    from vllm.lora.request import LoRARequest

    for name in [name for name in models.lora_requests if name.startswith(_PREFIX)]:
        del models.lora_requests[name]
    made = LoRARequest(adapter["name"], int(adapter["number"]), adapter["folder"])
    models.lora_requests[adapter["name"]] = made


async def _body(receive: Receive) -> bytes:
    parts, more = [], True
    while more:
        message = await receive()
        parts.append(message.get("body", b""))
        more = message.get("more_body", False)
    return b"".join(parts)

"""The route of `lowpeak serve` that answers with arrays: token ids and their log-probs, 8 bytes a token.

The request is that of vLLM's `/inference/v1/generate`, whose JSON has about 90 bytes a token and an object for each. The answer is
a line of JSON, with the length, finish reason and weight versions of each completion, then of each the ids (int32) and the
log-probs (float32), little-endian.
"""

from __future__ import annotations

import asyncio
import json
import struct
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from typing import Any, Final

from lowpeak.vllm.serving.middleware import App, Receive, Scope, Send, read_body, send_answer

TOKEN_ROUTE: Final = "/lowpeak_tokens"
SERVES_TOKENS = "LOWPEAK_SERVES_TOKENS"  # in the environment of a server with this route


def encode_completions(completions: Sequence[Mapping[str, Any]]) -> bytes:
    """Return completions as arrays, from their `token_ids`, `logprobs` and what else the header has of each."""
    headers, arrays = [], []
    for completion in completions:
        rest = {name: value for name, value in completion.items() if name not in ("token_ids", "logprobs")}
        headers.append({"count": len(completion["token_ids"]), **rest})
        ids, logprobs = completion["token_ids"], completion["logprobs"]
        arrays.append(struct.pack(f"<{len(ids)}i{len(ids)}f", *ids, *logprobs))
    return b"\n".join([json.dumps(headers).encode(), b"".join(arrays)])


def decode_completions(content: bytes) -> list[dict[str, Any]]:
    """Return what was encoded; ValueError, KeyError, TypeError or struct.error for anything else."""
    header, line, rest = content.partition(b"\n")
    completions, start = [], 0
    for each in json.loads(header):
        count = each.pop("count")
        values = struct.unpack_from(f"<{count}i{count}f", rest, start)
        start += 8 * count
        completions.append({"token_ids": values[:count], "logprobs": values[count:], **each})
    if not line or start != len(rest):
        raise ValueError(f"{len(rest)} bytes of arrays in place of {start}")
    return completions


class TokenRoute:
    """Middleware that answers the route; a client that leaves aborts its request."""

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] != TOKEN_ROUTE:
            await self._app(scope, receive, send)
            return
        body = await read_body(receive)
        work = asyncio.ensure_future(_answer(scope["app"].state, body))
        left = asyncio.ensure_future(receive())
        try:
            await asyncio.wait([work, left], return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                await send_answer(send, *work.result())
        finally:
            for task in (work, left):
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task


async def _answer(state: Any, body: bytes) -> tuple[int, bytes]:
    """Return status and content: arrays, or an error in the form of vLLM's other routes."""
    try:
        return 200, encode_completions(await _generate(state, body))
    except Exception as error:
        status = _status(error)
        message = str(error) or str(error.__cause__ or type(error).__name__)
        return status, json.dumps({"error": {"message": message[:2000], "code": status}}).encode()


async def _generate(state: Any, body: bytes) -> list[dict[str, Any]]:
    from vllm import TokensPrompt
    from vllm.sampling_params import RequestOutputKind

    request, engine = _request_class().model_validate_json(body), state.engine_client
    params, adapters = request.sampling_params, state.openai_serving_models.lora_requests
    if request.model is not None and request.model not in adapters:
        raise ValueError(f"The adapter {request.model!r} is not registered.")
    most = engine.vllm_config.scheduler_config.max_num_seqs
    if params.n > most:
        raise ValueError(f"sampling_params.n must be at most the server's max_num_seqs ({most}), got {params.n}.")
    params.output_kind, params.flat_logprobs = RequestOutputKind.FINAL_ONLY, True
    params.logprobs = params.logprobs or 0
    adapter = None if request.model is None else adapters[request.model]
    prompt, name = TokensPrompt(prompt_token_ids=request.token_ids), f"lowpeak-{uuid.uuid4().hex}"
    results = [result async for result in engine.generate(prompt, params, name, lora_request=adapter)]
    return [_completion(output) for output in results[-1].outputs]


def _completion(output: Any) -> dict[str, Any]:
    """Return one of vLLM's outputs, whose log-probs have the sampled token's first at each position."""
    if output.finish_reason == "error":
        raise RuntimeError("vLLM failed while it generated this request.")
    found = output.logprobs
    return {
        "token_ids": list(output.token_ids),
        "logprobs": [found.logprobs[start] for start in found.start_indices],
        "finish_reason": output.finish_reason,
        "weight_versions": [{"version": span.version} for span in getattr(output, "weight_versions", None) or ()],
    }


def _status(error: Exception) -> int:
    """Return the HTTP status of an error: its own, 400 for a request that vLLM refuses, else 500."""
    from vllm import exceptions

    for name in ("http_status", "status_code"):
        if getattr(error, name, None) is not None:
            return int(getattr(error, name))
    refused = ValueError, TypeError, OverflowError, getattr(exceptions, "VLLMClientError", ValueError)
    return 400 if isinstance(error, refused) or isinstance(error.__cause__, refused) else 500


@cache
def _request_class() -> Any:
    """Return the model of a request, validated like that of vLLM's route."""
    from pydantic import Field, create_model
    from vllm import SamplingParams

    fields: dict[str, Any] = {"token_ids": (list[int], Field(min_length=1)), "sampling_params": (SamplingParams, ...)}
    return create_model("TokenRequest", **fields, model=(str | None, None))

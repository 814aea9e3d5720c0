"""Requests and answers as vLLM's HTTP server has them: token ids in, token ids and log-probs out, by either of two routes.

`/inference/v1/generate` tells which weights wrote each token; `/v1/completions` is there without `--enable-scale-out`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from lowpeak.errors import EngineError
from lowpeak.rollout.vllm.vllm import Answer, Request

Route = Literal["/inference/v1/generate", "/v1/completions"]
GENERATE: Route = "/inference/v1/generate"
COMPLETIONS: Route = "/v1/completions"


def body_of(request: Request, route: Route) -> dict[str, Any]:
    """One completion's request; text is made only where a stop string needs it. An adapter is named as a model."""
    params = {"logprobs": 0, **request.params}
    named = {} if request.adapter is None else {"model": request.adapter.name}
    if route == COMPLETIONS:
        return (
            {"prompt": list(request.prompt_ids), "return_token_ids": True, "add_special_tokens": False} | params | named
        )
    params.setdefault("detokenize", bool(params.get("stop") or params.get("bad_words")))
    return {"token_ids": list(request.prompt_ids), "sampling_params": params} | named


def read(answer: Any, route: Route, url: str) -> Answer:
    """The answer to `body_of`; EngineError where it has another form. Whether it can be used is looked at as any engine's is."""
    try:
        (choice,) = answer["choices"]
        ids = tuple(choice["token_ids"])
        logprobs = _logprobs(choice["logprobs"], route)
        reason = choice["finish_reason"]
        versions = _versions(choice.get("weight_versions") or ())
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise EngineError(
            f"the server at {url} answered {route} in a form that vLLM does not ({type(error).__name__}: {error}); is its version "
            "in the supported range?"
        ) from None
    if not all(isinstance(each, int) and not isinstance(each, bool) for each in ids):
        raise EngineError(f"the server at {url} returned tokens that are no ids.")
    return Answer(ids, logprobs, str(reason), versions)


def _logprobs(found: Mapping[str, Any] | None, route: Route) -> tuple[float, ...]:
    if found is None:
        return ()
    if route == COMPLETIONS:
        return tuple(float(each) for each in found["token_logprobs"])
    return tuple(float(each["logprob"]) for each in found["content"] or ())


def _versions(spans: Any) -> frozenset[int]:
    """The policy versions among weight versions; vLLM's own word for a checkpoint as it was loaded is none."""
    names = (str(span["version"]) for span in spans)
    return frozenset(int(name) for name in names if name.isdigit())

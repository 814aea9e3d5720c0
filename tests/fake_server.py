"""A server that speaks vLLM's HTTP as far as lowpeak does, from the standard library, with faults on demand."""

from __future__ import annotations

import json
import threading
import time
from contextlib import contextmanager
from dataclasses import asdict, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from lowpeak.vllm.protocol import Adapter, EngineInfo, Request
from lowpeak.vllm.serving.token_route import TOKEN_ROUTE, encode_completions

FACTS = EngineInfo("0.32.0", "models/tiny", "0123456789abcdef:fedcba9876543210", "float32", 128, 16, 4096)
GENERATE = "/inference/v1/generate"


class FakeServer:
    """What it holds and what it does; `answers[path]` takes the place of its own answer: a function of the body that returns
    (status, what), where bytes are sent as they are. `calls` are the requests that came, as (path, body).
    """

    def __init__(self, token=None, scale_out=True, **facts):
        self.token = token
        self.scale_out = scale_out
        self.facts = replace(FACTS, **facts)
        self.incarnation = f"first of {id(self)}"
        self.answers = {}
        self.calls = []
        self.gone = threading.Event()  # a client that waited left

    def answer(self, path, body, authorization):
        name = path.partition("?")[0]
        self.calls.append((path, body))
        if self.token and name != "/health" and authorization != f"Bearer {self.token}":
            return 401, {"error": "Unauthorized"}
        if name in self.answers:
            return self.answers[name](body)
        if name == "/collective_rpc":
            return 200, {"results": [self.worker(body["method"])]}
        if name == GENERATE:
            return self.generate(body) if self.scale_out else (403, error("Scale-out endpoints are disabled."))
        if name == TOKEN_ROUTE and self.facts.serves_tokens:
            status, what = self.generate(body)
            return status, as_arrays(what) if status == 200 else what
        if name == "/v1/completions":
            return 200, completion([7, 1], [-0.5, -0.25])
        known = {
            "/health": None,
            "/pause": {"status": "paused"},
            "/resume": {},
            "/reset_prefix_cache": {"success": True},
            "/lowpeak_adapter": {},
        }
        return (200, known[name]) if name in known else (404, error("Not Found"))

    def worker(self, method):
        reply = {"lowpeak_identity": {"incarnation": self.incarnation}, "lowpeak_engine_info": asdict(self.facts)}
        return reply[method]

    def generate(self, body):
        return 200, generated([body["token_ids"][0], 1], [-0.5, -0.25])

    @property
    def url(self):
        return f"http://127.0.0.1:{self.port}"


class ScriptedServer(FakeServer):
    """A scripted vLLM of this process, for other processes."""

    def __init__(self, vllm):
        super().__init__()
        self._vllm, self._adapters = vllm, {}
        self.facts = replace(vllm.info(), in_process=False)
        self.answers["/lowpeak_adapter"] = self._register

    def worker(self, method):
        return asdict(self.facts) if method == "lowpeak_engine_info" else self._vllm.call(method, {})[0]

    def generate(self, body):
        adapter = self._adapters.get(body.get("model"))
        (answer,) = self._vllm.complete([Request(tuple(body["token_ids"]), body["sampling_params"], adapter)])
        return 200, generated(answer.ids, answer.logprobs, answer.finish_reason, "")

    def _register(self, body):
        self._adapters[body["name"]] = Adapter(**body)
        return 200, {}


def error(message):
    return {"error": {"message": message, "type": "BadRequestError", "code": 400}}


def generated(ids, logprobs, reason="stop", version="3"):
    content = [{"token_id": 0, "logprob": each} for each in logprobs]
    spans = [{"version": version, "start": 0, "end": len(ids)}]
    choice = {"token_ids": ids, "logprobs": {"content": content}, "finish_reason": reason, "weight_versions": spans}
    return {"choices": [choice]}


def as_arrays(answer):
    """An answer of `generated` as the route of arrays gives it."""
    choices = [
        {**each, "logprobs": [one["logprob"] for one in each["logprobs"]["content"]]} for each in answer["choices"]
    ]
    return encode_completions(choices)


def completion(ids, logprobs, reason="stop"):
    return {"choices": [{"token_ids": ids, "logprobs": {"token_logprobs": logprobs}, "finish_reason": reason}]}


def slow(seconds, then=(200, None)):
    def answer(body):
        time.sleep(seconds)
        return then

    return answer


@contextmanager
def listening(handler, port=0):
    """An HTTP server on a thread, until the block ends."""
    httpd = ThreadingHTTPServer(("127.0.0.1", port), handler)
    httpd.daemon_threads = True
    threading.Thread(target=httpd.serve_forever, args=(0.02,), daemon=True).start()
    try:
        yield httpd
    finally:
        httpd.shutdown()
        httpd.server_close()


@contextmanager
def serving(server, port=0):
    """The server on a port of its own, until the block ends."""
    with listening(_handler(server), port) as httpd:
        server.port = httpd.server_port
        yield server


def _handler(server):
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.reply(None)

        def do_POST(self):
            text = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            self.reply(json.loads(text) if text else None)

        def reply(self, body):
            status, what = server.answer(self.path, body, self.headers.get("Authorization"))
            if what is DROP:
                self.close_connection = True
                self.connection.close()
                return
            data = what if isinstance(what, bytes) else b"" if what is None else json.dumps(what).encode()
            try:
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)
            except OSError:
                server.gone.set()

        def log_message(self, *args):
            pass

    return Handler


DROP = object()

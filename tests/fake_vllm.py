"""A scripted vLLM, which says what a script says and fails as real ones do; engines over it, and prompts for them."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future
from dataclasses import replace

import torch

from lowpeak.arguments.sampling import Sampling
from lowpeak.arguments.vllm import ColocateSettings, VllmSettings
from lowpeak.errors import LostEngineError
from lowpeak.ranks import Ranks
from lowpeak.records import Prompt, WeightSlice
from lowpeak.vllm.engine import EngineSharing, PolicyFacts, VllmEngine
from lowpeak.vllm.protocol import Answer, EngineInfo, check_worker_answers, resumed_after
from lowpeak.vllm.weight_sync.buckets import Piece

FACTS = EngineInfo(
    version="0.32.0", model="scripted", fingerprint="", dtype="float32", max_model_len=128, max_num_seqs=256,
    kv_tokens=1 << 14, in_process=True,
)  # fmt: skip
SETTINGS = VllmSettings(ColocateSettings())
SAMPLING = Sampling(num_generations=4, max_new_tokens=3)
END = 1


def _noted(event):
    return lambda self, *args: self.events.append(event)


class ScriptedVllm:
    """A vLLM without a model: `script` returns each request's tokens, or its whole `Answer`.

    `waves` are the requests of each call to `complete`, `started` those of `start`; `weights` the pieces of the last push that was
    no adapter's, `adapters` the versions and pieces of those that it holds, by their numbers, at most `most_adapters` at once.
    Faults: after `dies_after` more answers it is lost and restarts without weights; it omits `answers_short` answers; an answer
    takes `seconds`; a push raises `push_error`; `restart()` and `hold(version)` change its weights behind the engine's back.
    """

    def __init__(self, script, facts=FACTS):
        self._script = script
        self._facts = facts
        self.waves = []
        self.started = []
        self._running = []
        self._lock = threading.Lock()
        self.calls = []
        self.events = []
        self.dies_after = None
        self.answers_short = 0
        self.seconds = 0.0
        self.push_error = None
        self.num_checks = 0
        self.incarnation = 0
        self.policy_version = None
        self.num_bases = 0
        self.most_adapters = 0
        self._adapter = None
        self.weights, self.adapters = {}, {}

    def call(self, method, arguments, timeout=None):
        """Run `method` as the one worker would, if this class has it; note any other call in `calls`."""
        run = getattr(self, f"_{method.removeprefix('lowpeak_')}", None)
        if run is None:
            self.calls.append((method, arguments))
            return [{}]
        return check_worker_answers([run(**arguments)])

    def _identity(self):
        found = {"incarnation": str(self.incarnation), "policy_version": self.policy_version, "base": self.num_bases}
        return found | {"adapter": self._served()}

    def _served(self):
        incarnation = str(self.incarnation)
        if self._adapter is None:
            return None
        number = self._adapter["number"]
        return {"name": f"scripted-{number}", "number": number, "folder": "", "incarnation": incarnation}

    def _begin(self, invitation, summing, adapter):
        if self.push_error is not None:
            raise self.push_error
        self.policy_version, self._adapter = None, adapter
        if adapter is None:
            self.num_bases += 1
            self.weights = {}
        else:
            self.adapters = {number: each for number, each in self.adapters.items() if number in adapter["in_use"]}
        self._received = {}
        return {"known": []}

    def _receive(self, pieces, data):
        for piece in map(Piece.from_json, pieces):
            self._received.setdefault(piece.name, []).append(piece.values_in(data).clone())
        return {}

    def _verify(self, sent, counts):
        return {"lacking": {}}

    def _commit(self, policy_version):
        self.policy_version = policy_version
        if self._adapter is None:
            self.weights = self._received
        else:
            self.adapters[self._adapter["number"]] = policy_version, self._received
            self.most_adapters = max(self.most_adapters, len(self.adapters))
        return {"adapter": self._served()}

    def _abort(self):
        self.policy_version = None
        return {}

    def _verify_unchanged(self):
        self.num_checks += 1
        return {"error": "The scripted vLLM has no weights."} if self.policy_version is None else {}

    def info(self, wait_seconds=None):
        return self._facts

    def paused(self):
        return resumed_after(self.pause, self.resume)

    def complete(self, requests, timeout=None):
        """What the script says; EngineError where vLLM would refuse, LostEngineError when it dies or is too slow."""
        self.waves.append(tuple(requests))
        answers = {}
        for i, request in enumerate(requests):
            if self.dies_after == 0:
                self.dies_after = None
                self.restart()
                raise _lost("The scripted vLLM died.", answers)
            if self.dies_after is not None:
                self.dies_after -= 1
            if timeout is not None and (i + 1) * self.seconds > timeout:
                raise _lost(f"The scripted vLLM did not answer within {timeout} s.", answers)
            time.sleep(self.seconds)
            try:
                answers[i] = self._answer(request)
            except LostEngineError as error:
                raise _lost(str(error), answers) from error
        return list(answers.values())[: len(answers) - self.answers_short]

    def start(self, request, timeout=None):
        """Answer the request at a later `step`; a server, which does not limit itself to its cache, steps by itself."""
        self.started.append(request)
        future = Future()
        self._running.append((request, future))
        if not self._facts.limits_to_cache:
            threading.Timer(self.seconds, self.step).start()
        return future

    def step(self):
        """Answer the request that started first."""
        with self._lock:
            self._running = [(request, future) for request, future in self._running if not future.cancelled()]
            if self.dies_after == 0:
                self.dies_after = None
                self.restart()
                lost, self._running = self._running, []
                for _, future in lost:
                    if future.set_running_or_notify_cancel():
                        future.set_exception(_lost("The scripted vLLM died.", {}))
            if self._running:
                request, future = self._running.pop(0)
                self.dies_after = None if self.dies_after is None else self.dies_after - 1
                if future.set_running_or_notify_cancel():
                    future.set_result(self._answer(request))

    pause, resume, wake, close = map(_noted, ("pause", "resume", "wake", "close"))

    def sleep(self):
        self.events.append("sleep")
        self.policy_version = None

    def restart(self):
        """Be another process, which holds no weights."""
        self.incarnation += 1
        self.policy_version = self._adapter = None
        self.weights, self.adapters = {}, {}

    def hold(self, policy_version):
        self.num_bases += 1
        self.policy_version = policy_version

    def weights_of(self, request):
        """The version and the pieces of the weights, with an adapter's, that a request asks for."""
        if request.adapter is None:
            return self.policy_version, self.weights
        if request.adapter.incarnation != str(self.incarnation):
            raise _lost("The scripted vLLM was restarted, and has not the adapter.", {})
        version, pieces = self.adapters[request.adapter.number]
        return version, self.weights | pieces

    def _answer(self, request):
        completion_ids = self._script(request)
        self.weights_of(request)
        if isinstance(completion_ids, Answer):
            return completion_ids
        ids = tuple(completion_ids)[: request.params["max_tokens"]]
        ended = ids[-1] in request.params["stop_token_ids"]
        return Answer(ids, (0.0,) * len(ids), "stop" if ended else "length")


def _lost(sentence, finished):
    error = LostEngineError(sentence)
    error.finished = dict(finished)
    return error


def prompts(count=3, length=4, first=0):
    """Prompts of different lengths whose first token tells them apart."""
    return [Prompt(first + i, tuple([2 + (first + i) % 9] * (length + i)), f"prompt {i}") for i in range(count)]


def answer_of(request):
    """Tokens that tell the prompt and the seed; half of the completions end by themselves."""
    seed = request.params.get("seed", 0)
    return [request.prompt_ids[0], 2 + seed % 7, END if seed % 2 else 3]


def facts(**changes):
    return replace(FACTS, **changes)


def slices(values=(1.0, 2.0)):
    tensor = torch.tensor(values)
    yield WeightSlice("weight", (len(values),), torch.float32, 0, tensor)


def engine_over(*vllms, sharing=None, adapter=None, load=True, num_tokens=13, **settings):
    """An engine over these vLLMs, awake and, with `load`, with weights of version 0."""
    made = VllmEngine(
        lambda: vllms,
        replace(SETTINGS, **settings),
        PolicyFacts(lambda sampling: {END, *sampling.stop_token_ids}, num_tokens, adapter),
        sharing or EngineSharing(Ranks()),
    )
    made.wake()
    if load:
        made.load(slices(), 0)
    return made


def scripted(script=answer_of, **changes):
    return ScriptedVllm(script, facts(**changes))

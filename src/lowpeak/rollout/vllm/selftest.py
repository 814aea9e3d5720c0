"""`lowpeak env --selftest`: whether vLLM works here, with lowpeak's weights in it.

A small random model is pushed into a vLLM of this process and into a server, over every transport that the machine has; it
is proved there, writes, sleeps and wakes. Nothing is downloaded.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from lowpeak.config.vllm import ColocateSettings, VllmSettings
from lowpeak.errors import EngineError
from lowpeak.ranks import Ranks
from lowpeak.records import WeightSlice
from lowpeak.rollout.vllm.colocated import Blueprint, ColocatedVllm
from lowpeak.rollout.vllm.command import CPU, Server
from lowpeak.rollout.vllm.ports import free_ports
from lowpeak.rollout.vllm.process import served
from lowpeak.rollout.vllm.server import ServerVllm
from lowpeak.rollout.vllm.versions import require_vllm
from lowpeak.rollout.vllm.vllm import Request, Vllm
from lowpeak.rollout.vllm.weights.proof import prove
from lowpeak.rollout.vllm.weights.selftest import selftest

_CACHE = 64 << 20
_CONTEXT = 128
_TOKENS = 16
# How far vLLM's log-probs may be from transformers' of the same weights, in nats: other kernels round otherwise.
_MOST_APART = {torch.float32: 1e-3, torch.bfloat16: 0.2}

Say = Callable[[str], None]


def run(say: Say = print) -> bool:
    """Test the engines that this machine has, a line for each thing that was tried; whether all of it worked."""
    require_vllm("lowpeak env --selftest")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = _model().to(device)
    with tempfile.TemporaryDirectory(prefix="lowpeak-selftest-") as folder:
        model.save_pretrained(folder)
        tokenizer = _tokenizer()
        tokenizer.save_pretrained(folder)
        trial = _Trial(model, device, say)
        with trial.part("a vLLM in this process"), _colocated(model, tokenizer, device) as vllm:
            trial.push("colocated", vllm)
            if device.type == "cuda":
                trial.sleep(vllm)
        server = _server(Path(folder), model.dtype, device)
        with trial.part("a vLLM server"), served(server, Path(folder) / "server.log"):
            trial.push("server", ServerVllm(server.url))
    return trial.worked


class _Trial:
    """What was tried, and whether it worked."""

    def __init__(self, model: Any, device: torch.device, say: Say) -> None:
        self._model = model
        self._device = device
        self._say = say
        self.worked = True

    @contextmanager
    def part(self, what: str) -> Iterator[None]:
        """A block that is told of when it fails, and does not end the others."""
        began = time.monotonic()
        try:
            yield
        except Exception as error:
            self._failed(f"{what}: {type(error).__name__}: {error}")
        else:
            self._say(f"{what}: {time.monotonic() - began:.1f} s in all")

    def push(self, name: str, vllm: Vllm) -> None:
        """Weights over each transport, and log-probs of what is written with the last ones against the model's own."""
        vllm.facts()
        vllm.workers.call("lowpeak_score_at_temperature", {})
        for each in selftest([vllm], self._slices, self._device):
            if each.report is None:
                self._failed(f"{name}, {each.transport}: {each.error}")
            else:
                self._say(f"{name}, {each.transport}: pushed and proved in {1000 * each.report.seconds:.0f} ms")
        self._say(f"{name}: log-probs within {self._distance(vllm):.1e} of the model's own")

    def sleep(self, vllm: Vllm) -> None:
        """Memory given back and had again, and the weights proved to be as they were."""
        began = time.monotonic()
        vllm.sleep()
        vllm.wake()
        prove([vllm])
        self._say(f"colocated: slept, woken and proved in {time.monotonic() - began:.1f} s")

    def _slices(self, version: int) -> Iterator[WeightSlice]:
        """The model's weights, other values for each version."""
        with torch.no_grad():
            for number, (name, parameter) in enumerate(self._model.named_parameters()):
                parameter.mul_(1.0 + 0.01 * ((version + number) % 5))
                yield WeightSlice(name, tuple(parameter.shape), parameter.dtype, 0, parameter.detach().flatten())

    def _distance(self, vllm: Vllm) -> float:
        """The largest difference of log-probs of what vLLM writes; EngineError where it is none of rounding."""
        prompt = (3, 4, 5, 6)
        params = {"temperature": 0.0, "max_tokens": _TOKENS, "logprobs": 0, "ignore_eos": True}
        answer = vllm.complete([Request(prompt, params)], timeout=120.0)[0]
        ids = torch.tensor([[*prompt, *answer.ids]], device=self._device)
        with torch.no_grad():
            logits_LV = self._model(input_ids=ids).logits[0, len(prompt) - 1 : -1].float()
        targets_L1 = torch.tensor(answer.ids, device=self._device)[:, None]
        logprobs_L = logits_LV.log_softmax(-1).gather(-1, targets_L1)[:, 0]
        apart = float((logprobs_L.cpu() - torch.tensor(answer.logprobs)).abs().max())
        if not apart <= _MOST_APART[self._model.dtype]:
            raise EngineError(
                f"vLLM's log-probs are up to {apart:.1e} nats from the model's: its weights are not the model's."
            )
        return apart

    def _failed(self, sentence: str) -> None:
        self.worked = False
        self._say(f"FAILED {sentence}")


@contextmanager
def _colocated(model: Any, tokenizer: Any, device: torch.device) -> Iterator[Vllm]:
    where = ColocateSettings(gpu_memory_utilization=0.1, max_model_length=_CONTEXT, sleeps=device.type == "cuda")
    dtype = str(model.dtype).removeprefix("torch.")
    blueprint = Blueprint(model.config, tokenizer, type(model).__name__, dtype, device, _CACHE, False, 0)
    vllm = ColocatedVllm(blueprint, VllmSettings(where), Ranks(device))
    try:
        yield vllm
    finally:
        vllm.close()


def _server(folder: Path, dtype: torch.dtype, device: torch.device) -> Server:
    """A server of the model on this device."""
    sizes = (
        "--max-model-len",
        str(_CONTEXT),
        "--gpu-memory-utilization",
        "0.1",
        "--kv-cache-memory-bytes",
        str(_CACHE),
    )
    devices = (CPU,) if device.type == "cpu" else ("0",)
    options, written = (*sizes, "--enforce-eager"), str(dtype).removeprefix("torch.")
    return Server(str(folder), port=free_ports(1)[0], devices=devices, dtype=written, options=options)


def _model() -> Any:
    """A small model with random weights, whose head and embedding are different ones."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=512,
        hidden_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=512,
        max_position_embeddings=_CONTEXT,
        tie_word_embeddings=False,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    dtype = torch.bfloat16 if torch.cuda.is_available() else torch.float32
    return Qwen2ForCausalLM(config).to(dtype).eval()


def _tokenizer() -> Any:
    """One that has as many tokens as the model; only their ids are used."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words: Sequence[str] = ["<pad>", "<eos>", *(f"w{i}" for i in range(510))]
    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<pad>"))
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>")

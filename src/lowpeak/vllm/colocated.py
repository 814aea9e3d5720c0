"""vLLM in the training process: one per rank, or one over several neighbouring ranks that generate together."""

from __future__ import annotations

import gc
import hashlib
import logging
import math
import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from lowpeak.arguments import ColocateSettings, VllmSettings, hide_secrets
from lowpeak.errors import ArgumentError, EngineError, LostEngineError, LowpeakError, MemoryExhaustedError
from lowpeak.memory import free_bytes, is_out_of_memory, used_bytes
from lowpeak.ranks import Ranks, has_process_group
from lowpeak.vllm.compatibility import read_engine_info, require_vllm, warn_unsupported
from lowpeak.vllm.engine_args import COMMON_ENGINE_ARGS, MIN_MEMORY_SHARE, memory_remedy
from lowpeak.vllm.process_isolation import (
    destroy_vllm_groups,
    disable_shared_memory,
    preserve_process_state,
    shut_down_vllm,
    undo_vllm_class_patch,
)
from lowpeak.vllm.protocol import Answer, EngineInfo, Request, Vllm, check_worker_answers, resumed_after
from lowpeak.vllm.requests import CompletionLengths, wave_capacity

logger = logging.getLogger(__name__)

_STEPS_PER_TIMEOUT_CHECK = 32  # of a team, whose ranks check the timeout with a collective


@dataclass(frozen=True)
class ColocatedModelSpec:
    """Specification of the model that vLLM is built for: config and tokenizer, without weights.

    `dtype` is torch's name; `kv_cache_bytes` bounds the cache (None: vLLM's share of the device); `seed` is the same
    on all ranks of a engine_ranks.
    """

    config: Any
    tokenizer: Any
    architecture: str
    dtype: str
    device: torch.device
    kv_cache_bytes: int | None
    trust_remote_code: bool
    seed: int


class ColocatedVllm(Vllm):
    """One vLLM, or this rank's part of one, behind `vllm.LLM` in this process.

    It is built with random weights, because the policy's are pushed before any generation: no checkpoint is read and
    no hub is asked. All ranks of a `engine_ranks` build it together and call `complete` with the same requests in the same
    order.
    """

    def __init__(self, spec: ColocatedModelSpec, settings: VllmSettings, engine_ranks: Ranks) -> None:
        assert isinstance(settings.where, ColocateSettings)
        self._where, self._batch_size = settings.where, settings.batch_size
        self._engine_ranks = engine_ranks
        self._device = spec.device
        self._had_group = has_process_group()
        require_vllm()
        import vllm

        warn_unsupported(vllm.__version__)
        self._num_requests = self._num_steps = 0
        self._running: dict[str, tuple[Future[Answer], float]] = {}  # and their deadlines, the oldest first
        self._lengths = CompletionLengths()
        self._model = getattr(spec.config, "_name_or_path", "") or spec.architecture
        on_cpu_ranks = engine_ranks.world_size > 1 and spec.device.type == "cpu"
        with (
            preserve_process_state(),
            disable_shared_memory(engine_ranks.rank) if on_cpu_ranks else nullcontext(),
        ):
            folder = write_model_folder(spec, Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"))
            try:
                self.llm: Any = self._build(str(folder), spec)
            except BaseException:
                destroy_vllm_groups(self._had_group)
                raise
        if self._where.model_impl != "vllm":
            undo_vllm_class_patch(self.model.modules(), _is_building_vllm)

    @property
    def model(self) -> torch.nn.Module:
        """Return vLLM's model, or this rank's part of it."""
        return self.llm.llm_engine.model_executor.driver_worker.model_runner.model

    def call(self, method: str, arguments: Mapping[str, Any], timeout: float) -> list[Any]:
        return check_worker_answers(self.llm.collective_rpc(method, kwargs=dict(arguments)))

    def info(self, wait_seconds: float | None = None) -> EngineInfo:
        info = read_engine_info(self.llm.llm_engine.vllm_config)
        return replace(info, model=self._model, limits_to_cache=True, in_process=True)

    def complete(self, requests: Sequence[Request], timeout: float | None = None) -> list[Answer]:
        """Complete one wave; after `timeout` abort the rest and raise LostEngineError with the finished answers."""
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        # vLLM would start as many sequences as their prompts allow, and preempt most of them later.
        most = wave_capacity([self.info()], requests, self._lengths, 1, self._where)
        futures: list[Future[Answer]] = []
        try:
            while self._running or len(futures) < len(requests):
                for request in requests[len(futures) : len(futures) + most - len(self._running)]:
                    futures.append(self.start(request, deadline - time.monotonic()))
                self.step()
        except LostEngineError as lost:
            lost.finished = {i: future.result() for i, future in enumerate(futures) if future.done()}
            raise
        finally:
            for future in futures:
                future.cancel()
        answers = [future.result() for future in futures]
        # The ranks of a team have the same answers, so that they start the same sequences in the next wave.
        self._lengths.add([len(answer.ids) for answer in answers])
        return answers

    def start(self, request: Request, timeout: float | None = None) -> Future[Answer]:
        name, future = self._add_request(request), Future[Answer]()
        self._running[name] = future, time.monotonic() + (math.inf if timeout is None else timeout)
        future.add_done_callback(partial(self._end, name))
        return future

    def _end(self, name: str, future: Future[Answer]) -> None:
        del self._running[name]
        if future.cancelled():
            self.llm.llm_engine.abort_request([name])

    def step(self) -> None:
        try:
            outputs = self.llm.llm_engine.step()
        except RuntimeError as error:
            raise self._explain_error("vLLM failed while generating", error) from error
        for output in outputs:
            if output.finished:
                self._running[output.request_id][0].set_result(_to_answer(output))
        self._num_steps += 1
        oldest = next((deadline for _, deadline in self._running.values()), math.inf)
        if oldest < math.inf and self._is_late(oldest):
            raise LostEngineError(
                f"vLLM did not finish {len(self._running)} completions within the time limit: raise vllm_wave_timeout, or lower "
                "vllm_batch_size."
            )

    def paused(self) -> AbstractContextManager[None]:
        return resumed_after(lambda: None, self._reset_cache)

    def _reset_cache(self) -> None:
        if not self.llm.reset_prefix_cache():
            raise EngineError(
                "vLLM did not reset its prefix cache after a load: completions still run with the old weights."
            )

    def sleep(self) -> None:
        """Release device memory; move the weights to host memory if there is room, otherwise drop them.

        There is room if twice the weights of all ranks of this host fit.
        """
        before = used_bytes(self._device)
        weights = sum(p.numel() * p.element_size() for p in self.model.parameters())
        level = (
            1 if free_bytes(torch.device("cpu")) > 2 * weights * num_host_ranks(self._engine_ranks, os.environ) else 2
        )
        self.llm.sleep(level=level)
        after = used_bytes(self._device)
        logger.info(
            "vLLM sleeps (level %d: weights %s): %d MiB of device memory freed, %d MiB in use.",
            level,
            "in host memory" if level == 1 else "dropped, and sent again after wake-up",
            (before - after) >> 20,
            after >> 20,
        )

    def wake(self) -> None:
        self.llm.wake_up()

    def close(self) -> None:
        llm, self.llm = self.llm, None
        if llm is not None:
            shut_down_vllm(llm, self._had_group)
            del llm
            gc.collect()

    def _build(self, folder: str, spec: ColocatedModelSpec) -> Any:
        """Build `vllm.LLM`; `vllm_engine_kwargs` override the run's arguments."""
        from vllm import LLM

        on_cpu, where = spec.device.type == "cpu", self._where
        arguments: dict[str, Any] = {
            "model": folder,
            "load_format": "dummy",
            "dtype": spec.dtype,
            "tensor_parallel_size": self._engine_ranks.world_size,
            "distributed_executor_backend": "external_launcher"
            if has_process_group() and "RANK" in os.environ
            else None,
            "gpu_memory_utilization": where.gpu_memory_utilization
            if where.kv_cache_bytes is None
            else MIN_MEMORY_SHARE,
            "max_model_len": where.max_model_length,
            "model_impl": where.model_impl,
            "enable_prefix_caching": True,
            **COMMON_ENGINE_ARGS,
            "trust_remote_code": spec.trust_remote_code,
            "seed": spec.seed,
            # On a CPU, compilation takes 40 s and gains nothing.
            "enforce_eager": on_cpu,
            "kv_cache_memory_bytes": spec.kv_cache_bytes,
        }
        if where.sleeps:
            arguments["enable_sleep_mode"] = True
        if on_cpu:
            # Chunked prefill rewinds the random generator, which CPU generators cannot do.
            arguments["enable_chunked_prefill"] = False
        try:
            return LLM(**{**arguments, **where.engine_kwargs})
        except Exception as error:
            if isinstance(error, TypeError) and where.engine_kwargs:
                raise ArgumentError(f"vllm_engine_kwargs={hide_secrets(where.engine_kwargs)!r}: {error}") from error
            raise self._explain_error("vLLM could not be built in this process", error) from error

    def _explain_error(self, what: str, error: Exception) -> LowpeakError:
        """Return an error with vLLM's message, and the arguments to change if memory or the context was too small."""
        kind = MemoryExhaustedError if is_out_of_memory(error) else EngineError
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        message = " ".join(lines[:3]) or type(error).__name__
        return kind(f"{what}: {message.removesuffix('.')}. {memory_remedy(self._where, self._batch_size)}")

    def _add_request(self, request: Request) -> str:
        """Add a request to vLLM and return its id."""
        from vllm import SamplingParams, TokensPrompt
        from vllm.lora.request import LoRARequest
        from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

        params = dict(request.params)
        if "structured_outputs" in params:
            params["structured_outputs"] = StructuredOutputsParams(**params["structured_outputs"])
        self._num_requests += 1
        name, lora = str(self._num_requests), request.adapter
        prompt = TokensPrompt(prompt_token_ids=list(request.prompt_ids))
        adapter = None if lora is None else LoRARequest(lora.name, lora.number, lora.folder)
        try:
            sampling = SamplingParams(**params, output_kind=RequestOutputKind.FINAL_ONLY)
            self.llm.llm_engine.add_request(name, prompt, sampling, lora_request=adapter)
        except Exception as error:
            raise EngineError(f"vLLM rejected a request: {error}") from error
        return name

    def _is_late(self, deadline: float) -> bool:
        """Return whether the deadline is past; the ranks of a team agree, because they step together."""
        if self._engine_ranks.world_size == 1:
            return time.monotonic() > deadline
        if self._num_steps % _STEPS_PER_TIMEOUT_CHECK:
            return False
        return bool(self._engine_ranks.max([float(time.monotonic() > deadline)])[0])


def num_host_ranks(engine_ranks: Ranks, environ: Mapping[str, str]) -> int:
    """Return how many ranks sleep on this host at once: those that a launcher started here, otherwise the engine_ranks."""
    return int(environ.get("LOCAL_WORLD_SIZE") or engine_ranks.world_size)


def _is_building_vllm() -> bool:
    from vllm.config import get_current_vllm_config_or_none

    return get_current_vllm_config_or_none() is not None


def check_colocated(settings: ColocateSettings, device: torch.device) -> None:
    """Raise ArgumentError for settings that have no effect on the device."""
    if settings.sleeps and device.type == "cpu":
        raise ArgumentError("vllm_enable_sleep_mode=True has no effect: vLLM has no sleep mode on CPUs; remove it.")


def write_model_folder(spec: ColocatedModelSpec, cache: Path) -> Path:
    """Write config and tokenizer for `from_pretrained`, without the policy's quantization config; return the folder in a cache.

    Its name is the hash of what it contains: vLLM finds compiled graphs by the path of a model. Without a cache that can be
    written it is in the folder of temporary files.
    """
    config = type(spec.config).from_dict(spec.config.to_dict())
    config.architectures = [spec.architecture]
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    models = cache / "lowpeak" / "vllm-models"
    try:
        models.mkdir(parents=True, exist_ok=True)
    except OSError:
        models = Path(tempfile.gettempdir())
    with tempfile.TemporaryDirectory(dir=models if os.access(models, os.W_OK) else None, prefix="making-") as making:
        folder = Path(making) / "model"
        config.save_pretrained(folder)
        spec.tokenizer.save_pretrained(folder)
        target = Path(making).parent / f"lowpeak-vllm-{_hash_of(folder)}"
        try:
            folder.rename(target)
        except OSError:
            # Another process was first.
            if not target.is_dir():
                raise
    return target


def _hash_of(folder: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(folder)} {len(content)}\n".encode() + content)
    return digest.hexdigest()[:32]


def _to_answer(output: Any) -> Answer:
    completion = output.outputs[0]
    ids = tuple(completion.token_ids)
    logprobs = tuple(values[token].logprob for token, values in zip(ids, completion.logprobs or (), strict=False))
    return Answer(ids, logprobs, str(completion.finish_reason))

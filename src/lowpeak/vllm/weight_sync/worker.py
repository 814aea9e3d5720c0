"""What vLLM's workers learn from lowpeak: `worker_extension_cls="lowpeak.vllm.weight_sync.worker.Extension"`.

Imported by every worker before it loads its model. On CPUs vLLM repacks linear weights into oneDNN's own format and empties the
parameters, so that nothing could be loaded into them again, and a tied head would keep its old values. Importing this turns that
off.

Log-probs of sampled tokens are made the policy's: of the full softmax at the sampling temperature, before top-k, top-p and
penalties. vLLM's "raw_logprobs" are at temperature 1, its "processed_logprobs" are renormalised over what top-k and top-p leave.
In raw mode its sampler computes them from the logits before anything else is done to these: there they are divided by each
row's temperature.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from lowpeak.errors import EngineError, LowpeakError, is_installed
from lowpeak.vllm.compatibility import engine_fingerprint, read_engine_info
from lowpeak.vllm.weight_sync.buckets import Piece
from lowpeak.vllm.weight_sync.lora import AdapterReceiver
from lowpeak.vllm.weight_sync.receiver import CheckpointNames, WeightReceiver
from lowpeak.vllm.weight_sync.reload import ReloadedModules, modules_to_reload
from lowpeak.vllm.weight_sync.transports import BucketReceiver, open_receiver, probe_location

_GREEDY = 1e-5  # vLLM's: at a lower temperature a row is greedy, and its log-probs are those at temperature 1


def disable_cpu_repacking() -> None:
    """Let CPU models keep their weights as loaded."""
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        import vllm._custom_ops as custom_ops
        from vllm.model_executor.layers import utils

        custom_ops._supports_onednn = False
        utils.check_cpu_sgl_kernel = lambda *args, **kwargs: False


if is_installed("vllm"):  # else it is a test's worker
    disable_cpu_repacking()


def reply_with_errors(method: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """Make a method answer errors as `{"error": sentence}`: an exception may end vLLM's engine, and loses its class on the way."""

    @wraps(method)
    def answered(self: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        try:
            return method(self, *args, **kwargs)
        except LowpeakError as error:
            return {"error": str(error)}
        except Exception as error:
            return {"error": f"vLLM's worker failed in {method.__name__}: {type(error).__name__}: {error}"[:500]}

    return answered


class Extension:
    """Methods that vLLM mixes into its worker class; each is called on all workers, and answers what JSON can hold."""

    @reply_with_errors
    def lowpeak_identity(self) -> dict[str, Any]:
        """Which worker this is, and the version that it holds: another incarnation is one that restarted."""
        work = _worker_state(self)
        return {"incarnation": work.incarnation, "policy_version": work.receiver.policy_version}

    @reply_with_errors
    def lowpeak_facts(self) -> dict[str, Any]:
        config = self.vllm_config  # type: ignore[attr-defined]
        return asdict(replace(read_engine_info(config), fingerprint=engine_fingerprint(config.model_config)))

    @reply_with_errors
    def lowpeak_look(self) -> dict[str, Any]:
        return probe_location(_worker_state(self).device)

    @reply_with_errors
    def lowpeak_begin(
        self, invitation: Mapping[str, Any], summing: bool, adapter: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """Begin an update, of an adapter alone where one is given: no version from here on.

        The names of tensors that need not come again.
        """
        work = _worker_state(self)
        work.close_inlet()
        if adapter is None:
            work.receiver = work.weights
            known = work.weights.begin(summing)
        elif work.weights.is_broken:
            raise EngineError("The last update of vLLM's base weights failed: push them before an adapter.")
        else:
            work.receiver = work.adapters
            known = work.adapters.begin(adapter)
        work.inlet = open_receiver(invitation, work.device, work.rank)
        return {"known": list(known)}

    @reply_with_errors
    def lowpeak_take(self, pieces: Sequence[Mapping[str, Any]], **where: Any) -> dict[str, Any]:
        work = _worker_state(self)
        try:
            if work.inlet is None:
                raise EngineError("No update of vLLM's weights is under way.")
            work.receiver.take([Piece.from_json(piece) for piece in pieces], work.inlet.read(where))
            if work.device.type != "cpu":  # the bucket may be filled again when this has answered
                torch.accelerator.synchronize(work.device)
        except BaseException:
            work.close_inlet()
            raise
        return {}

    @reply_with_errors
    def lowpeak_verify(self, sent: Mapping[str, str], counts: Mapping[str, int]) -> dict[str, Any]:
        work = _worker_state(self)
        work.close_inlet()
        return {"lacking": work.receiver.verify(sent, counts)}

    @reply_with_errors
    def lowpeak_commit(self, policy_version: int) -> dict[str, Any]:
        """The update is whole, everywhere. The adapter that requests name, where it was one."""
        receiver = _worker_state(self).receiver
        receiver.commit(policy_version)
        return {"adapter": receiver.adapter()}

    @reply_with_errors
    def lowpeak_abort(self) -> dict[str, Any]:
        """Give the update up, or forget the version of weights that were lost."""
        work = _worker_state(self)
        work.close_inlet()
        work.receiver.abort()
        return {}

    @reply_with_errors
    def lowpeak_prove(self) -> dict[str, Any]:
        """EngineError, and no version any more, where weights changed since they were verified: the adapter's base as well."""
        work = _worker_state(self)
        if work.receiver is work.adapters and work.weights.policy_version is not None:
            try:
                work.weights.prove()
            except EngineError:
                work.adapters.abort()
                raise
        work.receiver.prove()
        return {}

    @reply_with_errors
    def lowpeak_score_at_temperature(self) -> dict[str, Any]:
        score_at_temperature(self.model_runner.sampler)  # type: ignore[attr-defined]
        return {}


def _worker_state(worker: Any) -> WorkerState:
    """The work of a worker whose model is loaded, kept beside it."""
    if not hasattr(worker, "_lowpeak_work"):
        model, config = worker.model_runner.get_model(), worker.vllm_config
        device, rank = next(model.parameters()).device, config.parallel_config.rank
        paths = {module: name for name, module in model.named_modules()}
        reloads = ReloadedModules(modules_to_reload(model, config), paths, config.model_config)
        weights = WeightReceiver(model, CheckpointNames(config.model_config.hf_config), reloads)
        worker._lowpeak_work = WorkerState(
            weights, AdapterReceiver(worker), weights, device, rank, secrets.token_hex(8)
        )
    work: WorkerState = worker._lowpeak_work
    return work


@dataclass
class WorkerState:
    """One worker's part in updates; `rank` is its place among its engine's workers.

    `receiver` is that of the last update: of the model's weights, or of adapters beside the model that was loaded.
    """

    weights: WeightReceiver
    adapters: AdapterReceiver
    receiver: WeightReceiver | AdapterReceiver
    device: torch.device
    rank: int
    incarnation: str
    inlet: BucketReceiver | None = None

    def close_inlet(self) -> None:
        if self.inlet is not None:
            self.inlet.close()
            self.inlet = None


def score_at_temperature(sampler: Any) -> None:
    """Make a sampler of vLLM give its raw log-probs at each row's temperature; a second call changes nothing."""
    if getattr(sampler, "lowpeak_scores_at_temperature", False):
        return
    if getattr(sampler, "logprobs_mode", None) != "raw_logprobs":
        raise EngineError('vLLM was started with another logprobs_mode than "raw_logprobs": leave it at its default.')
    temperature: list[Tensor | None] = [None]
    compute: Callable[[Tensor], Tensor] = sampler.compute_logprobs
    forward: Callable[..., Any] = sampler.forward

    @wraps(forward)
    def forward_with_temperature(logits: Tensor, sampling_metadata: Any, *args: Any, **kwargs: Any) -> Any:
        temperature[0] = None if sampling_metadata.all_greedy else sampling_metadata.temperature
        try:
            return forward(logits, sampling_metadata, *args, **kwargs)
        finally:
            temperature[0] = None

    @wraps(compute)
    def compute_at_temperature(logits: Tensor) -> Tensor:
        rows = temperature[0]
        if rows is None:
            return compute(logits)
        divisor = torch.where(rows < _GREEDY, 1.0, rows).to(logits.device)
        return compute(logits.float() / divisor.unsqueeze(1))

    sampler.forward = forward_with_temperature
    sampler.compute_logprobs = compute_at_temperature
    sampler.lowpeak_scores_at_temperature = True

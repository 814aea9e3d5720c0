"""Methods that lowpeak adds to vLLM's workers: `worker_extension_cls="lowpeak.vllm.weight_sync.worker.Extension"`.

Every worker imports this module before it loads its model. On CPUs vLLM repacks linear weights into oneDNN's format
and empties the parameters, which prevents later loads and leaves a tied head with its old values. The import disables
that.

Log-probs of sampled tokens must be the policy's: of the full softmax at the sampling temperature, before top-k, top-p
and penalties. vLLM's "raw_logprobs" have temperature 1; its "processed_logprobs" are renormalised after top-k and
top-p. In raw mode vLLM's sampler computes them from the unmodified logits, so the logits are divided by each
sequence's temperature at that point.
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

# vLLM's threshold: below it a sequence is greedy, and its log-probs are those at temperature 1.
_GREEDY = 1e-5


def disable_cpu_repacking() -> None:
    """Make vLLM keep the weights of CPU models as they were loaded."""
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        import vllm._custom_ops as custom_ops
        from vllm.model_executor.layers import utils

        custom_ops._supports_onednn = False
        utils.check_cpu_sgl_kernel = lambda *args, **kwargs: False


# Without vLLM, the worker is a test's.
if is_installed("vllm"):
    disable_cpu_repacking()


def reply_with_errors(method: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """Make a method return errors as `{"error": message}`.

    An exception may end vLLM's engine, and loses its class on the way to the trainer.
    """

    @wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        try:
            return method(self, *args, **kwargs)
        except LowpeakError as error:
            return {"error": str(error)}
        except Exception as error:
            return {"error": f"vLLM's worker failed in {method.__name__}: {type(error).__name__}: {error}"[:500]}

    return call


class Extension:
    """Methods that vLLM mixes into its worker class; each runs on all workers and returns JSON-compatible values."""

    @reply_with_errors
    def lowpeak_identity(self) -> dict[str, Any]:
        """Return the worker's incarnation, which changes with a restart, and its policy version."""
        state = _worker_state(self)
        return {"incarnation": state.incarnation, "policy_version": state.receiver.policy_version}

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
        """Begin an update, of an adapter if one is given, and drop the version.

        Returns the names of tensors that need not be sent again.
        """
        state = _worker_state(self)
        state.close_transport()
        if adapter is None:
            state.receiver = state.weights
            known = state.weights.begin(summing)
        elif state.weights.is_broken:
            raise EngineError("The last update of vLLM's base weights failed: push the base weights before an adapter.")
        else:
            state.receiver = state.adapters
            known = state.adapters.begin(adapter)
        state.transport = open_receiver(invitation, state.device, state.rank)
        return {"known": list(known)}

    @reply_with_errors
    def lowpeak_take(self, pieces: Sequence[Mapping[str, Any]], **arguments: Any) -> dict[str, Any]:
        """Load a bucket's pieces."""
        state = _worker_state(self)
        try:
            if state.transport is None:
                raise EngineError("No weight update has begun in vLLM's worker.")
            state.receiver.take([Piece.from_json(piece) for piece in pieces], state.transport.read(arguments))
            # The trainer may refill the bucket after this call.
            if state.device.type != "cpu":
                torch.accelerator.synchronize(state.device)
        except BaseException:
            state.close_transport()
            raise
        return {}

    @reply_with_errors
    def lowpeak_verify(self, sent: Mapping[str, str], counts: Mapping[str, int]) -> dict[str, Any]:
        """Verify the checksums of all tensors; return per tensor the elements in this worker if it lacks some."""
        state = _worker_state(self)
        state.close_transport()
        return {"lacking": state.receiver.verify(sent, counts)}

    @reply_with_errors
    def lowpeak_commit(self, policy_version: int) -> dict[str, Any]:
        """Set the version, after all workers verified the update; return the adapter that requests may name, if any."""
        receiver = _worker_state(self).receiver
        receiver.commit(policy_version)
        return {"adapter": receiver.adapter()}

    @reply_with_errors
    def lowpeak_abort(self) -> dict[str, Any]:
        """Abort the update, or drop the version of weights that were lost."""
        state = _worker_state(self)
        state.close_transport()
        state.receiver.abort()
        return {}

    @reply_with_errors
    def lowpeak_prove(self) -> dict[str, Any]:
        """Verify that weights, and an adapter's base, are unchanged; otherwise raise EngineError and drop the
        version.
        """
        state = _worker_state(self)
        if state.receiver is state.adapters and state.weights.policy_version is not None:
            try:
                state.weights.prove()
            except EngineError:
                state.adapters.abort()
                raise
        state.receiver.prove()
        return {}

    @reply_with_errors
    def lowpeak_score_at_temperature(self) -> dict[str, Any]:
        score_at_temperature(self.model_runner.sampler)  # type: ignore[attr-defined]
        return {}


def _worker_state(worker: Any) -> WorkerState:
    """Return the state of a worker whose model is loaded; it is created once and stored on the worker."""
    if not hasattr(worker, "_lowpeak_state"):
        model, config = worker.model_runner.get_model(), worker.vllm_config
        device, rank = next(model.parameters()).device, config.parallel_config.rank
        paths = {module: name for name, module in model.named_modules()}
        reloads = ReloadedModules(modules_to_reload(model, config), paths, config.model_config)
        weights = WeightReceiver(model, CheckpointNames(config.model_config.hf_config), reloads)
        worker._lowpeak_state = WorkerState(
            weights, AdapterReceiver(worker), weights, device, rank, secrets.token_hex(8)
        )
    state: WorkerState = worker._lowpeak_state
    return state


@dataclass
class WorkerState:
    """State of one worker's weight updates; `rank` is its rank within its engine.

    `receiver` is that of the last update: `weights` for the model, or `adapters`.
    """

    weights: WeightReceiver
    adapters: AdapterReceiver
    receiver: WeightReceiver | AdapterReceiver
    device: torch.device
    rank: int
    incarnation: str
    transport: BucketReceiver | None = None

    def close_transport(self) -> None:
        if self.transport is not None:
            self.transport.close()
            self.transport = None


def score_at_temperature(sampler: Any) -> None:
    """Make a vLLM sampler return raw log-probs at each sequence's temperature; repeated calls have no effect."""
    if getattr(sampler, "lowpeak_scores_at_temperature", False):
        return
    if getattr(sampler, "logprobs_mode", None) != "raw_logprobs":
        raise EngineError('vLLM needs logprobs_mode="raw_logprobs": remove the option that changes it.')
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
        temperatures = temperature[0]
        if temperatures is None:
            return compute(logits)
        divisor = torch.where(temperatures < _GREEDY, 1.0, temperatures).to(logits.device)
        return compute(logits.float() / divisor.unsqueeze(1))

    sampler.forward = forward_with_temperature
    sampler.compute_logprobs = compute_at_temperature
    sampler.lowpeak_scores_at_temperature = True

"""Which engine a run generates with: the policy itself, a function of the user's, or vLLM."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from lowpeak.algorithms import Algorithm
from lowpeak.arguments import ALL, ColocateSettings, OnlineSettings, ServerSettings, VllmSettings
from lowpeak.data import PromptReader
from lowpeak.errors import ArgumentError, EngineError
from lowpeak.logprobs import causal_lm
from lowpeak.memory import free_bytes
from lowpeak.models import context_length, first_rotations, is_peft, num_embeddings
from lowpeak.parallel import Strategy, parts_tied, unchanging
from lowpeak.ranks import Ranks
from lowpeak.rewards import Reward
from lowpeak.rollout import FunctionEngine, RolloutEngine
from lowpeak.rollout.native import NativeEngine, bytes_per_token, end_token_ids, parameter_dtype
from lowpeak.training.collector import Tally
from lowpeak.training.evaluation import Success
from lowpeak.training.run import Run
from lowpeak.vllm import (
    Blueprint,
    Callers,
    ColocatedVllm,
    Facts,
    PolicyFacts,
    Vllm,
    VllmEngine,
    check_colocated,
    check_same,
    option,
    require_vllm,
    warn_unsupported,
)
from lowpeak.vllm import connect as connect_servers
from lowpeak.vllm.weight_sync import adapter_config


@dataclass(frozen=True)
class OnlineParts:
    """The arguments that were `given`, `args` with defaults for those without effect, and the settings of both.

    Beside them models and tokenizer, the rewards, and what an evaluation counts as a success.
    """

    given: Any
    args: Any
    settings: OnlineSettings
    algorithm: Algorithm
    policy: nn.Module
    reference_model: nn.Module | None
    tokenizer: Any
    rewards: Sequence[Reward]
    success: Success


_MOST_ROWS = 256  # that vLLM decodes at once, unless it is told otherwise
_LEAST_CACHE = 1 << 24


def check_engine(settings: VllmSettings | None, tensor_parallel: int = 1) -> None:
    """MissingPackageError for an engine in this process that is not installed; before anything loads.

    ArgumentError for vLLM beside a policy whose tensors are cut over `tensor_parallel` processes, which are one data rank.
    """
    if settings is not None and tensor_parallel > 1:
        raise ArgumentError(
            f"use_vllm=True does not go with tp_size={tensor_parallel}: the processes that share a policy's tensors would each "
            "ask for the same completions. Shard the policy with fsdp2 or zero3, or remove use_vllm."
        )
    if settings is not None and isinstance(settings.where, ColocateSettings):
        require_vllm()


def adapters_idle(settings: VllmSettings | None, policy: Any, num_ranks: int) -> str:
    """Return why `vllm_adapters=False` changes nothing, since merged weights are sent in any case; nothing where it acts."""
    if settings is None or settings.adapters:
        return ""
    where = settings.where
    if not is_peft(policy):
        return "the policy has no adapter; remove it"
    if _servable_adapter(policy) is None:
        return "vLLM cannot serve this adapter, and merged weights are sent; remove it"
    if isinstance(where, ColocateSettings) and not where.engine_kwargs.get("enable_lora"):
        return "a colocated engine gets merged weights unless vllm_engine_kwargs has enable_lora; remove it"
    if isinstance(where, ServerSettings) and num_ranks > 1:
        return "servers that several ranks share get merged weights; remove it"
    return ""


def make_engine(
    trainer: Any,
    parts: OnlineParts,
    strategy: Strategy,
    run: Run,
    tally: Tally,
    rollout_func: Callable[..., Mapping[str, Any]] | None,
) -> RolloutEngine:
    """The engine that the arguments ask for; vLLM's is connected, or built, when it is first needed."""
    budget = parts.settings.memory.gather_budget

    def hold(num_bytes: int | None = budget) -> AbstractContextManager[nn.Module]:
        gathered = _free_to_gather(trainer, strategy, run) if num_bytes is None else num_bytes
        return strategy.hold(trainer.model_wrapped, gathered)

    device = trainer.accelerator.device
    engine: RolloutEngine
    held: Callable[[], AbstractContextManager[nn.Module]]
    if parts.settings.vllm is None:
        engine = NativeEngine(hold, parts.tokenizer, lambda: run.sizes.kv_cache_bytes, tally.add, device)
        held = engine.held
    else:
        if rollout_func is not None:
            check_function(parts.settings.vllm)
        engine = vllm_engine(parts, strategy, run, device, tally)
        held = partial(hold, 0)
    if rollout_func is None:
        return engine
    policy, tokenizer = causal_lm(parts.policy), parts.tokenizer
    new_reader = partial(
        PromptReader,
        tokenizer,
        chat_template_kwargs=parts.args.chat_template_kwargs or {},
        num_embeddings=num_embeddings(policy),
    )
    return FunctionEngine(
        rollout_func,
        trainer,
        engine,
        held,
        end_ids=lambda sampling: end_token_ids(policy, tokenizer, sampling),
        new_reader=new_reader,
    )


def vllm_engine(parts: OnlineParts, strategy: Strategy, run: Run, device: torch.device, tally: Tally) -> VllmEngine:
    """The engine over vLLM in this process, or over servers."""
    settings, policy, tokenizer = parts.settings.vllm, causal_lm(parts.policy), parts.tokenizer
    assert settings is not None, "the run has vLLM"
    settings = replace(settings, where=within_rotations(settings.where, first_rotations(policy)))
    ranks, where = strategy.ranks, settings.where
    if is_peft(parts.policy) and parts_tied(parts.policy, strategy.layout(parts.policy)):
        raise ArgumentError(
            "the adapter makes different weights of embedding and head, which the model's config ties and vLLM keeps as one: leave "
            "both as they are, put both in modules_to_save with ensure_weight_tying=True, or leave use_vllm out."
        )
    adapter = _servable_adapter(parts.policy)
    told = PolicyFacts(
        lambda sampling: end_token_ids(policy, tokenizer, sampling),
        num_embeddings(policy),
        adapter,
        unchanging(parts.policy),
    )
    if isinstance(where, ColocateSettings):
        check_colocated(where, device)
        callers = Callers(ranks.teams(where.tensor_parallel_size))
        connect = partial(_colocated, _blueprint(parts, where, policy, run, device), settings, callers.team)
    else:
        callers = Callers(ranks.teams(1), num_callers=ranks.world_size, pushes=ranks.rank == 0)
        connect = partial(served, where, policy, tokenizer, lambda: run.interrupts.stopping)
    return VllmEngine(connect, settings, told, callers, tally.note_push)


def _colocated(blueprint: Blueprint, settings: VllmSettings, team: Ranks) -> Sequence[Vllm]:
    return [ColocatedVllm(blueprint, settings, team)]


def served(
    where: ServerSettings, policy: Any, tokenizer: Any, stopping: Callable[[], bool] = lambda: False
) -> Sequence[Vllm]:
    """The servers, once all of them answer; EngineError where one has another model or tokenizer loaded than the policy's."""
    vllms = connect_servers(where, stopping)
    for vllm in vllms:
        facts = vllm.facts()
        warn_unsupported(facts.version)
        check_same(facts, policy, tokenizer)
        _check_rotations(facts, first_rotations(policy), where)
    return vllms


def _check_rotations(facts: Facts, limit: int | None, where: ServerSettings) -> None:
    if limit is not None and facts.max_model_len > limit:
        raise EngineError(
            f"vLLM has a context of {facts.max_model_len} tokens, for which it rotates all rows as long ones (longrope): start "
            f"it with {option(where, 'max_model_length')} {limit}."
        )


def within_rotations(where: ColocateSettings | ServerSettings, limit: int | None) -> ColocateSettings | ServerSettings:
    """A colocated engine whose context ends where a longrope model's first rotations do; ArgumentError for a longer one."""
    if limit is None or isinstance(where, ServerSettings):
        return where
    given = where.max_model_length
    if given is not None and given > limit:
        raise ArgumentError(
            f"vllm_max_model_length={given} is beyond {limit}, up to which this model has one set of rotations (longrope): vLLM "
            "would rotate all rows as long ones. Lower it, or leave it out."
        )
    return replace(where, max_model_length=given or limit)


def _servable_adapter(policy: Any) -> dict[str, Any] | None:
    """The settings of the policy's adapter, if vLLM can put it on a base: one plain LoRA and nothing else that is trained."""
    if not is_peft(policy) or len(policy.active_adapters) != 1:
        return None
    config = adapter_config(policy)
    plain = config.get("peft_type") == "LORA" and config.get("bias", "none") == "none"
    return config if plain and not config.get("modules_to_save") and not config.get("use_dora") else None


def _blueprint(parts: OnlineParts, where: ColocateSettings, policy: Any, run: Run, device: torch.device) -> Blueprint:
    args, config = parts.args, policy.config
    dtype = "bfloat16" if args.bf16 else "float16" if args.fp16 else str(parameter_dtype(policy)).removeprefix("torch.")
    return Blueprint(
        config=config,
        tokenizer=parts.tokenizer,
        architecture=(config.architectures or [type(policy).__name__])[0],
        dtype=dtype,
        device=device,
        kv_cache_bytes=where.kv_cache_bytes or _cache_on_host(policy, run, device),
        trust_remote_code=args.trust_remote_code,
        seed=args.seed,
    )


def _cache_on_host(policy: Any, run: Run, device: torch.device) -> int | None:
    """On CPUs, where vLLM's share would be of all the host's memory: the native engine's bytes, or what most rows can fill."""
    if device.type != "cpu":
        return None
    enough = _MOST_ROWS * (context_length(policy) or 1 << 15) * bytes_per_token(policy)
    return int(min(run.sizes.kv_cache_bytes, max(_LEAST_CACHE, enough)))


def check_function(settings: VllmSettings) -> None:
    """ArgumentError if a user's function would ask an engine that several ranks have to ask equally often."""
    where = settings.where
    if isinstance(where, ColocateSettings) and where.tensor_parallel_size > 1:
        raise ArgumentError(
            f"vllm_tensor_parallel_size={where.tensor_parallel_size} does not go with rollout_func: the ranks of one engine ask "
            "it together, and functions ask as often as they like. Set it to 1, or use vllm_mode='server'."
        )


def _free_to_gather(trainer: Any, strategy: Strategy, run: Run) -> int:
    """Half of what the KV cache leaves of the free memory, on the rank that has least."""
    if not strategy.cuts_parameters:
        return ALL
    free = free_bytes(trainer.accelerator.device) - run.sizes.kv_cache_bytes
    return int(strategy.ranks.min([max(0, free)])[0]) // 2

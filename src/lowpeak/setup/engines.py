"""The engine of a run: the policy itself, vLLM, or a user's function over one of them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from lowpeak.arguments import (
    ColocateSettings,
    Sampling,
    ServerSettings,
    VllmSettings,
    check_server_groups,
    is_servable_adapter,
)
from lowpeak.data import PromptReader
from lowpeak.environments import EnvironmentEngine, ResultRow, ToolResults
from lowpeak.errors import ArgumentError, EngineError
from lowpeak.heads import causal_lm, critic_classifier, is_peft, num_embeddings, transformers_model
from lowpeak.journal import read_tool_results
from lowpeak.memory import free_bytes
from lowpeak.models import context_length, longrope_switch_length
from lowpeak.parallel import unchanged_names, unties_head
from lowpeak.ranks import Ranks
from lowpeak.rollout import FunctionEngine, RolloutEngine, TurnEngine
from lowpeak.rollout.native import (
    CudaCapture,
    DecodeGraphs,
    NativeEngine,
    end_token_ids,
    needs_equal_lengths,
    parameter_dtype,
    sequence_bytes,
    unsupported_reason,
    weight_copies,
)
from lowpeak.setup.prepare_run import OnlineParts
from lowpeak.setup.prompts import max_prompt_tokens, teacher_prompts
from lowpeak.sizes import SYNC_BYTES, Sizes
from lowpeak.training import RolloutStats, Run, RunContext
from lowpeak.vllm import (
    ColocatedModelSpec,
    ColocatedVllm,
    EngineInfo,
    EngineSharing,
    PolicyFacts,
    Vllm,
    VllmEngine,
    check_adapters,
    check_colocated,
    check_same_model,
    option_name,
    warn_unsupported,
)
from lowpeak.vllm import connect_servers as connect_servers
from lowpeak.vllm.weight_sync import adapter_config

_logger = logging.getLogger(__name__)

_MAX_SEQUENCES = 256  # that vLLM decodes at once by default
_LEAST_CACHE_BYTES = 1 << 24
# Decode steps between a turn and the next under full_determinism: more hide slower tools, and delay quick ones.
_TURN_LAG = 8


def why_adapters_idle(settings: VllmSettings | None, policy: nn.Module) -> str:
    """Return why `vllm_adapters=False` has no effect (merged weights are sent anyway); empty if it has one."""
    if settings is None or settings.adapters:
        return ""
    where = settings.where
    if not is_peft(policy):
        return "the policy has no adapter; remove it"
    if _servable_adapter(policy) is None:
        return "vLLM cannot serve this adapter, and merged weights are sent; remove it"
    if isinstance(where, ColocateSettings) and not where.engine_kwargs.get("enable_lora"):
        return "a colocated engine gets merged weights unless vllm_engine_kwargs has enable_lora; remove it"
    return ""


def why_no_graphs(policy: nn.Module, has_tools: bool) -> str:
    """Return why `cuda_graphs` has no effect for a model; empty if it has one."""
    if has_tools:
        return "turns are decoded without graphs; remove it"
    if getattr(transformers_model(policy), "is_quantized", False):
        return "the kernels of quantised weights are not captured; remove it"
    reason = unsupported_reason(policy)
    return "" if reason is None else f"the model generates by model.generate(): {reason}; remove it"


def describe_generation(policy: nn.Module, vllm: VllmSettings | None, *, by_function: bool = False) -> str:
    """Describe the generation path; name the reason if the decode loop cannot run."""
    if by_function:
        return f"rollout_func, whose engine is: {describe_generation(policy, vllm)}"
    if vllm is not None:
        return f"vLLM, {vllm.mode}"
    reason = unsupported_reason(policy)
    if reason is None:
        return "decode loop"
    equal = ", in batches of prompts of one length" if needs_equal_lengths(policy) else ""
    return f"model.generate(){equal}, which is slower and takes more memory: {reason}"


def make_engines(
    context: RunContext,
    parts: OnlineParts,
    run: Run,
    stats: RolloutStats,
    rollout_func: Callable[..., Mapping[str, Any]] | None,
) -> list[RolloutEngine]:
    """Return the run's engine, or with `max_staleness` one for each group of servers.

    Servers that hold an adapter per version of the weights are one group.
    """
    staleness, vllm = parts.settings.max_staleness, parts.settings.vllm
    if not staleness:
        return [make_engine(context, parts, run, stats, rollout_func)]
    assert vllm is not None and isinstance(vllm.where, ServerSettings), "rollouts ahead need servers"  # noqa: PT018
    _log_path(parts, by_function=False)
    device, urls = context.accelerator.device, vllm.where.base_urls
    has_adapters = vllm.adapters and _servable_adapter(parts.policy) is not None
    check_server_groups(staleness, vllm.where, has_adapters)
    num_groups = 1 if has_adapters else staleness
    groups = [replace(vllm, where=replace(vllm.where, base_urls=urls[i::num_groups])) for i in range(num_groups)]
    engines = [
        replace(
            vllm_engine(context, parts, run, device, stats, group), in_background=True, deadline=_stop_time(context)
        )
        for group in groups
    ]
    return [
        each if parts.toolset is None else _environment_engine(context, parts, run, each, stats) for each in engines
    ]


def _stop_time(context: RunContext) -> Callable[[], float]:
    return lambda: context.run.interrupts.deadline


def make_engine(
    context: RunContext,
    parts: OnlineParts,
    run: Run,
    stats: RolloutStats,
    rollout_func: Callable[..., Mapping[str, Any]] | None,
) -> RolloutEngine:
    """Return the engine that the arguments ask for; vLLM is connected, or built, when it is first needed."""
    budget, strategy = parts.settings.memory.gather_budget, run.strategy

    @contextmanager
    def gather_policy(num_bytes: int | None = budget) -> Iterator[nn.Module]:
        num_bytes = _free_in_rollout(context) if num_bytes is None else num_bytes
        # A user's function gets the model with its own weights.
        copies = 0 if strategy.shards_parameters or rollout_func is not None else num_bytes
        gathered = strategy.gather_for_inference(context.model_wrapped, num_bytes)
        with gathered as model, weight_copies(model, _autocast_dtype(context), copies):
            yield model

    device = context.accelerator.device
    _log_path(parts, by_function=rollout_func is not None)
    engine: TurnEngine
    gather_for_function: Callable[[], AbstractContextManager[nn.Module]]
    if parts.settings.vllm is None:
        kv_cache_bytes = lambda: context.run.sizes.kv_cache_bytes  # noqa: E731  # they change
        graphs = _decode_graphs(parts, device, strategy.shards_parameters)
        lag = _TURN_LAG if parts.args.full_determinism else None
        engine = NativeEngine(gather_policy, parts.tokenizer, kv_cache_bytes, stats.add, device, graphs, lag)
        gather_for_function = engine.keep_gathered
    else:
        if rollout_func is not None:
            check_function(parts.settings.vllm)
        engine = vllm_engine(context, parts, run, device, stats, parts.settings.vllm)
        gather_for_function = partial(gather_policy, 0)
    if rollout_func is not None:
        template = parts.settings.prompts.chat_template_kwargs
        reader = partial(_new_reader(parts), parts.tokenizer, chat_template_kwargs=template)
        return FunctionEngine(rollout_func, context, engine, gather_for_function, _end_ids(parts), reader)
    return engine if parts.toolset is None else _environment_engine(context, parts, run, engine, stats)


def _log_path(parts: OnlineParts, *, by_function: bool) -> None:
    is_slow = parts.settings.vllm is None and not by_function and unsupported_reason(parts.policy) is not None
    path = describe_generation(parts.policy, parts.settings.vllm, by_function=by_function)
    _logger.log(logging.WARNING if is_slow else logging.INFO, "Generation: %s.", path)


def _end_ids(parts: OnlineParts) -> Callable[[Sampling], frozenset[int]]:
    return partial(end_token_ids, causal_lm(parts.policy), parts.tokenizer)


def _new_reader(parts: OnlineParts) -> Callable[..., PromptReader]:
    return partial(
        PromptReader, num_embeddings=num_embeddings(causal_lm(parts.policy)), report_idle=parts.row_effects.add
    )


def _environment_engine(
    context: RunContext, parts: OnlineParts, run: Run, engine: TurnEngine, stats: RolloutStats
) -> EnvironmentEngine:
    """Return the engine of the run's tools and environments over `engine`."""
    assert parts.toolset is not None, "the run has tools"
    policy, prompts = causal_lm(parts.policy), parts.settings.prompts
    max_new_tokens, max_model_length = parts.settings.sampling.max_new_tokens, prompts.vllm_max_model_length
    group_size = parts.args.model_parallel.tensor
    return EnvironmentEngine(
        engine,
        parts.tokenizer,
        parts.toolset,
        prompts.chat_template_kwargs,
        partial(_new_reader(parts), teacher=teacher_prompts(parts.teacher)),
        _end_ids(parts),
        stats.add_conversations,
        stats.add_prompts,
        max_prompt_tokens(policy, critic_classifier(policy), max_new_tokens, max_model_length),
        run.strategy.ranks.processes.subgroup(group_size) if group_size > 1 else None,
        _tool_results(context),
        num_embeddings(policy),
    )


def _tool_results(context: RunContext) -> ToolResults:
    """Return the results of tools in the journal: a resumed run uses those of rollouts that it generates again."""

    def write(row: ResultRow) -> None:
        if context.is_in_train:  # an evaluation by itself would begin a new journal
            context.run.journal.write_tool_result(context.state.global_step + 1, row)

    def read() -> Mapping[str, ResultRow] | None:
        step = context.state.global_step
        if not context.is_in_train:
            return None
        # A run without a checkpoint starts anew: files that are there are another run's.
        return read_tool_results(context.run.journal.folder, step) if step else {}

    return ToolResults(write, read)


def _decode_graphs(parts: OnlineParts, device: torch.device, sharded: bool) -> DecodeGraphs | None:
    acts = parts.settings.cuda_graphs and device.type == "cuda" and not sharded
    return DecodeGraphs(CudaCapture) if acts and not why_no_graphs(parts.policy, parts.toolset is not None) else None


def vllm_engine(
    context: RunContext,
    parts: OnlineParts,
    run: Run,
    device: torch.device,
    stats: RolloutStats,
    settings: VllmSettings,
) -> VllmEngine:
    """Return the engine over vLLM in this process, or over servers."""
    policy, tokenizer = causal_lm(parts.policy), parts.tokenizer
    settings = replace(settings, where=within_rotations(settings.where, longrope_switch_length(policy)))
    ranks, where = run.strategy.ranks, settings.where
    if is_peft(parts.policy) and unties_head(parts.policy, run.strategy.layout(parts.policy)):
        raise ArgumentError(
            "the adapter trains embedding and lm_head separately, but the model ties them and vLLM stores one copy: train "
            "neither, put both in modules_to_save with ensure_weight_tying=True, or leave use_vllm out."
        )
    adapter = _servable_adapter(parts.policy)
    policy_facts = PolicyFacts(
        lambda sampling: end_token_ids(policy, tokenizer, sampling),
        num_embeddings(policy),
        adapter,
        unchanged_names(parts.policy),
    )
    if isinstance(where, ColocateSettings):
        check_colocated(where, device)
        sharing = EngineSharing(ranks.subgroup(where.tensor_parallel_size))
        spec = _model_spec(parts, where, policy, run, device)
        connect = partial(_colocated, spec, settings, sharing.engine_ranks, lambda: context.run.sizes)
    else:
        sharing = EngineSharing(ranks.subgroup(1), num_callers=ranks.world_size, pushes=ranks.rank == 0)
        staleness = parts.settings.max_staleness if adapter is not None and settings.adapters else 0
        connect = partial(connect_checked, where, policy, tokenizer, lambda: run.interrupts.stopping, staleness)

    def most_bucket_bytes() -> int:
        limit = context.run.sizes.sync_bytes  # of a memory budget, or after an out-of-memory error
        return limit if limit < SYNC_BYTES else settings.bucket_bytes

    return VllmEngine(connect, settings, policy_facts, sharing, stats.add_push, most_bucket_bytes)


def _colocated(
    spec: ColocatedModelSpec, settings: VllmSettings, engine_ranks: Ranks, sizes: Callable[[], Sizes]
) -> Sequence[Vllm]:
    if "kv_cache_bytes" in sizes().lowered:
        num_bytes, where = sizes().kv_cache_bytes, settings.where
        assert isinstance(where, ColocateSettings)
        spec = replace(spec, kv_cache_bytes=num_bytes)
        settings = replace(settings, where=replace(where, kv_cache_bytes=num_bytes))
    return [ColocatedVllm(spec, settings, engine_ranks)]


def connect_checked(
    where: ServerSettings,
    policy: nn.Module,
    tokenizer: Any,
    stopping: Callable[[], bool] = lambda: False,
    staleness: int = 0,
) -> Sequence[Vllm]:
    """Return the servers when all answer; EngineError if one has another model or tokenizer than the policy.

    Also if one holds too few adapters for rollouts that are `staleness` versions of the policy's adapter ahead.
    """
    vllms = connect_servers(where, stopping)
    for vllm in vllms:
        info = vllm.info()
        warn_unsupported(info.version)
        check_same_model(info, policy, tokenizer)
        _check_rotations(info, longrope_switch_length(policy), where)
        check_adapters(info, staleness)
    return vllms


def _check_rotations(info: EngineInfo, limit: int | None, where: ServerSettings) -> None:
    if limit is not None and info.max_model_len > limit:
        raise EngineError(
            f"vLLM has a context of {info.max_model_len} tokens, for which it uses the long rotations of longrope on all "
            f"sequences: start it with {option_name(where, 'max_model_length')} {limit}."
        )


def within_rotations(where: ColocateSettings | ServerSettings, limit: int | None) -> ColocateSettings | ServerSettings:
    """Limit a colocated engine's context to a longrope model's short rotations; ArgumentError for a longer context."""
    if limit is None or isinstance(where, ServerSettings):
        return where
    length = where.max_model_length
    if length is not None and length > limit:
        raise ArgumentError(
            f"vllm_max_model_length={length} is beyond {limit}, up to which this model uses its short rotations (longrope): "
            "vLLM would use the long ones on all sequences. Lower it, or leave it out."
        )
    return replace(where, max_model_length=length or limit)


def _servable_adapter(policy: Any) -> dict[str, Any] | None:
    """Return the settings of the policy's adapter if vLLM can serve it: one plain LoRA, and nothing else is trained."""
    if not is_peft(policy) or len(policy.active_adapters) != 1:
        return None
    config = policy.peft_config[policy.active_adapters[0]]
    return adapter_config(policy) if is_servable_adapter(config) else None


def _model_spec(
    parts: OnlineParts, where: ColocateSettings, policy: Any, run: Run, device: torch.device
) -> ColocatedModelSpec:
    args, config = parts.args, policy.config
    dtype = "bfloat16" if args.bf16 else "float16" if args.fp16 else str(parameter_dtype(policy)).removeprefix("torch.")
    return ColocatedModelSpec(
        config=config,
        tokenizer=parts.tokenizer,
        architecture=(config.architectures or [type(policy).__name__])[0],
        dtype=dtype,
        device=device,
        kv_cache_bytes=where.kv_cache_bytes or _cache_on_host(policy, run, device),
        trust_remote_code=parts.settings.model.trust_remote_code,
        seed=args.seed,
    )


def _cache_on_host(policy: nn.Module, run: Run, device: torch.device) -> int | None:
    """Return the bytes of vLLM's KV cache on CPUs, where its default is a share of all host memory.

    These are the native engine's bytes, or fewer if the most sequences that vLLM decodes cannot fill them.
    """
    if device.type != "cpu":
        return None
    enough = _MAX_SEQUENCES * sequence_bytes(policy, context_length(policy) or 1 << 15)
    return int(min(run.sizes.kv_cache_bytes, max(_LEAST_CACHE_BYTES, enough)))


def check_function(settings: VllmSettings) -> None:
    """Raise ArgumentError for a `rollout_func` over an engine that several ranks must call equally often."""
    where = settings.where
    if isinstance(where, ColocateSettings) and where.tensor_parallel_size > 1:
        raise ArgumentError(
            f"vllm_tensor_parallel_size={where.tensor_parallel_size} does not go with rollout_func: the ranks of one engine call "
            "it together, and functions call it as often as they like. Set it to 1, or use vllm_mode='server'."
        )


def _free_in_rollout(context: RunContext) -> int:
    """Return the gather budget of a plan, or half of what the KV cache leaves free; of shards on the rank that has least."""
    sizes, strategy = context.run.sizes, context.run.strategy
    if sizes.gather_budget is not None:
        return sizes.gather_budget
    free = max(0, free_bytes(context.accelerator.device) - sizes.kv_cache_bytes)
    return int(strategy.ranks.min([free])[0] if strategy.shards_parameters else free) // 2


def _autocast_dtype(context: RunContext) -> torch.dtype | None:
    """Return the dtype in which the policy's forward computes under autocast; None without autocast."""
    return torch.bfloat16 if context.accelerator.mixed_precision == "bf16" else None

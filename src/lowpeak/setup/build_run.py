"""The second half of building a run, once transformers' Trainer has an accelerator: strategy, sizes, engine, collector.

Of `args`, only arguments that transformers declares are read: bf16, seeds, output_dir, activation checkpointing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import AutocastKwargs
from torch import Tensor, nn
from transformers import PreTrainedModel

from lowpeak.arguments import MemorySettings, RunFacts
from lowpeak.attention import check_spans
from lowpeak.checkpoint import converts_weights
from lowpeak.data import PromptReader, padding_id
from lowpeak.errors import ModelError
from lowpeak.heads import (
    LoadBalance,
    causal_lm,
    check_critic_vocabulary,
    critic_classifier,
    install_head,
    load_balance_of,
    media_token_ids,
    num_embeddings,
    transformers_model,
    verify_load_balance,
)
from lowpeak.journal import Journal
from lowpeak.memory import (
    LEAST_BYTES,
    ActivationOffload,
    AsyncHostMover,
    HostMover,
    RolloutOffloader,
    allow_cudnn_attention,
    room_in_budget,
)
from lowpeak.models import LOGPROB_HEAD, HeadKind, Reference, adapter_reference, materialize_meta_params, own_teacher
from lowpeak.parallel import FrozenModel, Strategy, detect_strategy, is_sharded, states_on_host
from lowpeak.rewards import ModelReward, Reward, RewardPanel, RewardSettings
from lowpeak.setup.engines import make_engines, why_adapters_idle, why_no_graphs
from lowpeak.setup.prepare_run import OnlineParts, RunParts, needs_reference
from lowpeak.setup.prompts import (
    chat_options,
    check_end_tokens,
    context_name,
    dataset_completions,
    max_prompt_tokens,
    prompt_cursor,
    report_idle_template,
    teacher_prompts,
)
from lowpeak.setup.storage import acting_storage, add_idle_storage, set_optimizer, storage_fractions
from lowpeak.sizes import (
    LayoutChoice,
    LongestPrompts,
    PlannedMemory,
    StartPlan,
    budget_bytes,
    prepare_layout,
    resolve_sizes,
    training_bytes,
)
from lowpeak.training import (
    BuildContext,
    LogprobSettings,
    ProgressTracker,
    RolloutCollector,
    RolloutStats,
    Run,
    RunContext,
    SuccessfulSiblings,
    WeightSync,
)


def connect_online(
    context: BuildContext,
    parts: OnlineParts,
    rollout_func: Callable[..., Mapping[str, Any]] | None,
    start_plan: StartPlan,
) -> tuple[Run, tuple[RolloutCollector, ...]]:
    """Return the run of an online trainer that has its accelerator, and a rollout collector for each engine."""
    args, settings = parts.args, parts.settings
    strategy = detect_strategy(context.accelerator)
    with strategy.ranks.propagate_errors():
        check_spans(transformers_model(parts.policy))
        report_effects(parts, _run_facts(context, parts, strategy))
    critic = critic_classifier(causal_lm(parts.policy))
    if critic is not None:
        check_critic_vocabulary(critic, parts.policy, parts.tokenizer)
    check_end_tokens(settings.sampling.stop_token_ids, num_embeddings(parts.policy))
    prompts, max_new_tokens = settings.prompts, settings.sampling.max_new_tokens
    limit = max_prompt_tokens(parts.policy, critic, max_new_tokens, prompts.vllm_max_model_length)
    new_reader = partial(
        PromptReader,
        parts.tokenizer,
        chat_template_kwargs=chat_options(parts),
        max_prompt_tokens=limit,
        overlong=prompts.overlong_prompts,
        limit_reason=f"{context_name(prompts, critic)} less max_completion_length {max_new_tokens}",
        num_embeddings=num_embeddings(parts.policy),
        media_token_ids=media_token_ids(parts.policy),
        report_idle=parts.row_effects.add,
        teacher=teacher_prompts(parts.teacher),
    )
    reader = new_reader(completions=dataset_completions(parts))
    with strategy.ranks.propagate_errors():
        cursor = prompt_cursor(context.train_dataset, reader, settings, args)
        # A stream has read no row yet.
        longest = LongestPrompts(reader.longest, reader.longest_of_teacher) if reader.longest else None
        parts.row_effects.report()
        report_idle_template(parts, reader, cursor.rows_per_epoch)
    is_offloadable = _has_frozen_models(parts) or not states_on_host(context.accelerator.state)
    offloads = settings.memory.offload_during_rollout and is_offloadable
    offloader = make_rollout_offloader(context, parts.policy, strategy) if offloads else None
    freeze = _freezer(context, parts, strategy, offloader)
    reference = _reference(parts, freeze) if needs_reference(parts.algorithm, settings) else None
    _freeze_reward_models(parts.rewards, freeze, strategy, context.accelerator.device)
    run = make_run(context, parts, strategy, start_plan, reference, longest=longest)
    stats, panel = RolloutStats(), _panel(parts, new_reader)
    # A function may need all entries of a group, and environments stay in their process.
    splits_groups = rollout_func is None and not (parts.toolset is not None and parts.toolset.has_environments)
    shared = (panel, cursor, new_reader, stats, splits_groups, offloader)
    engines = make_engines(context, parts, run, stats, rollout_func)
    return run, tuple(RolloutCollector(context, settings, engine, WeightSync(context), *shared) for engine in engines)


def make_run(
    context: BuildContext,
    parts: RunParts,
    strategy: Strategy,
    start_plan: StartPlan,
    reference: Reference | None = None,
    head: HeadKind = LOGPROB_HEAD,
    longest: LongestPrompts | None = None,
) -> Run:
    """Install the log-prob head in the policy, check it against the model's logits, and return the run.

    A separate `reference` gets the policy's layout of sequences. The checks run as sharded models do. With a memory budget,
    sizes follow from a plan for prompts of these lengths at most.
    """
    device, ranks = context.accelerator.device, strategy.ranks
    args, settings, algorithm, policy = parts.args, parts.settings, parts.algorithm, parts.policy
    memory, passes, cast_head = settings.memory, settings.passes, settings.model.cast_lm_head_to_fp32
    allow_cudnn_attention(passes.cudnn_attention)
    # A cache of bf16 copies would keep 2 bytes per parameter until a forward pass ends, and each copy is used once.
    context.accelerator.autocast_handler = AutocastKwargs(cache_enabled=False)
    with ranks.propagate_errors():
        head.install(policy, cast_head_to_fp32=cast_head)
    load_balance = load_balance_of(transformers_model(policy), passes.router_aux_loss_coef)
    if load_balance is not None:  # sequences with zero advantages move the routers, too
        algorithm = replace(algorithm, skip_zero_advantage=False)
    choice = _check_models(context, strategy, policy, reference, memory, head, load_balance)
    storage = acting_storage(settings.model, policy)
    shares = storage_fractions(context, storage)
    sizes, memory_budget, planned = resolve_sizes(
        context, settings, policy, strategy, choice, shares, storage, longest, start_plan
    )
    materialize_meta_params(policy)
    if storage is not None:
        set_optimizer(context, args, storage)
    saving = ActivationOffload(policy, AsyncHostMover(device)).saving if memory.activation_offloading else nullcontext
    return Run(
        algorithm=algorithm,
        logprob_settings=LogprobSettings(
            passes.temperature, sizes.logprob_chunk_size, device, passes.log_entropy, saving, load_balance
        ),
        strategy=strategy,
        tracker=ProgressTracker(device, context),
        journal=Journal(Path(args.output_dir) / "journal", ranks.processes.rank),
        sizes=sizes,
        budget=sizes.budget(memory, padding_id(parts.tokenizer), policy.config),
        num_parameters=sum(getattr(p, "ds_numel", p.numel()) for p in policy.parameters()),
        memory_budget=memory_budget,
        storage=storage,
        converts_weights=_converts_weights(policy, strategy),
        reference=reference,
        planned=(
            PlannedMemory(context, policy, start_plan, planned)
            if memory.plan_memory and ranks.processes.rank == 0
            else None
        ),
    )


def _converts_weights(policy: nn.Module, strategy: Strategy) -> bool:
    """Return whether transformers converts the weights of a policy when it stores them; adapters are stored as they are."""
    return isinstance(policy, PreTrainedModel) and converts_weights(policy, strategy.layout(policy))


def _check_models(
    context: RunContext,
    strategy: Strategy,
    policy: nn.Module,
    reference: Reference | None,
    memory: MemorySettings,
    head: HeadKind,
    load_balance: LoadBalance | None,
) -> LayoutChoice:
    """Check the policy's head against its logits, and choose a layout of sequences that all models can have."""
    device, ranks = context.accelerator.device, strategy.ranks
    with ExitStack() as on_device:
        models = [on_device.enter_context(strategy.gather_for_inference(policy, 0, gather_head=True))]
        with ranks.propagate_errors(), _mixed_dtypes(context, policy):
            head.verify(policy)
            if load_balance is not None:
                verify_load_balance(policy, load_balance)
        if reference is not None and reference.model is not None:
            models.append(on_device.enter_context(reference.ready()))
        critic = critic_classifier(causal_lm(policy))
        if critic is not None:
            models.append(on_device.enter_context(strategy.gather_for_inference(critic, 0)))
        with context.accelerator.autocast():  # as the passes will compute
            return prepare_layout(memory, models, device, ranks)


def computes_in_fp32(args: Any, *models: nn.Module | None) -> bool:
    """Return whether all products are in fp32 already, so that `cast_lm_head_to_fp32` has no effect."""
    dtypes = {parameter.dtype for model in models if model is not None for parameter in model.parameters()}
    return not args.bf16 and dtypes <= {torch.float32}


@contextmanager
def _mixed_dtypes(context: RunContext, policy: nn.Module) -> Iterator[None]:
    """Compute under autocast if the weights have several dtypes; raise ModelError if they cannot be multiplied."""
    dtypes = {p.dtype for p in policy.parameters() if p.is_floating_point()}
    try:
        with context.accelerator.autocast() if len(dtypes) > 1 else nullcontext():
            yield
    except RuntimeError as error:
        if len(dtypes) == 1 or "dtype" not in str(error):
            raise
        names = " and ".join(sorted(str(d).removeprefix("torch.") for d in dtypes))
        in_bf16 = any(p.dtype == torch.bfloat16 for p in policy.parameters() if p.requires_grad)
        short, dtype = ("bf16", "bfloat16") if in_bf16 else ("fp32", "float32")
        raise ModelError(
            f"the model's weights are {names}, since trained weights are {short}, but its layers need one dtype: set bf16=True, or "
            f"load all in {short} (dtype={dtype!r} in from_pretrained or in model_init_kwargs)."
        ) from error


# offloading during rollouts, and frozen models


def make_rollout_offloader(
    context: RunContext,
    policy: nn.Module,
    strategy: Strategy,
    mover: HostMover | None = None,
    least_bytes: int = LEAST_BYTES,
) -> RolloutOffloader:
    """Return the offloader of a trainer's gradients and optimizer states."""
    mover = mover or HostMover(context.accelerator.device)

    def needed() -> Iterable[Tensor]:
        return _tensors(policy, strategy)

    # The optimizer is made when training starts, and has no states before its first step.
    return RolloutOffloader(mover, needed, lambda: strategy.offloadable_tensors(policy, context.optimizer), least_bytes)


def add_to_offloader(offloader: RolloutOffloader | None, strategy: Strategy, frozen: FrozenModel) -> FrozenModel:
    """Return a frozen model that the offloader moves too, and brings to the device while it is used."""
    if offloader is None:
        return frozen

    def tensors() -> Iterable[Tensor]:
        return _tensors(frozen.model, strategy)

    @contextmanager
    def ready() -> Iterator[Any]:
        with offloader.on_device(tensors), frozen.ready() as model:
            yield model

    offloader.add(tensors)
    return FrozenModel(frozen.model, ready)


def _tensors(model: nn.Module, strategy: Strategy) -> Iterable[Tensor]:
    return [*strategy.shards(model).values(), *model.buffers()]


def _freezer(
    context: RunContext, parts: RunParts, strategy: Strategy, offloader: RolloutOffloader | None
) -> Callable[[nn.Module], FrozenModel]:
    """Return a function that prepares a frozen model.

    The model stays unsharded if it fits into half of what training leaves free on every rank.
    """
    device = context.accelerator.device
    storage = acting_storage(parts.settings.model, parts.policy)
    budget = budget_bytes(parts.settings.memory, device, strategy.ranks)
    free = room_in_budget(device, budget) - training_bytes(
        parts.policy, device, storage_fractions(context, storage), storage
    )
    room = int(strategy.ranks.min([max(0, free)])[0]) // 2
    on_host = parts.settings.memory.offload_frozen_models
    return lambda model: add_to_offloader(offloader, strategy, strategy.prepare_frozen(model, room, on_host))


def _freeze_reward_models(
    rewards: Iterable[Reward], freeze: Callable[[nn.Module], FrozenModel], strategy: Strategy, device: torch.device
) -> None:
    for reward in rewards:
        if isinstance(reward, ModelReward):
            frozen = freeze(reward.model)
            reward.replace_model(frozen, strategy.ranks if is_sharded(frozen.model) else None, device)


def make_reference(context: RunContext, parts: RunParts, strategy: Strategy) -> Reference | None:
    """Return the prepared reference of an offline run, None if the algorithm needs none."""
    if not needs_reference(parts.algorithm, parts.settings):
        return None
    return _reference(parts, _freezer(context, parts, strategy, None))


def _reference(parts: RunParts, freeze: Callable[[nn.Module], FrozenModel]) -> Reference:
    if parts.reference_model is None:
        if parts.teacher is None or parts.num_shared_ids is None:
            return adapter_reference(parts.policy)
        return own_teacher(parts.policy, parts.num_shared_ids, with_adapters=parts.teacher.kind == "live")
    install_head(parts.reference_model, cast_head_to_fp32=parts.settings.model.cast_lm_head_to_fp32)
    frozen = freeze(parts.reference_model)
    return Reference(frozen.model, frozen.ready, parts.num_shared_ids)


def _has_frozen_models(parts: OnlineParts) -> bool:
    return parts.reference_model is not None or any(isinstance(reward, ModelReward) for reward in parts.rewards)


# arguments and rewards


def report_effects(parts: RunParts, facts: RunFacts) -> None:
    """Report the arguments without effect, now that models and devices are known."""
    parts.effects.add_declared(facts)
    model = parts.settings.model
    add_idle_storage(parts.effects, parts.args, model, parts.policy, acting_storage(model, parts.policy))
    parts.effects.report()


def _run_facts(context: BuildContext, parts: OnlineParts, strategy: Strategy) -> RunFacts:
    """Return the facts of a run whose models and devices are known."""
    why_merged = why_adapters_idle(parts.settings.vllm, parts.policy)
    why_eager = why_no_graphs(parts.policy, parts.toolset is not None) if parts.settings.cuda_graphs else ""
    facts, idle = parts.settings.facts, {"vllm_adapters=False": why_merged, "cuda_graphs=True": why_eager}
    return replace(
        facts,
        idle={**facts.idle, **{argument: reason for argument, reason in idle.items() if reason}},
        sharded=strategy.shards_parameters,
        casts_weights=bool(parts.args.bf16) and any(p.dtype == torch.float32 for p in parts.policy.parameters()),
        in_fp32=computes_in_fp32(parts.args, parts.policy, parts.reference_model),
        states_on_host=states_on_host(context.accelerator.state),
        frozen=_has_frozen_models(parts),
        passed_optimizer=None if context.optimizer is None else "instance",
        passed_schedule=context.lr_scheduler is not None,
    )


def _panel(parts: OnlineParts, new_reader: Callable[[], PromptReader]) -> RewardPanel:
    settings, tokenizer = parts.settings, parts.tokenizer
    siblings = SuccessfulSiblings(parts.success.is_met, lambda: new_reader().teacher_ids)
    add_contexts = siblings.add_contexts if parts.teacher is not None and parts.teacher.reads_successes else None
    reward_settings = RewardSettings(settings.reward_weights, settings.reward_failures, settings.reward_timeout)
    return RewardPanel(
        parts.rewards, reward_settings, lambda ids: tokenizer.decode(ids, skip_special_tokens=True), add_contexts
    )

"""Putting an online run together: what can be made before transformers' Trainer exists, and what needs it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import AutocastKwargs
from torch import nn
from transformers import set_seed

from lowpeak.algorithms import Algorithm
from lowpeak.arguments import MemorySettings, OnlineSettings, acting, resolve_online, tell_idle
from lowpeak.checkpoint import check_writable
from lowpeak.data import PromptCursor, PromptReader, check_embedded, cursor_over, padding_id
from lowpeak.errors import ArgumentError, DataError, ModelError
from lowpeak.journal import Journal
from lowpeak.logprobs import causal_lm, install_head, verify_load_balance
from lowpeak.memory import ActivationOffload, DeviceMover, Rest, free_bytes
from lowpeak.models import (
    LOGPROBS,
    Head,
    Reference,
    adapter_reference,
    check_reads,
    context_length,
    critics_model,
    disable_dropout,
    give_room,
    is_peft,
    load_balance_of,
    load_policy,
    load_reference,
    load_tokenizer,
    num_embeddings,
    transformers_model,
    upcast_trainable,
)
from lowpeak.parallel import Frozen, Strategy, check_devices, detect_strategy, is_sharded, shares_of, states_on_host
from lowpeak.records import Prompt
from lowpeak.rewards import ModelReward, Reward, RewardPanel, RewardSettings, listed, make_rewards
from lowpeak.training.collector import RolloutMaker, Tally
from lowpeak.training.engines import OnlineParts, adapters_idle, check_engine, make_engine
from lowpeak.training.evaluation import Success
from lowpeak.training.layouts import prepare_layout
from lowpeak.training.phase_progress import ProgressTracker
from lowpeak.training.rollout_offload import make_rest, resting
from lowpeak.training.run import Run
from lowpeak.training.run_sizes import Sizes, training_bytes
from lowpeak.training.step import Core

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class OnlineInputs:
    """Models, rewards and tokenizers as the user passed them to an online trainer."""

    model: Any
    reward_funcs: Any
    processing_class: Any
    reward_processing_classes: Any
    peft_config: Any
    ref_model: Any


def prepare_online(
    inputs: OnlineInputs,
    args: Any,
    make_algorithm: Callable[[Any, OnlineSettings], Algorithm],
    complete: Callable[[nn.Module, Any, Any], None],
) -> OnlineParts:
    """Load and check all that does not need a device: arguments first, so that a wrong one costs no loading.

    `make_algorithm(args, settings)` is the algorithm as the arguments describe it; `complete(policy, model, args)` adds what else
    is trained, once the reference has been taken.
    """
    check_devices(bool(args.fsdp), args.cut.tensor > 1)
    settings = resolve_online(args, args.world_size // args.cut.tensor, len(listed(inputs.reward_funcs)))
    given, args = args, acting(args, settings.facts)
    algorithm = make_algorithm(args, settings)
    set_seed(args.seed)  # before anything is made: an adapter's start is drawn
    check_engine(settings.vllm, args.cut.tensor)
    if args.process_index == 0:
        check_writable(Path(args.output_dir))
    rewards = make_rewards(
        inputs.reward_funcs,
        inputs.reward_processing_classes,
        model_kwargs={"trust_remote_code": True} if args.trust_remote_code else {},
        chat_template_kwargs=args.chat_template_kwargs,
        device=args.device,
    )
    success = _success(args, rewards)
    policy = load_policy(
        inputs.model,
        args.model_init_kwargs,
        trust_remote_code=args.trust_remote_code,
        peft_config=inputs.peft_config,
        cut=args.cut,
        device=None if args.fsdp else args.device,
    )
    if settings.reference_sync is not None and is_peft(policy):
        raise ArgumentError(
            "sync_ref_model moves a reference that has weights of its own, and under an adapter the reference is the "
            "policy without it: remove sync_ref_model, or train without an adapter."
        )
    tokenizer = load_tokenizer(inputs.processing_class, inputs.model, args.trust_remote_code)
    check_embedded(tokenizer, num_embeddings(policy))
    reference = _load_reference(policy, inputs, args, "reference" in algorithm.needs)
    complete(policy, inputs.model, args)
    upcast_trainable(policy)
    if args.disable_dropout:
        for each in filter(None, (policy, reference)):
            disable_dropout(each)
    return OnlineParts(given, args, settings, algorithm, policy, reference, tokenizer, rewards, success)


def _load_reference(policy: nn.Module, inputs: OnlineInputs, args: Any, is_needed: bool) -> nn.Module | None:
    if is_needed:
        return load_reference(
            policy,
            inputs.model,
            args.model_init_kwargs,
            inputs.ref_model,
            trust_remote_code=args.trust_remote_code,
            cut=args.cut,
            device=args.device,
        )
    if inputs.ref_model is not None:
        raise ArgumentError("ref_model has no effect: beta is 0, so there is no reference; set beta or remove it.")
    return None


def connect_online(
    trainer: Any, parts: OnlineParts, rollout_func: Callable[..., Mapping[str, Any]] | None
) -> tuple[Run, RolloutMaker]:
    """The run and the rollout maker of a trainer whose accelerator stands."""
    args, settings = parts.args, parts.settings
    strategy = detect_strategy(trainer.accelerator)
    _tell_idle(trainer, parts, strategy)
    own = critics_model(causal_lm(parts.policy))
    if own is not None:
        check_reads(own, parts.policy, parts.tokenizer)
    limit = _max_prompt_tokens(parts.policy, own, args.max_completion_length, args.vllm_max_model_length)
    new_reader = partial(
        PromptReader,
        parts.tokenizer,
        chat_template_kwargs=args.chat_template_kwargs or {},
        max_prompt_tokens=limit,
        overlong=args.overlong_prompts,
        limit_reason=f"{_context_name(args, own)} less max_completion_length {args.max_completion_length}",
        num_embeddings=num_embeddings(parts.policy),
    )
    with strategy.ranks.together():
        cursor = _cursor(trainer.train_dataset, new_reader(), settings, args)
    something_rests = _has_frozen(parts) or not states_on_host(trainer.accelerator.state)
    rests = settings.memory.idle_on_host and something_rests
    rest = make_rest(trainer, parts.policy, strategy) if rests else None
    freeze = _freezer(trainer, parts, strategy, rest)
    reference = _reference(parts, freeze) if "reference" in parts.algorithm.needs else None
    for reward in parts.rewards:
        if isinstance(reward, ModelReward):
            frozen = freeze(reward.model)
            reward.use(frozen, strategy.ranks if is_sharded(frozen.model) else None, trainer.accelerator.device)
    run = make_run(trainer, args, parts.algorithm, strategy, parts.policy, settings.memory, reference)
    budget = run.sizes.budget(settings.memory, padding_id(parts.tokenizer), parts.policy.config)
    tally = Tally()
    maker = RolloutMaker(
        settings=settings,
        algorithm=parts.algorithm,
        engine=make_engine(trainer, parts, strategy, run, tally, rollout_func),
        panel=_panel(parts),
        cursor=cursor,
        new_reader=new_reader,
        strategy=strategy,
        model=lambda: trainer.model_wrapped,
        reference=reference,
        core=run.core,
        budget=budget,
        tracker=run.tracker,
        tally=tally,
        rest=rest,
    )
    return run, maker


def make_run(
    trainer: Any,
    args: Any,
    algorithm: Algorithm,
    strategy: Strategy,
    policy: nn.Module,
    memory: MemorySettings,
    reference: Reference | None = None,
    head: Head = LOGPROBS,
) -> Run:
    """The run's own parts: the core in the head, compared with what the model itself gives; tracker, journal, sizes.

    A `reference` of its own has its rows laid out as the policy's. What is compared runs as sharded models do.
    """
    output_dir = Path(args.output_dir)
    device = trainer.accelerator.device
    ranks = strategy.ranks
    # No copies of weights until a forward ends: 2 bytes a parameter, and each is used once.
    trainer.accelerator.autocast_handler = AutocastKwargs(cache_enabled=False)
    with ranks.together():
        head.install(policy, cast_head_to_fp32=args.cast_lm_head_to_fp32)
    load_balance = load_balance_of(transformers_model(policy), args.router_aux_loss_coef)
    if load_balance is not None:  # a row without an advantage moves the routers, too
        algorithm = algorithm.without_skipping()
    with ExitStack() as ready:
        models = [ready.enter_context(strategy.hold(policy, 0, whole_head=True))]
        with ranks.together(), _computing(trainer, policy):
            head.verify(policy)
            if load_balance is not None:
                verify_load_balance(policy, load_balance)
        if reference is not None and reference.model is not None:
            models.append(ready.enter_context(reference.use()))
        own = critics_model(causal_lm(policy))
        if own is not None:
            models.append(ready.enter_context(strategy.hold(own, 0)))
        with trainer.accelerator.autocast():  # as the passes will compute
            choice = prepare_layout(memory, models, device, ranks)
    checkpointing = args.checkpoints_activations
    shares = shares_of(trainer.accelerator)
    sizes = Sizes.of(
        memory, policy, device, choice, ranks, bf16=bool(args.bf16), checkpointing=checkpointing, shares=shares
    )
    give_room(policy)
    offloads = memory.activation_offloading
    saving = ActivationOffload(policy, DeviceMover(device)).saving if offloads else nullcontext
    return Run(
        algorithm=algorithm,
        core=Core(
            getattr(args, "temperature", 1.0), sizes.logprob_chunk_size, device, args.log_entropy, saving, load_balance
        ),
        strategy=strategy,
        tracker=ProgressTracker(device, trainer),
        journal=Journal(output_dir / "journal", writes=ranks.processes.rank == 0),
        algorithm_state=dict(algorithm.state),
        sizes=sizes,
        num_parameters=sum(getattr(p, "ds_numel", p.numel()) for p in policy.parameters()),
    )


def computes_in_fp32(args: Any, *models: nn.Module | None) -> bool:
    """Return whether all products are in fp32: nothing is left for `cast_lm_head_to_fp32`."""
    dtypes = {parameter.dtype for model in models if model is not None for parameter in model.parameters()}
    return not args.bf16 and dtypes <= {torch.float32}


@contextmanager
def _computing(trainer: Any, policy: nn.Module) -> Iterator[None]:
    """As the passes will compute where weights are of several dtypes; ModelError where they cannot be multiplied."""
    dtypes = {p.dtype for p in policy.parameters() if p.is_floating_point()}
    try:
        with trainer.accelerator.autocast() if len(dtypes) > 1 else nullcontext():
            yield
    except RuntimeError as error:
        if len(dtypes) == 1 or "dtype" not in str(error):
            raise
        raise ModelError(
            f"the model's weights are {' and '.join(sorted(str(d).removeprefix('torch.') for d in dtypes))}, since what trains is "
            "fp32, and its layers take one: set bf16=True, or load all in fp32 (model_init_kwargs={'dtype': 'float32'})."
        ) from error


def _freezer(trainer: Any, parts: OnlineParts, strategy: Strategy, rest: Rest | None) -> Callable[[nn.Module], Frozen]:
    """Prepares a frozen model: whole where half of what training leaves free, on every rank, holds it."""
    device = trainer.accelerator.device
    free = free_bytes(device) - training_bytes(parts.policy, device, shares_of(trainer.accelerator))
    room = int(strategy.ranks.min([max(0, free)])[0]) // 2
    on_host = parts.settings.memory.frozen_on_host
    return lambda model: resting(rest, strategy, strategy.prepare_frozen(model, room, on_host))


def _reference(parts: OnlineParts, freeze: Callable[[nn.Module], Frozen]) -> Reference:
    if parts.reference_model is None:
        return adapter_reference(parts.policy)
    install_head(parts.reference_model, cast_head_to_fp32=parts.args.cast_lm_head_to_fp32)
    frozen = freeze(parts.reference_model)
    return Reference(frozen.model, frozen.ready)


def _tell_idle(trainer: Any, parts: OnlineParts, strategy: Strategy) -> None:
    """Name the arguments that have no effect, now that models and devices are known."""
    why_merged = adapters_idle(parts.settings.vllm, parts.policy, strategy.ranks.world_size)
    facts = parts.settings.facts
    if why_merged:
        facts = replace(facts, idle={**facts.idle, "vllm_adapters=False": why_merged})
    tell_idle(
        parts.given,
        replace(
            facts,
            sharded=strategy.cuts_parameters,
            in_fp32=computes_in_fp32(parts.args, parts.policy, parts.reference_model),
            states_on_host=states_on_host(trainer.accelerator.state),
            frozen=_has_frozen(parts),
        ),
    )


def _has_frozen(parts: OnlineParts) -> bool:
    return parts.reference_model is not None or any(isinstance(reward, ModelReward) for reward in parts.rewards)


def _panel(parts: OnlineParts) -> RewardPanel:
    settings = RewardSettings(parts.settings.reward_weights, parts.args.reward_failures, parts.args.reward_timeout)
    tokenizer = parts.tokenizer
    return RewardPanel(parts.rewards, settings, lambda ids: tokenizer.decode(ids, skip_special_tokens=True))


def _success(args: Any, rewards: Sequence[Reward]) -> Success:
    names = [reward.name for reward in rewards]
    if args.success_reward is None:
        return Success(0, args.success_threshold)
    if args.success_reward not in names:
        raise ArgumentError(f"success_reward={args.success_reward!r} is none of the rewards: {', '.join(names)}.")
    return Success(names.index(args.success_reward), args.success_threshold)


def _context_name(args: Any, critic: nn.Module | None) -> str:
    """What bounds a row: the model's context or its critic's, or vLLM's where that was set (the shortest of them)."""
    length = args.vllm_max_model_length
    context = "the model's context" if critic is None else "the model's context or its critic's"
    return context if length is None else f"{context} or vllm_max_model_length {length}"


def _max_prompt_tokens(
    policy: nn.Module, critic: nn.Module | None, max_completion_length: int, max_model_length: int | None
) -> int | None:
    contexts = [context_length(model) for model in (policy, critic) if model is not None]
    lengths = [length for length in (*contexts, max_model_length) if length is not None]
    context = min(lengths, default=None)
    if context is None:
        return None
    if context <= max_completion_length:
        raise ArgumentError(
            f"max_completion_length={max_completion_length} leaves no room for a prompt in the model's context of {context} "
            "tokens; lower it."
        )
    return context - max_completion_length


def _cursor(dataset: Any, reader: PromptReader, settings: OnlineSettings, args: Any) -> PromptCursor[Prompt]:
    """Check all rows, and that they are enough for a rollout (a stream starts again when it ends)."""
    cursor = cursor_over(dataset, reader, args)
    prompts = cursor.prompts_per_epoch
    if prompts is not None and prompts < settings.rollout.num_prompts:
        raise DataError(
            f"the data set has {prompts} usable prompts and a rollout asks {settings.rollout.num_prompts} "
            f"({settings.rollout.num_rows} completions, num_generations={settings.rollout.num_generations}): add rows, or "
            "lower per_device_train_batch_size, gradient_accumulation_steps or steps_per_generation."
        )
    return cursor

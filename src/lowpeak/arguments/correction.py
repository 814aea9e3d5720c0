"""Which policy's log-probs the loss takes as old: correction of the sampler's drift, and staleness of rollouts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

from lowpeak.arguments.declare import (
    NOT_NEGATIVE,
    EffectCondition,
    RunFacts,
    above_zero,
    argument,
    at_least,
    if_on,
    one_of,
    require,
    vllm_argument,
)
from lowpeak.arguments.vllm import USES_VLLM, ServerSettings, VllmSettings
from lowpeak.errors import ArgumentError

CorrectionMode = Literal[
    "token_truncate", "token_mask", "sequence_truncate", "sequence_mask", "sequence_geometric_mask"
]
OldPolicy = Literal["policy", "sampler"]

_MODE, _MAXIMUM = "vllm_importance_sampling_mode", "vllm_importance_sampling_clip_max"
_GEOMETRIC, _GEOMETRIC_BOUNDS = "sequence_geometric_mask", (0.99, 1.01)
_STALE_MAXIMUM = 2.0  # bound of stale tokens' weights
_HAS_WEIGHT = EffectCondition(
    lambda args, facts: resolve_old_policy(args) == "policy" or args.vllm_importance_sampling_mode == _GEOMETRIC,
    "the clip is around the sampler's log-probs, so the loss has no further weight; remove it, or set old_policy='policy'",
)
_CORRECTED = (USES_VLLM, if_on("vllm_importance_sampling_correction"), _HAS_WEIGHT)
_USES_SERVERS = (
    replace(
        USES_VLLM,
        reason="the native engine runs on the trainer's device; set use_vllm=True and vllm_mode='server', or remove it",
        raises=True,
    ),
    EffectCondition(
        lambda args, facts: args.vllm_mode == "server",
        "a colocated vLLM runs on the trainer's device; set vllm_mode='server', or remove it",
        raises=True,
    ),
)


@dataclass(repr=False)
class CorrectionArguments:
    """Arguments of stale rollouts, and of the correction between sampler and trainer (TRL's names)."""

    max_staleness: int = vllm_argument(
        0,
        "Server: rollouts that are generated ahead while the policy trains (0: none; N needs N servers, or adapters).",
        at_least(0),
        _USES_SERVERS,
    )
    old_policy: str | None = argument(
        None,
        "Old log-probs of the ratio: the policy's before a rollout's first step, or the sampler's (None: policy; sampler with "
        "max_staleness and ratios of tokens).",
        one_of(OldPolicy, None),
    )
    vllm_importance_sampling_correction: bool = vllm_argument(
        True,
        "Weigh the policy loss by the trainer's probability of a completion over vLLM's.",
        acts_if=(USES_VLLM, _HAS_WEIGHT),
    )
    vllm_importance_sampling_mode: str = vllm_argument(
        "sequence_mask",
        "That weight per token or completion; beyond its bounds it is truncated to them, or 0 (mask): token_truncate, "
        "token_mask, sequence_truncate or sequence_mask. sequence_geometric_mask: 0 for completions whose geometric mean of "
        "tokens' ratios is outside 0.99 to 1.01, else 1. With max_staleness, if not set: token_truncate, of RLOO and GSPO "
        "sequence_truncate.",
        one_of(CorrectionMode),
        _CORRECTED,
    )
    vllm_importance_sampling_clip_max: float | None = vllm_argument(
        3.0,
        "Upper bound of that weight (None: no bound); if not set, 1.01 with sequence_geometric_mask, and 2 for stale tokens.",
        above_zero(),
        _CORRECTED,
    )
    vllm_importance_sampling_cap: float | None = vllm_argument(
        None,
        "TRL's older name of vllm_importance_sampling_clip_max.",
        acts_if=_CORRECTED,
        alias_of="vllm_importance_sampling_clip_max",
    )
    vllm_importance_sampling_clip_min: float | None = vllm_argument(
        None,
        "Lower bound of that weight (None: no bound; 0.99 with sequence_geometric_mask).",
        NOT_NEGATIVE,
        _CORRECTED,
    )

    @property
    def ratio_level(self) -> Literal["token", "sequence"] | None:
        """The unit of the loss's ratios: tokens or sequences; None without ratios."""
        return "token"


@dataclass(frozen=True)
class Correction:
    """Importance weight of the policy loss that corrects the drift between the engine and the trainer.

    The weight is the old probability over the sampled one, of each token or of a whole completion (`per_sequence`). Beyond its
    bounds it is 0 (`masks`), or else the bound. A bound of None does not exist. `geometric`: the bounds are of the geometric mean
    of a completion's ratios, and the weight within them is 1.
    """

    per_sequence: bool
    masks: bool
    minimum: float | None
    maximum: float | None
    geometric: bool = False


class CorrectedSettings:
    """Settings of an algorithm whose correction each step computes, or, with scored old log-probs, is fixed for the rollout."""

    score_old: bool
    correction: Correction | None
    old_policy: OldPolicy

    @property
    def needs_old(self) -> bool:
        """Whether old log-probs are scored."""
        return self.score_old

    @property
    def step_correction(self) -> Correction | None:
        """The correction that each step computes with its log-probs, if old log-probs are not scored."""
        return None if self.needs_old else self.correction

    @property
    def rollout_correction(self) -> Correction | None:
        """The correction that is fixed for the rollout, if old log-probs are scored."""
        return self.correction if self.needs_old else None


def resolve_old_policy(args: Any) -> OldPolicy:
    """Return whose log-probs are the old ones of the ratio."""
    if args.old_policy is not None and _takes_sampler(args):
        old: OldPolicy = args.old_policy
        return old
    return "sampler" if args.max_staleness and args.ratio_level == "token" else "policy"


def check_staleness(args: Any, vllm: VllmSettings | None, facts: RunFacts) -> None:
    """Raise ArgumentError for rollouts ahead that the run's engine, algorithm or tools cannot have."""
    staleness = args.max_staleness
    if not staleness:
        return
    setting = f"max_staleness={staleness}"
    assert vllm is not None, "declared conditions require servers"
    assert isinstance(vllm.where, ServerSettings), "declared conditions require servers"
    check_server_groups(staleness, vllm.where, vllm.adapters and bool(facts.has_adapter))
    require(
        staleness == 1 or args.ratio_level != "sequence",
        f"{setting} is too stale for ratios of whole completions, whose variance grows with their length: set max_staleness=1, or "
        "train with ratios of tokens.",
    )
    require(
        facts.has_tools is True or not facts.has_turns,
        f"{setting} does not go with rollout_func, which runs in the trainer's thread and may use the policy: set "
        "max_staleness=0, or pass tools or environment_factory.",
    )


def check_server_groups(staleness: int, servers: ServerSettings, has_adapters: bool) -> None:
    """Raise ArgumentError for servers that are not enough groups, one per version unless they hold adapters of all versions."""
    if has_adapters:
        return
    setting, num_servers = f"max_staleness={staleness}", len(servers.base_urls)
    require(
        num_servers >= staleness,
        f"{setting} needs as many servers, one for each version of the weights, but the run has {num_servers}: add servers "
        f"(vllm_server_base_url, vllm_devices), or set max_staleness={num_servers}.",
    )
    require(
        staleness == 1 or servers.group_port is None,
        f"{setting} does not go with vllm_group_port={servers.group_port}: each group of servers takes weights on a port of "
        "its own; remove it, or set max_staleness=1.",
    )


def resolve_correction(args: Any) -> Correction | None:
    """Return the correction of a run, None without vLLM or if it is off; ArgumentError for invalid bounds.

    Also for stale rollouts without one, whose gradients point elsewhere: training collapses (docs/overlap.md).
    """
    mode, uses_policy = _resolve_mode(args), resolve_old_policy(args) == "policy"
    if not args.use_vllm or not args.vllm_importance_sampling_correction:
        if args.max_staleness and uses_policy:
            raise _uncorrected_error(args)
        return None
    if not uses_policy and mode != _GEOMETRIC:
        return None
    least, most = _resolve_bounds(args, mode)
    _check_bounds(mode, least, most)
    return Correction(mode.startswith("sequence"), mode.endswith("mask"), least, most, mode == _GEOMETRIC)


def _uncorrected_error(args: Any) -> ArgumentError:
    sampler = "old_policy='sampler' or " if _takes_sampler(args) else ""
    return ArgumentError(
        f"max_staleness={args.max_staleness} needs a correction of stale completions: set {sampler}"
        "vllm_importance_sampling_correction=True."
    )


def _takes_sampler(args: Any) -> bool:
    """Return whether the loss has a ratio to whose old log-probs `old_policy` applies."""
    condition: EffectCondition | None = args.never_act.get("old_policy")
    return condition is None or condition.holds(args, RunFacts())


def _resolve_mode(args: Any) -> str:
    """Return the mode; of stale rollouts one that keeps their completions, unless the user chose another."""
    if not args.max_staleness or _is_given(args, _MODE):
        return str(args.vllm_importance_sampling_mode)
    return "token_truncate" if args.ratio_level == "token" else "sequence_truncate"


def _resolve_bounds(args: Any, mode: str) -> tuple[float | None, float | None]:
    least, most = args.vllm_importance_sampling_clip_min, args.vllm_importance_sampling_clip_max
    if mode == _GEOMETRIC:
        least = _GEOMETRIC_BOUNDS[0] if least is None else least
        most = most if _is_given(args, _MAXIMUM) else _GEOMETRIC_BOUNDS[1]
    elif mode == "token_truncate" and args.max_staleness and not _is_given(args, _MAXIMUM):
        most = _STALE_MAXIMUM
    return least, most


def _check_bounds(mode: str, least: float | None, most: float | None) -> None:
    require(
        most is None or least is None or least < most,
        f"vllm_importance_sampling_clip_min={least} must be below vllm_importance_sampling_clip_max={most}.",
    )
    require(
        mode.endswith("mask") or most is not None or least is not None,
        f"vllm_importance_sampling_mode={mode!r} truncates weights to their bounds, but none is set: set "
        "vllm_importance_sampling_clip_max or vllm_importance_sampling_clip_min.",
    )


def _is_given(args: Any, name: str) -> bool:
    """Return whether the user set an argument, by its name or by an alias."""
    named: frozenset[str] = getattr(args, "given", frozenset())
    return name in named or getattr(args, "alias_of", {}).get(name) in named


def is_servable_adapter(config: Any) -> bool:
    """Return whether vLLM can serve the adapter of this peft configuration: a plain LoRA, and nothing else is trained."""
    is_plain = config.peft_type == "LORA" and config.bias == "none"
    return is_plain and not config.modules_to_save and not config.use_dora

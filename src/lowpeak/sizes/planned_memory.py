"""The plan of a run's memory, compared with measured peaks. Another process makes it while the run trains, or before.

Its phases are in the journal as `planned_memory/<phase>`, next to `peak_memory/<phase>`, with the device's memory as
`memory_limit`. One warning names a phase that took more than a tenth beyond its plan.
"""

from __future__ import annotations

import copy
import json
import logging
import os
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import psutil  # type: ignore[import-untyped]
from torch import nn

from lowpeak.arguments import CLASS_PREFIXES
from lowpeak.attention import ATTENTION_NAME
from lowpeak.heads import causal_lm, is_peft, transformers_model
from lowpeak.memory import has_device_memory, total_bytes
from lowpeak.parallel import sharding_of
from lowpeak.rewards import ModelReward

logger = logging.getLogger(__name__)

_KINDS = {f"{prefix}Config": kind for kind, prefix in CLASS_PREFIXES.items()}
_MORE = 1.1  # of the planned bytes, from which a measured peak is named


class LongestPrompts(NamedTuple):
    """Tokens of the longest prompt of a dataset, and of the longest one with a privileged context; 0 without one."""

    policy: int
    teacher: int = 0


@dataclass(frozen=True)
class RunDescription:
    """Inputs of a run's plan: its arguments with the run's sizes, its models' configs, and its placement.

    kind, args               the command, and the trainer's config
    config                   the policy's; `peft_config` of its adapter, `reward_configs` of reward models, `teacher_config`
    quantized_bits           4 or 8 of a base that bitsandbytes has quantised
    strategy                 a name in SHARDINGS
    prompt_tokens            length of the longest prompt; `teacher_prompt_tokens` with a privileged context, or 0
    num_devices, per_host    of the run, and on each of its hosts; `memory` are bytes of a device of type `device`
    budget                   bytes that the run may take of a device; None: the plan is of the sizes that `args` has
    unplanned_bytes          bytes of a process that the plan does not count
    """

    kind: str | None
    args: Any
    config: Any
    peft_config: Any
    quantized_bits: int | None
    reward_configs: list[Any]
    num_rewards: int
    strategy: str
    tensor_parallel: int
    prompt_tokens: int
    num_devices: int
    memory: int
    per_host: int
    device: Literal["cuda", "cpu"]
    budget: int | None = None
    unplanned_bytes: int = 0
    teacher_config: Any = None
    teacher_prompt_tokens: int = 0


# Starts a process that plans the described run, in a folder for its files; returns it and the file that it prints to.
StartPlan = Callable[[RunDescription, Path], tuple[subprocess.Popen[bytes], Path]]


class PlannedMemory:
    """The plan of one run, started with its first finished step; `row` returns its present entries.

    `planned` are the bytes by phase of a plan that is made already.
    """

    def __init__(
        self, context: Any, policy: nn.Module, start_plan: StartPlan, planned: Mapping[str, float] | None = None
    ) -> None:
        self._context, self._policy, self._start_plan = context, policy, start_plan
        self._process: subprocess.Popen[bytes] | None = None
        self._folder = tempfile.TemporaryDirectory(prefix="lowpeak-plan-")
        self._warned = False
        self._beside = bytes_beside_tensors(context, policy)
        self._planned = self._with_beside(planned) if planned else None

    def row(self, values: Mapping[str, float]) -> dict[str, float]:
        """Return the planned numbers for a step's row; compare them with the measured ones in `values`."""
        if self._planned is None:
            self._planned = self._poll()
        if not self._planned:
            return {}
        row = {f"planned_memory/{phase}": planned for phase, planned in self._planned.items()}
        self._compare(values)
        return {**row, "memory_limit": self._limit}

    def close(self) -> None:
        """End the planning process, if it still runs."""
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        self._folder.cleanup()

    def _compare(self, values: Mapping[str, float]) -> None:
        assert self._planned is not None
        for phase, planned in self._planned.items():
            measured = values.get(f"peak_memory/{phase}")
            if measured is not None and measured > _MORE * planned and not self._warned:
                self._warned = True
                logger.warning(
                    "Phase %s took %.2f GiB, and %.2f were planned: the plan lacks something of this run, such as tensors "
                    "that a reward function or callback keeps.",
                    *(phase, measured / 2**30, planned / 2**30),
                )

    def _poll(self) -> dict[str, float] | None:
        """Return the planned bytes by phase when the process has ended; an empty plan if it failed."""
        if self._process is None:
            self._start()
            return None
        status = self._process.poll()
        if status is None:
            return None
        text = self._output.read_text(encoding="utf-8")
        if status != 0:
            logger.info(
                "The run has no plan of its memory: %s", (text.strip().splitlines() or [f"status {status}"])[-1]
            )
            return {}
        return self._with_beside(json.loads(text.splitlines()[-1]))

    def _with_beside(self, planned: Mapping[str, float]) -> dict[str, float]:
        return {phase: float(tensors) + self._beside for phase, tensors in planned.items()}

    def _start(self) -> None:
        context = self._context
        description = run_description(
            context, self._policy, context.run.strategy, self._limit, context.run.sizes.as_dict()
        )
        self._process, self._output = self._start_plan(description, Path(self._folder.name))

    @property
    def _limit(self) -> int:
        return total_bytes(self._context.accelerator.device)


def bytes_beside_tensors(context: Any, policy: nn.Module) -> int:
    """Return a CPU process's resident bytes besides its models; 0 on a device, whose allocator counts tensors alone."""
    if has_device_memory(context.accelerator.device):
        return 0
    reference = context.parts.reference_model
    models = [
        policy,
        *([] if reference is None else [reference]),
        *(reward.model for reward in _reward_models(context)),
    ]
    loaded = sum(parameter.nbytes for model in models for parameter in model.parameters())
    return max(0, int(psutil.Process().memory_info().rss) - loaded)


def run_description(
    context: Any,
    policy: nn.Module,
    strategy: Any,
    memory: int,
    sizes: Mapping[str, Any],
    longest: LongestPrompts | None = None,
) -> RunDescription:
    """Return the inputs of a run's plan; `longest` has the longest prompts if there is no rollout yet."""
    longest = longest or _longest_prompts(context)
    ranks, args = strategy.ranks, copy.copy(context.acting_args)
    names = [name for name in sizes if hasattr(args, name)]
    for name in names:
        setattr(args, name, sizes[name])
    args.given = frozenset(args.given) | frozenset((*names, "bf16"))
    processes = ranks.processes.world_size
    return RunDescription(
        kind=kind_of(args),
        args=args,
        config=_plain_config(transformers_model(causal_lm(policy)).config),
        peft_config=_peft_config(policy),
        quantized_bits=_quantized_bits(policy),
        reward_configs=[_plain_config(reward.model.config) for reward in _reward_models(context)],
        num_rewards=max(1, len(context.parts.rewards)),
        strategy=sharding_of(context.accelerator).name,
        tensor_parallel=processes // ranks.world_size,
        prompt_tokens=longest.policy,
        num_devices=processes,
        memory=memory,
        per_host=int(os.environ.get("LOCAL_WORLD_SIZE") or processes),
        teacher_config=_teacher_config(context.parts),
        teacher_prompt_tokens=longest.teacher,
        device="cuda" if has_device_memory(context.accelerator.device) else "cpu",
    )


def _reward_models(context: Any) -> list[ModelReward]:
    return [reward for reward in context.parts.rewards if isinstance(reward, ModelReward)]


def _teacher_config(parts: Any) -> Any:
    """Return the config of a teacher that is not the policy's own, with the dtype that it has."""
    if parts.teacher is None or parts.teacher.kind is not None or parts.reference_model is None:
        return None
    model = transformers_model(causal_lm(parts.reference_model))
    config = _plain_config(model.config)
    config.dtype = model.dtype
    return config


def _plain_config(config: Any) -> Any:
    """Return a copy without the attention that the run installed, which another process does not know."""
    config = copy.deepcopy(config)
    if config._attn_implementation == ATTENTION_NAME:
        config._attn_implementation = "sdpa"
    if getattr(config, "quantization_config", None) is not None:  # the plan has layers of its own for it
        del config.quantization_config
    return config


def kind_of(args: Any) -> str | None:
    """Return the command of a trainer's config, by its class or a base class; None for another one."""
    return next((_KINDS[base.__name__] for base in type(args).__mro__ if base.__name__ in _KINDS), None)


def _peft_config(policy: Any) -> Any:
    return policy.peft_config[policy.active_adapters[0]] if is_peft(policy) else None


def _quantized_bits(policy: nn.Module) -> int | None:
    """Return the bits of a base that bitsandbytes has quantised, None for another."""
    model = transformers_model(causal_lm(policy))
    return (
        4 if getattr(model, "is_loaded_in_4bit", False) else 8 if getattr(model, "is_loaded_in_8bit", False) else None
    )


def _longest_prompts(context: Any) -> LongestPrompts:
    rollout = getattr(context, "rollout", None)
    if rollout is None:
        return LongestPrompts(max(1, (getattr(context.acting_args, "max_length", None) or 1024) // 2))
    policy = max(len(record.prompt_ids) for record in rollout.records)
    return LongestPrompts(policy, max(len(record.teacher_prompt_ids or ()) for record in rollout.records))

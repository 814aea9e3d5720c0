"""A run to plan."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lowpeak.arguments import Hardware, TeacherSettings, check_teacher_kind, resolve_teacher
from lowpeak.memory import Kind
from lowpeak.parallel import SHARDINGS, Sharding
from lowpeak.plan.hardware import Machine
from lowpeak.plan.rehearsal import MeshShape


@dataclass(frozen=True)
class PlanRequest:
    """A run to plan: its arguments, its models' configs, and where it runs.

    kind              "grpo", "rloo", "ppo", "online-dpo", "distillation", "sft", "reward", "dpo" or "kto"
    args              the trainer's config
    config            the policy's transformers config
    peft_config       of the policy's adapter; None: all weights are trained
    reward_configs    transformers configs of reward models
    strategy          a name in SHARDINGS
    tensor_parallel   devices of a tensor parallel group
    prompt_tokens     length of a prompt; every completion is planned at its maximal length
    quantized_bits    4 or 8 for a frozen base that bitsandbytes quantises
    num_rewards       functions and models
    teacher_config    transformers config of a separate teacher; its arguments of loading are in `args`
    has_tools         whether the policy talks to tools or environments; None: unknown

    A teacher's prompts, which have privileged contexts, have `teacher_prompt_tokens` tokens; 0: `prompt_tokens`.
    """

    kind: str
    args: Any
    config: Any
    machine: Machine
    strategy: str = "single"
    peft_config: Any = None
    reward_configs: Sequence[Any] = ()
    tensor_parallel: int = 1
    prompt_tokens: int = 512
    quantized_bits: Any = None
    num_rewards: int = 1
    teacher_config: Any = None
    teacher_prompt_tokens: int = 0
    has_tools: bool | None = None

    def __post_init__(self) -> None:
        """Raise ArgumentError for distillation without a teacher, or with two."""
        if self.teacher is not None:
            has_model, has_adapter = self.teacher_config is not None, self.peft_config is not None
            check_teacher_kind(self.teacher, has_adapter, has_model=has_model)

    @property
    def teacher(self) -> TeacherSettings | None:
        return resolve_teacher(self.args) if self.kind == "distillation" else None

    @property
    def acting_args(self) -> Any:
        """Return a copy of the arguments, with the config's choices on the planned device."""
        args = copy.copy(self.args)
        if self.machine.device == "cuda" and "bf16" not in args.given:
            args.bf16 = True
        return args

    @property
    def world_size(self) -> int:
        return self.machine.num_devices // self.tensor_parallel

    @property
    def hardware(self) -> Hardware:
        has_replicas = self.sharding.copies == "per rank" and self.world_size > 1
        return Hardware(self.machine.device, self.machine.num_devices, has_replicas)

    @property
    def sharding(self) -> Sharding:
        return SHARDINGS[self.strategy]

    @property
    def mesh(self) -> MeshShape:
        """Return the mesh on which the policy is rehearsed; the shares of ZeRO's stages are computed from one device."""
        shards, replicas = self.sharding.mesh(self.world_size, self.machine.num_hosts)
        return MeshShape(shards, replicas, self.tensor_parallel)

    def share_of(self, kind: Kind, num_bytes: int) -> int:
        """Return a rank's share of a kind's bytes."""
        copies = self.sharding.num_copies(self.world_size, self.machine.num_hosts)
        return int(num_bytes * self.sharding.share(kind, self.world_size, copies))

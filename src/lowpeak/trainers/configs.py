"""Config classes of the trainers: flat dataclasses over transformers' TrainingArguments.

Arguments have TRL's name if they have TRL's meaning. Modules of `lowpeak.arguments` declare them, one family each.
"""

from __future__ import annotations

import functools
import logging
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any, ClassVar, TypeVar, dataclass_transform

import torch
from transformers import TrainingArguments

from lowpeak.arguments import (
    ARGUMENT_OF_KWARG,
    MAPPING,
    NOT_PARALLEL,
    REJECTED,
    CommonArguments,
    DistillationArguments,
    DPOArguments,
    GRPOArguments,
    Hardware,
    KTOArguments,
    ModelParallel,
    OnlineArguments,
    OnlineDPOArguments,
    PPOArguments,
    RewardArguments,
    RLOOArguments,
    SFTArguments,
    argument,
    check_finite,
    check_names,
    check_range,
    check_type,
    check_types,
    declaration,
    default_value,
    disable_accelerate_fsdp,
    drop_trl_defaults,
    hide_secrets,
    is_switched_on,
    parse_bytes,
    read_object,
    redeclared,
    refuse_fsdp1,
    refuse_unsupported_parallelism,
    rename_dtype,
    require,
    require_deepspeed,
    resolve_collective_timeout,
    resolve_model_parallel,
    resolve_rollout,
    show,
    sync_deepspeed_config,
)
from lowpeak.cpu_cores import limit_threads
from lowpeak.errors import ArgumentError, LowpeakError
from lowpeak.memory import limit_onednn_caches
from lowpeak.setup import limit_collectives_on_cpu, renew_master_port

logger = logging.getLogger(__name__)

Config = TypeVar("Config", bound=TrainingArguments)

# Variables by which accelerate sees that a launcher started the process.
_SIZES_OF_LAUNCHERS = ("WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")
_PLAIN_TOKENS = ("eos_token", "pad_token")  # of a tokenizer, not secrets
_RENAMED = (
    ("gradient_checkpointing", "activation_checkpointing"),
    ("gradient_checkpointing_kwargs", "activation_checkpointing_kwargs"),
)


@dataclass_transform(field_specifiers=(argument, redeclared))
def config_dataclass(config: type[Config]) -> type[Config]:
    """Make a config class a dataclass whose constructor raises ArgumentError with a remedy for unknown names."""
    config = dataclass(repr=False)(config)
    original_init = config.__init__
    known = {f.name for f in fields(config) if f.init}
    rejected = REJECTED | getattr(config, "rejected", {})  # a class's names may be arguments of other configs

    @functools.wraps(original_init)
    def checked_init(self: Any, *args: Any, **kwargs: Any) -> None:
        kwargs = drop_trl_defaults(kwargs, known)
        check_names(kwargs, known, rejected)
        # Stored first, because transformers changes some of its own fields in __post_init__.
        self.given = frozenset(kwargs)
        original_init(self, *args, **kwargs)

    config.__init__ = checked_init
    return config


def _parse_mapping(args: Any, name: str) -> None:
    """Parse a mapping argument given as JSON text; ArgumentError if it is not a mapping."""
    value = getattr(args, name)
    if isinstance(value, str):
        try:
            setattr(args, name, read_object(value))
        except ValueError as error:  # without the text, which may contain an access token
            raise ArgumentError(f"{name} {MAPPING.requirement} ({error}).") from None
    check_range(args, name)


def _check_json(args: Any, name: str) -> None:
    """Raise ArgumentError for JSON that transformers cannot parse; other text is the path of a file."""
    value = getattr(args, name)
    if isinstance(value, str) and value.startswith("{"):
        try:
            read_object(value)
        except ValueError as error:
            raise ArgumentError(f"{name} {MAPPING.requirement} ({error}).") from None


@contextmanager
def _name_argument_in_errors(args: Any) -> Iterator[None]:
    """Raise ArgumentError in place of an error of transformers, with the argument whose value the error quotes first."""
    values = {field.name: getattr(args, field.name) for field in fields(args)}
    try:
        yield
    except LowpeakError:
        raise
    except (AttributeError, KeyError, NotImplementedError, OSError, TypeError, ValueError) as error:
        check_types(args)
        text = " ".join(str(error).split())
        quoted = {
            found.start(): show(name, value)
            for name, value in values.items()
            for word in (value if isinstance(value, dict) else [value])
            if isinstance(word, str) and value != default_value(args, name)
            for found in re.finditer(rf"(?<!\w){re.escape(word)}(?!\w)", text)
        }
        raise ArgumentError(f"{quoted[min(quoted)]}: {text}" if quoted else text) from error


@contextmanager
def _without_compiling(args: Any) -> Iterator[None]:
    """Undo transformers' settings for torch_compile: a backend, and environment variables that accelerate reads."""
    names = ("ACCELERATE_DYNAMO_BACKEND", "ACCELERATE_DYNAMO_MODE")
    before = {name: os.environ[name] for name in names if name in os.environ}
    backend = args.torch_compile_backend
    yield
    args.torch_compile_backend = backend
    for name in names:
        os.environ.pop(name, None)
    os.environ.update(before)


@dataclass(repr=False)
class CommonConfig(CommonArguments, TrainingArguments):
    """Arguments of every trainer, prepared for transformers and accelerate."""

    saves_no_tokens: ClassVar[bool] = False  # whether pickles omit access tokens

    def __post_init__(self) -> None:
        for field in fields(self):
            if declaration(field).check is MAPPING:
                _parse_mapping(self, field.name)
        kwargs: Any = self.model_init_kwargs
        self.model_init_kwargs = kwargs and rename_dtype(kwargs)
        self._default_precision()
        self._default_checkpointing()
        self._check_parallelism()
        self._prepare_process_group()
        check_finite(self, ("logging_steps", "eval_steps", "save_steps"))  # transformers rounds them to integers
        for name in getattr(TrainingArguments, "_VALID_DICT_FIELDS", ()):
            _check_json(self, name)
        with _without_compiling(self), _name_argument_in_errors(self):
            super().__post_init__()
        if self.fsdp_plugin_args is not None:
            refuse_fsdp1(self.fsdp_plugin_args["fsdp_version"], "fsdp_config")
        use_one_device(self)
        if self.device.type == "cpu":
            limit_onednn_caches()
        if self.world_size == 1:
            limit_threads()
        if self.deepspeed_plugin is not None:
            sync_deepspeed_config(self.deepspeed_plugin.hf_ds_config.config, self)

    def _prepare_process_group(self) -> None:
        require(
            self.ddp_backend is None or any(name in os.environ for name in _SIZES_OF_LAUNCHERS),
            f"ddp_backend={self.ddp_backend!r} needs several processes, which a launcher starts; remove it.",
        )
        renew_master_port()
        check_type(self, "ddp_timeout")  # checked early, because it is used here
        check_range(self, "ddp_timeout")
        if self.use_cpu or is_switched_on(os.environ, "ACCELERATE_USE_CPU"):
            limit_collectives_on_cpu(self.ddp_timeout, self.ddp_backend)

    @property
    def eval_batch_size(self) -> int:
        """The evaluation batch size that transformers reports."""
        return (self.per_device_eval_batch_size or self.per_device_train_batch_size) * max(1, self.n_gpu)

    @property
    def model_parallel(self) -> ModelParallel:
        """Sizes of tensor and data parallelism that the policy is loaded with."""
        return resolve_model_parallel(os.environ, self.parallelism_config)

    @property
    def uses_deepspeed(self) -> bool:
        """Whether the argument `deepspeed`, or accelerate's config in the environment, requests DeepSpeed."""
        return bool(self.deepspeed) or is_switched_on(os.environ, "ACCELERATE_USE_DEEPSPEED")

    @property
    def hardware(self) -> Hardware:
        """This process's device and its ranks, which have the same parameters under DDP alone."""
        uses_fsdp = self.fsdp or is_switched_on(os.environ, "ACCELERATE_USE_FSDP")
        one_model = uses_fsdp or self.uses_deepspeed or self.model_parallel.tensor > 1
        return Hardware(self.device.type, self.world_size, self.world_size > 1 and not one_model)

    @property
    def checkpoints_activations(self) -> bool:
        """Whether activations are recomputed, under either name of the argument in transformers."""
        return bool(getattr(self, "activation_checkpointing", None) or self.gradient_checkpointing)

    def __str__(self) -> str:
        shown = hide_secrets({field.name: getattr(self, field.name) for field in fields(self)})
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in shown.items())})"

    __repr__ = __str__

    def __getstate__(self) -> dict[str, Any]:
        return hide_secrets(self.__dict__, None) if self.saves_no_tokens else self.__dict__

    def to_dict(self) -> dict[str, Any]:
        """Return the arguments as trackers show them, without access tokens."""
        # transformers writes a placeholder for every name that ends with _token, also for None.
        plain = {
            name: getattr(self, name) if name in _PLAIN_TOKENS or getattr(self, name, "") is None else value
            for name, value in super().to_dict().items()
        }
        return hide_secrets(plain)

    def _check_parallelism(self) -> None:
        """Raise ArgumentError for parallelism, in arguments or the environment, that lowpeak does not support."""
        loading: Any = self.model_init_kwargs or {}
        refuse_unsupported_parallelism(os.environ, loading)
        other = "DeepSpeed" if self.uses_deepspeed else "the argument fsdp" if self.fsdp else ""
        if resolve_model_parallel(os.environ, self.parallelism_config, other) != NOT_PARALLEL:
            disable_accelerate_fsdp(os.environ)
        if self.uses_deepspeed:
            require_deepspeed("a run under DeepSpeed")
        if is_switched_on(os.environ, "ACCELERATE_USE_FSDP"):
            refuse_fsdp1(os.environ.get("FSDP_VERSION", "1"), "the environment (accelerate's config, or FSDP_VERSION)")
        args: Any = self  # transformers types `fsdp` as on its command line
        if str(args.fsdp).lower() == "true":
            args.fsdp = True

    def _default_precision(self) -> None:
        if self.bf16 is None:
            self.bf16 = not self.use_cpu and torch.cuda.is_available() and torch.cuda.is_bf16_supported()

    def _default_checkpointing(self) -> None:
        """Turn activation checkpointing on by default, under its name in the installed transformers."""
        newer = any(field.name == "activation_checkpointing" for field in fields(TrainingArguments))
        for old, new in _RENAMED if newer else ():
            require(
                getattr(self, old) is None or getattr(self, new) in (None, getattr(self, old)),
                f"{old}={getattr(self, old)!r} and {new}={getattr(self, new)!r} set the same argument; set one.",
            )
            if getattr(self, new) is None and getattr(self, old) is not None:
                setattr(self, new, getattr(self, old))
                self.alias_of = {**getattr(self, "alias_of", {}), new: old}
            setattr(self, old, None)
        name = "activation_checkpointing" if newer else "gradient_checkpointing"
        if getattr(self, name) is None:
            setattr(self, name, True)


@dataclass(repr=False)
class OnlineConfig(OnlineArguments, CommonConfig):
    """Arguments of all online trainers; a value of an alias becomes the value of its argument."""

    def __post_init__(self) -> None:
        # The alias that set each argument. This name, as `given`, is part of the pickled training_args.bin.
        self.alias_of: dict[str, str] = {}
        for field in fields(self):
            target = declaration(field).alias_of
            if target is not None:
                self._set_alias(field.name, target, getattr(self, field.name))
        super().__post_init__()
        if isinstance(self.kv_cache_bytes, str):
            self.kv_cache_bytes = parse_bytes(self.kv_cache_bytes) or self.kv_cache_bytes
        kwargs: Any = self.generation_kwargs or {}
        for name, target in ARGUMENT_OF_KWARG.items():
            self._set_alias(f"generation_kwargs[{name!r}]", target, kwargs.get(name))

    def _prepare_process_group(self) -> None:
        for name in ("ddp_timeout", "vllm_wave_timeout"):  # checked early, because they are used here
            check_type(self, name)
            check_range(self, name)
        num_processes = max(int(os.environ.get(name) or 1) for name in _SIZES_OF_LAUNCHERS)
        self.ddp_timeout = resolve_collective_timeout(self, num_processes)
        super()._prepare_process_group()

    def _set_alias(self, name: str, target: str, value: float | None) -> None:
        """Set the argument `target` by its alias `name`; ArgumentError if both are set to different values."""
        if value is None:
            return
        given: frozenset[str] = getattr(self, "given", frozenset())
        if target in given and getattr(self, target) not in (value, default_value(self, target)):
            value, other = getattr(self, name, value), getattr(self, target)
            raise ArgumentError(f"{name}={value!r} and {target}={other!r} set the same argument; set one.")
        setattr(self, target, value)
        self.alias_of[target] = name


@config_dataclass
class GRPOConfig(GRPOArguments, OnlineConfig):
    """Arguments of GRPO and its family (DeepSeekMath, arXiv 2402.03300; Dr. GRPO, DAPO, GSPO, CISPO)."""


@config_dataclass
class RLOOConfig(RLOOArguments, OnlineConfig):
    """Arguments of RLOO (Ahmadian et al. 2024, arXiv 2402.14740)."""


@config_dataclass
class DistillationConfig(DistillationArguments, OnlineConfig):
    """Arguments of distillation on the policy's own completions (arXiv 2306.13649)."""


@config_dataclass
class PPOConfig(PPOArguments, OnlineConfig):
    """Arguments of PPO (arXiv 1707.06347) with a KL in the reward (arXiv 1909.08593)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_mini_batches is not None:
            check_range(self, "num_mini_batches")  # checked early, because it is used below
            steps = self.num_mini_batches * self.gradient_accumulation_steps
            self._set_alias("num_mini_batches", "steps_per_generation", steps)
        if self.total_episodes is not None:
            check_range(self, "total_episodes")
            rollout = resolve_rollout(self, self.world_size // self.model_parallel.tensor)
            num_rollouts = -(-self.total_episodes // rollout.num_sequences)
            self._set_alias("total_episodes", "max_steps", num_rollouts * rollout.num_steps)
        zero = getattr(self, "deepspeed_plugin", None)
        require(
            self.value_learning_rate is None or zero is None or "optimizer" not in zero.hf_ds_config.config,
            f"value_learning_rate={self.value_learning_rate} needs a torch optimizer, but the DeepSpeed config has an optimizer "
            "section: remove the section (optim and learning_rate replace it), or remove value_learning_rate.",
        )


@config_dataclass
class OnlineDPOConfig(OnlineDPOArguments, OnlineConfig):
    """Arguments of Online DPO (Guo et al. 2024, arXiv 2402.04792)."""


@config_dataclass
class SFTConfig(SFTArguments, CommonConfig):
    """Arguments of supervised training."""


@config_dataclass
class RewardConfig(RewardArguments, CommonConfig):
    """Arguments of reward model training (Bradley-Terry; InstructGPT, arXiv 2203.02155)."""


@config_dataclass
class DPOConfig(DPOArguments, CommonConfig):
    """Arguments of DPO (Rafailov et al. 2023, arXiv 2305.18290)."""

    def __post_init__(self) -> None:
        if isinstance(self.loss_type, str):
            self.loss_type = [self.loss_type]
        super().__post_init__()


@config_dataclass
class KTOConfig(KTOArguments, CommonConfig):
    """Arguments of KTO (Ethayarajh et al. 2024, arXiv 2402.01306)."""


def use_one_device(args: TrainingArguments) -> None:
    """Train on the first of several devices that a process sees, and log a warning."""
    # transformers would use DataParallel, which splits a padded batch over the devices.
    if args.n_gpu > 1:
        logger.warning(
            "One process sees %d devices and trains on the first: start one process per device with "
            "--accelerate_config ddp (or fsdp2), `accelerate launch` or torchrun, or set CUDA_VISIBLE_DEVICES.",
            args.n_gpu,
        )
        args._n_gpu = 1

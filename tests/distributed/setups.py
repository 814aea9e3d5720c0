"""Each strategy on CPU ranks, for real: what accelerate has to be told, small runs to train under it, and what ranks note."""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import DistributedType
from datasets import Dataset
from torch import nn

from lowpeak.heads.lm_head import causal_lm
from lowpeak.heads.value_heads import critic_of
from preference_data import tiny_classifier
from tiny_models import char_tokenizer, tiny_model

TOLERANCE = 5e-6  # of weights
# A checkpoint after step 3 is in the middle of a rollout, which serves steps 3 and 4; the last one is that of step 5.
SAVED: dict[str, Any] = {"max_steps": 5, "save_strategy": "steps", "save_steps": 3}
SAVED |= {"gradient_accumulation_steps": 2, "steps_per_generation": 4}


def prepare(strategy: str) -> dict[str, Any]:
    """The environment that makes accelerate take `strategy`; the arguments that a config needs for it."""
    if strategy in ("fsdp2", "hsdp"):
        os.environ.update(FSDP2)
    if strategy == "hsdp":  # two replicas on four ranks
        sizes = {"PARALLELISM_CONFIG_DP_REPLICATE_SIZE": "2", "PARALLELISM_CONFIG_DP_SHARD_SIZE": "2"}
        os.environ.update(sizes, ACCELERATE_USE_PARALLELISM_CONFIG="true")
    return {"use_cpu": True, **({"deepspeed": zero_config(int(strategy[-1]))} if "zero" in strategy else {})}


def tensor_parallel(tensor: int, data: int) -> dict[str, Any]:
    """The environment in which accelerate has tensors cut over so many ranks, and FSDP2 over so many; arguments for a config."""
    if tensor > 1:
        sizes = {"PARALLELISM_CONFIG_TP_SIZE": str(tensor), "PARALLELISM_CONFIG_DP_SHARD_SIZE": str(data)}
        os.environ.update(sizes, ACCELERATE_USE_PARALLELISM_CONFIG="true")
    return {"use_cpu": True}


def forget() -> None:
    """Let the next trainer of this process take another strategy: accelerate and transformers keep one for good."""
    from accelerate.state import AcceleratorState
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    AcceleratorState._reset_state(reset_partial_state=True)
    unset_hf_deepspeed_config()
    for name in [*FSDP2, "ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_PARALLELISM_CONFIG"]:
        os.environ.pop(name, None)


FSDP2 = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
    "FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "true",
}


def allow_meshes_on_cpu() -> None:
    """Between config and trainer: on a CPU accelerate would train DDP without a word, so it is told of several devices."""
    if "true" in (os.environ.get("ACCELERATE_USE_FSDP"), os.environ.get("ACCELERATE_USE_PARALLELISM_CONFIG")):
        state = PartialState._shared_state
        state["distributed_type"], state["device"] = DistributedType.MULTI_GPU, torch.device("cpu")


def zero_config(stage: int) -> dict[str, Any]:
    """A DeepSpeed config whose every number is the run's own."""
    return {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
    }


def rank() -> int:
    return int(os.environ["RANK"])


def note(place: Path, **found: Any) -> None:
    (place / f"seen{rank()}.json").write_text(json.dumps(found))


def noted(place: Path, number: int) -> dict[str, Any]:
    return json.loads((place / f"seen{number}.json").read_text())


def seen(place: Path, world_size: int = 2) -> list[dict[str, Any]]:
    return [noted(place, number) for number in range(world_size)]


def keep(trainer: Any, result: Any, path: Path) -> None:
    """Write what may hold tensors, once."""
    if trainer.is_world_process_zero():
        torch.save(result, path)


def error_of(call: Any) -> str:
    """The class and words of the error that `call()` raises."""
    try:
        call()
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def weights_of(trainer: Any, weights: str = "merged", model: nn.Module | None = None) -> dict[str, torch.Tensor]:
    """The policy's weights; every rank asks. Or those of another model."""
    return joined(trainer.run.strategy, model or trainer.model_wrapped, 1 << 10, weights)


def joined(strategy: Any, model: nn.Module, max_bytes: int, weights: str = "merged") -> dict[str, torch.Tensor]:
    """A model's weights, put together from the strategy's slices."""
    found: dict[str, list[torch.Tensor]] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for piece in strategy.slices(model, max_bytes, None, weights):
        assert piece.values.numel() * piece.dtype.itemsize <= max_bytes
        assert piece.start == sum(part.numel() for part in found.get(piece.name, []))
        found.setdefault(piece.name, []).append(piece.values.clone())
        shapes[piece.name] = piece.shape
    return {name: torch.cat(parts).view(shapes[name]) for name, parts in found.items()}


def weights(trainer: Any) -> list[float]:
    """A sum of each parameter, by which runs are compared; every rank asks."""
    return [float(values.double().abs().sum()) for values in weights_of(trainer).values()]


def result_of(trainer: Any) -> dict[str, Any]:
    """What a run came to: weights, a critic's too, losses and gradient norms by their step, and what was in force."""
    weights, critic = weights_of(trainer), critic_of(causal_lm(trainer.accelerator.unwrap_model(trainer.model)))
    if critic is not None:
        weights |= {f"critic.{name}": values for name, values in weights_of(trainer, model=critic).items()}
    return {
        "weights": weights,
        "steps": {row["step"]: (row["loss"], row["grad_norm"]) for row in trainer.state.log_history if "loss" in row},
        "strategy": type(trainer.run.strategy).__name__,
        "parameter": type(next(trainer.model.parameters())).__name__,
        "ranks": trainer.args.world_size,
    }


class Failing:
    """A `hold` of whose model one part raises when it is called for the third time, on the second process alone."""

    def __init__(self, hold: Any, part: str, error: Exception) -> None:
        self._hold, self._part, self._error, self._calls = hold, part, error, 0

    @contextmanager
    def __call__(self) -> Iterator[nn.Module]:
        with self._hold() as model:
            handle = model.get_submodule(self._part).register_forward_pre_hook(self._count)
            try:
                yield model
            finally:
                handle.remove()

    def _count(self, module: nn.Module, args: Any) -> None:
        self._calls += 1
        if rank() == 1 and self._calls == 3:
            raise self._error


def later_steps(run: dict[str, Any]) -> dict[int, Any]:
    """The losses and gradient norms of a run after the checkpoint that `SAVED` has in its middle."""
    return {step: run["steps"][step] for step in (4, 5)}


def assert_same_bits(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []


def assert_same_run(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    """The same weights, losses and gradient norms, up to rounding."""
    assert ours["weights"].keys() == theirs["weights"].keys()
    for name, values in theirs["weights"].items():
        torch.testing.assert_close(ours["weights"][name], values, atol=TOLERANCE, rtol=0)
    for step in ours["steps"].keys() | theirs["steps"].keys():
        found, expected = torch.tensor(ours["steps"][step]), torch.tensor(theirs["steps"][step])
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)


PROMPTS = [f"{a}{b}=" for a in range(6) for b in range(4)]
# What stands beside a prompt in the rows of trainers that generate nothing.
ANSWERS: dict[str, Callable[[str], dict[str, Any]]] = {
    "SFT": lambda p: {"completion": f"{p[0]}1"},
    "Reward": lambda p: {"chosen": p[0] * (1 + int(p[1])), "rejected": p[:2], "margin": int(p[1]) / 8},
    "DPO": lambda p: {"chosen": p[0] * (1 + int(p[1])), "rejected": p[:2]},
    "KTO": lambda p: {"completion": p[0] * (1 + int(p[1])), "label": p[1] in "13"},
}


def spread(completions: list[str], **columns: Any) -> list[float]:
    """A number from the text, so that rewards differ within a group."""
    return [sum(ord(c) * (i + 1) for i, c in enumerate(text)) % 7 / 7 for text in completions]


def named_models(folder: Path) -> tuple[str, str]:
    """A policy and a reward model in folders, to be loaded by name; both have a tokenizer beside them."""
    policy, judge, tokenizer = folder / "policy", folder / "judge", char_tokenizer()
    if not folder.exists():
        tiny_model(len(tokenizer)).save_pretrained(policy)
        tiny_classifier(len(tokenizer), seed=3).save_pretrained(judge)
        for path in (policy, judge):
            tokenizer.save_pretrained(path)
    return str(policy), str(judge)


def classes_of(algorithm: str) -> tuple[Any, Any]:
    """The configuration and the trainer of an algorithm: the library's, or of a user's own file."""
    name = "examples.own_algorithm" if algorithm == "Reinforce" else "lowpeak"
    where = importlib.import_module(name)
    return getattr(where, f"{algorithm}Config"), getattr(where, f"{algorithm}Trainer")


def build(
    algorithm: str, folder: Path, arguments: dict[str, Any], model: Any = None, rewards: Any = None, **more: Any
) -> Any:
    """A small trainer: 8 completions of 2 prompts a rollout, whatever the number of ranks."""
    config, trainer = classes_of(algorithm)
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    tokenizer = char_tokenizer()
    base = {
        "output_dir": str(folder), "report_to": "none", "disable_tqdm": True, "learning_rate": 1e-2,
        "adam_epsilon": 1e-3,  # with 1e-8, where a gradient is nearly zero its last bit would become a whole step
        "max_grad_norm": 0.5, "logging_steps": 1, "save_strategy": "no", "max_steps": 3,
        "per_device_train_batch_size": 8 // world_size, "micro_batch_tokens": 64, "logprob_chunk_size": 16,
        "num_generations": 4, "max_completion_length": 6, "kv_cache_bytes": 1 << 24,
    }  # fmt: skip
    rows = [{"prompt": p, **ANSWERS.get(algorithm, lambda p: {})(p)} for p in PROMPTS]
    if algorithm in ANSWERS:
        for name in ("num_generations", "max_completion_length", "kv_cache_bytes"):
            base.pop(name)
    else:
        more["reward_funcs"] = rewards or spread
    if "teacher_model_kind" in arguments:
        rows = [{**row, "privileged_context": "12345"[: 1 + i % 5]} for i, row in enumerate(rows)]
    elif algorithm == "Distillation":
        more["teacher_model"] = tiny_model(len(tokenizer), seed=1, hidden=48)
    if algorithm == "Reward":
        base.pop("logprob_chunk_size")
    args = config(**{**base, **arguments})
    allow_meshes_on_cpu()
    return trainer(
        model=model if model is not None else tiny_model(len(tokenizer)),
        args=args,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        **more,
    )

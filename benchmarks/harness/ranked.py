"""One side's GRPO steps, watched by phase: `benchmarks.harness.ranks` calls `main` on every rank; run apart, it is one process."""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerFast, TrainerCallback

from benchmarks.harness import shapes, task
from benchmarks.harness.clock import PhaseClock, watch_step
from benchmarks.harness.process import MemoryWatch, in_mb, peaks_by_phase, resident_bytes
from benchmarks.harness.report import OURS, print_result
from benchmarks.harness.stepping import our_countdowns, spread

HIDDEN, LAYERS, VOCABULARY = 768, 12, 30_720  # 113M parameters, 24M of them the tied embedding
PROMPT = 64
FSDP2 = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
    "FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT",
}


@dataclass(frozen=True)
class RankedRequest:
    """What one side is to do: `options` are more arguments of its trainer."""

    library: str
    strategy: str
    beta: float
    completion: int
    steps: int
    start: str
    folder: str
    canned: bool = False  # fixed completions of exponential lengths in the place of generation
    options: dict[str, Any] = field(default_factory=dict)


class Stamps(TrainerCallback):
    """Seconds by phase, and all of them, when each step ends."""

    def __init__(self, clock: PhaseClock) -> None:
        self.clock = clock
        self.seen = [{"total": time.perf_counter()}]
        self.between = self.tensors = 0

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Note the seconds so far, and what is resident and which tensors live between steps."""
        self.seen.append({**self.clock.seconds, "total": time.perf_counter()})
        self.between = resident_bytes() or 0
        self.tensors = tensor_bytes(more["model"], more["optimizer"])


def save_model(folder: Path, quick: bool) -> None:
    """The weights and the tokenizer that both sides load; a quick run's have two narrow layers."""
    hidden, layers = (128, 2) if quick else (HIDDEN, LAYERS)
    shapes.make_model(hidden, layers, VOCABULARY).save_pretrained(folder)
    shapes.make_tokenizer().save_pretrained(folder)


def settings_of(request: RankedRequest) -> dict[str, Any]:
    """The arguments of either library's trainer: 2 prompts x 8 completions a step on two ranks."""
    zero = {"deepspeed": _zero_config(int(request.strategy[-1]))} if request.strategy.startswith("zero") else {}
    return {
        **task.trainer_settings("grpo", 0, request.steps, Path(request.folder)),
        "per_device_train_batch_size": shapes.NUM_GENERATIONS,
        "max_completion_length": request.completion,
        "learning_rate": 1e-6,
        "gradient_checkpointing": True,
        "beta": request.beta,
        "shuffle_dataset": False,
        "logging_steps": 1,
        **zero,
        **request.options,
    }


def make_trainer(request: RankedRequest) -> Any:
    """The trainer of either library under the asked strategy, by the model's path, as users have it."""
    from datasets import Dataset

    package = importlib.import_module(request.library)
    if request.strategy == "fsdp2":
        os.environ.update(FSDP2)
    args = package.GRPOConfig(**settings_of(request))
    if request.strategy == "fsdp2":
        allow_fsdp_on_cpu()
    words = [text.replace("<start>", "w257") for text in shapes.make_prompts(2 * request.steps, PROMPT)]
    ours, lengths = request.library == OURS, canned_lengths(request)
    trainer = package.GRPOTrainer(
        model=request.start,
        reward_funcs=spread([]),
        args=args,
        train_dataset=Dataset.from_list([{"prompt": text} for text in words]),
        processing_class=PreTrainedTokenizerFast.from_pretrained(request.start),
        **(
            {"rollout_func": lambda texts, owner: our_countdowns(texts, owner, lengths)}
            if ours and request.canned
            else {}
        ),
    )
    if request.canned and not ours:
        trainer._generate_single_turn = lambda *_, **__: (list(map(shapes.countdown, next(lengths))), None)
    return trainer


def canned_lengths(request: RankedRequest) -> Iterator[list[int]]:
    """Lengths of a rank's eight completions, step by step, the same on both sides."""
    rank = int(os.environ.get("RANK", "0"))
    for step in range(request.steps):
        yield shapes.draw_lengths(shapes.NUM_GENERATIONS, 2 * step + rank, request.completion)


def planned_steps(request: RankedRequest) -> dict[str, Any]:
    """Train, and tell this rank's memory by phase above the process before the model, and the last step's seconds."""
    importlib.import_module(f"{request.library}").GRPOTrainer  # noqa: B018, loads what is loaded lazily
    before = resident_bytes() or 0
    trainer, clock = make_trainer(request), PhaseClock(time.perf_counter)
    watch_step(trainer, request.library, clock)
    stamps = Stamps(clock)
    trainer.add_callback(stamps)
    loaded = resident_bytes() or 0
    with MemoryWatch(resident_bytes) as watch:
        trainer.train()
    peaks = peaks_by_phase(clock.events, watch.samples)
    last = {name: stamps.seen[-1][name] - stamps.seen[-2].get(name, 0.0) for name in stamps.seen[-1]}
    return {
        "parameter": type(next(trainer.model.parameters())).__name__,
        "parameters": sum(parameter.numel() for parameter in trainer.model.parameters()),
        "tensor_bytes": stamps.tensors,
        "between_mb": in_mb(stamps.between - before),
        "loaded_mb": in_mb(loaded - before),
        "peak_mb": in_mb((watch.peak_bytes or 0) - before),
        "peak_mb_above_loaded": in_mb((watch.peak_bytes or 0) - loaded),
        "peak_mb_by_phase": {name: round(peak - before / 2**20, 1) for name, peak in peaks.items()},
        "seconds": {name: round(value, 2) for name, value in last.items()},
        "loss": [log["loss"] for log in trainer.state.log_history if "loss" in log],
    }


def tensor_bytes(model: Any, optimizer: Any) -> int:
    """The bytes of this rank's weights, gradients and optimizer states, each storage once."""
    parameters = list(model.parameters())
    tensors = [*parameters, *(parameter.grad for parameter in parameters)]
    tensors += [value for state in optimizer.state.values() for value in state.values()]
    local = [
        each.to_local() if hasattr(each, "to_local") else each for each in tensors if isinstance(each, torch.Tensor)
    ]
    return sum({each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in local}.values())


def main(request: dict[str, Any]) -> None:
    """One rank; rank 0 tells what all found."""
    import torch.distributed as dist

    torch.set_num_threads(1)
    found = planned_steps(RankedRequest(**request))
    if not dist.is_initialized():
        print_result({"ranks": [found]})
        return
    everybodys: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everybodys, found)
    if dist.get_rank() == 0:
        print_result({"ranks": everybodys})


def allow_fsdp_on_cpu() -> None:
    """On a CPU accelerate would train DDP without a word: its state is told that there are several devices."""
    from accelerate import PartialState
    from accelerate.utils import DistributedType

    state = PartialState._shared_state
    state["distributed_type"], state["device"] = DistributedType.MULTI_GPU, torch.device("cpu")


def _zero_config(stage: int) -> dict[str, Any]:
    """DeepSpeed with the sizes that transformers derives from the model's width, as its documentation has them."""
    sizes = ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold")
    own = dict.fromkeys(sizes, "auto") if stage == 3 else {}
    return {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "zero_optimization": {"stage": stage, **own},
        "zero_allow_untested_optimizer": True,
    }


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))

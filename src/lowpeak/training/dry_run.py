"""What a run resolved to, in plain words and numbers: the dry run's answer."""

from __future__ import annotations

from dataclasses import asdict
from itertools import islice
from typing import Any

from lowpeak.arguments import VllmSettings
from lowpeak.batching import Budget, arrange


def describe_run(trainer: Any) -> dict[str, Any]:
    """Model, data, algorithm, rollout, sampling, sizes and the plan of micro-batches of an online trainer."""
    maker, settings = trainer.maker, trainer.maker.settings
    return {
        "model": {**_model(trainer), "reference": _reference(maker)},
        "data": {"usable_prompts": maker.cursor.prompts_per_epoch, **_data(trainer)},
        "rewards": dict(zip(maker.panel.names, settings.reward_weights, strict=True)),
        "algorithm": {
            "name": trainer.run.algorithm.name,
            "unit": trainer.run.algorithm.unit,
            "scored_before_training": sorted(trainer.run.algorithm.needs),
        },
        "rollout": {
            **asdict(settings.rollout),
            "completions": settings.rollout.num_rows,
            "steps": settings.rollout.num_steps,
        },
        "sampling": asdict(settings.sampling),
        **({} if settings.vllm is None else {"vllm": describe_vllm(settings.vllm)}),
        "sizes": trainer.run.sizes.as_dict(),
        "layout": str(trainer.run.sizes.choice),
        "micro_batches": _plan(trainer),
    }


def describe_vllm(settings: VllmSettings) -> dict[str, Any]:
    """Where vLLM runs, and what it was told; of a token, that there is one."""
    told = {"mode": settings.mode, **asdict(settings)}
    told |= told.pop("where")
    if told.pop("token", None):
        told["token"] = "given"
    return told


def describe_offline(trainer: Any) -> dict[str, Any]:
    """Model, data, sizes and the plan of micro-batches of an offline trainer."""
    length, rows, unit = trainer.reader.max_length, trainer.rows_per_step, trainer.run.algorithm.unit
    plan: dict[str, Any] = {"rows_per_step": rows}
    if length is not None:
        bound = [i for i in range(rows) for _ in range(2)] if unit == "pair" else None
        prompts: list[tuple[int, ...]] = [(i,) for i in bound or range(rows)]
        plan = {"longest_row": length, **_cut(trainer, prompts, length - 1, trainer.budget, bound), **plan}
    return {
        "model": _model(trainer),
        "data": {"usable_rows": trainer.cursor.prompts_per_epoch, **_data(trainer)},
        "algorithm": {"name": trainer.run.algorithm.name, "unit": unit},
        "sizes": trainer.run.sizes.as_dict(),
        "layout": str(trainer.run.sizes.choice),
        "micro_batches": plan,
    }


def _model(trainer: Any) -> dict[str, Any]:
    parameters = list(trainer.model.parameters())
    return {
        "class": type(trainer.model).__name__,
        "parameters": sum(p.numel() for p in parameters),
        "trainable": sum(p.numel() for p in parameters if p.requires_grad),
        "dtypes": sorted({str(p.dtype).removeprefix("torch.") for p in parameters}),
        "device": str(trainer.args.device),
        "bf16_compute": bool(trainer.args.bf16),
    }


def _data(trainer: Any) -> dict[str, Any]:
    return {"steps_per_epoch": trainer.num_steps_per_epoch(), "columns": _columns(trainer.train_dataset)}


def _reference(maker: Any) -> str:
    if maker.reference is None:
        return "none (beta is 0)"
    return "the policy with its adapters off" if maker.reference.model is None else type(maker.reference.model).__name__


def _columns(dataset: Any) -> list[str]:
    names = getattr(dataset, "column_names", None)
    return list(names) if names else []


def _plan(trainer: Any) -> dict[str, Any]:
    """How a step is cut when every completion is as long as it may be: the most micro-batches that a step can take."""
    maker, settings = trainer.maker, trainer.maker.settings
    dataset = trainer.train_dataset
    reader = maker.new_reader()
    rows = [reader.read(row, i) for i, row in enumerate(islice(iter(dataset), settings.rollout.num_prompts))]
    longest = max((len(prompt.ids) for prompt in rows if prompt is not None), default=0)
    length = settings.sampling.max_new_tokens
    groups = [i // settings.rollout.num_generations for i in range(settings.rollout.rows_per_step)]
    bound = None
    if trainer.run.algorithm.unit == "pair":  # two rows of each group are trained on, and stay together
        groups = bound = [group for group in sorted(set(groups)) for _ in range(2)]
    cut_up = _cut(trainer, [(group,) * longest for group in groups], length, maker.budget, bound)
    return {"longest_prompt_seen": longest, "longest_row": longest + length, **cut_up}


def _cut(
    trainer: Any, prompts: list[tuple[int, ...]], completion: int, budget: Budget, bound: list[int] | None = None
) -> dict[str, Any]:
    batches = arrange(prompts, [completion] * len(prompts), budget, bound)
    return {
        "rows_per_step": len(prompts),
        "micro_batch_tokens": budget.max_tokens,
        "micro_batches_at_most": len(batches),
        "rows_per_micro_batch_at_least": min((sum(map(len, parts)) for parts in batches), default=0),
        "logprob_chunk_size": trainer.run.core.chunk_size,
    }

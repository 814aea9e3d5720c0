"""The dry run: the resolved arguments in words and numbers, and a rendered prompt, without training."""

from __future__ import annotations

import math
from dataclasses import asdict
from itertools import islice
from typing import Any

from torch import nn

from lowpeak.arguments import VllmSettings
from lowpeak.batching import plan_micro_batches
from lowpeak.data import DatasetCursor
from lowpeak.environments import EnvironmentEngine
from lowpeak.records import Record
from lowpeak.rollout import FunctionEngine
from lowpeak.setup.engines import describe_generation
from lowpeak.training import BuildContext, RolloutCollector, Run

Report = dict[str, Any]


def describe_run(context: BuildContext, model: nn.Module, collector: RolloutCollector, num_steps: int | None) -> Report:
    """Return the dry run of an online trainer: model, data, algorithm, rollout, sampling, sizes, generation, micro-batches.

    `num_steps` is the number of steps of an epoch.
    """
    run, settings = context.run, collector.settings
    return {
        "model": {**_model(context, model), "reference": _reference(run)},
        "data": {"usable_prompts": collector.cursor.rows_per_epoch, **_data(context, num_steps)},
        "rewards": dict(zip(collector.panel.names, settings.reward_weights, strict=True)),
        "algorithm": {
            "name": run.algorithm.name,
            "unit": run.algorithm.unit,
            "scored_before_training": sorted(run.algorithm.needs),
        },
        "rollout": {
            **asdict(settings.rollout),
            "completions": settings.rollout.num_sequences,
            "steps": settings.rollout.num_steps,
            **_staleness(settings.max_staleness, settings.rollout.num_steps),
        },
        "sampling": {name: value for name, value in asdict(settings.sampling).items() if name != "first_completion"},
        **({} if settings.vllm is None else {"vllm": describe_vllm(settings.vllm)}),
        "sizes": run.sizes.as_dict(),
        "generation": describe_generation(
            model, settings.vllm, by_function=isinstance(collector.engine, FunctionEngine)
        ),
        **_rendered(context, collector),
        "layout": str(run.sizes.layout_choice),
        "micro_batches": _rollout_plan(context, collector),
    }


def _staleness(ahead: int, num_steps: int) -> Report:
    """Return the rollouts that are generated ahead, and how many steps old their tokens are when they are trained on."""
    oldest = (ahead + 1) * num_steps - 1
    return {"generated_ahead": ahead, "token_age_in_steps": [ahead * num_steps, oldest]} if ahead else {}


def _rendered(context: BuildContext, collector: RolloutCollector) -> Report:
    """Return the first prompt as the policy reads it; with tools, a conversation from it."""
    prompt = collector.new_reader().read(next(iter(context.train_dataset)), 0)
    if prompt is None:
        return {}
    if isinstance(collector.engine, EnvironmentEngine):
        return {"conversation": collector.engine.example(prompt)}
    return {"first_prompt": context.processing_class.decode(prompt.ids)}


def describe_vllm(settings: VllmSettings) -> Report:
    """Return the settings of vLLM; of a token, only that there is one."""
    report = {"mode": settings.mode, **asdict(settings)}
    report |= report.pop("where")
    if report.pop("token", None):
        report["token"] = "given"
    return report


def describe_offline(
    context: BuildContext,
    model: nn.Module,
    cursor: DatasetCursor[Any],
    num_steps: int | None,
    rows: int,
    longest: int | None,
    first: Record,
) -> Report:
    """Return the dry run of an offline trainer: model, data, sizes and micro-batches.

    A step takes `rows` of the dataset, of `longest` tokens at most; `num_steps` is the number of steps of an epoch. `first` is the
    first row's sequence.
    """
    run = context.run
    plan: Report = {"rows_per_step": rows}
    if longest is not None:
        pairs = [i for i in range(rows) for _ in range(2)] if run.algorithm.unit == "pair" else None
        prompts: list[tuple[int, ...]] = [(i,) for i in pairs or range(rows)]
        counts = _micro_batches(run, prompts, longest - 1, pairs)
        if pairs:  # a row of the dataset is two sequences
            counts |= {name: counts[name] // 2 for name in ("rows_per_rank_at_most", "rows_per_micro_batch_at_least")}
        plan = {"longest_row": longest, **counts, **plan}
    return {
        "model": _model(context, model),
        "data": {"usable_rows": cursor.rows_per_epoch, **_data(context, num_steps)},
        "algorithm": {"name": run.algorithm.name, "unit": run.algorithm.unit},
        "sizes": run.sizes.as_dict(),
        "first_row": context.processing_class.decode([*first.prompt_ids, *first.completion.ids.tolist()]),
        "layout": str(run.sizes.layout_choice),
        "micro_batches": plan,
    }


def _model(context: BuildContext, model: nn.Module) -> Report:
    parameters = list(model.parameters())
    return {
        "class": type(model).__name__,
        "parameters": sum(p.numel() for p in parameters),
        "trainable": sum(p.numel() for p in parameters if p.requires_grad),
        "dtypes": sorted({str(p.dtype).removeprefix("torch.") for p in parameters}),
        "device": str(context.args.device),
        "bf16_compute": bool(context.args.bf16),
        "storage": str(context.run.storage or _optimizers_storage(model)),
    }


def _optimizers_storage(model: nn.Module) -> str:
    """Return the format of trained weights whose states an optimizer of torch or of the user's stores."""
    dtypes = sorted({str(p.dtype).removeprefix("torch.") for p in model.parameters() if p.requires_grad})
    return f"weights in {' and '.join(dtypes)}, optimizer states as optim stores them"


def _data(context: BuildContext, num_steps: int | None) -> Report:
    columns, args = getattr(context.train_dataset, "column_names", None), context.args
    steps = args.max_steps if args.max_steps > 0 else math.ceil(args.num_train_epochs * (num_steps or 0))
    return {"steps": steps, "steps_per_epoch": num_steps, "columns": list(columns) if columns else []}


def _reference(run: Run) -> str:
    if run.reference is None:
        return "none (beta is 0)"
    model = run.reference.model
    if run.reference.with_adapters:
        return "the policy itself"
    return "the policy with its adapters off" if model is None else type(model).__name__


def _rollout_plan(context: BuildContext, collector: RolloutCollector) -> Report:
    """Return the most micro-batches of a rank's step: every completion has the maximal length, in all its branches."""
    run, settings = context.run, collector.settings
    reader = collector.new_reader()
    rows = islice(iter(context.train_dataset), settings.rollout.num_prompts)
    prompts = [reader.read(row, i) for i, row in enumerate(rows)]
    longest = max((len(prompt.ids) for prompt in prompts if prompt is not None), default=0)
    length = settings.tools.max_branches * settings.sampling.max_new_tokens
    groups = [i // settings.rollout.num_generations for i in range(settings.rollout.rows_per_step)]
    pairs = None
    if run.algorithm.unit == "pair":  # two completions of each group are trained on, in one micro-batch
        groups = pairs = [group for group in sorted(set(groups)) for _ in range(2)]
    plan = _micro_batches(run, [(group,) * longest for group in groups], length, pairs)
    return {"longest_prompt_seen": longest, "longest_row": longest + length, **plan}


def _micro_batches(run: Run, prompts: list[tuple[int, ...]], completion: int, pairs: list[int] | None) -> Report:
    num_ranks = run.strategy.ranks.world_size
    rows = -(-len(prompts) // num_ranks)
    rows += rows % 2 if pairs else 0  # a pair is in one micro-batch
    batches = plan_micro_batches(prompts[:rows], [completion] * rows, run.budget, pairs and pairs[:rows])
    return {
        "rows_per_step": len(prompts),
        "ranks": num_ranks,
        "rows_per_rank_at_most": rows,
        "micro_batch_tokens": run.budget.max_tokens,
        "micro_batches_at_most": len(batches),
        "rows_per_micro_batch_at_least": min((sum(map(len, parts)) for parts in batches), default=0),
        "logprob_chunk_size": run.logprob_settings.chunk_size,
    }

"""Saving: a checkpoint is staged, synced and renamed, and only then the oldest one is removed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from transformers.trainer_callback import ExportableState

from lowpeak.checkpoint.atomic import prune, staged
from lowpeak.checkpoint.state import RunState, save_run_state
from lowpeak.training.models import REFERENCE_ADAPTER, is_peft


def save_checkpoint(trainer: Any, trial: Any, state: RunState) -> Path:
    """Write `checkpoint-<step>` of a trainer, whole or not at all; returns its folder."""
    args, ranks = trainer.args, trainer.run.strategy.ranks
    run_dir = Path(trainer._get_output_dir(trial=trial))
    final = run_dir / f"checkpoint-{trainer.state.global_step}"
    trainer.store_flos()
    with ExitStack() as stack:
        stage = ranks.first(lambda: stack.enter_context(staged(final)))
        trainer.save_model(os.fspath(stage), _internal_call=True)
        if not args.save_only_model:
            trainer._save_optimizer_and_scheduler(os.fspath(stage))
            trainer._save_scaler(os.fspath(stage))
        save_run_state(stage, state, args.process_index)
        trainer.save_more(stage)
        _note_best(trainer, run_dir, final)
        _note_callbacks(trainer)
        if ranks.rank == 0:
            trainer.state.save_to_json(os.fspath(stage / "trainer_state.json"))
        ranks.barrier()
    ranks.barrier()
    if args.push_to_hub:
        trainer._push_from_checkpoint(os.fspath(final))
    best = trainer.state.best_model_checkpoint
    if ranks.rank == 0:
        prune(run_dir, trainer.user_args.save_total_limit, [Path(best)] if best else [])
    return final


@contextmanager
def without_reference(model: Any) -> Iterator[None]:
    """Hide the adapter that is only the reference from `save_pretrained`."""
    adapters: dict[str, Any] = model.peft_config if is_peft(model) else {}
    hidden = adapters.pop(REFERENCE_ADAPTER, None)
    try:
        yield
    finally:
        if hidden is not None:
            adapters[REFERENCE_ADAPTER] = hidden


def _note_best(trainer: Any, run_dir: Path, final: Path) -> None:
    """`best_model_checkpoint`, as the base class sets it: the folder of the best step, once that exists."""
    step = trainer.state.best_global_step
    if step:
        best = run_dir / f"checkpoint-{step}"
        if best == final or best.is_dir():
            trainer.state.best_model_checkpoint = os.fspath(best)


def _note_callbacks(trainer: Any) -> None:
    """The states of callbacks that have one, as the base class keeps them."""
    holders = [h for h in (*trainer.callback_handler.callbacks, trainer.control) if isinstance(h, ExportableState)]
    for holder in holders:
        name, state = type(holder).__name__, holder.state()
        kept = trainer.state.stateful_callbacks.get(name)
        if isinstance(kept, list):
            kept.append(state)
        else:
            trainer.state.stateful_callbacks[name] = state

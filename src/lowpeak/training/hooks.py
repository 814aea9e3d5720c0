"""The memory tracker, which shows phases and explains memory errors, and the callback at transformers' hooks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from transformers.trainer_callback import ProgressCallback, TrainerCallback

from lowpeak.memory import MemoryTracker, Phase
from lowpeak.optim import find_compact, warn_of_lost_updates
from lowpeak.training.memory_errors import explain_out_of_memory
from lowpeak.training.run import BuildContext, Run

_PROGRESS_TEXTS = {
    Phase.ROLLOUT: "generating",
    Phase.REWARD: "rewarding",
    Phase.SCORE: "scoring",
    Phase.TRAIN: "training",
    Phase.EVALUATE: "evaluating",
    Phase.SAVE: "saving",
}


class ProgressTracker(MemoryTracker):
    """A memory tracker that shows the phase on the progress bar and explains errors of memory."""

    def __init__(self, device: torch.device | str, context: BuildContext) -> None:
        super().__init__(device)
        self._context, self._callbacks = context, context.callback_handler

    @contextmanager
    def phase(self, phase: Phase) -> Iterator[None]:
        if phase in _PROGRESS_TEXTS:
            self._show(_PROGRESS_TEXTS[phase])
        with super().phase(phase), explain_out_of_memory(phase, self._context):
            yield

    def _show(self, text: str) -> None:
        for callback in self._callbacks.callbacks:
            bar = getattr(callback, "training_bar", None) if isinstance(callback, ProgressCallback) else None
            if bar is not None:
                bar.set_postfix_str(text)


class StepCallback(TrainerCallback):
    """Calls at transformers' hooks: the optimizer's phase, the end of a step, the request to stop."""

    def __init__(self, current_run: Callable[[], Run], finish_step: Callable[[], object]) -> None:
        self._current_run, self._finish_step = current_run, finish_step
        self._open = ExitStack()
        self._is_training = False

    def on_train_begin(self, args: Any, state: Any, control: Any, optimizer: Any = None, **kwargs: Any) -> None:
        self._is_training = True
        if state.is_world_process_zero and find_compact(optimizer) is None:
            warn_of_lost_updates(optimizer)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._is_training = False
        planned = self._current_run().planned
        if planned is not None:
            planned.close()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        run = self._current_run()
        self._open.close()  # still open if the last optimizer step raised
        self._open.enter_context(run.tracker.phase(Phase.OPTIMIZER))
        run.strategy.deepspeed_step()

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._open.close()

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **kwargs: Any) -> None:
        if self._is_training:  # an evaluation by itself would begin a new journal
            self._current_run().journal.write_evaluation(state.global_step, metrics)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        self._finish_step()
        if self._current_run().interrupts.agreed:
            control.should_save = True
            control.should_training_stop = True
        return control

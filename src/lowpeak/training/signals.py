"""Ctrl-C: the first finishes the step, saves and says how to resume; the second stops now. SIGTERM is a first Ctrl-C.

Launchers pass both on to all ranks, which may be in different steps then: the ranks agree at the end of a step.
"""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from transformers import TrainerCallback

from lowpeak.errors import EngineError, StoppedError
from lowpeak.memory import Phase
from lowpeak.ranks import Ranks

logger = logging.getLogger(__name__)

STOPS = ("should_training_stop", "should_epoch_stop")
WISHES = (*STOPS, "should_log", "should_evaluate", "should_save")


class Interrupts:
    """Watches SIGINT and SIGTERM while a run trains; outside the main thread it watches nothing.

    `stopping` is whether this rank was asked to stop, `agreed` whether any was, as all ranks know since the last step's end.
    """

    def __init__(self) -> None:
        self.stopping = False
        self.agreed = False

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Take both signals over for the block, and give them back however it is left."""
        self.stopping = self.agreed = False
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self._asked) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _asked(self, signum: int, frame: FrameType | None) -> None:
        """The first of either asks to stop; SIGTERM may come again, from a scheduler and from the launcher in between."""
        if not self.stopping:
            self.stopping = True
            who = "Interrupted" if signum == signal.SIGINT else "Asked to stop (SIGTERM)"
            logger.warning("%s: finishing this step and saving; press Ctrl-C again to stop at once.", who)
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def raise_if_stopped(self, output_dir: Path, step: int) -> None:
        """KeyboardInterrupt that says how to resume, when the run was asked to stop."""
        if not self.agreed:
            return
        saved = output_dir / f"checkpoint-{step}"
        if not step:
            raise KeyboardInterrupt("stopped on request before the first step: there was nothing to save.")
        if not saved.is_dir():  # asked after the last step, when there was no other left to end with a save
            raise KeyboardInterrupt(f"stopped on request, when the run had finished its last step, {step}.")
        raise KeyboardInterrupt(
            f"stopped on request; everything is saved in {saved}. Resume with resume_from_checkpoint=True "
            "(--resume_from_checkpoint true)."
        )


def agree_on(control: Any, names: Sequence[str], ranks: Ranks) -> None:
    """Ask of every rank what the callbacks of any ask for, by a clock or a metric of their own: it takes all of them."""
    asked = ranks.max([float(getattr(control, name)) for name in names])
    for name, is_asked in zip(names, asked, strict=True):
        if is_asked:
            setattr(control, name, True)


@contextmanager
def saved_where_it_waits(trainer: Any, output_dir: Path) -> Iterator[None]:
    """A block in which a run that is asked to stop while it waits for an engine saves what it has, and stops.

    So do ranks that gave up for another reason. What the step under way has drawn is taken back: it begins again.
    """
    trainer.step_began_with = None
    try:
        yield
    except (EngineError, StoppedError) as error:
        run, step = trainer.run, trainer.state.global_step
        if not run.strategy.ranks.max([float(isinstance(error, StoppedError))])[0]:
            raise
        run.interrupts.agreed = True
        if step and not run.strategy.ranks.first(lambda: (output_dir / f"checkpoint-{step}").is_dir()):
            trainer.save_state(None, trainer.step_began_with or trainer.run_state())
            trainer.callback_handler.on_save(trainer.args, trainer.state, trainer.control)
        trainer.callback_handler.on_train_end(trainer.args, trainer.state, trainer.control)
        run.interrupts.raise_if_stopped(output_dir, step)


class StepCallback(TrainerCallback):
    """What has to happen at transformers' hooks: the optimizer's phase, the journal, the request to stop."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._optimizer = ExitStack()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._optimizer.close()  # open still when the last optimizer step raised
        self._optimizer.enter_context(self._trainer.run.tracker.phase(Phase.OPTIMIZER))
        self._trainer.run.strategy.own_step()

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._optimizer.close()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        self._trainer.finish_step()
        if self._trainer.run.interrupts.agreed:
            control.should_save = True
            control.should_training_stop = True
        return control

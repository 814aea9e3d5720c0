"""What ranks do in the tests of faults: small runs in which one of them fails, dies, is slow or is told to stop."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from accelerate import PartialState
from setups import build, error_of, named_models, note, prepare, rank, spread, weights
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from transformers import TrainerCallback

from lowpeak.arguments.base import MemorySettings
from lowpeak.journal import read_steps
from lowpeak.parallel.detect import DeviceFractions
from lowpeak.ranks import Ranks
from lowpeak.sizes.run_sizes import Sizes, prepare_layout
from tiny_models import tiny_model


def run_with(place: Path, reward: Any, strategy: str = "ddp", name: str = "run", **arguments: Any) -> Any:
    return build("GRPO", place / name, {**prepare(strategy), **arguments}, rewards=reward)


def reward_that(act: Callable[[], Any], steps: int = 0, on: int = 1) -> Any:
    """A reward that does something else first, on one rank, when so many steps are done."""

    def reward(completions: list[str], trainer_state: Any, **columns: Any) -> list[float]:
        if rank() == on and trainer_state.global_step == steps:
            act()
        return spread(completions)

    return reward


def fail(error: BaseException) -> None:
    raise error


def answers(prompts: list[str]) -> dict[str, Any]:
    """What a user's own generation gives for these prompts."""
    rows = len(prompts)
    return {"prompt_ids": [[2, 3]] * rows, "completion_ids": [[4, 1]] * rows, "logprobs": [[-1.0, -1.0]] * rows}


def ask_alone(place: Path) -> None:
    """Rank 1's callback alone asks for an evaluation and a checkpoint after the first step, and then to stop."""

    class Asking(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
            control.should_evaluate = control.should_save = rank() == 1 and state.global_step == 1
            return control

        def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
            control.should_training_stop = rank() == 1
            return control

    trainer = run_with(place, spread, max_steps=6)
    trainer.eval_dataset = [{"prompt": "12="}]
    trainer.add_callback(Asking())
    trainer.train()
    evaluated = sum("eval_reward" in row for row in trainer.state.log_history)
    saved = sorted(path.name for path in (place / "run").glob("checkpoint-*"))
    note(place, step=trainer.state.global_step, evaluated=evaluated, saved=saved)


def evaluate_and_save(place: Path, strategy: str) -> None:
    """A supervised run that evaluates and saves after each step, and one that does neither: what each has trained."""
    trained, early = [], []
    for name, often in (("often", "steps"), ("never", "no")):
        arguments = {"eval_strategy": often, "save_strategy": often, "eval_steps": 1, "save_steps": 1}
        rows = [{"prompt": "12=", "completion": "1"}]
        trainer = build("SFT", place / name, {**prepare(strategy), **arguments}, eval_dataset=rows)
        early.append(error_of(trainer.evaluate))
        trainer.train()
        trained.append(weights(trainer))
    note(place, often=trained[0], never=trained[1], early=early)


# errors that the ranks agree on


def fail_in_turn(place: Path) -> None:
    """One rank alone fails, again and again in the same processes: in each case all ranks raise, and can go on."""
    note(place, **{name: error_of(lambda case=case: case(place)) for name, case in FAILURES.items()})


def failing_reward(place: Path) -> None:
    run_with(place, reward_that(lambda: fail(KeyError("no such answer"))), name="reward").train()


def leaving_reward(place: Path) -> None:
    run_with(place, reward_that(lambda: sys.exit(0)), name="exit").train()


def failing_function(place: Path) -> None:
    def rollout_func(prompts: list[str], trainer: Any) -> dict[str, Any]:
        if rank() == 1:
            raise ConnectionError("the sandbox does not answer")
        return answers(prompts)

    build("GRPO", place / "function", prepare("ddp"), rollout_func=rollout_func).train()


def failing_data(place: Path) -> None:
    from datasets import IterableDataset

    def rows() -> Any:
        for number in range(64):
            yield {"prompt": 7 if rank() == 1 and number == 3 else "12="}

    trainer = run_with(place, spread, name="data")
    trainer.collector.cursor = type(trainer.collector.cursor)(
        IterableDataset.from_generator(rows), trainer.collector.new_reader(), shuffle=False, seed=0
    )
    trainer.train()


def failing_folder(place: Path) -> None:
    blocked = place / "blocked"
    blocked.write_text("a file") if rank() == 0 else None
    run_with(place, spread, name="blocked/run")


def failing_load(place: Path) -> None:
    model = str(place / "no-such-model") if rank() == 1 else tiny_model()
    build("GRPO", place / "load", prepare("ddp"), model)


def failing_resume(place: Path) -> None:
    """One rank alone cannot load: the folder stays as it was."""
    saved: dict[str, Any] = {"name": "resume", "max_steps": 2, "save_strategy": "steps", "save_steps": 1}
    run_with(place, spread, **saved).train()
    resumed = run_with(place, spread, **saved)
    broken = KeyError("last_epoch") if rank() == 1 else None
    try:
        with patch.object(LambdaLR, "load_state_dict", side_effect=broken):
            resumed.train(resume_from_checkpoint=str(place / "resume" / "checkpoint-1"))
    finally:
        assert (place / "resume" / "checkpoint-2").is_dir()
        assert len(read_steps(place / "resume" / "journal")) == 2


def broken_weight(place: Path) -> None:
    """A NaN in one rank's copy of a weight that no forward reads: only that rank sees it, when the checkpoint is due."""
    trainer = run_with(place, spread, name="weights", save_strategy="steps", save_steps=1)

    class Break(TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            if rank() == 1:
                with torch.no_grad():
                    trainer.model.model.layers[1].mlp.up_proj.weight[0, 0] = torch.nan

    trainer.add_callback(Break())
    trainer.train()


def out_of_memory(place: Path) -> None:
    """In a pass that takes no other rank's part."""
    trainer = run_with(place, spread, name="memory", num_iterations=2)

    def hook(module: Any, args: Any) -> None:
        if rank() == 1 and not torch.is_grad_enabled() and trainer.run.tracker.current_phase == "phase score":
            raise torch.OutOfMemoryError("tried to allocate 20.00 GiB")

    trainer.model.model.register_forward_pre_hook(hook)
    trainer.train()


def second_run_in_the_folder(place: Path) -> None:
    """Another process holds the folder: rank 0 alone finds out."""
    from lowpeak.checkpoint.folders import lock_run_folder

    trainer = run_with(place, spread, name="held")
    if rank() == 0:
        with lock_run_folder(place / "held"):
            trainer.train()
    else:
        trainer.train()


FAILURES = {
    "reward": failing_reward,
    "exit": leaving_reward,
    "rollout_func": failing_function,
    "data": failing_data,
    "folder": failing_folder,
    "load": failing_load,
    "resume": failing_resume,
    "weights": broken_weight,
    "memory": out_of_memory,
    "held": second_run_in_the_folder,
}


# ranks that go away


def die(place: Path, strategy: str, victim: int, how: str, busy: float) -> None:
    """The rank `victim` goes away while it judges after two steps; the others judge for `busy` seconds, then wait for it."""

    def reward(completions: list[str], trainer_state: Any, **columns: Any) -> list[float]:
        if trainer_state.global_step == 2:
            if rank() == victim:
                (place / "died").write_text(str(time.monotonic()))
                leave(how)
            time.sleep(busy)
        return spread(completions)

    trainer = run_with(place, reward, strategy, max_steps=4, per_device_train_batch_size=4)
    note(place, error=error_of(trainer.train))
    raise SystemExit(3)


class Dying:
    """A strategy in whose slices the rank dies."""

    def __init__(self, strategy: Any, place: Path) -> None:
        self._strategy, self._place = strategy, place

    def __getattr__(self, name: str) -> Any:
        return getattr(self._strategy, name)

    def slices(self, *args: Any) -> Any:
        yield next(self._strategy.slices(*args))
        (self._place / "died").write_text(str(time.monotonic()))
        leave("kill")


def die_saving(place: Path) -> None:
    """Rank 1 goes away while the trained model is written."""
    trainer = run_with(place, spread, "fsdp2", max_steps=1)
    trainer.train()
    if rank() == 1:
        trainer.run = replace(trainer.run, strategy=Dying(trainer.run.strategy, place))
    note(place, error=error_of(trainer.save_model))
    raise SystemExit(3)


def leave(how: str) -> None:
    if how == "kill, and leave a child" and not os.fork():
        time.sleep(30)  # it has the sockets of its parent, which so stay open
        os._exit(0)
    if how.startswith("kill"):
        os.kill(os.getpid(), signal.SIGKILL)
    os._exit(7)


def fail_alone(place: Path) -> None:
    """Rank 1 fails where nobody asks whether others did: in a callback."""

    class Fail(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if rank() == 1 and state.global_step == 2:
                raise LookupError("a bug of the user's")

    trainer = run_with(place, spread)
    trainer.add_callback(Fail())
    note(place, error=error_of(trainer.train))


def lose_communicator(place: Path) -> None:
    """NCCL finds no memory on rank 1 in a collective of a step's pass."""
    trainer = run_with(place, spread)

    def hook(module: Any, args: Any) -> None:
        if rank() == 1 and torch.is_grad_enabled() and trainer.state.global_step == 1:
            raise RuntimeError("NCCL error in: NCCLUtils.cpp:94\nLast error:\nCuda failure 2 'out of memory'")

    trainer.model.model.register_forward_pre_hook(hook)
    note(place, error=error_of(trainer.train), lowered=sorted(trainer.run.sizes.lowered))


def wait_too_long(place: Path) -> None:
    """Rank 1 is alive and takes longer than a collective may."""
    trainer = run_with(place, reward_that(lambda: time.sleep(30), 1), ddp_timeout=4)
    note(place, error=error_of(trainer.train))


def be_stopped(place: Path) -> None:
    """Rank 1's process is stopped as by SIGSTOP; rank 0 writes its error and ends it for good."""
    (place / f"pid{rank()}").write_text(str(os.getpid()))
    reward = reward_that(lambda: os.kill(os.getpid(), signal.SIGSTOP), 1)
    start = time.monotonic()
    try:
        error = error_of(run_with(place, reward, "zero3", ddp_timeout=5).train)
    finally:
        os.kill(int((place / "pid1").read_text()), signal.SIGKILL)
    note(place, error=error, seconds=time.monotonic() - start)


def be_slow(place: Path) -> None:
    """Rank 1's reward holds the interpreter for seconds, so that not even another thread of it can run."""

    def hold() -> None:
        start = time.monotonic()
        while time.monotonic() < start + 4:
            re.match(r"(a+)+b", "a" * 24)

    trainer = run_with(place, reward_that(hold, 1))
    trainer.train()
    note(place, step=trainer.state.global_step)


def stop(place: Path, when: dict[int, tuple[str, int]], strategy: str = "ddp") -> None:
    """Signals come to ranks at different moments: `when` says which, after how many steps, in the reward."""
    kind, step = when.get(rank(), ("SIGINT", -1))

    def interrupt() -> None:
        for _ in range(2 if kind == "SIGTERM" else 1):  # a scheduler's and its launcher's
            os.kill(os.getpid(), getattr(signal, kind))

    reward = reward_that(interrupt, step, rank())
    trainer = run_with(place, reward, strategy, max_steps=6)
    found = error_of(trainer.train)
    checkpoints = sorted(path.name for path in (place / "run").glob("checkpoint-*"))
    resumed = run_with(place, spread, strategy, max_steps=6)
    resumed.train(resume_from_checkpoint=True)
    note(place, error=found, step=trainer.state.global_step, checkpoints=checkpoints, weights=weights(resumed))


def stop_at_once(place: Path) -> None:
    """Ctrl-C twice on rank 0, while rank 1 is busy for long."""

    def act() -> None:
        if rank() == 1:
            time.sleep(40)
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    trainer = run_with(place, reward_that(act, 2, rank()), max_steps=6)
    note(place, error=error_of(trainer.train))


def leave_alone(place: Path, strategy: str = "ddp") -> None:
    """The same run, which nobody stops."""
    trainer = run_with(place, spread, strategy, max_steps=6)
    trainer.train()
    logs = [{k: v for k, v in row.items() if k != "train_runtime"} for row in trainer.state.log_history[:-1]]
    flos, tokens = trainer.state.total_flos, trainer.state.num_input_tokens_seen
    note(place, weights=weights(trainer), logs=logs, flos=flos, tokens=tokens)


def resume_automatically(place: Path) -> None:
    """The run of the tests of restarts, once more by the same script."""
    saves: dict[str, Any] = {"max_steps": 6, "save_strategy": "steps", "save_steps": 2}
    trainer = run_with(place, spread, "fsdp2", resume_from_checkpoint="auto", **saves)
    trainer.train()
    note(place, steps=trainer.state.global_step)


def choose(place: Path) -> None:
    """Rank 1's memory is full and its model's attention takes no forest; its reward fails beside a sharded reward model."""
    PartialState(cpu=True)
    ranks = Ranks(torch.device("cpu"))
    policy = tiny_model()
    if rank() == 1:
        policy.config._attn_implementation = "eager"
    choice = prepare_layout(MemorySettings(), [policy], torch.device("cpu"), ranks)
    needs = 10**13 if rank() == 1 else 1
    full = SimpleNamespace(
        config=policy.config,
        get_input_embeddings=policy.get_input_embeddings,
        parameters=lambda: iter([nn.Parameter(torch.empty(needs, device="meta"))]),
    )
    sizes = Sizes.of(
        MemorySettings(),
        full,
        torch.device("cpu"),
        choice,
        ranks,
        bf16=False,
        checkpointing=True,
        shares=DeviceFractions(),
    )
    first = ranks.call_on_first(lambda: f"rank {rank()}'s")
    note(place, layout=choice.layout, why=choice.why, sizes=sizes.as_dict(), first=first)


def have_nothing(place: Path, strategy: str) -> None:
    """One prompt a rollout for two ranks: one of them generates and judges nothing."""
    arguments: dict[str, Any] = {"per_device_train_batch_size": 2, "max_steps": 2, "beta": 0.1}
    policy, judge = named_models(place / "named")
    settings = {**prepare(strategy), **arguments}
    trainer = build("GRPO", place / "run", settings, model=policy, rewards=[judge, spread])
    trainer.train()

    failing = reward_that(lambda: fail(KeyError("no such answer")), on=rank())
    judged = build("GRPO", place / "failing", settings, model=policy, rewards=[judge, failing])
    error = error_of(judged.train)

    arguments.pop("beta")
    settings = {**prepare(strategy), **arguments}
    other = build("GRPO", place / "function", settings, rollout_func=lambda prompts, trainer: answers(prompts))
    other.train()
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    note(place, steps=[trainer.state.global_step, other.state.global_step], losses=losses, error=error)

"""`lowpeak check`: tools and an environment, in conversations of random calls and in training of a tiny model."""

from __future__ import annotations

import gc
import itertools
import logging
import statistics
import threading
import time
import tracemalloc
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from inspect import signature
from tempfile import TemporaryDirectory
from typing import Any, cast

import psutil  # type: ignore[import-untyped]
import torch
from datasets import Dataset
from transformers import GenerationConfig, TrainerCallback
from transformers.trainer_callback import PrinterCallback

from lowpeak.arguments import Sampling, ToolSettings, make_settings, require
from lowpeak.data import environment_datasets
from lowpeak.environments import (
    EnvironmentEngine,
    Message,
    ToolResults,
    ToolRunner,
    Toolset,
    ToolTimeoutError,
    tool_call,
)
from lowpeak.errors import ArgumentError, files_of
from lowpeak.models import load_tokenizer
from lowpeak.records import Prompt, Record
from lowpeak.rewards import TimeLimitExceeded, call_with_timeout
from lowpeak.selftest.checks import TINY_RUN, Check, explain, run_check
from lowpeak.selftest.models import make_chat_tokenizer, make_model
from lowpeak.selftest.random_turns import RandomTurns
from lowpeak.trainers import GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

_NUM_PROMPTS, _MAX_TOKENS = 8, 1 << 15  # tokens of a conversation
_GRPO = {"max_steps": 1000, "per_device_train_batch_size": 16, "learning_rate": 1e-4, "max_tool_calling_iterations": 8}


class _TimedRunner(ToolRunner):
    """A runner that keeps, by the function's name, the seconds of calls, the number of failures and one error."""

    def __init__(self, timeout: float) -> None:
        super().__init__(timeout)
        self.timeout = timeout
        self.seconds = defaultdict[str, list[float]](list)
        self.num_failed, self.errors = Counter[str](), dict[str, BaseException]()

    async def run(self, function: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
        start = time.perf_counter()
        name = getattr(function, "func", function).__name__  # a program is a partial
        try:
            return await super().run(function, arguments)
        except Exception as error:
            self.num_failed[name] += 1
            if isinstance(error, ToolTimeoutError) or name not in self.errors:
                self.errors[name] = error
            raise
        finally:
            self.seconds[name].append(time.perf_counter() - start)


@dataclass(eq=False)
class EnvironmentCheck:
    """Tools and an environment under check.

    parts       `tools`, `environment_factory` and `reward_funcs` of the trainer
    dataset     the rows; None if the environment opens conversations itself
    model       name or path of a model whose tokenizer is used; None for a built-in one
    arguments   the user's arguments of GRPOConfig
    seconds     of training
    """

    parts: Mapping[str, Any]
    dataset: Any
    model: str | None
    arguments: Mapping[str, Any]
    seconds: float
    runner: _TimedRunner = field(init=False)
    trainer: GRPOTrainer = field(init=False)
    engine: EnvironmentEngine = field(init=False)
    calls: RandomTurns = field(init=False)
    prompts: list[Prompt] = field(init=False)
    records: Sequence[Record] = ()
    failures: list[tuple[Any, ...]] = field(default_factory=list)

    def run(self) -> Iterator[Check]:
        """Yield the checks, up to one that the others need."""
        self.dataset, _ = environment_datasets(self.dataset, None, self.parts["environment_factory"] or True)
        handler = logging.Handler()
        handler.emit = lambda record: self.failures.append((record.args[:2], record.error))  # type: ignore
        logging.getLogger(EnvironmentEngine.__module__.rpartition(".")[0]).addHandler(handler)
        with TemporaryDirectory(prefix="lowpeak-check-") as folder:
            self.arguments = {**TINY_RUN, **_GRPO, "output_dir": folder, **self.arguments}
            self.runner = _TimedRunner(GRPOConfig(**self.arguments).tool_timeout or 60.0)
            for name, check in _CHECKS.items():
                self.failures.clear()
                result = run_check(name, partial(check, self), self.files)
                yield result
                if not result.passed and name in ("schema", "template", "conversations"):
                    return

    def files(self) -> set[str]:
        """Return the files of the user's code."""
        factory = self.parts["environment_factory"]
        return files_of(*self.parts["tools"], *(factory.values() if isinstance(factory, Mapping) else [factory]))

    def make_trainer(self, model: Any, tokenizer: Any, length: int = 256) -> GRPOTrainer:
        """Return a trainer of the tiny model with the tools, and completions of `length` if the user names no other."""
        args = GRPOConfig(**{"max_completion_length": length, **self.arguments})
        return GRPOTrainer(model, args=args, train_dataset=self.dataset, processing_class=tokenizer, **self.parts)

    def play(self, num_prompts: int, size: int, seed: int = 0, are_equal: bool = False) -> list[Record]:
        """Return rewarded conversations of random calls, `size` for each prompt."""
        self.calls.are_equal = are_equal
        sampling, panel = Sampling(size, _MAX_TOKENS, seed=seed), self.trainer.collector.panel

        def play() -> list[Record]:
            self.engine.results = ToolResults()  # every call runs, equal ones too
            groups = self.engine.generate(self.prompts[:num_prompts], sampling)
            completions, start = [each for group in groups for each in group.completions], time.perf_counter()
            # The panel's completions have no messages.
            records = zip(panel.compute_rewards(groups).records, completions, strict=True)
            self.runner.seconds["rewards"].append((time.perf_counter() - start) / len(completions))
            return [replace(record, completion=completion) for record, completion in records]

        try:
            records: list[Record] = _call_within(5 * (self.runner.timeout + 1), "a conversation", play)
        finally:
            self.raise_failure()
        return records

    def raise_failure(self) -> None:
        """Raise ArgumentError for the first method of an environment that failed, or the first call that was late."""
        for (kind, method), error in self.failures:
            raise ArgumentError(f"{kind}.{method} raised {explain(error, self.files())}.")
        for name, error in self.runner.errors.items():
            require(not isinstance(error, ToolTimeoutError), f"{name} gave {error}: bound what it waits for.")


def _call_within(seconds: float, name: str, call: Callable[[], Any]) -> Any:
    """Return `call()`; ArgumentError if it does not return in so many seconds."""
    try:
        return call_with_timeout(call, seconds)
    except TimeLimitExceeded:
        raise ArgumentError(f"{name} did not return within {seconds:g} seconds: bound what it waits for.") from None


def _schema(check: EnvironmentCheck) -> str:
    settings = make_settings(ToolSettings, GRPOConfig(**check.arguments))
    make = partial(Toolset, check.parts["tools"], check.parts["environment_factory"], settings)
    toolset: Toolset = _call_within(check.runner.timeout, "environment_factory", make)
    toolset.check_row(next(iter(check.dataset)))
    return ", ".join(f"{each.__name__}{signature(each)}" for each in toolset.tools).replace("'", "") or "no tools"


def _template(check: EnvironmentCheck) -> str:
    tokenizer = load_tokenizer(None, check.model, False) if check.model else make_chat_tokenizer()
    model = make_model(len(tokenizer), hidden=64, context=_MAX_TOKENS * 2)
    for config in (model.config, model.generation_config):
        config.pad_token_id, config.eos_token_id = tokenizer.pad_token_id, tokenizer.eos_token_id
    if check.model:
        with suppress(OSError):  # a folder with a tokenizer alone
            model.generation_config.eos_token_id = GenerationConfig.from_pretrained(check.model).eos_token_id
    check.trainer = check.make_trainer(model, tokenizer)
    collector = check.trainer.collector
    check.engine, reader = cast(EnvironmentEngine, collector.engine), collector.new_reader()
    rows = list(itertools.islice(iter(check.dataset), _NUM_PROMPTS))
    check.prompts = [prompt for i, row in enumerate(rows) if (prompt := reader.read(row, i)) is not None]
    check.calls = RandomTurns(check.engine, rows)
    check.engine.engine, check.engine.toolset.runner = check.calls, check.runner  # type: ignore[assignment]
    return f"{check.model or 'a built-in one'} writes the tools' calls and results"


def _conversations(check: EnvironmentCheck) -> str:
    check.records = check.play(_NUM_PROMPTS, 2, are_equal=True)
    turns = [each for record in check.records for each in _messages(record) if each["role"] == "assistant"]
    num_calls = sum("tool_calls" in turn for turn in turns)
    require(
        num_calls == check.calls.num_drawn,
        "not every call is read back from the template's text: set tokenizer.response_template.",
    )
    drawn = f"{num_calls} random calls" if num_calls else f"{len(turns)} random texts"
    return f"{len(check.records)} with {drawn}, and their rewards"


def _time(check: EnvironmentCheck) -> str:
    texts = []
    for name, seconds in check.runner.seconds.items():
        text = f"{name} {statistics.median(seconds):.2g} s, at most {max(seconds):.2g}"
        text += " (more than half of tool_timeout)" if max(seconds) > check.runner.timeout / 2 else ""
        if name in check.runner.errors:
            reason = explain(check.runner.errors[name], check.files())
            text += f" ({check.runner.num_failed[name]} of {len(seconds)} failed: {reason})"
        texts.append(text)
    return "; ".join(texts)


def _tokens(check: EnvironmentCheck) -> str:
    control = [token for token in check.calls.tokenizer.get_added_vocab() if len(token) > 1]
    _require_replies(check)
    num_turns = num_tokens = 0
    for serial, record in enumerate(check.records):
        if record.completion.branches:
            continue  # the messages between two turns may open a branch
        ids, is_sampled = record.completion.ids.tolist(), record.completion.loss_mask.tolist()
        messages = _messages(record)
        turns = [i for i in range(len(ids) - 1) if is_sampled[i] and not is_sampled[i + 1]]
        for last, turn, result in zip(turns, messages[::2], messages[1::2], strict=False):
            # A text like a control token is one in the template's ids, and text in the appended ones.
            if not any(token in result["content"] for token in control):
                appended = ids[last + 1 : is_sampled.index(True, last + 1)]
                whole = _template_ids(check, serial // 2, turn, result)
                is_equal = whole[-len(appended) - 1 :] == ids[last : last + 1] + appended
                require(is_equal, f"{result!r:.200} is appended as other ids than the template's.")
                num_turns, num_tokens = num_turns + 1, num_tokens + len(appended)
    longest = max(len(record.completion) for record in check.records)
    return f"the {num_tokens} appended in {num_turns} turns are the template's; the longest conversation has {longest}"


def _require_replies(check: EnvironmentCheck) -> None:
    has_replies = any(len(_messages(record)) > 1 for record in check.records)
    require(
        has_replies or not any(hasattr(each, "respond") for each in check.calls.environments),
        "respond ended every conversation at its first random text, so no reply was compared: give the environment an "
        "`action_space` whose sample() is a text that it answers.",
    )


def _template_ids(check: EnvironmentCheck, serial: int, turn: Message, reply: Message) -> list[int]:
    """Return the template's ids of a user's message, a turn and its reply."""
    if "tool_calls" not in turn:
        return check.calls.ids(serial, None, [turn, reply])
    return check.calls.ids(serial, tool_call(**turn["tool_calls"][0]["function"]), [reply])


def _seeds(check: EnvironmentCheck) -> str:
    first = [_texts(check, record) for record in check.records]
    again, other = (
        [_texts(check, record) for record in check.play(_NUM_PROMPTS, 2, seed=seed, are_equal=True)] for seed in (0, 1)
    )
    _require_equal(first[::2], first[1::2], "environments of one seed, row and calls differ", "draw from Random(seed)")
    _require_equal(first, again, "an environment's next conversation differs", "set all of its state in reset")
    note = "so do other seeds: only rows differ" if again == other else "other seeds give others"
    return f"the same seed and calls give the same texts and rewards, {note}"


def _require_equal(one: list[list[str]], two: list[list[str]], what: str, remedy: str) -> None:
    for a, b in zip(itertools.chain(*one), itertools.chain(*two), strict=False):
        require(a == b, f"{what} ({a[-80:]!r} and {b[-80:]!r}): {remedy}.")


def _texts(check: EnvironmentCheck, record: Record) -> list[str]:
    texts = [str(message["content"]) for message in _messages(record)]
    return [check.calls.tokenizer.decode(record.prompt_ids), *texts, f"reward {record.reward:g}"]


def _messages(record: Record) -> Sequence[Message]:
    assert record.completion.conversation is not None
    return record.completion.conversation.messages


def _leaks(check: EnvironmentCheck) -> str:
    process = psutil.Process()

    def count() -> dict[str, int]:
        gc.collect()
        counts = {"threads": threading.active_count(), "open files": process.num_fds()}
        return {**counts, "processes": len(process.children()), "bytes": tracemalloc.get_traced_memory()[0]}

    tracemalloc.start()
    check.play(1, 5)
    before, number, end = count(), 0, time.monotonic() + 10
    while number < 50 and time.monotonic() < end:
        check.play(1, 5)
        number += 5
    growth = {name: value - before[name] for name, value in count().items()}
    tracemalloc.stop()
    for name, value in growth.items():
        small = number * (1 << 16 if name == "bytes" else 0.5)
        require(value < small, f"{number} conversations leave {value} more {name}: end in reset what the last began.")
    check.engine.toolset.close()
    check.raise_failure()
    return f"{number} conversations leave no threads, files or processes, and {growth['bytes'] / number:.0f} bytes each"


def _rewards(check: EnvironmentCheck) -> str:
    found = [record.reward for record in check.play(_NUM_PROMPTS, 8)]
    groups, rewards = [found[i : i + 8] for i in range(0, len(found), 8)], [each for each in found if each == each]
    require(bool(rewards), "every conversation has the reward None, so there is nothing to learn from.")
    num_unequal = sum(len(set(group).intersection(rewards)) > 1 for group in groups)
    require(
        num_unequal > 0,
        f"all conversations of a prompt have the same reward ({rewards[0]:g}), so there is no gradient: reward parts of the task, "
        "or begin with a model that solves it at times.",
    )
    numbers = f"{min(rewards):g} to {max(rewards):g}, mean {statistics.fmean(rewards):.3g}"
    return f"{numbers}, {len(found) - len(rewards)} None; {num_unequal} of {len(groups)} groups have unequal ones"


class _StopAfter(TrainerCallback):
    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop |= time.monotonic() > self._end


def _train(check: EnvironmentCheck) -> str:
    """Train the tiny model to write random calls, then by GRPO."""
    rows = []
    for record in check.play(_NUM_PROMPTS, 8):
        ids, prompt = record.completion.ids, list(record.prompt_ids)
        labels = torch.where(record.completion.loss_mask, ids, -100).tolist()
        rows.append({"input_ids": prompt + ids.tolist(), "labels": [-100] * len(prompt) + labels})
    tokenizer, longest = check.calls.tokenizer, max(len(record.completion) for record in check.records)
    args = SFTConfig(**TINY_RUN, output_dir=check.arguments["output_dir"], max_steps=1000, learning_rate=5e-3)
    warm = SFTTrainer(check.trainer.model, args, train_dataset=Dataset.from_list(rows), processing_class=tokenizer)
    trainer = check.make_trainer(warm.model, tokenizer, min(longest + 8, 2048))
    for each in (warm, trainer):
        each.remove_callback(PrinterCallback)
        each.add_callback(_StopAfter(check.seconds / 2))
        _call_within(check.seconds + check.runner.timeout + 60, "training", each.train)
    check.raise_failure()
    steps = [row for row in trainer.state.log_history if "loss" in row]
    require(bool(steps), f"no step ended in {check.seconds / 2:g} seconds: raise --seconds.")
    rewards = [row.get("reward", torch.nan) for row in steps]
    name, what = ("programs/turns", "turns") if "programs/turns" in steps[0] else ("tools/call_frequency", "calls")
    number = statistics.fmean(row.get(name, torch.nan) for row in steps)
    shares = [row.get("frac_reward_zero_std", torch.nan) for row in steps]
    idle = "; nothing was learned, since all completions of each prompt had the same reward" if min(shares) == 1 else ""
    return (
        f"{len(steps)} steps of GRPO after supervised ones, {number:.2g} {what} per completion, reward {rewards[0]:.3g} at first "
        f"and {rewards[-1]:.3g} at last{idle}"
    )


_CHECKS: Mapping[str, Callable[[EnvironmentCheck], str]] = {
    "schema": _schema,
    "template": _template,
    "conversations": _conversations,
    "time": _time,
    "tokens": _tokens,
    "seeds": _seeds,
    "leaks": _leaks,
    "rewards": _rewards,
    "training": _train,
}

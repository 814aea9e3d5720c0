"""`lowpeak check`: tools and an environment, in conversations of random calls and in training of a tiny model.

Arguments of a random call have the types of the schema; texts and numbers are taken from the conversation.
"""

from __future__ import annotations

import gc
import itertools
import json
import logging
import random
import re
import statistics
import sys
import threading
import time
import tracemalloc
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from inspect import signature
from tempfile import TemporaryDirectory
from typing import Any

import psutil  # type: ignore[import-untyped]
import torch
from datasets import Dataset
from transformers import TrainerCallback
from transformers.trainer_callback import PrinterCallback

from lowpeak.arguments import Sampling, ToolSettings, make_settings, require
from lowpeak.data import TEMPLATE_ERRORS, common_prefix_length, environment_prompts
from lowpeak.environments import (
    CALL_ID,
    USER,
    CallParser,
    EnvironmentEngine,
    Message,
    ToolRunner,
    Toolset,
    ToolTimeoutError,
    render,
    tool_call,
)
from lowpeak.errors import ArgumentError
from lowpeak.models import load_tokenizer
from lowpeak.records import Completion, Prompt, Record
from lowpeak.rewards import TimeLimitExceeded, call_with_timeout
from lowpeak.rollout import Key, SliceForm, TurnQueue, TurnRequest, answer_in_rounds
from lowpeak.selftest.checks import Check, explain, files_of, run_check
from lowpeak.selftest.models import make_chat_tokenizer, make_model
from lowpeak.trainers import GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

_NUM_PROMPTS = 8
_NUM_TURNS = 3
_NUM_MORE = 50  # conversations that must not leave anything behind
_LEAKED_BYTES = 1 << 16  # by a conversation
_MAX_TOKENS = 1 << 15  # of a conversation of random calls
_ARGUMENTS: Mapping[str, Any] = {
    "use_cpu": True,
    "max_steps": 1000,
    "per_device_train_batch_size": 16,
    "learning_rate": 1e-4,
    "lr_scheduler_type": "constant",
    "gradient_checkpointing": False,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
}


class _TimedRunner(ToolRunner):
    """A runner that notes the seconds and errors of calls by function, and the function that did not return."""

    def __init__(self, timeout: float) -> None:
        super().__init__(timeout)
        self.timeout = timeout
        self.seconds = defaultdict[str, list[float]](list)
        self.errors = defaultdict[str, list[BaseException]](list)
        self.stuck = ""

    async def run(self, function: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
        start = time.perf_counter()
        try:
            return await super().run(function, arguments)
        except (Exception, SystemExit) as error:
            self.errors[function.__name__].append(error)
            self.stuck = function.__name__ if isinstance(error, ToolTimeoutError) else self.stuck
            raise
        finally:
            self.seconds[function.__name__].append(time.perf_counter() - start)


class _RandomCalls:
    """A TurnEngine whose turns are random calls, then a text; with `are_equal` alike in all completions of a prompt.

    `schemas` are those of the prompt with each serial number.
    """

    policy_version: int | None = 0
    slice_form = SliceForm()

    def __init__(self, engine: EnvironmentEngine, schemas: Sequence[Sequence[Mapping[str, Any]]]) -> None:
        self.tokenizer, self.template, self.schemas = engine.tokenizer, engine.template, schemas
        self.end_ids = engine.end_ids(Sampling(1, 1))
        self.are_equal = False

    def sample_turns(self, queue: TurnQueue, sampling: Sampling) -> None:
        turns = Counter[Key]()

        def sample(requests: Sequence[TurnRequest]) -> list[Completion]:
            turns.update(request.conversation for request in requests)
            return [self._turn(request, turns[request.conversation]) for request in requests]

        with queue.answering():
            answer_in_rounds(queue, sample)

    def _turn(self, request: TurnRequest, number: int) -> Completion:
        serial, completion = request.conversation
        message: Message = {"role": "assistant", "content": "done"}
        if number <= _NUM_TURNS and self.schemas[serial]:
            draw = random.Random(f"{serial} {0 if self.are_equal else completion} {number}")
            words = re.findall(r"\w+", self.tokenizer.decode(request.ids, skip_special_tokens=True))
            message = self.call(draw.choice(self.schemas[serial]), draw, words)
        ids = torch.tensor(self.turn_ids(serial, message), dtype=torch.int32)
        return Completion(ids, torch.zeros(len(ids)), torch.ones(len(ids), dtype=torch.bool), "stop")

    def call(self, schema: Mapping[str, Any], draw: random.Random, words: Sequence[str]) -> Message:
        """Return a message with a call of a tool."""
        function = schema["function"]
        arguments = _random_value(function["parameters"], draw, words)
        return {"role": "assistant", "content": "", "tool_calls": [tool_call(function["name"], arguments)]}

    def turn_ids(self, serial: int, message: Message) -> list[int]:
        """Return the ids of an assistant's message after the user's, up to its end token."""
        before, whole = self.ids(serial, [USER], opens=True), self.ids(serial, [USER, message], opens=False)
        ids = whole[common_prefix_length(before, whole) :]
        return ids[: next((i for i, token in enumerate(ids) if token in self.end_ids), len(ids)) + 1]

    def ids(self, serial: int, messages: Sequence[Message], opens: bool) -> list[int]:
        """Return the ids of a conversation as the template writes it; the arguments are mappings, or JSON texts."""
        options = {**self.template, "tools": self.schemas[serial], "add_generation_prompt": opens}
        try:
            text = render(self.tokenizer, [_with_ids(each, dict) for each in messages], options)
        except TEMPLATE_ERRORS:
            text = render(self.tokenizer, [_with_ids(each, json.dumps) for each in messages], options)
        ids: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids


def _with_ids(message: Message, convert: Callable[[Any], Any]) -> Message:
    """Return the message with ids of calls, and their arguments converted."""
    calls = [each["function"] for each in message.get("tool_calls", ())]
    entries = [tool_call(each["name"], convert(each["arguments"])) for each in calls]
    return {**message, "tool_call_id": CALL_ID, **({"tool_calls": entries} if entries else {})}


def _random_value(schema: Mapping[str, Any], draw: random.Random, words: Sequence[str]) -> Any:
    """Return a value of a JSON schema; optional properties are often left out."""
    value = partial(_random_value, draw=draw, words=words)
    kinds = schema.get("type", "string")
    kind = kinds[0] if isinstance(kinds, list) else kinds
    if "enum" in schema:
        return draw.choice(schema["enum"])
    if kind == "object":
        required = schema.get("required", schema.get("properties", {}))
        properties = schema.get("properties", {}).items()
        return {name: value(each) for name, each in properties if name in required or draw.random() < 0.5}
    if kind == "array":
        items = schema.get("prefixItems") or [schema.get("items", {})] * draw.randint(1, 3)
        return [value(each) for each in items]
    numbers = [int(word) for word in words if word.isascii() and word.isdigit() and len(word) < 10]
    number = draw.choice([*numbers, *range(10)])
    return {"integer": number, "number": float(number), "boolean": number % 2 == 0}.get(
        kind, draw.choice([*words, "a"])
    )


class _Failures(logging.Handler):
    """Collects what environments raised: the class, the method, the kind, the error."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.found: list[Any] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.found.append(record.args)


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
    failures: _Failures = field(default_factory=_Failures)
    runner: _TimedRunner = field(init=False)
    trainer: GRPOTrainer = field(init=False)
    calls: _RandomCalls = field(init=False)
    prompts: list[Prompt] = field(init=False)
    records: Sequence[Record] = ()

    def run(self) -> Iterator[Check]:
        """Yield the checks, up to one that the others need; none follows a call that did not return."""
        self.dataset = environment_prompts(self.dataset, self.parts["environment_factory"] or True)
        logger = logging.getLogger("lowpeak.environments.tools")
        logger.addHandler(self.failures)
        logger.propagate = False
        with TemporaryDirectory(prefix="lowpeak-check-") as folder:
            self.arguments = {**_ARGUMENTS, "output_dir": folder, **self.arguments}
            self.runner = _TimedRunner(GRPOConfig(**self.arguments).tool_timeout or 60.0)
            for name, check in _CHECKS.items():
                result = run_check(name, partial(check, self), self.files)
                yield result
                if not result.passed and (name in _NEEDED or self.runner.stuck):
                    return

    def files(self) -> set[str]:
        """Return the files of the user's code."""
        factory = self.parts["environment_factory"]
        return files_of(*self.parts["tools"], *(factory.values() if isinstance(factory, Mapping) else [factory]))

    def within(self, seconds: float, name: str, call: Callable[[], Any]) -> Any:
        """Return `call()`; ArgumentError if it, or a tool in it, does not return in time, or if an environment fails."""
        try:
            result = call_with_timeout(call, seconds)
        except TimeLimitExceeded:
            self.runner.stuck = name
        if self.runner.stuck:
            files, places = self.files(), []
            for frame in list(sys._current_frames().values()):
                inner: Any = frame
                while inner is not None and inner.f_code.co_filename not in files:
                    inner = inner.f_back
                places += [] if inner is None else [f" ({inner.f_code.co_filename}, line {inner.f_lineno})"]
            raise ArgumentError(f"{self.runner.stuck} did not return{''.join(places[:1])}: bound what it waits for.")
        if self.failures.found:
            kind, method, _, error = self.failures.found[0]
            raise ArgumentError(f"{kind}.{method} raised {explain(error, self.files())}")
        return result

    def play(self, num_prompts: int, size: int, seed: int = 0, are_equal: bool = False) -> Sequence[Record]:
        """Return rewarded conversations of random calls, `size` for each prompt."""
        collector, self.calls.are_equal = self.trainer.collector, are_equal
        sampling = Sampling(size, _MAX_TOKENS, seed=seed)

        def play() -> list[Record]:
            groups = collector.engine.submit(self.prompts[:num_prompts], sampling).result()
            start = time.perf_counter()
            records = collector.panel.compute_rewards(groups).records
            self.runner.seconds["rewards"].append((time.perf_counter() - start) / len(records))
            completions = (completion for group in groups for completion in group.completions)
            # The panel's completions have no messages.
            return [replace(record, completion=each) for record, each in zip(records, completions, strict=True)]

        records: list[Record] = self.within(5 * (self.runner.timeout + 1), "the environment", play)
        return records


def _schema(check: EnvironmentCheck) -> str:
    settings = make_settings(ToolSettings, GRPOConfig(**check.arguments))
    make = partial(Toolset, check.parts["tools"], check.parts["environment_factory"], settings)
    toolset: Toolset = check.within(check.runner.timeout, "environment_factory", make)
    toolset.check_row(next(iter(check.dataset)))
    names = [each.name for each in toolset.rewards()]
    require(
        bool(names or check.parts["reward_funcs"]),
        "nothing rewards a conversation: define get_reward, or add --reward.",
    )
    return f"{len(toolset.tools)} tools: " + ", ".join(f"{each.__name__}{signature(each)}" for each in toolset.tools)


def _template(check: EnvironmentCheck) -> str:
    tokenizer = load_tokenizer(None, check.model, False) if check.model else make_chat_tokenizer()
    model = make_model(len(tokenizer), hidden=64, context=_MAX_TOKENS * 2)
    for name in ("pad_token_id", "eos_token_id"):
        setattr(model.config, name, getattr(tokenizer, name))
        setattr(model.generation_config, name, getattr(tokenizer, name))
    check.trainer = _make_trainer(check, model, tokenizer)
    engine = check.trainer.collector.engine
    assert isinstance(engine, EnvironmentEngine)
    rows = list(itertools.islice(iter(check.dataset), _NUM_PROMPTS))
    reader = check.trainer.collector.new_reader()
    check.prompts = [prompt for i, row in enumerate(rows) if (prompt := reader.read(row, i)) is not None]
    check.calls = _RandomCalls(engine, [each.schemas for each, _ in engine.toolset.start(rows)])
    engine.engine, engine.toolset.runner = check.calls, check.runner  # type: ignore[assignment]
    for serial, schemas in enumerate(check.calls.schemas):
        parser = CallParser(tokenizer, check.calls.end_ids, {**engine.template, "tools": schemas}) if schemas else None
        for schema in schemas:
            message = check.calls.call(schema, random.Random(serial), ["two words", "1"])
            read = parser.parse(check.calls.turn_ids(serial, message)).message
            call = message["tool_calls"][0]["function"]
            require(
                [each["function"] for each in read.get("tool_calls", ())] == [call],
                f"the call {call} is read back as {read}: set tokenizer.response_template.",
            )
    return f"{check.model or 'a built-in template'} writes calls and results, and calls of each tool are read back"


def _make_trainer(check: EnvironmentCheck, model: Any, tokenizer: Any, **changes: Any) -> GRPOTrainer:
    args, parts = GRPOConfig(**{**check.arguments, **changes}), {"processing_class": tokenizer, **check.parts}
    trainer = GRPOTrainer(model=model, args=args, train_dataset=check.dataset, **parts)
    trainer.remove_callback(PrinterCallback)
    return trainer


def _conversations(check: EnvironmentCheck) -> str:
    check.records = check.play(_NUM_PROMPTS, 2, are_equal=True)
    seconds, errors = check.runner.seconds, check.runner.errors
    texts = [
        f"{name} {statistics.median(each):.2g} s (at most {max(each):.2g}"
        + (
            f"; {len(errors[name])} of {len(each)} failed: {explain(errors[name][0], check.files())}"
            if errors[name]
            else ""
        )
        + (f"; more than half of tool_timeout={check.runner.timeout:g}" if max(each) > check.runner.timeout / 2 else "")
        + ")"
        for name, each in seconds.items()
    ]
    return f"{len(check.records)} with random calls: {', '.join(texts)}"


def _tokens(check: EnvironmentCheck) -> str:
    control = [token for token in check.calls.tokenizer.get_added_vocab() if len(token) > 1]
    num_turns = num_tokens = 0
    for serial, record in enumerate(check.records):
        ids, mask = record.completion.ids.tolist(), record.completion.loss_mask.tolist()
        conversation = record.completion.conversation
        assert conversation is not None
        messages, position = list(conversation.messages), 0
        for turn in conversation.turns[:-1]:
            position = next(
                (i for i in range(position + 1, len(messages)) if messages[i]["role"] == "assistant"), len(messages)
            )
            appended = ids[turn.last + 1 : mask.index(True, turn.last + 1)]
            whole = check.calls.ids(serial // 2, [USER, *messages[:position]], opens=True)
            # A text like a control token is one in the canonical ids, and text in the appended ones.
            if not any(token in str(messages[:position]) for token in control):
                require(
                    whole[-len(appended) - 1 :] == [ids[turn.last], *appended],
                    f"the results {messages[position - 1 : position]!r:.200} are appended as other ids than the template's.",
                )
                num_turns, num_tokens = num_turns + 1, num_tokens + len(appended)
    longest = max(len(record.completion) for record in check.records)
    return f"{num_tokens} of {num_turns} turns' results equal the template's rendering; the longest conversation has {longest}"


def _seeds(check: EnvironmentCheck) -> str:
    first = [_texts(check, record) for record in check.records]
    again, other = (
        [_texts(check, record) for record in check.play(_NUM_PROMPTS, 2, seed=seed, are_equal=True)] for seed in (0, 1)
    )
    for one, two, what in (
        (
            first[::2],
            first[1::2],
            "environments with the same seed, row and calls differ ({}): draw from random.Random(seed)",
        ),
        (first, again, "a conversation changes the next one of its environment ({}): set all state in reset"),
    ):
        lines = zip(itertools.chain(*one), itertools.chain(*two), strict=False)
        for a, b in lines:
            require(a == b, what.format(f"{a[-80:]!r}, {b[-80:]!r}") + ".")
    note = "so do other seeds, thus only rows differ" if again == other else "other seeds give others"
    return f"the same seed and calls give the same texts and rewards, {note}"


def _texts(check: EnvironmentCheck, record: Record) -> list[str]:
    """Return what an environment said in a conversation, and the reward."""
    messages = [str(message["content"]) for message in _messages(record)]
    return [check.calls.tokenizer.decode(record.prompt_ids), *messages, f"reward {record.reward:g}"]


def _messages(record: Record) -> Sequence[Message]:
    assert record.completion.conversation is not None
    return record.completion.conversation.messages


def _leaks(check: EnvironmentCheck) -> str:
    process, engine, start = psutil.Process(), check.trainer.collector.engine, time.monotonic()

    def count() -> dict[str, int]:
        gc.collect()
        named = {"threads": threading.active_count(), "open files": process.num_fds()}
        return {**named, "processes": len(process.children()), "bytes": tracemalloc.get_traced_memory()[0]}

    tracemalloc.start()
    check.play(1, 5)
    before, snapshot, number = count(), tracemalloc.take_snapshot(), 0
    while number < _NUM_MORE and time.monotonic() < start + 10:
        check.play(1, 5)
        number += 5
    growth = {name: value - before[name] for name, value in count().items()}
    line = tracemalloc.take_snapshot().compare_to(snapshot, "lineno")[0].traceback[0]
    tracemalloc.stop()
    for name, value in growth.items():
        each = _LEAKED_BYTES if name == "bytes" else 0.5
        place = f", most at {line.filename}, line {line.lineno}" if name == "bytes" else ""
        require(
            value < each * number,
            f"{number} conversations leave {value} {name}{place}: end in reset what the last one began.",
        )
    check.within(check.runner.timeout, "close", engine.toolset.close)  # type: ignore[attr-defined]
    return (
        f"{number} more conversations leave no thread, file or process, and {growth['bytes'] / number:.0f} bytes each"
    )


def _rewards(check: EnvironmentCheck) -> str:
    records = check.play(_NUM_PROMPTS, 8)
    rewards = [record.reward for record in records if record.reward == record.reward]
    groups = [[each.reward for each in records[i : i + 8]] for i in range(0, len(records), 8)]
    num_spread = sum(len({reward for reward in group if reward == reward}) > 1 for group in groups)
    require(bool(rewards), "every conversation has None, so there is nothing to learn from.")
    require(
        num_spread > 0,
        f"all conversations of a prompt have equal rewards ({rewards[0]:g}), so random calls have no gradient: reward parts of "
        "the task, or start from a model that solves it sometimes.",
    )
    mean, missing = statistics.fmean(rewards), len(records) - len(rewards)
    numbers = f"{min(rewards):g} to {max(rewards):g}, mean {mean:.3g}, {missing} of {len(records)} None"
    return f"{numbers}; {num_spread} of {len(groups)} groups have unequal rewards"


class _StopAfter(TrainerCallback):
    """Ends a run after so many seconds."""

    def __init__(self, seconds: float) -> None:
        self.end = time.monotonic() + seconds

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop |= time.monotonic() > self.end


def _train(check: EnvironmentCheck) -> str:
    """Train the tiny model to write such calls, then by GRPO."""
    rows = []
    for record in check.play(_NUM_PROMPTS, 8):
        ids, mask = record.completion.ids.tolist(), record.completion.loss_mask.tolist()
        labels = [token if is_sampled else -100 for token, is_sampled in zip(ids, mask, strict=True)]
        rows.append({"input_ids": [*record.prompt_ids, *ids], "labels": [-100] * len(record.prompt_ids) + labels})
    tokenizer, longest = check.calls.tokenizer, max(len(record.completion) for record in check.records)
    args = SFTConfig(
        **{**_ARGUMENTS, "learning_rate": 5e-3, "per_device_train_batch_size": 8},
        output_dir=str(check.arguments["output_dir"]),
    )
    warm = SFTTrainer(check.trainer.model, args, train_dataset=Dataset.from_list(rows), processing_class=tokenizer)
    trainer = _make_trainer(check, warm.model, tokenizer, max_completion_length=longest + 8)
    for each in (warm, trainer):
        each.remove_callback(PrinterCallback)
        each.add_callback(_StopAfter(check.seconds / 2))
        check.within(check.seconds + 60, "train()", each.train)
    steps = [row for row in trainer.state.log_history if "reward" in row]
    calls, rewards = ([row[name] for row in steps] for name in ("tools/call_frequency", "reward"))
    return (
        f"{len(steps)} steps of GRPO after supervised ones, {statistics.fmean(calls):.2g} calls per completion, reward "
        f"{rewards[0]:.3g} at first and {rewards[-1]:.3g} at last"
    )


_CHECKS: Mapping[str, Callable[[EnvironmentCheck], str]] = {
    "schema": _schema,
    "template": _template,
    "conversations": _conversations,
    "tokens": _tokens,
    "seeds": _seeds,
    "leaks": _leaks,
    "rewards": _rewards,
    "training": _train,
}
_NEEDED = ("schema", "template", "conversations")

"""One side of benchmarks.tools: trains on the calculator's conversations with lowpeak or with TRL.

Run apart: `python -m benchmarks.harness.tool_side REQUEST`.
"""

from __future__ import annotations

import functools
import importlib
import json
import random
import sys
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.harness.process import ROOT, in_mb, resident_bytes
from benchmarks.harness.report import OURS, print_result
from benchmarks.harness.side import step_logs
from benchmarks.harness.task import load_example

calculator = load_example("calculator")
GENERATIONS = 8
LONGEST_CANNED = 100
# Turns of each completion of a prompt; a text without <eos> was cut off by the length.
OPENS, CLOSES = calculator.CALL_TOKENS
CANNED = (
    (f"{OPENS}[add(a=12, b=30)]{CLOSES}<eos>", "42<eos>"),
    (f"{OPENS}[add(a=1, b=2)]{CLOSES}{OPENS}[add(a=3, b=4)]{CLOSES}<eos>", "7<eos>"),
    ("7<eos>",),
    (f"{OPENS}[multiply(a=2, b=3)]{CLOSES}<eos>", "6<eos>"),
    (f"{OPENS}[add(a=5)]{CLOSES}<eos>", "none<eos>"),
    (f"{OPENS}[add(a=7, b=8)]{CLOSES}<eos>", f"{OPENS}[add(a=15, b=9)]{CLOSES}<eos>", "24<eos>"),
    (f"a call: {OPENS}[add(a=2, b=2)]{CLOSES}<eos>", "4<eos>"),
    ("1" * LONGEST_CANNED,),
)
# How transformers reads a call of the calculator's template: both sides read alike. lowpeak alone would find a format.
RESPONSE_TEMPLATE = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<assistant>",
    "fields": {
        "tool_calls": {
            "open_pattern": r"<\|tool_call_start\|>\[(?P<name>[a-z_]+)\(",
            "close_pattern": r"\)\]<\|tool_call_end\|>",
            "repeats": True,
            "content": "xml-inline",
            "content_args": {"tag_pattern": r"(?P<key>[a-z]+)=(?P<value>[^,)]*)", "value_parser": {"name": "text"}},
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
        },
        "content": {"close_pattern": r"<eos>|$", "content": "text"},
    },
}


@dataclass(frozen=True)
class ToolRequest:
    """What one side is to do: `num_terms` - 1 calls a conversation, each of `delay` seconds.

    With `tail` a call takes `delay` times a Pareto draw of that exponent. `canned` puts CANNED in place of sampled turns. With a
    `program` it drives the conversations (`chat` or `tokens`), in place of `tools=`.
    """

    library: str
    start: str
    folder: str
    steps: int
    num_prompts: int
    num_terms: int = 2
    max_completion_length: int = 40
    seed: int = 0
    delay: float = 0.0
    tail: float | None = None
    canned: bool = False
    program: str | None = None
    settings: dict[str, Any] = field(default_factory=dict)

    def call_seconds(self, a: int, b: int) -> float:
        """Return how long a call takes, the same for the same arguments."""
        return self.delay * (1.0 if self.tail is None else random.Random(f"{a}+{b}").paretovariate(self.tail))


class WorkCount:
    """Tokens that a model forwards with and without gradients, tokens that rewards see, and seconds of calls.

    `slowest` sums the seconds that the slowest conversation of each rollout waits for its calls.
    """

    def __init__(self, model: nn.Module, tokenizer: Any, request: ToolRequest) -> None:
        self.generated = self.trained = self.useful = 0
        self.slowest = 0.0
        self.tokenizer, self.request = tokenizer, request
        model.get_submodule("model").register_forward_pre_hook(self._count, with_kwargs=True)

    def _count(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        ids = kwargs["input_ids"] if "input_ids" in kwargs else args[0]
        if torch.is_grad_enabled():
            self.trained += ids.numel()
        else:
            self.generated += ids.numel()

    def reward(self, reward: Callable[..., list[float]]) -> Callable[..., list[float]]:
        """Return the reward, which also counts each completion's tokens, and each prompt's once per group."""

        @functools.wraps(reward)
        def count(
            prompts: Sequence[Any], completions: Sequence[Any], completion_ids: Sequence[Any], **columns: Any
        ) -> list[float]:
            texts = [self.tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=False)
                     for prompt in prompts[::GENERATIONS]]  # fmt: skip
            self.slowest += max(map(self._waited, completions))
            self.useful += sum(map(len, completion_ids))
            self.useful += sum(len(self.tokenizer(text, add_special_tokens=False)["input_ids"]) for text in texts)
            return reward(completions=completions, **columns)

        return count

    def _waited(self, messages: Sequence[Any]) -> float:
        calls = [call["function"] for message in messages for call in message.get("tool_calls") or ()]
        complete = [call["arguments"] for call in calls if call["name"] == "add" and {*call["arguments"]} == {"a", "b"}]
        return sum(self.request.call_seconds(**arguments) for arguments in complete)


def number_of_messages(completions: Sequence[Any], **columns: Any) -> list[float]:
    """Return how many messages each conversation has."""
    return [float(len(messages)) for messages in completions]


def text_checksum(completions: Sequence[Any], **columns: Any) -> list[float]:
    """Return numbers that differ within a group, so that every completion has a gradient."""
    texts = ["".join(message.get("content") or "" for message in messages) for messages in completions]
    return [float(zlib.crc32(text.encode()) % 97) for text in texts]


def slow_tool(request: ToolRequest) -> Callable[..., int]:
    """Return the calculator, which sleeps before it answers."""

    @functools.wraps(calculator.add)
    def add(a: int, b: int) -> int:
        time.sleep(request.call_seconds(a, b))
        return calculator.add(a, b)

    return add


def blocked_seconds() -> float:
    """Return a clock that runs while this thread neither computes nor waits for a CPU (Linux)."""
    computing, queued = (int(each) / 1e9 for each in Path("/proc/thread-self/schedstat").read_text().split()[:2])
    return time.perf_counter() - computing - queued


def settings_of(request: ToolRequest) -> dict[str, Any]:
    """Return the arguments of either library's trainer: names and meanings are the same in both."""
    settings = {
        "output_dir": request.folder,
        "max_steps": request.steps,
        "per_device_train_batch_size": request.num_prompts * GENERATIONS,
        "num_generations": GENERATIONS,
        "max_completion_length": request.max_completion_length,
        "temperature": 1.0,
        "learning_rate": 5e-4,
        "warmup_steps": min(10, request.steps // 2),
        "lr_scheduler_type": "linear",
        "weight_decay": 0.0,
        "beta": 0.0,
        "loss_type": "dapo",
        "gradient_checkpointing": False,
        "bf16": False,
        "use_cpu": True,
        "logging_steps": 1 if request.canned else 10,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "seed": request.seed,
    }
    return settings | ({"shuffle_dataset": False} if request.canned else {}) | request.settings


def make_trainer(request: ToolRequest) -> tuple[Any, WorkCount]:
    """Return the trainer of either library, and what counts its tokens."""
    package = importlib.import_module(request.library)
    tokenizer = AutoTokenizer.from_pretrained(request.start)
    tokenizer.chat_template = calculator.CHAT_TEMPLATE
    tokenizer.response_template = RESPONSE_TEMPLATE
    model = AutoModelForCausalLM.from_pretrained(request.start)
    count = WorkCount(model, tokenizer, request)
    long = text_checksum if request.num_terms > 2 else calculator.sum_is_right
    reward = number_of_messages if request.canned else long
    num_rows = request.steps * request.num_prompts
    trainer = package.GRPOTrainer(
        model=model,
        reward_funcs=count.reward(reward),
        args=package.GRPOConfig(**settings_of(request)),
        train_dataset=calculator.make_prompts(num_rows, request.seed, num_terms=request.num_terms),
        processing_class=tokenizer,
        **tools_of(request),
    )
    return trainer, count


def tools_of(request: ToolRequest) -> dict[str, Any]:
    """Return the trainer's tools, or the program that calls them itself."""
    if request.program is not None:
        programs = importlib.import_module("benchmarks.harness.tool_programs")
        return {"environment_factory": programs.PROGRAMS[request.program]}
    return {"tools": [slow_tool(request) if request.delay else calculator.add]}


def can_ours(trainer: Any) -> None:
    """Give lowpeak's engine the fixed turns."""
    sys.path.append(str(ROOT / "tests"))
    scripted = importlib.import_module("scripted_turns")
    trainer.collector.engine.engine = scripted.ScriptedTurns(trainer.processing_class, CANNED)


def can_peer(trainer: Any, masks: list[list[int]]) -> None:
    """Make `generate` of TRL's model return the fixed turns, and keep the masks of its conversations."""
    tokenizer, inner = trainer.processing_class, trainer._generate

    def generate(input_ids: Tensor, **options: Any) -> Tensor:
        rows = []
        for i, text in enumerate(tokenizer.batch_decode(input_ids)):
            turn = text.count("<assistant>") - 1
            number = next(n for n, turns in enumerate(CANNED) if turns[0] in text) if turn else i % len(CANNED)
            rows.append(torch.tensor(tokenizer(CANNED[number][turn], add_special_tokens=False)["input_ids"]))
        return torch.cat([input_ids, nn.utils.rnn.pad_sequence(rows, batch_first=True)], 1)

    def keep_masks(prompts: Any) -> Any:
        found = inner(prompts)
        masks.extend(found[2])
        return found

    trainer.model.generate = generate
    trainer._generate = keep_masks


def run_side(request: ToolRequest) -> dict[str, Any]:
    """Train, and return seconds, tokens and logs; the model is left in `folder`."""
    trainer, count = make_trainer(request)
    masks: list[list[int]] = []
    if request.canned:
        can_ours(trainer) if request.library == OURS else can_peer(trainer, masks)
    resident = resident_bytes()
    start, cpu_start, blocked_start = time.perf_counter(), time.process_time(), blocked_seconds()
    trainer.train()
    seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu_start
    blocked = blocked_seconds() - blocked_start
    trainer.save_model()
    if request.canned and request.library == OURS:
        masks = [record.completion.loss_mask.int().tolist() for record in trainer.rollout.records]
    return {
        "seconds": round(seconds, 3),
        "blocked": round(blocked, 3),
        "slowest": round(count.slowest, 3),
        "cpu_seconds": round(cpu_seconds, 3),
        "start_rss_mb": None if resident is None else in_mb(resident),
        "tokens": {"generated": count.generated, "trained": count.trained, "useful": count.useful},
        "logs": step_logs(trainer.state.log_history),
        "masks": masks,
    }


def accuracy(request: dict[str, Any]) -> dict[str, Any]:
    """Return each model's share of right answers to held-out sums, greedy and sampled, measured by lowpeak."""
    package = importlib.import_module(OURS)
    tokenizer = calculator.make_tokenizer()
    held_out = calculator.make_prompts(request["held_out"], 10**6, held_out=True)
    found = {}
    for name, folder in request["models"].items():
        args = package.GRPOConfig(
            output_dir=request["folder"], max_steps=1, num_generations_eval=1, num_generations=GENERATIONS,
            per_device_train_batch_size=GENERATIONS, max_completion_length=calculator.MAX_COMPLETION_LENGTH,
            use_cpu=True, report_to="none", disable_tqdm=True,
        )  # fmt: skip
        trainer = package.GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(folder), reward_funcs=calculator.sum_is_right, args=args,
            train_dataset=held_out, processing_class=tokenizer, tools=[calculator.add],
        )  # fmt: skip
        metrics = trainer.predict(held_out).metrics
        found[name] = {"greedy": metrics["test_greedy_accuracy"], "sampled": metrics["test_accuracy"]}
    return found


def warm_start(
    folder: Path, seed: int, steps: int, num_terms: int, guess_share: float | None = None, width: int | None = None
) -> None:
    """Save a model that was taught the calculator's demonstrations by a plain loop, which is neither library's."""
    tokenizer, model = calculator.make_tokenizer(), calculator.make_model(seed)
    if width is not None:
        changes = {"hidden_size": width, "intermediate_size": 4 * width, "num_hidden_layers": 8, "head_dim": width // 4}
        model = type(model)(type(model.config)(**{**model.config.to_dict(), **changes}))
    rows = calculator.make_demonstrations(steps * calculator.WARM_ROWS, seed, num_terms, guess_share)["messages"]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.98), weight_decay=0.0)
    model.train()
    for start in range(0, len(rows), calculator.WARM_ROWS):
        pairs = [_encode(tokenizer, messages) for messages in rows[start : start + calculator.WARM_ROWS]]
        inputs_BL, labels_BL = (
            nn.utils.rnn.pad_sequence([torch.tensor(pair[i]) for pair in pairs], batch_first=True, padding_value=filler)
            for i, filler in ((0, tokenizer.pad_token_id), (1, -100))
        )
        model(input_ids=inputs_BL, labels=labels_BL).loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _encode(tokenizer: Any, messages: Sequence[dict[str, Any]]) -> tuple[list[int], list[int]]:
    """Return a conversation's ids, and labels: the assistant's tokens after the header of its turn."""
    ids: list[int] = []
    labels: list[int] = []
    for message in messages:
        text = tokenizer.apply_chat_template([message], tokenize=False)
        part = tokenizer(text, add_special_tokens=False)["input_ids"]
        ids += part
        labels += [-100, *part[1:]] if message["role"] == "assistant" else [-100] * len(part)
    return ids, labels


def main(request: dict[str, Any]) -> dict[str, Any]:
    """Do what the request names: a warm start, an accuracy, or the training of one side."""
    if "models" in request:
        return accuracy(request)
    if "library" in request:
        return run_side(ToolRequest(**request))
    warm_start(Path(request.pop("folder")), **request)
    return {}


if __name__ == "__main__":
    print_result(main(json.loads(sys.argv[1])))

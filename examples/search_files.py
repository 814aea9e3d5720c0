"""A search tool over a folder of text files: GRPO on questions whose answers are in the files.

    python examples/search_files.py --model Qwen/Qwen2.5-1.5B-Instruct --folder docs --questions questions.jsonl

A line of the questions is {"question": "...", "answer": "..."}. The policy calls `search` and `read`, and the reward is 1 if its
last message has the answer. The tools read the folder's files, as they were at the start, and nothing else.
"""

from __future__ import annotations

import argparse
import re
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from datasets import load_dataset

from lowpeak import GRPOConfig, GRPOTrainer

RESULTS = 5  # lines
CHARACTERS = 1500  # of a file that `read` returns


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, and save the model."""
    trainer = make_trainer(arguments)
    trainer.train()
    trainer.save_model()


def make_trainer(arguments: Sequence[str] | None = None) -> GRPOTrainer:
    """Return the trainer of these command-line arguments."""
    parser = argparse.ArgumentParser(description="Train a model to search a folder of text files.")
    parser.add_argument("--model", required=True, help="a model whose chat template writes tool calls")
    parser.add_argument("--folder", required=True, type=Path)
    parser.add_argument("--questions", required=True, help="JSON lines with question and answer")
    parser.add_argument("--output_dir", default="runs/search_files")
    parser.add_argument("--max_steps", type=int, default=100)
    parser.add_argument("--max_completion_length", type=int, default=1024, help="of a conversation, with the results")
    options = parser.parse_args(arguments)
    questions = load_dataset("json", data_files=options.questions, split="train")
    args = GRPOConfig(
        output_dir=options.output_dir,
        max_steps=options.max_steps,
        max_completion_length=options.max_completion_length,
        max_tool_calling_iterations=4,
        num_generations=8,
        per_device_train_batch_size=32,
        learning_rate=1e-6,
        beta=0.0,
    )
    return GRPOTrainer(
        model=options.model,
        reward_funcs=answer_is_found,
        args=args,
        train_dataset=questions.map(_ask, remove_columns=["question"]),
        tools=make_tools(options.folder),
    )


def _ask(row: dict[str, str]) -> dict[str, Any]:
    return {"prompt": [{"role": "user", "content": f"{row['question']} Search the files, then answer in one line."}]}


def make_tools(folder: Path) -> list[Callable[..., str]]:
    """Return the functions `search` and `read` of the folder's text files."""
    paths = sorted(path for path in folder.rglob("*") if path.suffix in (".txt", ".md"))
    texts = {str(path.relative_to(folder)): path.read_text(encoding="utf-8") for path in paths}

    def search(query: str) -> str:
        """Find the lines that have most of the query's words.

        Args:
            query: Words to look for.
        """
        wanted = set(_words(query))
        matches = Counter(
            {
                f"{name}: {line.strip()}": len(wanted.intersection(_words(line)))
                for name, text in texts.items()
                for line in text.splitlines()
            }
        )
        return "\n".join(line for line, count in matches.most_common(RESULTS) if count) or "no line has these words"

    def read(name: str) -> str:
        """Return the beginning of a file.

        Args:
            name: The file's name, as search returns it.
        """
        if name not in texts:
            raise ValueError(f"there is no file {name}")
        return texts[name][:CHARACTERS]

    return [search, read]


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


def answer_is_found(completions: Sequence[Any], answer: Sequence[str], **columns: Any) -> list[float]:
    """Return 1 for each conversation whose last message has the words of the answer, else 0."""
    last = [messages[-1] for messages in completions]
    return [
        float(
            message["role"] == "assistant" and " ".join(_words(right)) in " ".join(_words(message.get("content") or ""))
        )
        for message, right in zip(last, answer, strict=True)
    ]


if __name__ == "__main__":
    main()

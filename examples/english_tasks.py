"""Two tasks in English for a small chat model: sums up to 20 + 20, and answers of a stated number of sentences."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from datasets import Dataset

HELD_OUT = 64
LARGEST = 20
COUNTS = {1: "one sentence", 2: "two sentences", 3: "three sentences", 4: "four sentences"}
TOPICS = (
    "rain snow wind thunder fog ice rivers lakes oceans islands mountains deserts forests caves volcanoes earthquakes the_moon "
    "the_sun stars planets comets cats dogs horses cows sheep bees ants spiders snakes frogs owls eagles penguins whales sharks "
    "dolphins elephants lions tigers bears wolves foxes rabbits mice bread rice cheese milk honey sugar salt coffee tea apples "
    "oranges bananas tomatoes potatoes onions trains planes ships bicycles cars bridges roads tunnels houses castles schools "
    "libraries museums hospitals markets farms gardens parks clocks lamps mirrors windows doors chairs paper pencils books maps "
    "music drums guitars pianos dancing painting football chess swimming running sleeping dreaming laughing cooking"
)


@dataclass(frozen=True)
class Task:
    """Rows with a `prompt` in chat form and an `answer`, of which HELD_OUT are never trained on, and their reward."""

    rows: Callable[[], list[dict[str, Any]]]
    reward: Callable[..., list[float]]
    steps: int
    max_completion_length: int

    def prompts(self, seed: int) -> Dataset:
        """The rows to train on, in an order of this seed."""
        rows = self._shuffled()[HELD_OUT:]
        random.Random(seed).shuffle(rows)
        return Dataset.from_list(rows)

    def held_out(self) -> Dataset:
        """The same rows for every seed."""
        return Dataset.from_list(self._shuffled()[:HELD_OUT])

    def _shuffled(self) -> list[dict[str, Any]]:
        rows = self.rows()
        random.Random(0).shuffle(rows)
        return rows


def _row(question: str, answer: str) -> dict[str, Any]:
    return {"prompt": [{"role": "user", "content": question}], "answer": answer}


def sum_rows() -> list[dict[str, Any]]:
    """All sums of two numbers from 1 to LARGEST."""
    numbers = range(1, LARGEST + 1)
    return [_row(f"What is {a} + {b}?", str(a + b)) for a in numbers for b in numbers]


def last_number_is_right(completions: Sequence[Any], answer: Sequence[str], **columns: Any) -> list[float]:
    """The reward for sums: 1 if the last number of the answer is the sum, else 0."""
    found = [re.findall(r"\d+", completion[0]["content"])[-1:] for completion in completions]
    return [float(numbers == [right]) for numbers, right in zip(found, answer, strict=True)]


def sentence_rows() -> list[dict[str, Any]]:
    """Each topic with each number of sentences."""
    topics = [topic.replace("_", " ") for topic in TOPICS.split()]
    return [_row(f"Tell me about {topic} in exactly {COUNTS[n]}.", str(n)) for topic in topics for n in COUNTS]


def count_sentences(text: str) -> int:
    """The sentences that end with a full stop, an exclamation mark or a question mark; -1 if there is text after the last."""
    text = text.strip()
    return len(re.findall(r"[.!?]+(?=\s|$)", text)) if text.endswith((".", "!", "?")) else -1


def has_stated_length(completions: Sequence[Any], answer: Sequence[str], **columns: Any) -> list[float]:
    """The reward for sentences: 1 if the answer has the stated number, else 0."""
    counts = [count_sentences(completion[0]["content"]) for completion in completions]
    return [float(count == int(stated)) for count, stated in zip(counts, answer, strict=True)]


TASKS = {
    "sums": Task(sum_rows, last_number_is_right, steps=50, max_completion_length=24),
    "sentences": Task(sentence_rows, has_stated_length, steps=60, max_completion_length=80),
}

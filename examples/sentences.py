"""Two sentences from a small chat model: "Tell me about bread in two short sentences."

The reward is 1 if a completion is two whole sentences, else 0; what they say is not judged. A sentence ends with a full stop,
a question mark or an exclamation mark before a space or the end: the dot of "Dr. " counts as one.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from typing import Any

from datasets import Dataset

HELD_OUT = 64
STEPS = 40
PROMPTS = 4  # a step
LEARNING_RATE = 2e-5
MAX_COMPLETION_LENGTH = 40
NUMBER = "2"
TOPICS = (
    "apples ants autumn bakers balloons bananas bears bees bells bicycles birds boats books bread bridges buses butter "
    "cameras candles cars castles cats chairs cheese chess children cities clocks clouds coffee colours cooking cows "
    "dancing deserts dogs doors dreams ducks eagles eggs elephants engines farmers fire fish flags flowers football "
    "forests foxes friends frogs games gardens glass goats gold grass guitars hats honey horses hospitals hotels houses "
    "ice insects islands jackets jokes keys kings kitchens lakes lamps languages letters libraries lions markets maps "
    "mice milk mirrors money monkeys mountains museums music newspapers nurses oceans onions owls paint paper parks "
    "pianos pigs planes planets plants poems potatoes rabbits radios rain rice rivers roads robots rockets salt sand "
    "schools sheep ships shoes singing sleep snakes snow soap soccer soup spiders spring stars storms sugar summer "
    "teachers tea tennis theatres tigers tomatoes towers trains trees trucks turtles umbrellas villages violins volcanoes "
    "walking watches water weddings whales wheat wind windows winter wolves wood wool writing"
)


def make_prompts(seed: int) -> Dataset:
    """Questions to train on in chat form, each with the number of sentences, in an order of this seed."""
    rows = _shuffled()[HELD_OUT:]
    random.Random(seed).shuffle(rows)
    return Dataset.from_list(rows)


def make_held_out() -> Dataset:
    """Questions about topics that are never trained on, the same for every seed."""
    return Dataset.from_list(_shuffled()[:HELD_OUT])


def _shuffled() -> list[dict[str, Any]]:
    """A question about each topic."""
    topics = TOPICS.split()
    random.Random(0).shuffle(topics)
    questions = [f"Tell me about {topic} in two short sentences." for topic in topics]
    return [{"prompt": [{"role": "user", "content": text}], "answer": NUMBER} for text in questions]


def number_of_sentences_is_right(completions: Sequence[Any], answer: Sequence[str], **columns: Any) -> list[float]:
    """The reward: 1 if the completion consists of the stated number of whole sentences, else 0."""
    texts = [completion[0]["content"].strip() for completion in completions]
    return [float(_count_sentences(text) == int(number)) for text, number in zip(texts, answer, strict=True)]


def _count_sentences(text: str) -> int:
    """The number of sentences; 0 if the last one has no end."""
    return len(re.findall(r"[.!?]+(?=\s|$)", text)) if re.search(r"[.!?]$", text) else 0

"""When a completion ends: end-of-sequence tokens, stop strings, and what each row has written so far."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from lowpeak.config.rollout import Sampling
from lowpeak.errors import EngineError
from lowpeak.records import Completion

# Tokens before the shortest window that could hold a stop string: a window that starts inside a character or a word
# decodes differently there, and special tokens have no text of their own.
_MARGIN = 8


def end_token_ids(model: nn.Module, tokenizer: Any, sampling: Sampling) -> frozenset[int]:
    """The tokens that end a completion: those of the generation config, of the tokenizer, and of `sampling`."""
    ids = set(sampling.stop_token_ids)
    for owner in (getattr(model, "generation_config", None), tokenizer):
        found = getattr(owner, "eos_token_id", None)
        if found is not None:
            ids.update([found] if isinstance(found, int) else found)
    return frozenset(ids)


class StopStrings:
    """Tells whether the last token of a completion completed one of the stop strings.

    The same as `any(s in decode(ids) for s in stop)` asked after every token, but only a window of the last tokens is
    decoded, and only when the new token's own text can hold the last character of a stop string.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._window = max((len(text.encode()) for text in stop), default=0) + _MARGIN
        self._may_complete: dict[int, bool] = {}

    def completed(self, ids: Sequence[int]) -> bool:
        """Whether `ids` contain a stop string that `ids[:-1]` did not."""
        if not self._stop or not self._can_complete(ids[-1]):
            return False
        text = self._decode(ids[-self._window :])
        return any(stop in text for stop in self._stop)

    def _can_complete(self, token: int) -> bool:
        if token not in self._may_complete:
            text = self._decode([token])
            # Part of a character decodes to U+FFFD; a space that starts a word may be lost when the word stands alone.
            unclear = not text or "\ufffd" in text
            self._may_complete[token] = unclear or any(stop[-1] in text or stop[-1] == " " for stop in self._stop)
        return self._may_complete[token]

    def _decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)


class Progress:
    """What rows have written, on the host; one that has ended or is `max_new_tokens` long takes no more tokens."""

    def __init__(
        self,
        num_rows: int,
        end_ids: frozenset[int],
        stops: StopStrings,
        on_tokens: Callable[[int, int], None] | None,
        max_new_tokens: float = math.inf,
    ) -> None:
        self._max_new_tokens = max_new_tokens
        self._end_ids = end_ids
        self._stops = stops
        self._on_tokens = on_tokens
        self._ids: list[list[int]] = [[] for _ in range(num_rows)]
        self._logprobs: list[list[float]] = [[] for _ in range(num_rows)]
        self._ended = [False] * num_rows

    def add(self, rows: Sequence[int], tokens: Sequence[int], logprobs: Sequence[float]) -> list[bool]:
        """Give each of `rows` its next token; True where the row goes on. EngineError on a log-prob that is NaN."""
        if not all(map(math.isfinite, logprobs)):
            raise EngineError(
                "The model's logits are NaN or infinite while generating: the policy's weights are broken "
                "(a diverged step or a checkpoint that was not loaded)."
            )
        running = [row for row in rows if self.runs(row)]
        for row, token, logprob in zip(rows, tokens, logprobs, strict=True):
            if self.runs(row):
                self._ids[row].append(token)
                self._logprobs[row].append(logprob)
                self._ended[row] = token in self._end_ids or self._stops.completed(self._ids[row])
        if self._on_tokens is not None:
            self._on_tokens(len(running), len(rows))
        return [self.runs(row) for row in rows]

    def runs(self, row: int) -> bool:
        """Whether the row takes another token."""
        return not self._ended[row] and len(self._ids[row]) < self._max_new_tokens

    def ids(self, row: int) -> Sequence[int]:
        """The tokens of the row so far."""
        return self._ids[row]

    @property
    def ended(self) -> list[bool]:
        """Which rows have ended by a token or a string."""
        return list(self._ended)

    def completions(self) -> list[Completion]:
        """The rows as completions; one that has not ended was cut off by its length."""
        return [
            Completion(
                ids=torch.tensor(ids, dtype=torch.int32),
                logprobs=torch.tensor(logprobs, dtype=torch.float32),
                loss_mask=torch.ones(len(ids), dtype=torch.bool),
                finish_reason="stop" if ended else "length",
            )
            for ids, logprobs, ended in zip(self._ids, self._logprobs, self._ended, strict=True)
        ]

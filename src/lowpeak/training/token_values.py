"""Token values of a few completions, for the journal: text, log-prob, entropy, mismatch and loss mask of each token.

The engine's log-probs come with the completions. The policy's log-probs and entropies are those of the rollout's first
step, which computes them anyway: its weights are those that generated the completions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import wraps

from torch import Tensor

from lowpeak.algorithms import Algorithm
from lowpeak.records import Metric, Record, TokenBatch

Columns = tuple[Tensor | Sequence[float], ...]

_MAX_PENDING = 16  # tokens that may wait for the rest of a character
_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"


def choose_evenly(indices: Sequence[int], most: int, offset: int = 0) -> tuple[int, ...]:
    """Return at most `most` of the indices at even distances; each `offset` starts at another one."""
    count = min(most, len(indices))
    return tuple(indices[(offset + i * len(indices) // count) % len(indices)] for i in range(count))


class TokenObserver:
    """Keeps a step's values of the loss tokens of some records.

    `ranges` has the range [start, stop) of each record's loss tokens by its index, for each micro-batch. `values` then has
    their log-probs, and their entropies if the step computes them. A record whose forward pass the step skips is missing.
    """

    def __init__(self, ranges: Sequence[Mapping[int, tuple[int, int]]] = ()) -> None:
        self.values: dict[int, Columns] = {}
        self._ranges = ranges

    def attach(self, algorithm: Algorithm) -> Algorithm:
        """Return the algorithm, which also gives this observer the inputs of its metrics, in the order of micro-batches."""
        if not any(self._ranges):
            return algorithm
        remaining = iter(self._ranges)

        @wraps(algorithm.measure)
        def measure(logprobs_T: Tensor, entropy_T: Tensor | None, tokens: TokenBatch) -> dict[str, Metric]:
            columns = (logprobs_T,) if entropy_T is None else (logprobs_T, entropy_T)
            for index, (start, stop) in next(remaining, {}).items():
                self.values[index] = tuple(column[start:stop].clone() for column in columns)
            return algorithm.measure(logprobs_T, entropy_T, tokens)

        return replace(algorithm, measure=measure)


def token_rows(
    records: Mapping[int, Record],
    selected: Sequence[int],
    values: Mapping[int, Columns],
    decode: Callable[[list[int]], str],
) -> Iterator[dict[str, object]]:
    """Yield the journal's row of token values of each record, given with its index; `selected` are the rows of all.

    `logprobs` are the engine's. `mismatch` is the policy's log-prob minus the engine's; it and `entropy` are None for
    tokens that the step has not computed. `values` are those of a `TokenObserver`.
    """
    for index, record in records.items():
        completion = record.completion
        policy, entropy = (*values.get(index, ()), None, None)[:2]
        logprobs, mask = completion.logprobs.tolist(), completion.loss_mask.tolist()
        policy_logprobs = _at_loss_tokens(mask, policy)
        yield {
            "row": selected[index],
            "pieces": token_texts(completion.ids.tolist(), decode),
            "logprobs": [_rounded(each, 3) for each in logprobs],
            "entropy": [_rounded(each, 3) for each in _at_loss_tokens(mask, entropy)],
            "mismatch": [
                None if trained is None else _rounded(trained - sampled, 4)
                for trained, sampled in zip(policy_logprobs, logprobs, strict=True)
            ],
            "loss_mask": [int(each) for each in mask],
        }


def _at_loss_tokens(mask: Sequence[bool], column: Tensor | Sequence[float] | None) -> list[float | None]:
    """Return the values of loss tokens at their positions in the completion, None elsewhere."""
    if column is None:
        return [None] * len(mask)
    numbers = iter(column)
    return [float(next(numbers)) if counts else None for counts in mask]


def _rounded(value: float | None, digits: int) -> float | None:
    return None if value is None else round(value, digits) + 0.0  # no minus zero


def token_texts(ids: Sequence[int], decode: Callable[[list[int]], str]) -> list[str]:
    """Return the text that each token adds; joined, they are the text of all.

    A character whose bytes are split over tokens stands at the last of them, and the others have no text.
    """
    # Decoded alone, a token may lose a leading space: it is decoded with the one before it.
    texts: list[str] = []
    start = end = 0  # the window's first token, and the first token whose text is not complete
    shown = ""  # the window's text that tokens before have
    for position in range(len(ids)):
        text = decode(list(ids[start : position + 1]))
        pending = text.endswith(_INCOMPLETE) and position < len(ids) - 1 and position - end < _MAX_PENDING
        complete = text.removesuffix(_INCOMPLETE) if pending else text
        texts.append(complete[len(shown) :])
        shown = complete
        if not pending:
            start, end = end, position + 1
            shown = decode(list(ids[start:end]))
    return texts

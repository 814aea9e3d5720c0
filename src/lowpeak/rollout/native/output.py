"""Output of generation: the tokens of each sequence and the detection of its end."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lowpeak.arguments import Sampling
from lowpeak.errors import EngineError
from lowpeak.records import Completion
from lowpeak.rollout.sampling import BannedTokens, TokenDraw

# Extra tokens before the shortest window that could contain a stop string: a window that starts inside a character or a word
# decodes differently there, and special tokens decode to no text.
_MARGIN = 8
_NON_FINITE = 2  # state of a sequence with a non-finite log-prob; 0: running, 1: ended


def end_token_ids(model: nn.Module, tokenizer: Any, sampling: Sampling) -> frozenset[int]:
    """Return the tokens that end a completion: those of the generation config, of the tokenizer, and of `sampling`."""
    ids = set(sampling.stop_token_ids)
    for owner in (getattr(model, "generation_config", None), tokenizer):
        end_ids = getattr(owner, "eos_token_id", None)
        if end_ids is not None:
            ids.update([end_ids] if isinstance(end_ids, int) else end_ids)
    return frozenset(ids)


class StopStrings:
    """Detection of stop strings after each token.

    Equivalent to `any(s in decode(ids) for s in stop)`, but decodes only a window of the last tokens, and only if the
    new token's text can contain the last character of a stop string.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str], min_new_tokens: int = 0) -> None:
        self._tokenizer = tokenizer
        self._stop, self.min_new_tokens = tuple(stop), min_new_tokens
        self.window = max((len(text.encode()) for text in stop), default=0) + _MARGIN
        self._may_complete: dict[int, bool] = {}

    def completed(self, ids: Sequence[int]) -> bool:
        """Return whether `ids` contain a stop string that `ids[:-1]` did not."""
        if not self._stop or not self.can_complete(ids[-1]):
            return False
        text = self._decode(ids[-self.window :])
        return any(stop in text for stop in self._stop)

    @property
    def any(self) -> bool:
        return bool(self._stop)

    def can_complete(self, token: int) -> bool:
        if token not in self._may_complete:
            text = self._decode([token])
            # A partial character decodes to U+FFFD; a word decoded alone may lose the space before it.
            unclear = not text or "\ufffd" in text
            self._may_complete[token] = unclear or any(stop[-1] in text or stop[-1] == " " for stop in self._stop)
        return self._may_complete[token]

    def _decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)


class OutputBuffer:
    """Tokens and log-probs of all sequences, on their device; a sequence ends by itself or at its most tokens.

    These are `max_new_tokens`, or what `begin` sets for a sequence in the row of one that has ended.
    Shapes: R sequences, N of them that receive a token, C tokens of the longest completion. It takes 8 bytes per
    token.
    """

    def __init__(
        self,
        num_rows: int,
        max_new_tokens: int,
        end_ids: frozenset[int],
        stops: StopStrings,
        on_tokens: Callable[[int, int], None] | None,
        device: torch.device,
    ) -> None:
        self.device = device
        self._stops = stops
        self._on_tokens = on_tokens
        self._end_ids_E = torch.tensor(sorted(end_ids), dtype=torch.int64).to(device)
        self._ids_RC = torch.zeros(num_rows, max_new_tokens, dtype=torch.int32, device=device)
        self._logprobs_RC = torch.zeros(num_rows, max_new_tokens, device=device)
        self._written_R = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self._most_R: Tensor | None = None  # tokens of each row, if `begin` has set them
        self._stopped_R = torch.zeros(num_rows, dtype=torch.bool, device=device)  # by a stop string

    def begin(self, rows: Sequence[int], max_tokens: Sequence[int]) -> None:
        """Empty these rows for sequences of at most so many tokens."""
        rows_N, most_N = torch.tensor([rows, max_tokens]).to(self.device)
        if self._most_R is None:
            self._most_R = torch.zeros_like(self._written_R)
        self._written_R[rows_N], self._stopped_R[rows_N], self._most_R[rows_N] = 0, False, most_N

    def add(self, rows_N: Tensor, draw: TokenDraw, num_computed: int) -> list[bool]:
        """Add the next tokens of running sequences, from a forward of `num_computed`; return which are finished.

        This is the only device read of a step, except where `draw` needs the whole vocabulary. Raise EngineError for a
        NaN or infinite log-prob.
        """
        states = self.write(rows_N, draw.tokens_N, draw.logprobs_N).tolist()
        if _NON_FINITE in states:
            draw.redraw_from_vocabulary([i for i, state in enumerate(states) if state == _NON_FINITE])
            self._written_R[rows_N] -= 1
            states = self.write(rows_N, draw.tokens_N, draw.logprobs_N).tolist()
        if _NON_FINITE in states:
            raise EngineError(
                "The model's logits are NaN or infinite while generating: the policy's weights are broken "
                "(a diverged step or a checkpoint that was not loaded)."
            )
        if self._on_tokens is not None:
            self._on_tokens(len(states), num_computed)
        stopped = self._stopped(rows_N, draw.tokens_N)
        return [bool(state) or i in stopped for i, state in enumerate(states)]

    def write(self, rows_N: Tensor, tokens_N: Tensor, logprobs_N: Tensor) -> Tensor:
        """Add the next tokens; return each sequence's state, int8 [N]: running, finished or non-finite."""
        positions_N = self._written_R[rows_N]
        self._ids_RC[rows_N, positions_N] = tokens_N.to(torch.int32)
        self._logprobs_RC[rows_N, positions_N] = logprobs_N
        self._written_R[rows_N] = written_N = positions_N + 1
        most = self._ids_RC.shape[1] if self._most_R is None else self._most_R[rows_N]
        finished_N = self._is_end(tokens_N) | (written_N >= most)
        # `isfinite` is four kernels.
        return torch.where(logprobs_N.abs() < math.inf, finished_N.to(torch.int8), _NON_FINITE)

    def _is_end(self, tokens_N: Tensor) -> Tensor:
        return (tokens_N[:, None] == self._end_ids_E).any(dim=-1)

    def _stopped(self, rows_N: Tensor, tokens_N: Tensor) -> set[int]:
        """Return the sequences that have just completed a stop string, and mark them as ended."""
        tokens = tokens_N.tolist() if self._stops.any else []
        stopped: set[int] = set()
        for i, token in enumerate(tokens):
            if self._stops.can_complete(token):
                row = int(rows_N[i])
                stop = int(self._written_R[row])
                start = max(0, stop - self._stops.window)
                if stop > self._stops.min_new_tokens and self._stops.completed(self._ids_RC[row, start:stop].tolist()):
                    self._stopped_R[row] = True
                    stopped.add(i)
        return stopped

    def banned(self, written_N: Tensor) -> BannedTokens | None:
        """Return the end tokens, for sequences below `min_new_tokens`; None without such a minimum."""
        return (self._end_ids_E, written_N < self._stops.min_new_tokens) if self._stops.min_new_tokens else None

    def written(self, rows_N: Tensor) -> Tensor:
        return self._written_R[rows_N]

    def newest(self, rows_N: Tensor, written_N: Tensor) -> Tensor:
        """Return the newest token [N] of each row; any token if there is none."""
        return self._ids_RC[rows_N, (written_N - 1).clamp(min=0)].long()

    def tokens(self, rows_N: Tensor, num_tokens: int) -> Tensor:
        """Return at most the first tokens [N, num_tokens] of the rows, zeros beyond a row's end."""
        return self._ids_RC[rows_N, :num_tokens].long()

    def completions(self, rows: Sequence[int] | None = None) -> list[Completion]:
        """Return the rows (None: all) as completions; one that has not ended was truncated by its length."""
        rows_N = torch.tensor(range(len(self._written_R)) if rows is None else rows, dtype=torch.int64).to(self.device)
        written_N = self._written_R[rows_N]
        stopped = (self._stopped_R[rows_N] | self._is_end(self.newest(rows_N, written_N))).tolist()
        counts = written_N.tolist()
        is_written_NC = torch.arange(max(counts, default=0)) < torch.tensor(counts)[:, None]
        # Each row is a view of one tensor: separate tensors would take a thousand small copies.
        written = (self._ids_RC, self._logprobs_RC)
        ids, logprobs = (x[rows_N, : is_written_NC.shape[1]].cpu()[is_written_NC] for x in written)
        masks = torch.ones_like(ids, dtype=torch.bool).split(counts)
        parts = zip(ids.split(counts), logprobs.split(counts), masks, stopped, strict=True)
        return [Completion(i, p, mask, "stop" if ended else "length") for i, p, mask, ended in parts]

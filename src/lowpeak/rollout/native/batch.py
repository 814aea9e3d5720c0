"""The rows that generate together, each at its own position, and what the model is fed for each.

All rows end in the same column of the cache; one with a shorter history is padded on the left. When rows leave or
enter, everything but the cache is made anew from what the host knows, and leading columns that nobody needs are dropped.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from lowpeak.config.rollout import Sampling
from lowpeak.records import Prompt
from lowpeak.rollout.native.cache import SlotCache
from lowpeak.rollout.native.draws import Draws
from lowpeak.rollout.native.prefill import left_mask, left_padded, prefill
from lowpeak.rollout.native.stop import Progress
from lowpeak.rollout.native.waves import Row, Wave
from lowpeak.rollout.sampling import choose


class Batch:
    """Rows in the cache; `rows x columns` of it never exceed `max_tokens`."""

    def __init__(
        self, model: nn.Module, prompts: Sequence[Prompt], sampling: Sampling, progress: Progress, max_tokens: int
    ) -> None:
        self.rows: Wave = []
        self._model = model
        self._prompts = prompts
        self._sampling = sampling
        self._progress = progress
        self._max_tokens = max_tokens
        self._device = next(model.parameters()).device
        self._cache = SlotCache()
        # A row that has ended and not left is fed at positions that the model may not have.
        self._last_position = max((len(p.ids) for p in prompts), default=0) + sampling.max_new_tokens - 1
        self._num_columns = self._capacity = self._num_steps = 0
        # Made by `_restart`, which follows every change of the rows.
        self._tokens_N1: Tensor
        self._positions_N1: Tensor
        self._mask_NL: Tensor | None
        self._history_NL: Tensor | None
        self._draws: Draws

    def running(self) -> list[int]:
        """Which of the rows take another token."""
        return [i for i, row in enumerate(self.rows) if self._progress.runs(self._number(row))]

    @property
    def is_full(self) -> bool:
        """Whether there is no column for another token: `keep` makes room."""
        return self._num_columns == self._capacity

    def enter(self, kept: Sequence[int], entering: Wave) -> None:
        """Drop the rows but `kept`, prefill those that are `entering` behind them, and choose their first tokens."""
        self._arrange(kept, entering)
        ids = [prompt.ids for prompt in self._prompts]
        logits_NV = prefill(self._model, entering, ids, self._cache, first_row=len(kept))
        draws = Draws(entering, self._prompts, self._sampling, self._device)
        self._add(entering, *choose(logits_NV, self._sampling, draws.at(0), self._history(entering)))
        self._restart()

    def keep(self, kept: Sequence[int]) -> None:
        """Drop the other rows, and the columns that only they needed."""
        self._arrange(kept, [])
        self._restart()

    def step(self) -> None:
        """Feed each row its newest token and choose the next."""
        self._num_columns += 1
        output = self._model(
            input_ids=self._tokens_N1,
            attention_mask=None if self._mask_NL is None else self._mask_NL[:, : self._num_columns],
            position_ids=self._positions_N1,
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=1,
        )
        uniforms_N = self._draws.at(self._num_steps)
        tokens_N, logprobs_N = choose(output.logits[:, -1], self._sampling, uniforms_N, self._history_NL)
        self._add(self.rows, tokens_N, logprobs_N)
        self._tokens_N1 = tokens_N[:, None]
        self._positions_N1 = (self._positions_N1 + 1).clamp(max=self._last_position)
        self._num_steps += 1
        if self._history_NL is not None:
            self._history_NL = torch.cat([self._history_NL, self._tokens_N1], dim=-1)

    def _arrange(self, kept: Sequence[int], entering: Wave) -> None:
        """Make the rows `kept` and then `entering`, with as many columns as the longest of them has in the cache."""
        self.rows = [self.rows[i] for i in kept] + entering
        self._num_columns = max(self._cached(row) for row in self.rows)
        rest = max(self._sampling.max_new_tokens - self._num_written(row) for row in self.rows)
        self._capacity = min(self._num_columns + rest, self._max_tokens // len(self.rows))
        indices = torch.tensor(kept, dtype=torch.int64).to(self._device)
        self._cache.arrange(indices, len(self.rows), self._num_columns, self._capacity)

    def _restart(self) -> None:
        """Make what the model is fed from what the rows have written, each of them one token at least."""
        lengths = [self._cached(row) for row in self.rows]
        newest = [self._progress.ids(self._number(row))[-1] for row in self.rows]
        self._tokens_N1 = torch.tensor(newest)[:, None].to(self._device)
        self._positions_N1 = torch.tensor(lengths)[:, None].to(self._device)
        room = self._capacity - self._num_columns
        self._mask_NL = left_mask(lengths, self._num_columns, self._device, room)
        self._history_NL = self._history(self.rows)
        starts = [self._num_written(row) for row in self.rows]
        self._draws = Draws(self.rows, self._prompts, self._sampling, self._device, starts)
        self._num_steps = 0

    def _add(self, rows: Wave, tokens_N: Tensor, logprobs_N: Tensor) -> None:
        self._progress.add([self._number(row) for row in rows], *read(tokens_N, logprobs_N))

    def _history(self, rows: Wave) -> Tensor | None:
        """The tokens [N, L] that a repetition penalty knows."""
        if self._sampling.repetition_penalty == 1:
            return None
        ids = [[*self._prompts[row.prompt].ids, *self._progress.ids(self._number(row))] for row in rows]
        return left_padded(ids, self._device)

    def _number(self, row: Row) -> int:
        return row.prompt * self._sampling.num_generations + row.completion

    def _num_written(self, row: Row) -> int:
        return len(self._progress.ids(self._number(row)))

    def _cached(self, row: Row) -> int:
        """Tokens of the row in the cache: all but the newest that it has written."""
        return len(self._prompts[row.prompt].ids) + max(0, self._num_written(row) - 1)


def read(tokens_N: Tensor, logprobs_N: Tensor) -> tuple[list[int], list[float]]:
    """Tokens and log-probs on the host, in one copy: float64 holds both exactly."""
    tokens, logprobs = torch.stack([tokens_N.double(), logprobs_N.double()]).tolist()
    return [int(token) for token in tokens], logprobs

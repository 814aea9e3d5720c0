"""The decode loop: one token for each row of a wave at a time, until all have ended.

One small read per token, of the tokens and their log-probs, is all that waits for the device. Rows that have ended
leave the batch once they are enough to pay for moving the cache.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from lowpeak.config.rollout import Sampling
from lowpeak.records import Prompt
from lowpeak.rollout.native.cache import WaveCache
from lowpeak.rollout.native.draws import Draws
from lowpeak.rollout.native.prefill import left_mask, left_padded, prefill
from lowpeak.rollout.native.stop import Progress
from lowpeak.rollout.native.waves import Wave
from lowpeak.rollout.sampling import choose

_COMPACT_ONE_IN = 4  # the cache is compacted when one row in so many has ended


def decode(model: nn.Module, wave: Wave, prompts: Sequence[Prompt], sampling: Sampling, progress: Progress) -> None:
    """Generate the rows of `wave` into `progress`; `prompts` are all prompts that they may name."""
    logits_NV, cache = prefill(model, wave, [prompt.ids for prompt in prompts], sampling.max_new_tokens)
    draws = Draws(wave, prompts, sampling, logits_NV.device)
    live = LiveRows([prompts[row.prompt].ids for row in wave], sampling, cache, logits_NV.device)
    for position in range(sampling.max_new_tokens):
        tokens_N, logprobs_N = choose(logits_NV, sampling, draws.at(position), live.history_NL)
        running = progress.add(live.rows, *read(tokens_N, logprobs_N))
        if not any(running) or position + 1 == sampling.max_new_tokens:
            return
        live.append(tokens_N)
        if running.count(False) * _COMPACT_ONE_IN >= len(running):
            kept = torch.tensor([i for i, runs in enumerate(running) if runs])
            draws.keep(kept.to(tokens_N.device))
            live.keep(kept)
        logits_NV = live.forward(model)


def read(tokens_N: Tensor, logprobs_N: Tensor) -> tuple[list[int], list[float]]:
    """Tokens and log-probs on the host, in one copy: float64 holds both exactly."""
    tokens, logprobs = torch.stack([tokens_N.double(), logprobs_N.double()]).tolist()
    return [int(token) for token in tokens], logprobs


class LiveRows:
    """The rows of a wave that are still in the batch, and what the model is fed for each."""

    def __init__(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, cache: WaveCache, device: torch.device
    ) -> None:
        lengths = [len(ids) for ids in prompts]
        self.rows = list(range(len(prompts)))  # which row of the wave each one is
        self.history_NL = left_padded(prompts, device) if sampling.repetition_penalty != 1 else None
        self._cache = cache
        self._num_columns = max(lengths)
        self._mask_NL = left_mask(lengths, self._num_columns, device, sampling.max_new_tokens)
        self._positions_N1 = torch.tensor(lengths)[:, None].to(device) - 1
        self._tokens_N1 = torch.empty(0, device=device)

    def append(self, tokens_N: Tensor) -> None:
        """Make these the rows' newest tokens, which the next forward reads."""
        self._tokens_N1 = tokens_N[:, None]
        self._positions_N1 = self._positions_N1 + 1
        self._num_columns += 1
        if self.history_NL is not None:
            self.history_NL = torch.cat([self.history_NL, self._tokens_N1], dim=-1)

    def keep(self, kept: Tensor) -> None:
        """Drop the other rows from the batch; `kept` are indices into it, on the host."""
        self.rows = [self.rows[i] for i in kept.tolist()]
        kept = kept.to(self._tokens_N1.device, non_blocking=True)
        self._cache.batch_select_indices(kept)
        self._tokens_N1, self._positions_N1 = self._tokens_N1[kept], self._positions_N1[kept]
        self._mask_NL = None if self._mask_NL is None else self._mask_NL[kept]
        self.history_NL = None if self.history_NL is None else self.history_NL[kept]

    def forward(self, model: nn.Module) -> Tensor:
        """Logits [N, V] of each row's next token."""
        output = model(
            input_ids=self._tokens_N1,
            attention_mask=None if self._mask_NL is None else self._mask_NL[:, : self._num_columns],
            position_ids=self._positions_N1,
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=1,
        )
        return output.logits[:, -1]

"""Native rollout engine: the policy generates with its training weights, without a second copy.

Models with other caches than keys and values, of all tokens or of a window, or without position ids, generate by
`model.generate()`: linear attention and state-space layers need transformers' bookkeeping. Every sequence forwards its prompt
then, and ended sequences stay in the batch, so this is slower. Tokens and log-probs come from the same sampling code, in a
logits processor that leaves `generate()` one token to choose."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    DynamicCache,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
)

from lowpeak.arguments import Sampling
from lowpeak.attention import FULL, attends, spans_by_type
from lowpeak.errors import EngineError
from lowpeak.heads import transformers_model
from lowpeak.memory import return_cached_memory
from lowpeak.records import Completion, Group, Prompt, Weights, WeightSlice
from lowpeak.rollout.engine import SliceForm, check_lengths
from lowpeak.rollout.native.admission import RequestSchedule, TurnDecodeLoop
from lowpeak.rollout.native.cache import cache_argument, left_mask, left_pad, text_config
from lowpeak.rollout.native.cache_bytes import sequence_bytes
from lowpeak.rollout.native.cache_layers import unsupported_layers
from lowpeak.rollout.native.decode_graphs import DecodeGraphs
from lowpeak.rollout.native.decode_loop import DecodeLoop, mask_dtype
from lowpeak.rollout.native.output import OutputBuffer, StopStrings, end_token_ids
from lowpeak.rollout.native.scheduler import PromptQueue, SequenceId, form_waves, sequence_keys
from lowpeak.rollout.pending import GeneratedOnResult, Pending
from lowpeak.rollout.sampling import TokenDraw
from lowpeak.rollout.turns import Key, TurnQueue, TurnRequest, answer_in_rounds
from lowpeak.rollout.uniforms import UniformDraws


@dataclass(eq=False, repr=False)
class NativeEngine:
    """Rollout engine over a transformers causal language model, with a KV cache of bounded size.

    `gather_policy` returns the policy, ready for generation (eval mode, weights gathered, cache allowed), for one call of
    `generate`. `kv_cache_bytes()` is read at each call, because a resumed run uses the value of its checkpoint.
    `on_tokens` receives, for each forward, the tokens added to completions and the sequences computed. `device` is
    where the engine computes, which may differ from the parameters' device (default: theirs); `graphs` the CUDA graphs of its
    decode steps, which turns do not use. With a `turn_lag` a conversation goes on exactly so many steps after its turn has ended,
    so that the bits of log-probs do not depend on the speed of tools; None: as soon as it can. Greedy tokens equal those of
    `model.generate(do_sample=False)` on each prompt alone.
    """

    gather_policy: Callable[[], AbstractContextManager[nn.Module]]
    tokenizer: Any
    kv_cache_bytes: Callable[[], int]
    on_tokens: Callable[[int, int], None] | None = None
    device: torch.device | None = None
    graphs: DecodeGraphs | None = None
    turn_lag: int | None = None
    policy_version: int | None = field(default=None, init=False)
    slice_form = SliceForm()

    def submit(self, prompts: Sequence[Prompt], sampling: Sampling) -> Pending:
        return GeneratedOnResult(partial(self.generate, prompts, sampling))

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling) -> list[Group]:
        if self.policy_version is None:
            raise EngineError("The engine has no known weights yet: call load() before generate().")
        with self.gather_policy() as model, torch.no_grad():
            context = getattr(text_config(model), "max_position_embeddings", None)
            check_lengths(prompts, sampling, context, "the model's", "shorten prompts or completions")
            completions = self._complete(model, prompts, sampling) if prompts else []
        size = sampling.num_generations
        return [Group(prompt, tuple(completions[i * size : (i + 1) * size])) for i, prompt in enumerate(prompts)]

    def sample_turns(self, queue: TurnQueue, sampling: Sampling) -> None:
        if self.policy_version is None:
            raise EngineError("The engine has no known weights yet: call load() before sample_turns().")
        with (
            queue.answering(),
            self.gather_policy() as model,
            queue.sampling_by(driver := transformers_model(model)),
            torch.no_grad(),
        ):
            if unsupported_reason(model) is not None:
                answer_in_rounds(queue, partial(self._sample_round, model, sampling))
                return
            # Ranks in lockstep wait for requests by taking part in the others' forwards.
            poll = getattr(driver.forward, "wait_in_step", None)
            requests = RequestSchedule(queue, self.turn_lag, poll)
            new_output = partial(self._new_output, model, sampling)
            with _inference_mode(model):
                TurnDecodeLoop(model, requests, self.kv_cache_bytes(), sampling, new_output, self.on_tokens).run()

    def _new_output(self, model: nn.Module, sampling: Sampling, num_rows: int) -> OutputBuffer:
        stops = StopStrings(self.tokenizer, sampling.stop, sampling.min_new_tokens)
        ends = (end_token_ids(model, self.tokenizer, sampling), stops)
        device = self.device or next(model.parameters()).device
        return OutputBuffer(num_rows, sampling.max_new_tokens, *ends, self.on_tokens, device)

    def _sample_round(self, model: nn.Module, sampling: Sampling, requests: Sequence[TurnRequest]) -> list[Completion]:
        """Return the turns of all requests, in waves that fit the KV cache."""
        new = max(request.max_tokens for request in requests)
        sampling = replace(sampling, num_generations=1, max_new_tokens=new)
        max_tokens = _tokens_of(model, self.kv_cache_bytes(), min(len(request.ids) for request in requests))
        turns: dict[int, Completion] = {}
        lengths, equal = [len(request.ids) for request in requests], needs_equal_lengths(model)
        for wave in form_waves(lengths, 1, new, max_tokens, equal_lengths=equal):
            indices = [sequence.prompt for sequence in wave]
            output = self._new_output(model, sampling, len(wave))
            ids, keys = [requests[i].ids for i in indices], [requests[i].key for i in indices]
            decode_by_generate(model, ids, keys, sampling, output)
            turns.update(zip(indices, output.completions(), strict=True))
        return [turns[i] for i in range(len(requests))]

    @contextmanager
    def keep_gathered(self) -> Iterator[nn.Module]:
        """Keep the policy gathered for all calls of `generate` in the block; every rank enters it."""
        with self.gather_policy() as model:
            gather_policy, self.gather_policy = self.gather_policy, lambda: nullcontext(model)
            try:
                yield model
            finally:
                self.gather_policy = gather_policy

    def load(self, slices: Iterable[WeightSlice], policy_version: int, weights: Weights = "merged") -> None:
        self.policy_version = policy_version

    def sleep(self) -> None:
        """Return cached memory of torch's allocator; a call's KV cache ends with the call."""
        if self.device is not None:
            return_cached_memory(self.device)

    def wake(self) -> None:
        pass

    def close(self) -> None:
        pass

    def _complete(self, model: nn.Module, prompts: Sequence[Prompt], sampling: Sampling) -> list[Completion]:
        kv_cache_bytes, lengths = self.kv_cache_bytes(), [len(prompt.ids) for prompt in prompts]
        shape = (lengths, sampling.num_generations, sampling.max_new_tokens)
        if unsupported_reason(model) is None:
            output = self._new_output(model, sampling, len(prompts) * sampling.num_generations)
            queue = PromptQueue(*shape, lambda tokens: kv_cache_bytes // sequence_bytes(model, tokens))
            try:
                with _inference_mode(model):
                    DecodeLoop(model, queue, kv_cache_bytes, prompts, sampling, output, self.graphs).run()
            finally:
                if self.graphs is not None:
                    self.graphs.clear()
            return output.completions()
        completions: dict[SequenceId, Completion] = {}
        max_tokens = _tokens_of(model, kv_cache_bytes, min(lengths))
        for wave in form_waves(*shape, max_tokens, equal_lengths=needs_equal_lengths(model)):
            output = self._new_output(model, sampling, len(wave))
            ids = [prompts[sequence.prompt].ids for sequence in wave]
            decode_by_generate(model, ids, sequence_keys(wave, prompts, sampling), sampling, output)
            completions.update(zip(wave, output.completions(), strict=True))
        return [completions[sequence] for sequence in sorted(completions)]


def _inference_mode(model: nn.Module) -> AbstractContextManager[Any]:
    """Return inference mode if all parameters are plain tensors, otherwise a no-op."""
    # Inference mode saves a tenth of a short forward. Training reuses tensors that sharded parameters gather, and may not
    # modify tensors made in inference mode.
    is_plain = all(type(p) is nn.Parameter for p in model.parameters())
    return torch.inference_mode() if is_plain else nullcontext()


_NEEDED = ("attention_mask", "logits_to_keep")


def unsupported_reason(model: nn.Module) -> str | None:
    """Return why the decode loop does not support `model`, or None if it does."""
    missing = _missing_arguments(model)
    if missing:
        return f"its forward does not accept {', '.join(missing)}"
    if "local" in (getattr(text_config(model), "attention_layers", None) or ()):
        return "its local layers measure their window in columns of the cache"
    if getattr(text_config(model), "attn_temperature_tuning", False):
        return "it scales queries by columns of the cache (attn_temperature_tuning)"
    other = unsupported_layers(model)
    if not other and mask_dtype(model) is None and set(spans_by_type(text_config(model)).values()) != {FULL}:
        return "its windows need an attention implementation that adds masks (sdpa)"
    return f"its layers need {', '.join(other)}" if other else None


def _missing_arguments(model: nn.Module) -> list[str]:
    accepted = inspect.signature(transformers_model(model).forward).parameters
    needed = [*_NEEDED, cache_argument(model), *(["position_ids"] if attends(text_config(model)) else [])]
    return [name for name in needed if name not in accepted]


def _tokens_of(model: nn.Module, num_bytes: int, num_tokens: int) -> int:
    """Return the tokens for which a budget has room, in sequences of at least `num_tokens`."""
    return num_bytes * num_tokens // max(1, sequence_bytes(model, num_tokens))


# Families with states outside of transformers' cache.
_OWN_STATES = ("minimax", "recurrent_gemma")


def needs_equal_lengths(model: nn.Module) -> bool:
    """Return whether `generate()` is wrong for prompts of several lengths, which it pads on the left.

    Padding changes states that a family keeps outside of transformers' cache (MiniMax, RecurrentGemma) or in cache layers
    of its own (DeepSeek-V4), and the queries' scale of models with chunks (Llama 4).
    """
    config = text_config(model)
    own_layers = any(type(layer).__module__ != DynamicCache.__module__ for layer in DynamicCache(config=config).layers)
    return own_layers or config.model_type in _OWN_STATES or bool(getattr(config, "attention_chunk_size", None))


def decode_by_generate(
    model: nn.Module, ids: Sequence[Sequence[int]], keys: Sequence[Key], sampling: Sampling, output: OutputBuffer
) -> None:
    """Generate after these prompts into `output`, as `DecodeLoop.run` does; `keys` are those of the random numbers."""
    device = output.device
    lengths = [len(x) for x in ids]
    mask_NL = left_mask(lengths, device)
    driver = transformers_model(model)
    draws = UniformDraws(len(ids), sampling, device)
    draws.make(range(len(ids)), keys)
    chooser = TokenChooser(sampling, draws, output, len(ids))
    with _use_generation_config(driver, GenerationConfig(max_new_tokens=sampling.max_new_tokens, do_sample=False)):
        driver.generate(
            input_ids=(input_ids := left_pad(ids, device)),
            attention_mask=torch.ones_like(input_ids) if mask_NL is None else mask_NL,
            logits_processor=LogitsProcessorList([chooser]),
            stopping_criteria=StoppingCriteriaList([_StopEnded(chooser)]),
            # By default ranks of a sharded model would have to call `generate` equally often; here forwards run in lockstep.
            synced_gpus=False,
        )


class TokenChooser(LogitsProcessor):
    """Logits processor that chooses each token as the decode loop does, and leaves it the only finite score."""

    def __init__(self, sampling: Sampling, draws: UniformDraws, output: OutputBuffer, num_rows: int) -> None:
        self._sampling = sampling
        self._draws = draws
        self._output = output
        self._position = 0
        self.ended = [False] * num_rows

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        # Ended sequences stay in the batch until all have ended; any token will do for them.
        running = [row for row, ended in enumerate(self.ended) if not ended]
        rows_n = torch.tensor(running).to(scores.device)
        written_n = torch.full_like(rows_n, self._position)
        uniforms_n, banned = self._draws.at(rows_n, written_n), self._output.banned(written_n)
        draw = TokenDraw(scores, self._sampling, uniforms_n, input_ids[rows_n], rows_n, banned)
        ended = self._output.add(rows_n, draw, len(scores))
        self._position += 1
        for row, has_ended in zip(running, ended, strict=True):
            self.ended[row] = has_ended
        tokens_N = torch.zeros(len(scores), dtype=torch.int64, device=scores.device)
        tokens_N[rows_n] = draw.tokens_N
        return torch.full_like(scores, float("-inf")).scatter(-1, tokens_N[:, None], 0.0)


class _StopEnded(StoppingCriteria):
    def __init__(self, chooser: TokenChooser) -> None:
        self._chooser = chooser

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: Any) -> Tensor:
        return torch.tensor(self._chooser.ended, device=input_ids.device)


@contextmanager
def _use_generation_config(model: Any, config: GenerationConfig) -> Iterator[None]:
    """Set the model's generation config to `config` in the block, because `generate()` merges the model's into its
    argument.
    """
    original, model.generation_config = model.generation_config, config
    try:
        yield
    finally:
        model.generation_config = original

"""A step the plain way: all rows in one batch, padded on the left, full logits, log_softmax, the paper's normalisation."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import torch

from forest_cases import draw_branches, tokens_before
from lowpeak.algorithms.algorithm import StepCounts
from lowpeak.attention.install import install_attention, packing_unsupported_reason
from lowpeak.batching.loss_tokens import num_loss_tokens
from lowpeak.batching.packing import TokenBudget, pack
from lowpeak.heads.lm_head import install_head
from lowpeak.records import Completion, Record
from lowpeak.training.rollout import with_step_shares
from lowpeak.training.step import LogprobSettings, run_step
from naive_losses import Row, plain_grpo, plain_rloo, plain_weights
from rounding import assert_each_close_to_largest
from step_settings import GRPO, LocalStrategy

TEMPERATURE = 0.8
BASE = replace(GRPO, loss_type="grpo", max_completion_length=9)


def ready(model):
    """The model with our head, and our attention where it takes a forest."""
    install_head(model)
    if packing_unsupported_reason(model) is None:
        install_attention(model)
    return model


def name_of(budget):
    return f"{budget.layout}-{budget.max_tokens}-{budget.multiple}" + ("-where-it-pays" if budget.costs else "")


def make_record(model, prompt, length, generator, mask, branches=()):
    """A row after `prompt` whose old log-probs are near the policy's, so that some ratios clip."""
    ids = torch.randint(2, 13, (length,), generator=generator).int()
    completion = Completion(ids, torch.zeros(length), mask, "stop", branches=branches)
    record = Record(0, tuple(prompt.tolist()), completion, (0.0,), 0.0)
    with torch.no_grad():
        exact = plain_logprobs(model, [record])[0].float()
    noise = torch.randn(length, generator=generator)
    advantage = torch.randn(1, generator=generator).item()
    return replace(
        record,
        completion=replace(completion, logprobs=exact),
        old=exact + 0.25 * noise,
        reference=exact + 0.5 * noise.flip(0),
        advantages=torch.full((length,), advantage),
    )


def ragged_records(model, seed=0):
    """Rows of uneven lengths with masked tokens, each with a prompt of its own."""
    generator = torch.Generator().manual_seed(seed)
    records = []
    for prompt_length, length in [(3, 9), (5, 2), (2, 6), (4, 1), (1, 7), (6, 4)]:
        mask = torch.ones(length, dtype=torch.bool)
        mask[1:2] = length < 3
        prompt = torch.randint(2, 13, (prompt_length,), generator=generator)
        records.append(make_record(model, prompt, length, generator, mask))
    return records


def grouped_records(model, seed=0):
    """Groups of mixed prompt lengths in mixed order: completions of one token, with branches, holes in masks, another prompt."""
    generator = torch.Generator().manual_seed(seed)
    records = []
    for prompt_length, lengths in [(7, (9, 1, 5, 3, 8, 6, 4)), (3, (2, 6, 4)), (1, (1, 1)), (5, (4,)), (6, (1, 7))]:
        prompt = torch.randint(2, 13, (prompt_length,), generator=generator)
        for number, length in enumerate(lengths):
            mask = torch.rand(length, generator=generator) < 0.8
            mask[torch.randint(length, (1,), generator=generator)] = True
            own = prompt.flip(0) if (prompt_length, number) == (7, 3) else prompt
            records.append(make_record(model, own, length, generator, mask))
        # Branches of all kinds: from the prompt, from the completion, with a start of their own.
        branches, mask = draw_branches(prompt_length, 9, generator), torch.rand(9, generator=generator) < 0.6
        mask[-1] = True
        mask[[each.start for each in branches if each.after < 0]] = False
        records.append(make_record(model, prompt, 9, generator, mask, branches))
    order = torch.randperm(len(records), generator=generator).tolist()
    return [records[i] for i in order]


def plain_paths(record):
    """The tokens of prompt + completion that each part of a completion is read with, and how many of the last are the part."""
    first = len(record.prompt_ids)
    starts = [first, *(first + branch.start for branch in record.completion.branches)]
    bounds = pairwise([*starts, record.num_tokens])
    return [([*tokens_before(record, stop - 1), stop - 1], stop - start) for start, stop in bounds if stop > start]


def plain_logprobs(model, records):
    """Each row's log-probs over its completion, from one left-padded batch of full logits; branches are rows."""
    paths = [(record, path, own) for record in records for path, own in plain_paths(record)]
    width = max(len(path) for _, path, _ in paths)
    ids = torch.zeros(len(paths), width, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for b, (record, path, _) in enumerate(paths):
        row = torch.tensor([*record.prompt_ids, *record.completion.ids.tolist()])[path]
        ids[b, width - len(row) :], mask[b, width - len(row) :] = row, 1
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    logits = model(input_ids=ids, attention_mask=mask, position_ids=positions).logits / TEMPERATURE
    logprobs = logits[:, :-1].log_softmax(-1).gather(2, ids[:, 1:, None]).squeeze(2)
    logprobs = torch.nn.functional.pad(logprobs, (1, 0))  # nothing predicts a sequence's first token
    pieces = [logprobs[b, width - own :] for b, (_, _, own) in enumerate(paths)]
    return list(torch.cat(pieces).split([len(record.completion) for record in records]))


def plain_rows(settings, model, records):
    """The counted tokens of each row by the plain way, with the policy's own log-probs where no old ones are scored."""
    rows = []
    for record, logprobs in zip(records, plain_logprobs(model, records), strict=True):
        mask = record.completion.loss_mask
        p, sampling = logprobs[mask], record.completion.logprobs[mask]
        old = p.detach() if record.old is None else record.old[mask]
        correction = settings.correction
        weights = torch.ones_like(p) if correction is None else plain_weights(correction, p.detach(), sampling).float()
        rows.append(Row(p, None, old, record.reference[mask], weights, record.advantages[0].item()))
    return rows


def plain_grpo_loss(settings, model, records):
    return plain_grpo(settings, plain_rows(settings, model, records), masked=True)


def plain_rloo_loss(settings, model, records):
    return plain_rloo(settings, plain_rows(settings, model, records), weighed=True)


def micro_batches(algorithm, records, budget):
    counts = StepCounts(len(records), sum(num_loss_tokens(record) for record in records))
    batches = pack(
        records,
        range(len(records)),
        budget,
        lambda num_tokens: algorithm.reduction(num_tokens, counts),
        unit=algorithm.unit,
    )
    return list(with_step_shares(batches, counts, num_ranks=1))


def streamed_loss(algorithm, model, records, budget):
    budget = TokenBudget(budget) if isinstance(budget, int) else budget
    batches = micro_batches(algorithm, records, budget)
    core = LogprobSettings(TEMPERATURE, 5, torch.device("cpu"))
    loss, _ = run_step(model, batches, algorithm, core, LocalStrategy(), algorithm.coefficients())
    return loss, len(batches)


def assert_same_gradients(model, naive, streamed, loss_close=4e-6, gradients_close=2e-5):
    """Loss, a sum of terms of about one, and every parameter's gradient, relative to its largest number."""
    plain = naive(model)
    plain.backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    loss = streamed(model)
    torch.testing.assert_close(loss, plain.detach(), rtol=0.0, atol=loss_close, check_dtype=False)
    assert_each_close_to_largest({name: p.grad for name, p in model.named_parameters()}, expected, gradients_close)

"""A step in every layout, however it is cut, has the loss and gradients of the plain padded way; so have scores."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import pytest
import torch
from step_cases import (
    BASE,
    TEMPERATURE,
    assert_same_gradients,
    grouped_records,
    micro_batches,
    name_of,
    plain_grpo_loss,
    plain_logprobs,
    plain_rloo_loss,
    ready,
    streamed_loss,
)
from transformers import AutoModelForCausalLM, GPTNeoXConfig

from all_pairs import all_pairs
from forest_cases import shared_of, tokens_before
from lowpeak.algorithms.grpo import make_grpo
from lowpeak.algorithms.rloo import make_rloo
from lowpeak.algorithms.supervised import make_supervised
from lowpeak.arguments.grpo import EntropyBonus, GRPOLossType
from lowpeak.arguments.rloo import RLOOSettings
from lowpeak.batching.packing import TokenBudget, pack
from lowpeak.batching.prefix_tree import LayerCosts
from lowpeak.records import Branch, Completion, Record
from lowpeak.training.step import LogprobSettings, score
from step_settings import OF_LOSS_TYPE
from tiny_models import tiny_model

SHARED, ROWS = TokenBudget(1000, layout="shared"), TokenBudget(1000, layout="rows")
SOME = TokenBudget(1000, layout="shared", costs=LayerCosts(token=1.0, pair=0.0, merge=0.0, tree=4.0))
# The group of prompt 7 does not fit 28, nor a row of 15 tokens 12.
FORESTS = [SHARED, replace(SHARED, max_tokens=28), replace(SHARED, max_tokens=12, multiple=4)]
FORESTS += [ROWS, replace(ROWS, max_tokens=28, multiple=8), SOME]
CUT = [*FORESTS, TokenBudget(12), TokenBudget(30), TokenBudget(1000)]
# The step's weights and its sum are fp32 whatever the model is; gradients are as exact as their weights are the same.
CORE = LogprobSettings(TEMPERATURE, 5, torch.device("cpu"))
FLOAT64 = {"loss_close": 1e-6, "gradients_close": 1e-9}
# In float64, where the weights are products of a sequence's ratios, rounded to fp32.
RATIO_TOLERANCE = {"loss_close": 4e-7, "gradients_close": 4e-7}


BY_NAME = {name_of(budget): budget for budget in CUT}
# Every pair of two settings' values once.
GRPO_CASES = all_pairs(
    {
        "loss_type": list(get_args(GRPOLossType)),
        "level": ["token", "sequence"],
        "beta": ["0", "0.04"],
        "budget": list(BY_NAME),
        "tied": ["tied", "untied"],
        "checkpointing": ["", "checkpointing"],
    }
)


def double_model(seed=0, layers=2, tied=False):
    """A model that is float64 throughout, where Qwen's norms are fp32 whatever it is cast to."""
    torch.manual_seed(seed)
    config = GPTNeoXConfig(
        vocab_size=13, hidden_size=32, num_hidden_layers=layers, num_attention_heads=4, intermediate_size=64,
        initializer_range=0.2, max_position_embeddings=64, bos_token_id=None, eos_token_id=1,
        tie_word_embeddings=tied,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config).double().eval()


@pytest.mark.parametrize("case", GRPO_CASES, ids=lambda case: "-".join(case.values()))
def test_a_grpo_step_equals_the_plain_padded_way(case):
    """In fp32, but VESPO in float64: a sequence's ratio multiplies its terms and their rounding."""
    tied, in_float64 = case["tied"] == "tied", case["loss_type"] == "vespo"
    model = ready(double_model(tied=tied) if in_float64 else tiny_model(tied=tied))
    records = grouped_records(model)
    of_type = OF_LOSS_TYPE.get(case["loss_type"], {})
    settings = replace(BASE, loss_type=case["loss_type"], importance_level=case["level"], **of_type)
    settings = replace(settings, beta=float(case["beta"]))
    if case["checkpointing"]:
        model.train()
        model.gradient_checkpointing_enable({"use_reentrant": False})
    assert_same_gradients(
        model,
        lambda m: plain_grpo_loss(settings, m, records),
        lambda m: streamed_loss(make_grpo(settings), m, records, BY_NAME[case["budget"]])[0],
        **(RATIO_TOLERANCE if in_float64 else {}),
    )


def padded(algorithm, records):
    """The step in padded rows, as something to call backward on; its gradients are formed already."""
    return lambda model: streamed_loss(algorithm, model, records, 1000)[0].requires_grad_()


@pytest.mark.parametrize(
    ("settings", "seed"),
    [
        (replace(BASE, loss_type="dapo", beta=0.04), 0),
        (replace(BASE, loss_type="dapo", beta=0.04, importance_level="sequence"), 1),
        (replace(BASE, entropy_bonus=EntropyBonus(0.05)), 2),
    ],
    ids=["token", "sequence", "entropy bonus"],
)
def test_in_float64_a_forests_gradients_are_those_of_padded_rows_to_nine_digits(settings, seed):
    model = ready(double_model(seed, layers=1 + seed))
    records, algorithm = grouped_records(model, seed), make_grpo(settings)
    for budget in FORESTS:
        model.zero_grad(set_to_none=True)
        assert_same_gradients(
            model,
            padded(algorithm, records),
            lambda m, budget=budget: streamed_loss(algorithm, m, records, budget)[0],
            **FLOAT64,
        )


@pytest.mark.parametrize("budget", CUT, ids=name_of)
def test_an_rloo_step_equals_the_plain_padded_way(budget):
    """In float64: a sequence's ratio multiplies its gradients, so that fp32's rounding alone comes to more than 1e-6."""
    model = ready(double_model())
    records = grouped_records(model)
    settings = RLOOSettings(0.2, 0.28, 0.0, "k1", False, None, False, True)
    assert_same_gradients(
        model,
        lambda m: plain_rloo_loss(settings, m, records),
        lambda m: streamed_loss(make_rloo(settings), m, records, budget)[0],
        **RATIO_TOLERANCE,
    )


@pytest.mark.parametrize("budget", CUT, ids=name_of)
def test_scores_are_those_of_the_plain_way_and_a_supervised_step_is_their_mean(budget):
    model = ready(tiny_model())
    records = grouped_records(model)
    masks = [record.completion.loss_mask for record in records]
    expected = [logprobs[mask] for logprobs, mask in zip(plain_logprobs(model, records), masks, strict=True)]
    batches, seen = pack(records, range(len(records)), budget), []
    for batch, scored in zip(batches, score(model, batches, CORE, entropy=True), strict=True):
        for row, index in enumerate(batch.record_indices):
            mine = scored["logprobs"][batch.tokens.sequences_T == row]
            torch.testing.assert_close(mine, expected[index].detach(), rtol=0.0, atol=1e-5)
            seen.append(index)
    assert sorted(seen) == list(range(len(records)))
    scaled = [replace(record, advantages=None) for record in records]
    assert_same_gradients(
        model,
        lambda _: -torch.cat(expected).mean(),
        lambda m: streamed_loss(make_supervised(), m, scaled, budget)[0],
    )


def test_these_budgets_share_cut_and_decline_to_share():
    model = tiny_model()
    records = [record for record in grouped_records(model) if not record.completion.branches]
    forests = [[batch.forest for batch in micro_batches(make_grpo(BASE), records, budget)] for budget in FORESTS]
    prompts = [sorted(length for forest in each for length in shared_of(forest)) for each in forests]
    assert prompts[0] == [3, 7]
    assert prompts[1] == [3, 7, 7]
    assert prompts[2] == [3]
    assert prompts[3] == prompts[4] == []
    assert prompts[5] == [3, 7]
    num_trees = [sum(node.parent < 0 for forest in each for node in forest.nodes) for each in forests]
    assert num_trees[2] > num_trees[0]
    cut, whole = (len(micro_batches(make_grpo(BASE), records, TokenBudget(size))) for size in (12, 1000))
    assert cut > whole == 1


def transcript(prompt, tools, generator):
    """A conversation that is compacted twice and asks two subagents with tools of their own: sampled tokens, then context."""

    def draw(size):
        return torch.randint(2, 13, (size,), generator=generator)

    first, turn = len(prompt), [(30, True), (12, False), (20, True)]
    parts = [(first - 1, turn), (31, [(15, False), *turn]), (31, [(15, False), *turn])]
    ids, mask, branches = [], [], []
    for after, pieces in parts:
        if ids:
            branches.append(Branch(sum(map(len, ids)), after))
        for size, is_sampled in pieces:
            ids.append(draw(size))
            mask += [is_sampled] * size
    start = len(mask)
    branches += [Branch(start, -1), Branch(start + 40 + 28, first + start + 39)]
    for piece, is_sampled in ((tools, False), (draw(8), False), (draw(20), True), (draw(8), False), (draw(20), True)):
        ids.append(piece)
        mask += [is_sampled] * len(piece)
    completion = Completion(
        torch.cat(ids).int(), torch.zeros(len(mask)), torch.tensor(mask), "stop", branches=tuple(branches)
    )
    return Record(0, tuple(prompt.tolist()), completion, (0.0,), 0.0)


def test_scores_of_conversations_with_branches_are_the_plain_ways_and_few_more_tokens_than_are_distinct_are_forwarded():
    generator = torch.Generator().manual_seed(0)
    tools, distinct, records = torch.randint(2, 13, (40,), generator=generator), 0, []
    for _ in range(2):
        prompt = torch.randint(2, 13, (48,), generator=generator)
        group = [transcript(prompt, tools, generator) for _ in range(4)]
        seen = set()  # the beginnings of sequences up to what predicts a loss token
        for record in group:
            ids = [*record.prompt_ids, *record.completion.ids.tolist()]
            for offset in record.completion.loss_mask.nonzero().flatten().tolist():
                before = [ids[i] for i in tokens_before(record, len(prompt) + offset)]
                seen |= {tuple(before[:length]) for length in range(1, len(before) + 1)}
        distinct, records = distinct + len(seen), records + group
    model, sizes = ready(tiny_model(context=256)), []
    model.register_forward_pre_hook(lambda _, args, kwargs: sizes.append(kwargs["input_ids"].numel()), with_kwargs=True)
    with torch.no_grad():
        plain = zip(plain_logprobs(model, records), records, strict=True)
        expected, forwarded = [logprobs[record.completion.loss_mask] for logprobs, record in plain], {}
    for layout in ("shared", "rows", "padded"):
        batches = pack(records, range(len(records)), TokenBudget(2048, 8, layout=layout))
        sizes.clear()
        scored = score(model, batches, CORE)
        forwarded[layout] = sum(sizes)
        wanted = torch.cat([expected[i] for batch in batches for i in batch.record_indices])
        torch.testing.assert_close(torch.cat([each["logprobs"] for each in scored]), wanted, rtol=0.0, atol=1e-5)
    assert distinct <= forwarded["shared"] <= 1.05 * distinct
    assert forwarded["shared"] < forwarded["rows"] < forwarded["padded"]

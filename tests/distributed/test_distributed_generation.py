"""A sharded model generates the same tokens at every budget, and gives back all that it changed, also when it fails."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from setups import Failing, build, error_of, forget, note, prepare, rank, seen
from transformers import TrainerCallback

from case_selection import mark_extended, selected_cases
from child_processes import succeed_on_ranks
from lowpeak.arguments.sampling import Sampling
from lowpeak.parallel.partial_gather import Gatherer, find_sharded_parameters
from lowpeak.records import Prompt
from lowpeak.rollout.native.engine import NativeEngine
from tiny_models import char_tokenizer, footprint, tiny_model
from turn_programs import Programs

SHARDED = mark_extended(["fsdp2", "zero3"], ["fsdp2"])
# Ranks have different numbers and lengths of prompts; in the second round the second rank has none at all.
TEXTS = {"uneven": (["12=", "3=", "405=", "1=", "22="], ["77="]), "empty": (["12=", "3="], [])}


def prompts_of(texts: list[str]) -> list[Prompt]:
    """Prompts whose serial numbers differ between ranks."""
    tokenizer = char_tokenizer()
    return [Prompt(i + 10 * rank(), tuple(tokenizer(text)["input_ids"]), text) for i, text in enumerate(texts)]


def generate(trainer: Any, hold: Any, texts: list[str]) -> list[list[int]]:
    """Token ids of two completions a prompt."""
    engine = NativeEngine(hold, trainer.processing_class, lambda: 1 << 22)
    engine.load((), 1)
    groups = engine.generate(prompts_of(texts), Sampling(2, 9 - 4 * rank()))
    return [completion.ids.tolist() for group in groups for completion in group.completions]


def without_room_at(number: int, on_rank: int, error: Exception) -> Any:
    """`torch.empty` that has no room in this call, on one rank."""
    calls = 0

    def allocate(*args: Any, **kwargs: Any) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls == number and on_rank == rank():
            raise error
        return torch.empty(*args, **kwargs)

    return allocate


class Trying(TrainerCallback):
    """Between the first step and the second, what a run must survive."""

    def __init__(self, trainer: Any, found: dict[str, Any], name: str, place: Path) -> None:
        self._trainer, self._found, self._name, self._place = trainer, found, name, place

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 1:
            self._found[self._name] = try_budgets(self._trainer)
            if self._name == "tied":
                self._found.update(try_failures(self._trainer), turns=try_turns(self._trainer, self._place))


def train_all(place: Path, strategy: str) -> None:
    found: dict[str, Any] = {}
    for name, options in {"tied": {}, "untied": {"tied": False}, "odd": {"vocab_size": 15}}.items():
        model = tiny_model(**{"vocab_size": 14, "layers": 4, **options})
        trainer = build("GRPO", place / name, {**prepare(strategy), "max_steps": 2}, model=model)
        trainer.add_callback(Trying(trainer, found, name, place))
        trainer.train()
        found[name]["loss"] = [row["loss"] for row in trainer.state.log_history if "loss" in row]
        forget()
    note(place, **found)


def try_budgets(trainer: Any) -> dict[str, Any]:
    """The tokens at each budget, and whether everything was as before."""
    strategy, model = trainer.run.strategy, trainer.accelerator.unwrap_model(trainer.model_wrapped)
    parts = find_sharded_parameters(model, strategy._shard)
    layer = max((sum(p.shard.nbytes for p in places) for _, places in parts.layers), default=0)
    found: dict[str, Any] = {"layers": len(parts.layers)}
    for budget in (None, 0, 3 * layer + (1 << 13)):
        for kind, texts in TEXTS.items():
            before = footprint(model)
            hold = lambda budget=budget: strategy.gather_for_inference(trainer.model_wrapped, budget)  # noqa: E731
            tokens = generate(trainer, hold, texts[rank()])
            found[f"{kind}/{'all' if budget is None else (budget and 'some') or 'none'}"] = tokens
            assert footprint(model) == before, "something was not given back"
    with strategy.gather_for_inference(trainer.model_wrapped, 0) as held:  # as a user's own rollout may do
        ids = torch.tensor([[4 + rank(), 5]])
        found["generate"] = held.generate(
            ids, max_new_tokens=3 + 2 * rank(), do_sample=False, eos_token_id=None
        ).tolist()
    return found


def try_turns(trainer: Any, place: Path) -> list[tuple[tuple[int, int], list[int]]]:
    """The turns of this rank's conversations; those of the second rank wait until the first rank's have ended."""
    ended = place / "ended"
    engine = NativeEngine(
        lambda: trainer.run.strategy.gather_for_inference(trainer.model_wrapped, 0),
        trainer.processing_class,
        lambda: 1 << 22,
    )
    engine.load((), 1)
    programs = Programs(
        prompts_of(TEXTS["uneven"][rank()]),
        Sampling(2, 40 - 9 * rank(), seed=2, stop_token_ids=(3, 4)),
        is_ready=ended.exists if rank() else lambda: True,
        on_end=ended.touch if rank() == 0 else lambda: None,
    )
    log = programs.run(engine)
    assert programs.failures == []
    return [(request.conversation, turn.ids) for request, turn in log]


def try_failures(trainer: Any) -> dict[str, Any]:
    """A rank that raises, and one that has no room: what each rank is told, and that training goes on."""
    strategy, model = trainer.run.strategy, trainer.accelerator.unwrap_model(trainer.model_wrapped)
    errors = {}
    for part in ("", "model.layers.1.mlp", "model.norm", "model.rotary_emb"):
        before = footprint(model)
        hold = Failing(lambda: strategy.gather_for_inference(trainer.model_wrapped, 0), part, ValueError("out of luck"))
        errors[part] = error_of(lambda hold=hold: generate(trainer, hold, TEXTS["uneven"][rank()]))
        assert footprint(model) == before, "something was not given back"
    tokens = {}
    # One of a layer's tensors on a GPU, and the last of all, the embedding, on a CPU, whose allocator has its own words.
    for number, error in ((20, torch.OutOfMemoryError("no room")), (49, RuntimeError("can't allocate memory"))):
        gatherer = Gatherer(strategy.ranks, trainer.accelerator.device, without_room_at(number, 1, error))
        tokens[str(number)] = generate(
            trainer, lambda g=gatherer: g.gathered_model(model, strategy._shard, None), TEXTS["uneven"][rank()]
        )
        assert rank() == 0 or not strategy.shards_parameters or error.__traceback__, "nothing ran out of room"
    return {"errors": errors, "without_room": tokens}


@pytest.fixture(scope="module")
def runs(request, tmp_path_factory):
    out, strategies = tmp_path_factory.mktemp("generation"), ["ddp", *selected_cases(request, "strategy")]
    for strategy in strategies:
        succeed_on_ranks(train_all, out / strategy, strategy)
    return {(s, number): found for s in strategies for number, found in enumerate(seen(out / s))}


@pytest.mark.parametrize("strategy", SHARDED)
@pytest.mark.parametrize("model", ["tied", "untied", "odd"])
@pytest.mark.parametrize("kind", ["uneven", "empty"])
def test_tokens_are_the_same_at_every_budget_and_under_every_strategy(runs, strategy, model, kind):
    for number in (0, 1):
        expected = runs["ddp", number][model][f"{kind}/all"]
        assert len(expected) == {("uneven", 0): 10, ("uneven", 1): 2, ("empty", 0): 4, ("empty", 1): 0}[kind, number]
        found = runs[strategy, number][model]
        assert {found[f"{kind}/{budget}"] == expected for budget in ("all", "some", "none")} == {True}


@pytest.mark.parametrize("strategy", SHARDED)
def test_transformers_own_generate_runs_on_a_sharded_model(runs, strategy):
    for number in (0, 1):
        assert runs[strategy, number]["tied"]["generate"] == runs["ddp", number]["tied"]["generate"]


@pytest.mark.parametrize("strategy", SHARDED)
def test_a_rank_whose_conversations_wait_takes_part_and_the_others_do_not_wait(runs, strategy):
    for number in (0, 1):
        turns = runs[strategy, number]["turns"]
        assert len(turns) > len({tuple(conversation) for conversation, _ in turns})
        assert turns == runs["ddp", number]["turns"]


@pytest.mark.parametrize("part", ["", "model.layers.1.mlp", "model.norm", "model.rotary_emb"])
@pytest.mark.parametrize("strategy", SHARDED)
def test_a_rank_that_raises_while_it_generates_ends_it_on_all_and_training_goes_on(runs, strategy, part):
    assert runs[strategy, 1]["errors"][part] == "ValueError: out of luck"
    assert runs[strategy, 0]["errors"][part].startswith("EngineError: rank 1 failed")
    assert runs[strategy, 0]["tied"]["loss"] == pytest.approx(runs["ddp", 0]["tied"]["loss"], abs=1e-5)


@pytest.mark.parametrize("allocation", ["20", "49"])
@pytest.mark.parametrize("strategy", SHARDED)
def test_where_one_rank_has_no_room_for_all_layers_all_keep_fewer_and_the_tokens_are_the_same(
    runs, strategy, allocation
):
    for number in (0, 1):
        assert runs[strategy, number]["without_room"][allocation] == runs[strategy, number]["tied"]["uneven/all"]

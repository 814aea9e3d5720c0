"""bf16 weights with low bits and 8-bit states on ranks: replicas agree, resumed runs go on to the same bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from setups import SAVED, assert_same_bits, build, forget, keep, later_steps, prepare, result_of, tensor_parallel
from torch.nn.parallel import DistributedDataParallel

from case_selection import is_selected, mark_extended, selected_cases
from child_processes import succeed_on_ranks
from lowpeak.optim.compact_adamw import MOMENTS, find_compact
from lowpeak.parallel.checkpoint_state import trained_parameters
from lowpeak.training.checkpoints import load_extra_weights
from tiny_models import char_tokenizer, tiny_model

FORMATS = {
    "32": {"weight_bits": 32},
    "24": {"weight_bits": 24, "state_bits": 32},
    "16": {"weight_bits": 16},
    "fp32 sums": {"weight_bits": 32, "gradient_bits": 32},
    "shards": {"weight_bits": 16, "shard_optimizer_states": True},
    "shards, fp32 sums": {"weight_bits": 24, "state_bits": 32, "gradient_bits": 32, "shard_optimizer_states": True},
}
CASES = [("ddp", bits) for bits in FORMATS]
CASES += [("fsdp2", "24"), ("fsdp2", "fp32 sums"), ("tensor", "32"), ("tensor", "16")]
CORE = [("ddp", "16"), ("ddp", "shards"), ("fsdp2", "24"), ("tensor", "32")]
BITS_OF_REPLICAS = mark_extended([bits for bits in FORMATS if "shards" not in bits], ["16"], "release")


def run(strategy: str, bits: str, folder: Path, resume: Path | None = None, **changes: Any) -> Any:
    """A GRPO run of a model whose matrices are large enough for 8-bit states; tensor parallelism loads it from a folder."""
    is_cut = folder.parent.name.startswith("tensor")
    placed = {**tensor_parallel(2, 1), "per_device_train_batch_size": 8} if strategy == "tensor" else prepare(strategy)
    arguments = {**placed, **SAVED, **(FORMATS[bits] if bits else {}), **changes}
    model: Any = str(folder.parent.parent / "model") if is_cut else tiny_model(len(char_tokenizer()), hidden=64)
    trainer = build("GRPO", folder, arguments, model=model)
    trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
    return trainer


def real_weights(trainer: Any) -> dict[str, torch.Tensor]:
    """The fp32 values that this rank updates."""
    optimizer = find_compact(trainer.optimizer)
    parameters = trained_parameters(trainer.accelerator.unwrap_model(trainer.model))
    return {name: optimizer.tensor(p).read("weight") for name, p in parameters.items()}


def held_states(trainer: Any) -> int:
    """The values of one moment that this rank has."""
    return sum(state["exp_avg"].numel() for state in find_compact(trainer.optimizer).state.values())


@contextmanager
def built_ddps() -> Iterator[list[Any]]:
    """Record the DDP wrappers that are built inside."""
    built: list[Any] = []
    build_ddp = DistributedDataParallel.__init__

    def record(self: Any, *arguments: Any, **options: Any) -> None:
        built.append(self)
        build_ddp(self, *arguments, **options)

    DistributedDataParallel.__init__ = record
    try:
        yield built
    finally:
        DistributedDataParallel.__init__ = build_ddp


def states(trainer: Any) -> set[torch.dtype]:
    return {state[key].dtype for state in find_compact(trainer.optimizer).state.values() for key in MOMENTS}


def train(strategy: str, bits: str, out: Path) -> None:
    with built_ddps() as built:
        whole = run(strategy, bits, out / "run")
    ranks = whole.run.strategy.ranks
    everybodys, held = ranks.gather(real_weights(whole)), ranks.gather(held_states(whole))
    found = {"real": everybodys, "states": states(whole), "held": held, "ddps": len(built)}
    keep(whole, {**result_of(whole), **found}, out / "whole.pt")
    forget()
    again = run(strategy, bits, out / "again", out / "run" / "checkpoint-3")
    keep(again, {**result_of(again), "real": ranks.gather(real_weights(again))}, out / "again.pt")
    forget()


def go_on_alone(strategy: str, bits: str, out: Path) -> None:
    """The run from its middle on one process, in its format and in fp32; and the weights of its last checkpoint."""
    for name, format_ in (("same", bits), ("fp32", "")):
        trainer = run("single", format_, out / name, out / "run" / "checkpoint-3", per_device_train_batch_size=8)
        ranks, loaded = trainer.run.strategy.ranks, trained_parameters(trainer.model)
        keep(trainer, result_of(trainer), out / f"{name}.pt")
        if name == "fp32":
            load_extra_weights(out / "run" / "checkpoint-5", "shards", loaded, ranks)
            keep(trainer, {key: values.detach() for key, values in loaded.items()}, out / "loaded.pt")
        forget()


def train_replicas_of_shards(place: Path, out: Path) -> None:
    for bits in ("24", "fp32 sums"):
        folder = out / f"hsdp-{bits}"
        folder.mkdir(exist_ok=True)
        train("hsdp", bits, folder)


def each_case(place: Path, out: Path, phase: Callable[[str, str, Path], None], cases: list[tuple[str, str]]) -> None:
    for strategy, bits in cases:
        folder = out / f"{strategy}-{bits}"
        folder.mkdir(exist_ok=True)
        phase(strategy, bits, folder)


@pytest.fixture(scope="module")
def runs(request, tmp_path_factory):
    out, cases = tmp_path_factory.mktemp("storage"), selected_cases(request, "strategy", "bits") or CASES
    tiny_model(16, hidden=64).save_pretrained(out / "model")
    char_tokenizer("0123456789=+-*").save_pretrained(out / "model")
    succeed_on_ranks(each_case, out / "two", out, train, cases)
    succeed_on_ranks(each_case, out / "one", out, go_on_alone, cases, world_size=1)
    if is_selected(request, "test_replicas_of_shards_have_the_same_bits_and_resume_to_them"):
        succeed_on_ranks(train_replicas_of_shards, out / "four", out, world_size=4)
    return lambda strategy, bits, name: torch.load(out / f"{strategy}-{bits}" / f"{name}.pt")


@pytest.mark.parametrize(("strategy", "bits"), mark_extended(CASES, CORE, "release"))
def test_the_model_is_bf16_and_states_have_the_bytes_asked_for(runs, strategy, bits):
    whole = runs(strategy, bits, "whole")
    assert {values.dtype for values in whole["weights"].values()} == {torch.bfloat16}
    small_or_full = {torch.float32}
    is_full = FORMATS[bits].get("state_bits") == 32
    assert whole["states"] == (small_or_full if is_full else {torch.int8, torch.uint8, torch.float32})
    assert whole["ddps"] == 0 or strategy != "ddp"  # replicas average their gradients without DDP
    assert whole["parameter"] == ("Parameter" if strategy == "ddp" else "DTensor")


@pytest.mark.parametrize("bits", BITS_OF_REPLICAS)
def test_replicas_have_the_same_bits_also_where_rounding_is_random(runs, bits):
    first, second = runs("ddp", bits, "whole")["real"]
    assert_same_bits(first, second)


@pytest.mark.release
@pytest.mark.parametrize("bits", ["24", "fp32 sums"])
def test_replicas_of_shards_have_the_same_bits_and_resume_to_them(runs, bits):
    whole, again = (runs("hsdp", bits, name)["real"] for name in ("whole", "again"))
    for one, other in ((0, 2), (1, 3)):
        assert_same_bits(whole[one], whole[other])
    for ours, theirs in zip(again, whole, strict=True):
        assert_same_bits(ours, theirs)
    found = runs("hsdp", bits, "whole")
    assert sum(found["held"]) == 2 * sum(weights.numel() for weights in found["weights"].values())


@pytest.mark.parametrize("bits", mark_extended(["shards", "shards, fp32 sums"], ["shards"], "release"))
def test_replicas_have_the_states_of_their_rows_alone(runs, bits):
    whole = runs("ddp", bits, "whole")
    size = sum(weights.numel() for weights in whole["weights"].values())
    assert sum(whole["held"]) == size
    assert max(whole["held"]) < 0.6 * size


def test_sharded_states_train_the_bits_of_unsharded_ones(runs):
    unsharded, sharded = (runs("ddp", bits, "whole") for bits in ("16", "shards"))
    assert_same_bits(sharded["weights"], unsharded["weights"])


@pytest.mark.parametrize(("strategy", "bits"), mark_extended(CASES, CORE, "release"))
def test_a_resumed_run_has_the_bits_of_the_run_that_was_not_cut(runs, strategy, bits):
    whole, again = runs(strategy, bits, "whole"), runs(strategy, bits, "again")
    for ours, theirs in zip(again["real"], whole["real"], strict=True):
        assert_same_bits(ours, theirs)
    assert later_steps(again) == later_steps(whole)


@pytest.mark.parametrize(
    ("strategy", "bits"),
    mark_extended([case for case in CASES if case[0] != "tensor"], [c for c in CORE if c[0] != "tensor"], "release"),
)
def test_a_checkpoint_has_the_fp32_weights(runs, strategy, bits):
    ranks = runs(strategy, bits, "whole")["real"]
    real = (
        ranks[0]
        if strategy == "ddp" and "shards" not in bits
        else {name: torch.cat([rank[name] for rank in ranks]) for name in ranks[0]}
    )
    loaded = runs(strategy, bits, "loaded")
    assert_same_bits({name: values.flatten() for name, values in loaded.items()}, real)
    has_low_bits = any(not torch.equal(values, values.bfloat16().float()) for values in loaded.values())
    assert has_low_bits == (FORMATS[bits]["weight_bits"] != 16)


@pytest.mark.parametrize(("strategy", "bits"), mark_extended(CASES, CORE, "release"))
@pytest.mark.parametrize("name", ["same", "fp32"])
def test_a_run_goes_on_with_one_process_and_in_fp32(runs, strategy, bits, name):
    whole, other = runs(strategy, bits, "whole"), runs(strategy, bits, name)
    # The first step after the checkpoint has the same weights; fp32 computes without the rounding of bf16.
    assert other["steps"][4] == pytest.approx(whole["steps"][4], rel=0.1, abs=0.02)
    for key, values in whole["weights"].items():
        torch.testing.assert_close(other["weights"][key].float(), values.float(), atol=0.02, rtol=0.02)

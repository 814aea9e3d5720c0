"""Engines that are lost, and engines over several ranks, among ranks: nobody hangs, nothing is generated twice."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import PartialState
from setups import build, error_of, forget, named_models, note, prepare, rank, seen, weights, weights_of

from child_processes import succeed_on_ranks
from fake_server import ScriptedServer, serving
from fake_vllm import SAMPLING, answer_of, engine_over, prompts, scripted
from lowpeak.errors import CheckpointError
from lowpeak.ranks import Ranks
from lowpeak.rollout.turns import Key
from lowpeak.vllm.engine import EngineSharing, VllmEngine
from lowpeak.vllm.requests import sequence_requests
from lowpeak.vllm.server import ServerVllm
from overlap_runs import LORA, Delayed, Sampler, connect, run_ahead, talk
from scripted_turns import Score, Talk
from small_runs import StopAfter, digits, journal
from turn_programs import converse, ids_of


def run_with(
    place: Path, name: str, judged: list[Any], dies_after: int | None, strategy: str = "ddp"
) -> tuple[Any, Any]:
    """A trainer whose engine is over a vLLM that dies after so many answers; a sharded one has a reward model, sharded too."""

    def reward(completion_ids: Any, **columns: Any) -> list[float]:
        judged.extend(tuple(ids) for ids in completion_ids)
        return [float(sum(ids) % 5) for ids in completion_ids]

    reward.__name__ = "reward"
    policy, judge = (None, None) if strategy == "ddp" else named_models(place / "named")
    rewards = [reward] if judge is None else [judge, reward]
    trainer = build(
        "GRPO", place / name, {**prepare(strategy), "max_completion_length": 3}, model=policy, rewards=rewards
    )
    vllm = scripted(answer_of)
    trainer.collector.engine = engine_over(vllm, sharing=EngineSharing(Ranks().subgroup(1)))
    trainer.collector.engine.close()
    vllm.dies_after = dies_after
    return trainer, vllm


def lose_one(place: Path) -> None:
    """Rank 1's vLLM dies in the second of three rollouts."""
    found: dict[str, Any] = {}
    for name, dies_after in (("calm", None), ("shaken", 6 if rank() == 1 else None)):
        judged: list[Any] = []
        trainer, vllm = run_with(place, name, judged, dies_after, "fsdp2")
        trainer.train()
        wave_sizes, loads = [len(wave) for wave in vllm.waves], vllm.events.count("pause")
        found[name] = {"judged": judged, "weights": weights(trainer), "loads": loads, "asked": wave_sizes}
    note(place, **found)


def generate_ahead(place: Path) -> None:
    """Two ranks generate each group in parts, two rollouts ahead, stop after two steps and go on; or one process does."""
    runs = {"whole": (4, None), "stopped": (2, None), "resumed": (4, True)}
    found: dict[str, Any] = {}
    for name, (max_steps, resume) in runs.items():
        settings = {
            "max_completion_length": 3, "num_generations": 4, "max_steps": 4, "max_staleness": 2, "save_strategy": "steps",
            "save_steps": 1, "use_vllm": True, "vllm_mode": "server", "vllm_server_base_url": ["http://a:1", "http://a:2"],
            "per_device_train_batch_size": 4 // int(os.environ["WORLD_SIZE"]),
        }  # fmt: skip
        stop = [StopAfter(max_steps)] if max_steps < 4 else []
        folder = place / name.replace("resumed", "stopped")
        trainer = build("GRPO", folder, {**prepare("ddp"), **settings}, rewards=[digits], callbacks=stop)
        for collector in trainer.pipeline.collectors:
            vllm = Sampler(delays=rank()).vllm
            sharing = EngineSharing(Ranks().subgroup(1))
            collector.engine = replace(collector.engine, connect=lambda vllm=vllm: (vllm,), sharing=sharing)
        trainer.train(resume_from_checkpoint=resume)
        found[name] = [weights(trainer), [row["policy_version"] for row in journal(folder, "rollouts")]]
    note(place, **found)


def talk_ahead(place: Path) -> None:
    """As `generate_ahead`, with conversations; then a conversation of the last rank fails in a way that ends the run."""
    runs = {"whole": (4, None), "stopped": (2, None), "resumed": (4, True), "failed": (4, None)}
    found: dict[str, Any] = {}
    for name, (max_steps, resume) in runs.items():
        size, stop = 8 // int(os.environ["WORLD_SIZE"]), [StopAfter(max_steps)] if max_steps < 4 else []
        settings = {
            **prepare("ddp"), **talk(rank()), "max_steps": 4, "save_strategy": "steps", "save_steps": 1, "callbacks": stop,
            "per_device_train_batch_size": size,
        }  # fmt: skip
        folder, of = place / name.replace("resumed", "stopped"), [Sampler(delays=rank(), model=settings["model"])]
        trainer = run_ahead(folder, of, 1, **settings)
        connect(trainer, of, sharing=EngineSharing(Ranks().subgroup(1)))
        if name == "failed":
            if rank() == int(os.environ["WORLD_SIZE"]) - 1:
                trainer.collector.engine.results.write = fail_to_write
            found[name] = error_of(trainer.train)
        else:
            trainer.train(resume_from_checkpoint=resume)
            found[name] = [weights(trainer), [row["completion"] for row in journal(folder, "rollouts")]]
        assert not Delayed.open
    note(place, **found)


def fail_to_write(row: Any) -> None:
    raise CheckpointError("no space left")


def share_adapters(place: Path) -> None:
    """All ranks generate two rollouts ahead on one server, which rank 0 gives the adapter alone."""
    found: dict[str, Any] = {}
    for strategy in ("ddp", "fsdp2", "zero3") if os.environ["WORLD_SIZE"] == "2" else ("ddp",):
        settings = {
            "max_completion_length": 3, "num_generations": 4, "max_steps": 4, "max_staleness": 2, "use_vllm": True,
            "vllm_mode": "server", "vllm_server_base_url": "http://a:1", **prepare(strategy),
            "per_device_train_batch_size": 4 // int(os.environ["WORLD_SIZE"]),
        }  # fmt: skip
        trainer = build("GRPO", place / strategy, settings, rewards=[digits], peft_config=LORA)
        ranks = Ranks()
        sampler = Sampler(max_loras=3)
        with serving(ScriptedServer(sampler.vllm)) as server:
            url = ranks.gather(server.url)[0]
            vllm: Any = sampler.vllm if rank() == 0 else ServerVllm(url)
            trainer.collector.engine = replace(trainer.collector.engine, connect=lambda vllm=vllm: (vllm,))
            trainer.train()
            ranks.gather(None)  # the server answers all ranks
        adapter = weights_of(trainer, "adapter")
        pushed = [row["push/bytes"] for row in journal(place / strategy) if "push/bytes" in row]
        versions = [row["policy_version"] for row in journal(place / strategy, "rollouts")]
        found[strategy] = [weights(trainer), versions, pushed[1:], sum(4 * p.numel() for p in adapter.values())]
        forget()
    note(place, **found)


def lose_for_good(place: Path) -> None:
    """Rank 1's vLLM dies at every answer."""
    trainer, vllm = run_with(place, "run", [], None)

    def doomed(request: Any) -> Any:
        vllm.dies_after = 0
        return answer_of(request)

    if rank() == 1:
        vllm._script = doomed
    note(place, error=error_of(trainer.train))


def stop_while_one_waits(place: Path) -> None:
    """Rank 1's vLLM dies in the second of three rollouts and is waited for where no server is; rank 1 alone is asked to stop."""
    trainer, vllm = run_with(place, "run", [], 6 if rank() == 1 else None)
    interrupts, info, began = trainer.run.interrupts, vllm.info, []

    def wait(wait_seconds: float | None = None) -> Any:
        if vllm.incarnation:
            began.append(time.monotonic())
            threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM)).start()
            ServerVllm("http://127.0.0.1:9", None, lambda: interrupts.stopping).wait(40.0)
        return info()

    vllm.info = wait
    text = error_of(trainer.train)
    note(place, error=text, seconds=time.monotonic() - began[0] if began else None)


def uneven(conversation: Key, turn: int) -> float:
    return 0.01 * ((sum(conversation) + turn) % 3)


def share_prompts(place: Path) -> None:
    """A team of two asks the same requests in the same order, and each keeps the answers to its own prompts."""
    PartialState(cpu=True)
    engine_ranks = Ranks().subgroup(2)
    vllm = scripted(answer_of)
    engine: VllmEngine = engine_over(vllm, sharing=EngineSharing(engine_ranks), batch_size=4)
    own = prompts(2 - rank(), first=10 * rank())  # one rank has two prompts, the other one
    groups = engine.generate(own, replace(SAMPLING, num_generations=2))
    none = engine.generate(own if rank() == 0 else [], SAMPLING)
    turns = scripted(answer_of, limits_to_cache=True)
    engine = engine_over(turns, sharing=EngineSharing(engine_ranks), batch_size=2)
    talks = [converse(engine, batch, SAMPLING, delay=uneven) for batch in (own, own if rank() == 0 else [])]
    # One rank's environment does not open: its error reaches the other, which does not wait for its requests.
    factory = {"a": Score} if rank() else {"b": Score}
    talk = Talk([["x"]], environment=factory, max_tokens=8)
    talk.engine.engine = engine_over(scripted(answer_of, limits_to_cache=True), sharing=EngineSharing(engine_ranks))
    opened = error_of(lambda: Ranks().call_on_all(lambda: len(talk.run(environment="a").completions)))
    alone = Ranks().subgroup(1)
    note(
        place,
        asked=[[request.prompt_ids for request in wave] for wave in vllm.waves],
        serials=[group.prompt.serial for group in groups],
        answers=[[one.ids.tolist() for one in group.completions] for group in groups],
        none=len(none),
        started=[[request.prompt_ids, request.params["seed"]] for request in turns.started],
        talks=[ids_of(each) for each in talks],
        alone=[alone.rank, alone.world_size, alone.gather(rank()), alone.sum([1.0])],
        opened=opened,
        team=[engine_ranks.rank, engine_ranks.world_size, engine_ranks.gather(rank())],
    )
    torch.distributed.barrier()


def test_an_engine_that_one_rank_loses_is_loaded_again_by_all_and_nothing_is_judged_twice(tmp_path):
    """Also where the others would ask a sharded reward model meanwhile, which takes all ranks."""
    named_models(tmp_path / "named")
    succeed_on_ranks(lose_one, tmp_path)
    ranks = seen(tmp_path)
    for found in ranks:
        assert found["shaken"]["judged"] == found["calm"]["judged"]
        assert found["shaken"]["weights"] == found["calm"]["weights"]
        assert found["shaken"]["loads"] == found["calm"]["loads"] + 1
    assert ranks[0]["shaken"]["asked"] == [4, 4, 4]  # what it had answered, it kept
    assert ranks[1]["shaken"]["asked"] == [4, 4, 2, 4]


def test_an_engine_that_never_comes_back_ends_all_ranks_with_one_sentence(tmp_path):
    succeed_on_ranks(lose_for_good, tmp_path)
    other, own = (found["error"] for found in seen(tmp_path))
    assert own.startswith("LostEngineError: ")
    assert "scripted vLLM" in own
    assert other.startswith("LostEngineError: on rank 1")
    assert other.endswith(own.removeprefix("LostEngineError: "))


@pytest.mark.extended
def test_ranks_of_which_one_waits_for_a_server_and_is_asked_to_stop_save_the_same_step(tmp_path):
    succeed_on_ranks(stop_while_one_waits, tmp_path)
    calm, waiting = seen(tmp_path)
    assert waiting["seconds"] < 10  # the wait was of 40
    saved = tmp_path / "run/checkpoint-1"
    for found in (calm, waiting):
        assert found["error"].startswith("KeyboardInterrupt: ")
        assert str(saved) in found["error"]
    assert (saved / "trainer_state.json").exists()


def test_a_team_asks_the_same_in_the_same_order_and_each_keeps_its_own(tmp_path):
    succeed_on_ranks(share_prompts, tmp_path)
    first, second = seen(tmp_path)
    assert first["asked"] == second["asked"]
    assert [len(wave) for wave in first["asked"]] == [2, 4, 4, 4]
    assert (first["serials"], second["serials"]) == ([0, 1], [10])
    for found, own in ((first, prompts(2)), (second, prompts(1, first=10))):
        rows = sequence_requests(own, SAMPLING, (1,))
        expected = [list(answer_of(row.request)) for row in rows if row.number < 2]
        assert [ids for group in found["answers"] for ids in group] == expected
    assert (first["none"], second["none"]) == (2, 0)
    assert first["started"] == second["started"]
    assert len(first["started"]) == 3 * (12 + 8)  # turns of both ranks' conversations, then of one's
    for found, own in ((first, prompts(2)), (second, prompts(1, first=10))):
        expected = ids_of(converse(engine_over(scripted(limits_to_cache=True)), own, SAMPLING))
        lists = json.loads(json.dumps(expected))
        assert found["talks"] == [lists, lists if found is first else []]
    assert first["opened"].startswith("DataError: a row has environment='a'")
    assert second["opened"].startswith("DataError: on rank 0")
    assert first["team"] == [0, 2, [0, 1]]
    assert second["team"] == [1, 2, [0, 1]]
    assert (first["alone"], second["alone"]) == ([0, 1, [0], [1.0]], [0, 1, [1], [1.0]])


def alone_and_on_two_ranks(function, folder):
    """What one process saw of a function, and what each of two ranks did."""
    for world_size in (1, 2):
        place = folder / str(world_size)
        place.mkdir()
        succeed_on_ranks(function, place, world_size=world_size)
    (alone,) = seen(folder / "1", 1)
    return alone, seen(folder / "2")


@pytest.mark.extended
def test_ranks_talk_ahead_resume_and_fail_together(tmp_path):
    alone, ours = alone_and_on_two_ranks(talk_ahead, tmp_path)
    for each in ours:
        assert each["whole"] == each["resumed"]
        assert each["whole"][1] == alone["whole"][1]
        assert each["whole"][0] == pytest.approx(alone["whole"][0], abs=1e-5)
    assert ours[1]["failed"] == alone["failed"] == "CheckpointError: no space left"
    assert ours[0]["failed"].startswith("CheckpointError: on rank 1")


@pytest.mark.extended
def test_ranks_that_share_a_group_generate_ahead_and_resume(tmp_path):
    alone, both = alone_and_on_two_ranks(generate_ahead, tmp_path)
    for ours in both:
        assert ours["whole"] == ours["resumed"]
        assert ours["whole"][1] == alone["whole"][1] == [0] * 4 + [0] * 4 + [0] * 4 + [1] * 4
        assert ours["whole"][0] == pytest.approx(alone["whole"][0], abs=1e-5)


@pytest.mark.extended
def test_ranks_push_an_adapter_alone_to_the_server_that_they_share(tmp_path):
    alone, both = alone_and_on_two_ranks(share_adapters, tmp_path)
    for ours in both:
        assert ours.keys() == {"ddp", "fsdp2", "zero3"}
        for found, versions, pushed, num_bytes in ours.values():
            assert found == pytest.approx(alone["ddp"][0], abs=1e-5)
            assert versions == alone["ddp"][1] == [0] * 4 + [0] * 4 + [0] * 4 + [1] * 4
            assert pushed == alone["ddp"][2] == [num_bytes] * 3

"""The benchmarks' smallest cases and their arithmetic: they run, and compare what they say they do."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from benchmarks import critic_layouts, learning_curve, logprob_core, online_dpo, plot_curve, same_steps, step_table
from benchmarks import weight_stream as stream
from benchmarks.harness import critics, pairing, shapes
from benchmarks.harness.canned import can_peer, our_rollouts
from benchmarks.harness.counting import Counting, length_scores
from benchmarks.harness.flops import forward_flops, gflops_per_second
from benchmarks.harness.head import WAYS, HeadRequest, make_case, measure
from benchmarks.harness.process import SideError, last_object, peaks_by_phase, run_apart
from benchmarks.harness.report import require, versions
from benchmarks.harness.task import noisy_sort, trainer_settings
from safetensors.torch import save_file

import lowpeak

pytestmark = pytest.mark.extended


@pytest.mark.parametrize("name", ["GRPO, LoRA", "PPO, head", "PPO, adapter, LoRA", "PPO, model"])  # of seven
def test_a_critics_layout_is_the_trainer_that_it_says(tmp_path, name):
    shapes.make_model(64, 1).save_pretrained(tmp_path / "start")
    shapes.make_tokenizer().save_pretrained(tmp_path / "start")
    inputs = critic_layouts.request_of(critic_layouts.parse(["--quick"]), name, 0, tmp_path / "start", tmp_path)
    trainer = critics.make_trainer(critics.CriticRequest(**inputs))
    critic, lora = critic_layouts.LAYOUTS[name]
    trained = [n for n, p in trainer.model.named_parameters() if p.requires_grad]
    assert any("critic" in n.split(".") for n in trained) == (critic is not None)
    assert any("lora_A.default" in n for n in trained) == lora
    assert any("lora_A.critic" in n for n in trained) == (critic == "adapter")
    assert critic_layouts.base_of(name) == ("GRPO, LoRA" if lora else "GRPO")


@pytest.mark.parametrize("way", ["one visit", "recompute", "no-grad"])
def test_what_the_core_is_timed_for_has_the_loss_and_the_gradients_of_naive(way):
    case = HeadRequest(way, num_tokens=19, dtype="float32", chunk_size=8)
    found, naive = (measure(make_case(case, vocabulary=67, width=8), WAYS[name]) for name in (way, "naive"))
    assert found["loss"] == pytest.approx(naive["loss"], rel=1e-5)
    norms = [None, None] if way == "no-grad" else naive["grad_norms"]
    assert found["grad_norms"] == [norm and pytest.approx(norm, rel=1e-5) for norm in norms]
    row = {**naive, "forward_s": 2.0, "backward_s": 4.0, "start_rss_mb": 9.0, "peak_rss_mb": 17.0}
    rows = {name: logprob_core.summary(row) for name in ("naive", "products", way)}
    assert logprob_core.ratios(rows)[way] == {"peak_of_naive": 1.0, "cpu_of_naive": 1.0, "cpu_of_products": 1.0}


@pytest.mark.parametrize("given", [None, [5, 1, 9, 3]])
def test_a_model_counts_down_from_drawn_and_from_given_lengths(given):
    counting, model = Counting(length_scores(64, 9)), shapes.make_model(64, 1, 64).eval()
    counting.lengths = given and torch.tensor(given)
    model.register_forward_hook(counting, with_kwargs=True)
    prompts = torch.tensor([[7, 8, 63]] * 4)
    mask = torch.ones_like(prompts)
    rows = model.generate(prompts, attention_mask=mask, max_new_tokens=9, do_sample=True, top_k=0)[:, 3:].tolist()
    lengths = [row.index(1) + 1 for row in rows]
    assert [row[:length] for row, length in zip(rows, lengths, strict=True)] == [*map(shapes.countdown, lengths)]
    assert given in (None, lengths)


def test_both_sides_get_the_same_canned_completions():
    prompts = [prompt for prompt in noisy_sort.draw_prompts(4, seed=0) for _ in range(8)]
    peer = SimpleNamespace(processing_class=noisy_sort.make_tokenizer())
    can_peer(peer, "rloo")
    ours = our_rollouts(prompts, peer)
    assert ours["completion_ids"] == peer._generate_single_turn(ours["prompt_ids"])
    owner = SimpleNamespace(processing_class=shapes.make_tokenizer())
    pairs = pairing.our_countdowns(["w400 <start>"] * 4, owner, [2, 1, 3, 1])["completion_ids"]
    plan = online_dpo.parse(["--prompts", "2", "--at_once", "2"])
    inputs = pairing.PairRequest(**online_dpo.request_of(plan, "trl", [[2, 1, 3, 1]], Path("a"), Path("b")))
    _, _, rows, mask, _ = pairing.canned_batch(owner, ["w400 <start>"] * 2, next(pairing.portions(inputs)))
    theirs = [row[: int(count)] for row, count in zip(rows.tolist(), mask.sum(1), strict=True)]
    assert [theirs[0], theirs[2], theirs[1], theirs[3]] == pairs
    assert pairing.settings_of(inputs)["max_new_tokens"] == shapes.LONGEST


def test_curves_agree_within_two_deviations_of_the_peers_seeds(tmp_path):
    def runs(*sampled):
        return [{"accuracy": {"60": {"sampled": each}}} for each in sampled]

    def within(ours, peer):
        return learning_curve.compare({"lowpeak": runs(*ours), "trl": runs(*peer)}, 60)["within"]

    assert within([0.65, 0.7], [0.4, 0.5, 0.6]) is True
    assert within([0.71, 0.75], [0.4, 0.5, 0.6]) is False
    assert within([0.5], [0.4]) is None
    assert plot_curve.band(runs(0.2, 0.4)) == [(60, pytest.approx(0.3), pytest.approx(2 * 0.02**0.5))]
    for name, last in (("a", 1.0), ("b", -0.5)):
        (tmp_path / name).mkdir()
        save_file(
            {"first": torch.zeros(2), "second": torch.tensor([0.25, last])}, tmp_path / name / "model.safetensors"
        )
    assert same_steps.furthest(tmp_path / "a", tmp_path / "b") == 1.5


def test_operations_peaks_and_medians_are_counted_by_hand():
    # One group of two: 4 + 5 tokens through the body, 5 through the head; pairs 4 * 4 / 2 + (2*4 + 2) + (3*4 + 4.5).
    model, operations = {"body": 10, "head": 100, "layers": 2, "hidden": 4}, 2 * 10 * 9 + 2 * 100 * 5 + 32 * 34.5
    assert forward_flops(model, [2, 3], 4, 2) == operations
    assert gflops_per_second(model, [[2, 3]], 4, 2, {"train": operations / 1e9}) == {"train": 3.0}
    events, samples = [(1.0, "train"), (2.0, "rest")], [(0.5, 9 << 20), (1.5, 3 << 20), (2.0, 7 << 20)]
    assert peaks_by_phase(events, samples) == {"train": 3.0, "rest": 7.0}
    steps = [{"total": 10.0, "train": 6.0, "rollout": 1.0}, {"total": 4.0, "train": 2.0}, {"total": 5.0, "train": 3.0}]
    medians = {"rollout": 0.0, "score": 0.0, "train": 3.0, "rest": 2.0, "total": 5.0}
    assert step_table.median_seconds(steps) == medians
    ways = {name: {"seconds": 2.0, "extra_mib": 9.0} for name in ("slices_8MiB", "gather_all", "gather_each")}
    slow = {**ways, "slices_8MiB": {"seconds": 3.0, "extra_mib": 11.0}}
    assert stream.slowest([{"model_mib": 4.0, "ways": each} for each in (ways, slow)])["slices_8MiB"]["seconds"] == 3.0
    assert stream.aims(slow) == {"memory": False, "time": False}


def test_a_side_or_a_peer_that_is_not_there_is_told():
    with pytest.raises(SideError, match=r"benchmarks\.nothing .* 1;"):
        run_apart("benchmarks.nothing", {})
    with pytest.raises(SideError, match="side"):
        last_object("3\n", "side")
    with pytest.raises(SystemExit) as stopped:
        require("no_such_peer", "install it")
    assert stopped.value.code == 2
    assert versions()["torch"] == torch.__version__


@pytest.mark.parametrize("name", ["GRPO", "RLOO"])
def test_our_trainer_takes_the_settings_that_the_peer_takes(name, tmp_path):
    settings = trainer_settings(name.lower(), seed=0, steps=20, output_dir=tmp_path)
    args = getattr(lowpeak, f"{name}Config")(**json.loads(json.dumps(settings)))
    different = {key for key, value in settings.items() if getattr(args, key) != value}
    assert different <= {"report_to", "gradient_checkpointing"}  # transformers spells these in its own way

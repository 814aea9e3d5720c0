"""Break the source in 63 ways, one at a time, and name the test that notices: `python tests/faults/injected.py [part of a name]`.

Run it in a clean checkout, before and after tests are rewritten: a fault that the tests of `make test` miss is a hole. It takes
about 40 minutes on one core. Each test file runs in a process forked from this one, which has imported all libraries but lowpeak.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import sys
import tempfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LIBRARIES = (
    "accelerate",
    "datasets",
    "peft",
    "torch",
    "transformers.models.qwen2.modeling_qwen2",
    "transformers.trainer",
)
IN_MAKE_TEST = ("-m", "not extended and not release")
ALGORITHMS, BATCHING, ROLLOUT = (
    "tests/unit/algorithms",
    "tests/unit/batching",
    "tests/unit/rollout tests/unit/vllm_engine",
)
CORE = "tests/unit/logprobs tests/parity"
REWARDS, DATA, TRAINING = "tests/unit/rewards", "tests/unit/data", "tests/unit/training"
CHECKPOINTS = (
    "tests/unit/checkpoint tests/faults/test_faults_damage.py tests/distributed/test_distributed_checkpoints.py"
)
SHARDS = "tests/unit/parallel tests/distributed/test_distributed_generation.py tests/distributed/test_distributed_checkpoints.py"
ARGUMENTS = (
    "tests/unit/arguments tests/unit/training/test_training_arguments.py tests/unit/training/test_training_bad_input.py"
)
SIZES, RECOVERY = "tests/unit/training/test_training_run_sizes.py", "tests/unit/training/test_training_recovery.py"
RECOVERED_RUNS = "tests/distributed/test_distributed_memory.py"
FORMATS = "tests/unit/test_compact_adamw.py tests/unit/test_compact_adamw_extremes.py tests/unit/training/test_training_formats.py"

# What is wrong, the text that is replaced wherever it stands, by what, and the tests in the order of their speed.
FAULTS = [
    (
        "surrogate takes the maximum",
        "-torch.minimum(bounded * advantages, clipped * advantages)",
        "-torch.maximum(bounded * advantages, clipped * advantages)",
        ALGORITHMS,
    ),
    (
        "the lower clip is the upper one",
        "ratio.clamp(1.0 - clip_low, 1.0 + clip_high)",
        "ratio.clamp(1.0 - clip_high, 1.0 + clip_high)",
        ALGORITHMS,
    ),
    (
        "CISPO's weight keeps a gradient",
        "-ratio.detach().clamp(max=1.0 + clip_high)",
        "-ratio.clamp(max=1.0 + clip_high)",
        ALGORITHMS,
    ),
    ("k3 with a wrong sign", "torch.expm1(-log_ratio) + log_ratio", "torch.expm1(-log_ratio) - log_ratio", ALGORITHMS),
    ("GAE forgets gamma in its recursion", "+ gamma * gae_lambda * running_N", "+ gae_lambda * running_N", ALGORITHMS),
    (
        "dr_grpo divides by the sequence's length",
        "1.0 / (max_length * counts.",
        "1.0 / (length * counts.",
        ALGORITHMS,
    ),
    (
        "leave-one-out without n / (n - 1)",
        "num_rewarded / (num_rewarded - 1) if",
        "num_rewarded / num_rewarded if",
        ALGORITHMS,
    ),
    (
        "the bias-corrected KL lacks its ratio",
        "kl_T * ratio_T if settings.bias_corrected_kl",
        "kl_T if settings.bias_corrected_kl",
        ALGORITHMS,
    ),
    (
        "PPO penalises completions that ended",
        'settings.missing_eos_penalty if record.completion.finish_reason != "stop"',
        'settings.missing_eos_penalty if record.completion.finish_reason == "stop"',
        ALGORITHMS,
    ),
    (
        "the clipped value loss takes the minimum",
        "torch.maximum(loss_T, (_clipped(",
        "torch.minimum(loss_T, (_clipped(",
        ALGORITHMS,
    ),
    (
        "the adaptive KL is steered the wrong way",
        'metrics["objective/kl"] / adaptive.target - 1.0',
        '1.0 - metrics["objective/kl"] / adaptive.target',
        ALGORITHMS,
    ),
    ("DPO's logit without beta", "-logsigmoid(beta * logit_U)", "-logsigmoid(logit_U)", ALGORITHMS),
    (
        "a masked correction weighs 1",
        "weight > correction.maximum, 0.0, weight",
        "weight > correction.maximum, 1.0, weight",
        ALGORITHMS,
    ),
    (
        "old log-probs are not used",
        "logprobs_T.detach() if tokens.old_T is None else tokens.old_T",
        "logprobs_T.detach()",
        ALGORITHMS,
    ),
    ("ranks are balanced by count, not tokens", "(load + costs[index], part)", "(load + 1, part)", BATCHING),
    (
        "a filling micro-batch weighs 1",
        "TokenBatch(one, 1, zero, zero,",
        "TokenBatch(one, 1, zero + 1, zero,",
        BATCHING,
    ),
    (
        "a step counts a row too many",
        "StepCounts(len(rows), sum(",
        "StepCounts(len(rows) + 1, sum(",
        f"{BATCHING} {TRAINING}",
    ),
    ("soft-cap's slope with a wrong sign", "slope_RV.square_().neg_().add_(1.0)", "slope_RV.square_().add_(1.0)", CORE),
    (
        "the entropy's sum is off by a thousandth",
        "shifted_RV.mul_(exp_RV).sum(-1)",
        "shifted_RV.mul_(exp_RV).sum(-1) * 1.001",
        CORE,
    ),
    (
        "a completion's draws depend on its wave",
        "self._sampling.first_completion + completion for",
        "completion for",
        ROLLOUT,
    ),
    (
        "the repetition penalty favours seen tokens",
        "torch.where(seen_NL < 0, seen_NL * penalty",
        "torch.where(seen_NL > 0, seen_NL * penalty",
        ROLLOUT,
    ),
    (
        "top-p keeps what it should drop",
        "(whole_N1 * sampling.top_p).long()",
        "(whole_N1 * (1 + sampling.top_p) / 2).long()",
        "tests/unit/rollout/test_rollout_sampling.py",
    ),
    (
        "cut completions are said to have stopped",
        '"stop" if ended else "length"',
        '"length" if ended else "stop"',
        ROLLOUT,
    ),
    (
        "slots forget the completion's tokens",
        "self.max_tokens // (longest + self._max_new_tokens)",
        "self.max_tokens // longest",
        ROLLOUT,
    ),
    (
        "the checksum forgets a row's sum",
        "self._rows[first // ROW_BYTES] += words.sum()",
        "self._rows[first // ROW_BYTES] += 0",
        ROLLOUT,
    ),
    (
        "a tensor that did not arrive whole passes",
        "if lost and not shared:",
        "if False and lost and not shared:",
        ROLLOUT,
    ),
    (
        "one wave too many",
        "num_waves = -(-len(ordered) // capacity)",
        "num_waves = len(ordered) // capacity + 1",
        ROLLOUT,
    ),
    (
        "any token opens the server",
        "len(credentials) == 1 and hmac.compare_digest(credentials[0], self._expected)",
        "len(credentials) == 1",
        ROLLOUT,
    ),
    ("a minus after a currency sign is lost", 'number["minus"] or number["minus_2"]', 'number["minus"]', REWARDS),
    (
        "the overlong punishment is too small",
        "(self.max_length - self.cache - length) / self.cache",
        "(self.max_length - self.cache - length) / self.max_length",
        REWARDS,
    ),
    (
        "failed rewards raise where they should not",
        'if self.settings.on_failure == "raise":',
        'if self.settings.on_failure != "raise":',
        REWARDS,
    ),
    (
        "a resumed cursor miscounts its epoch",
        'self._epoch_serial = state["epoch_serial"]',
        "self._epoch_serial = self._serial",
        DATA,
    ),
    ("dropped prompts are not counted", "self.num_dropped += 1", "self.num_dropped += 0", DATA),
    (
        "the journal loses the step it resumes at",
        'row["step"] <= step',
        'row["step"] < step',
        "tests/unit/test_journal.py tests/unit/checkpoint",
    ),
    (
        "changed bytes of a checkpoint pass",
        "if _digest(file) != digest:",
        "if False and _digest(file) != digest:",
        CHECKPOINTS,
    ),
    ("every rollout is shuffled alike", "(seed * 1_000_003 + rollout.number)", "(seed * 1_000_003)", TRAINING),
    (
        "gradients are not scaled by the ranks",
        "strategy.backward(loss * strategy.ranks.world_size, last)",
        "strategy.backward(loss, last)",
        "tests/distributed/test_distributed_numbers.py",
    ),
    (
        "a broadcast range begins one value late",
        "self.local[first - owner * self.chunk : last - owner * self.chunk]",
        "self.local[first - owner * self.chunk + (owner > 0) : last - owner * self.chunk + (owner > 0)]",
        SHARDS,
    ),
    (
        "ZeRO's fp32 weights are not loaded into the model",
        "local[: master.count].copy_(master.fragment(master.flat).values)",
        "local[: master.count]",
        CHECKPOINTS,
    ),
    (
        "top_p=0 is taken",
        'lambda x: 0 < x <= 1, "must be in (0, 1]"',
        'lambda x: 0 <= x <= 1, "must be in (0, 1]"',
        ARGUMENTS,
    ),
    (
        "token values are of the next token",
        "index: (stop - count, stop) for",
        "index: (stop - count + 1, stop + 1) for",
        "tests/unit/training/test_training_token_values.py",
    ),
    (
        "only one rank's token values are kept",
        "tokens |= rank_tokens",
        "tokens = tokens or rank_tokens",
        "tests/distributed/test_distributed_metrics.py",
    ),
    (
        "a report embeds markup",
        '":")).replace("<",',
        '":")).replace(">",',
        "tests/unit/report",
    ),
    ("a rollout may split a group", "rows % args.num_generations == 0", "True", ARGUMENTS),
    (
        "a budget forgets what the plan does not count",
        "budget, unplanned_bytes, budget - unplanned_bytes",
        "budget, unplanned_bytes, budget",
        "tests/unit/plan/test_budget.py::test_bytes_beside_tensors_count",
    ),
    (
        "ZeRO-2 is planned with whole gradients",
        "*(Over.NONE, Over.COPY, Over.COPY, Over.NONE),",
        "*(Over.NONE, Over.NONE, Over.COPY, Over.NONE),",
        "tests/unit/plan/test_plan.py::test_a_strategy_spreads_weights_gradients_and_states_over_its_devices",
    ),
    (
        "a sleeping engine is planned awake",
        "VLLM_ASLEEP_BYTES if where.sleeps else awake",
        "awake",
        "tests/unit/plan/test_plan.py::test_a_colocated_vllm_takes_its_share_while_it_generates",
    ),
    (
        "a frozen model is rehearsed whole on each rank",
        "return model if self._mesh is None else shard_layers(model, self._mesh, False)",
        "return model",
        "tests/memory/test_memory_rehearsal.py::test_a_frozen_reference_is_sharded_as_the_policy_is",
    ),
    (
        "automatic micro-batches forget the inputs of layers",
        "shape.layers * layer_input + per_layer if checkpointing",
        "per_layer if checkpointing",
        SIZES,
    ),
    (
        "half of the budget is taken for half of what failed",
        "_half(min(sizes.micro_batch_tokens, demand.batch_tokens))",
        "_half(sizes.micro_batch_tokens)",
        RECOVERY,
    ),
    (
        "gradients of a failed pass stay",
        "discard_gradients(context.model_wrapped.parameters())",
        "context.model_wrapped.parameters()",
        RECOVERED_RUNS,
    ),
    (
        "each rank lowers sizes by its own demand",
        "ranks.max([float(number) for number in vars(demand).values()])",
        "vars(demand).values()",
        RECOVERED_RUNS,
    ),
    ("a failed rank does not stand aside", "run_pass(self._masked)", "run_pass(batch)", RECOVERED_RUNS),
    ("a resumed run has its first sizes again", 'frozenset(saved.get("lowered", ()))', "frozenset()", RECOVERY),
    (
        "recorded sizes act in each later run",
        "(output_dir / SIZES_FILE).unlink(missing_ok=True)",
        "(output_dir / SIZES_FILE).exists()",
        RECOVERY,
    ),
    (
        "rounding draws the same noise in each step",
        "f\"{self.seed}/{state['step']}/{shard.name}\"",
        'f"{self.seed}/{shard.name}"',
        FORMATS,
    ),
    ("a second moment's code may be zero", ".round_().maximum(smallest)", ".round_()", FORMATS),
    (
        "loaded states are those of a first step",
        'state["step"] = int(saved["step"])',
        'state["step"] = 0',
        FORMATS,
    ),
    (
        "scales take no bytes",
        "(2 + 8 / 128 if",
        "(2 if",
        "tests/unit/training/test_training_storage.py::test_dtype_bfloat16_asks_for_them_and_the_log_names_the_format",
    ),
    (
        "a sum of gradients begins with what was there",
        "self._buffer.zero_()",
        "self._buffer.data",
        "tests/unit/test_gradient_sums.py",
    ),
    (
        "a journal's last line is taken without its end",
        'json.loads(line) if line.endswith(b"\\n") else None',
        "json.loads(line)",
        "tests/unit/test_journal.py",
    ),
    (
        "an interrupted write loses the earlier checkpoint",
        "if replaced.exists() and not final.exists():",
        "if replaced.exists() and final.exists():",
        "tests/unit/checkpoint/test_checkpoint_folders.py",
    ),
    (
        "a resumed rollout serves all of its steps again",
        'packed["number"], packed["steps_used"]',
        'packed["number"], 0',
        "tests/unit/checkpoint/test_checkpoint_run_state.py",
    ),
]


def run_tests(part: str, log: str) -> None:
    """Run pytest in this forked process, with its output in a file."""
    output = os.open(log, os.O_WRONLY | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os._exit(pytest.main(["-x", "-p", "no:cacheprovider", *IN_MAKE_TEST, part]))


def failed_test(part: str) -> str | None:
    """Return the first test of a file or folder that fails; None if all pass."""
    with tempfile.NamedTemporaryFile("r") as log:
        process = multiprocessing.get_context("fork").Process(target=run_tests, args=(part, log.name))
        process.start()
        process.join(1800)
        if process.is_alive():
            process.kill()
            print(f"{part} does not end", flush=True)
            return None
        lines = [line.strip() for line in log if line.startswith(("FAILED", "ERROR"))]
        assert lines or process.exitcode in (0, 5), f"{part} ended with {process.exitcode} and without a failed test"
        return lines[0] if lines else None


def caught_by(old: str, new: str, tests: str) -> str | None:
    """The first test that fails with the fault in, None if all pass."""
    texts = {file: text for file in ROOT.glob("src/lowpeak/**/*.py") if old in (text := file.read_text())}
    assert texts, f"the source no longer has {old!r}: say the fault in its present words"
    try:
        for file, text in texts.items():
            file.write_text(text.replace(old, new))
        return next((found for part in tests.split() if (found := failed_test(part))), None)
    finally:
        for file, text in texts.items():
            file.write_text(text)


def main() -> None:
    os.chdir(ROOT)
    sys.path.insert(0, str(ROOT / "src"))
    sys.dont_write_bytecode = True
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"  # two edits in one second have the same time
    for library in LIBRARIES:
        importlib.import_module(library)
    missed = []
    for name, old, new, tests in FAULTS:
        if all(part in name for part in sys.argv[1:]):
            found = caught_by(old, new, tests)
            missed += [] if found else [name]
            print(f"{name}: {found or 'MISSED'}", flush=True)
    sys.exit(f"not caught: {', '.join(missed)}" if missed else 0)


if __name__ == "__main__":
    main()

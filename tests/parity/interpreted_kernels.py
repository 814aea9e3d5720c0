"""The Triton kernels against the torch kernels, on a CPU: run with TRITON_INTERPRET=1; prints one line a case."""

from __future__ import annotations

import itertools
import os

import torch

from all_pairs import all_pairs
from extreme_steps import GRADIENTS, read, steps
from lowpeak.logprobs import torch_kernels, triton_kernels
from lowpeak.logprobs.reference import ChunkSettings, HeadScale, naive_divergence, naive_logprobs
from lowpeak.logprobs.torch_kernels import LossDerivatives, PairStatistics, TeacherLogits
from lowpeak.optim import triton_step
from lowpeak.optim.compact_adamw import kernel_difference

SHAPES = {"below": (3, 37), "at": (2, 4096), "beyond": (2, 4133)}
SCALES = {"plain": HeadScale(), "scaled": HeadScale(0.3), "capped": HeadScale(0.8, 2.5)}


def difference(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    assert ours.shape == theirs.shape
    return float((ours.double() - theirs.double()).abs().max() / theirs.double().abs().max().clamp(min=1e-30))


def case(num_rows: int, num_ids: int, scale: HeadScale, biased: bool, entropy: bool, narrow: bool) -> float:
    """The largest relative difference between kernels, torch kernels and, in fp64, the naive gradients."""
    torch.manual_seed(num_rows + num_ids)
    settings = ChunkSettings(num_rows, 0.7, scale, entropy=entropy, entropy_grad=entropy)
    logits = torch.randn(num_rows, num_ids) * 4
    bias = torch.randn(num_ids) if biased else None
    targets = torch.randint(num_ids, (num_rows,))
    greatest = (logits if bias is None else logits + bias).argmax(-1)
    targets[0] = greatest[0]
    by_logprobs, by_entropy = torch.randn(num_rows), torch.randn(num_rows) if entropy else None
    found = []
    for kernels in (triton_kernels, torch_kernels):
        raw = logits.clone()
        chosen = kernels.target_logits(raw, bias, targets, settings)
        statistics = kernels.softmax_statistics(raw, bias, settings)
        assert torch.equal(statistics.is_top1(chosen), targets == greatest)
        assert torch.equal(raw, logits), "the statistics are a read"
        derivatives = LossDerivatives(by_logprobs, by_entropy)
        half = torch.zeros(num_rows, num_ids, dtype=torch.bfloat16) if narrow else None
        kernels.logits_gradient_(raw, bias, settings, targets, statistics, derivatives, half)
        if half is not None:
            torch.testing.assert_close(half.float(), raw, rtol=2**-7, atol=1e-30)  # the interpreter may cut, not round
        parts = []
        for rows in (slice(0, num_ids // 3), slice(num_ids // 3, num_ids)):
            part, bias_part = logits[:, rows].contiguous(), None if bias is None else bias[rows]
            kernels.logits_gradient_(part, bias_part, settings, targets - rows.start, statistics, derivatives)
            parts.append(part)
        values = [statistics.logprobs(chosen), raw, torch.cat(parts, 1)]
        found.append(values + ([statistics.entropy()] if entropy else []))
    leaf = logits.double().requires_grad_()
    identity = torch.eye(num_ids, dtype=torch.float64)
    wide_bias = None if bias is None else bias.double()
    logprobs, entropies = naive_logprobs(leaf, identity, wide_bias, targets, 0.7, scale)
    loss = (logprobs * by_logprobs).sum()
    loss = loss if by_entropy is None else loss + (entropies * by_entropy).sum()
    (truth,) = torch.autograd.grad(loss, leaf)
    exact = [logprobs.detach(), truth, truth, entropies.detach()]
    ours, theirs = found
    pairs = [*zip(ours, theirs, strict=True), *zip(ours, exact, strict=False)]
    return max(difference(one, other) for one, other in pairs)


def pair_case(num_rows: int, num_ids: int, scales: tuple[HeadScale, HeadScale], biased: bool, beta: float) -> float:
    """The largest relative difference of divergences and gradients between both kernels and the definition in fp64."""
    torch.manual_seed(num_rows + num_ids)
    settings, of_teacher = (ChunkSettings(num_rows, 0.7, scale, beta=beta) for scale in scales)
    logits, teacher_logits = torch.randn(num_rows, num_ids + 3) * 4, torch.randn(num_rows, num_ids) * 4
    biases = [torch.randn(num_ids), torch.randn(num_ids)] if biased else [None, None]
    by_divergence, found = torch.randn(num_rows), []
    for kernels in (triton_kernels, torch_kernels):
        student = (logits.clone()[:, :num_ids], biases[0], settings)  # rows are strided, as those of fewer common ids
        teacher = TeacherLogits(teacher_logits.clone(), biases[1], of_teacher)
        log_sums = [kernels.softmax_statistics(*each).log_sum() for each in (student, teacher)]
        divergence, center = kernels.divergences(*student, teacher, *log_sums)
        pair = PairStatistics(*log_sums, center)
        extra = kernels.divergence_gradient_(*student, teacher, pair, by_divergence)
        raw, none = logits.clone(), torch.zeros(num_rows)
        wide_bias = None if biases[0] is None else torch.nn.functional.pad(biases[0], (0, 3))
        statistics = kernels.softmax_statistics(raw, wide_bias, settings)
        targets = torch.zeros(num_rows, dtype=torch.long)
        kernels.logits_gradient_(raw, wide_bias, settings, targets, statistics, LossDerivatives(none), None, extra)
        assert not raw[:, num_ids:].any(), "ids that are not compared get no gradient"
        found.append([divergence, raw[:, :num_ids]])
    leaf = logits[:, :num_ids].double().requires_grad_()
    final = [
        scale.apply(raw if bias is None else raw + bias.double()) / 0.7
        for raw, bias, scale in zip((leaf, teacher_logits.double()), biases, scales, strict=True)
    ]
    exact = naive_divergence(*final, beta)
    (truth,) = torch.autograd.grad((exact * by_divergence).sum(), leaf)
    ours, theirs = found
    pairs = [*zip(ours, theirs, strict=True), *zip(ours, [exact.detach(), truth], strict=True)]
    return max(difference(one, other) for one, other in pairs)


def near_difference(beta: float) -> float:
    """The relative error of the divergence of nearly equal logits."""
    torch.manual_seed(0)
    logits = torch.randn(4, 5000) * 2
    near, settings = logits + 1e-3 * torch.randn_like(logits), ChunkSettings(4, beta=beta)
    teacher = TeacherLogits(near.clone(), None, settings)
    log_sums = [triton_kernels.softmax_statistics(each, None, settings).log_sum() for each in (logits, near)]
    found, _ = triton_kernels.divergences(logits, None, settings, teacher, *log_sums)
    exact = naive_divergence(logits.double(), near.double(), beta)
    return float(((found.double() - exact) / exact).abs().max())


def extreme_differences() -> tuple[float, float]:
    """The largest differences of the optimizer's kernel from torch on extremes: of a weight, and of a moment beside the largest."""
    worst = {"weight": 0.0, "exp_avg": 0.0, "exp_avg_sq": 0.0}
    for (i, gradients), (j, weight_bits) in itertools.product(enumerate(GRADIENTS), enumerate((32, 24, 16))):
        state_bits = (8, 32)[(i + j) % 2]  # so that each pair of two of the three stands once
        ours, theirs = (read(*steps(gradients, weight_bits, state_bits, each)) for each in (triton_step.update, None))
        assert torch.equal(ours["exp_avg_sq"] > 0, theirs["exp_avg_sq"] > 0), "no divisor is rounded to zero"
        for key, exact in theirs.items():
            assert torch.equal(ours[key].isfinite(), exact.isfinite())
            sizes = exact.double().abs().clamp(min=1e-3 if key == "weight" else float(exact.abs().max()) + 1e-44)
            worst[key] = max(worst[key], float(((ours[key].double() - exact.double()).abs() / sizes).max()))
    for weight_bits in (32, 24, 16):
        assert read(*steps(float("nan"), weight_bits, 32, triton_step.update))["weight"][1].isnan().all()
    return worst.pop("weight"), max(worst.values())


def main() -> None:
    """Every pair of settings, at shapes below, at and beyond the kernels' block."""
    assert os.environ.get("TRITON_INTERPRET") == "1", "kernels run without a GPU only in Triton's interpreter"
    worst = 0.0
    for each in all_pairs({"shape": [*SHAPES], "scale": [*SCALES], "bias": ("yes", "no"), "entropy": ("yes", "no")}):
        biased, entropy = each["bias"] == "yes", each["entropy"] == "yes"
        worst = max(worst, case(*SHAPES[each["shape"]], SCALES[each["scale"]], biased, entropy, narrow=biased))
    print(f"worst {worst:.3e}")
    of_pairs, betas = 0.0, ("0", "0.1", "0.5", "0.9", "1")
    pairs = {"shape": [*SHAPES], "scale": [*SCALES], "teacher": [*SCALES], "bias": ("yes", "no"), "beta": betas}
    for each in all_pairs(pairs):
        scales = SCALES[each["scale"]], SCALES[each["teacher"]]
        case_inputs = (*SHAPES[each["shape"]], scales, each["bias"] == "yes", float(each["beta"]))
        of_pairs = max(of_pairs, pair_case(*case_inputs))
    print(f"pairs {of_pairs:.3e}")
    print(f"near {max(near_difference(beta) for beta in (0.1, 0.5, 0.9)):.3e}")
    of_weights, of_moments = extreme_differences()
    print(f"extremes {of_weights:.3e} {of_moments:.3e}")
    print(f"optimizer {kernel_difference(triton_step.update, torch.device('cpu')):.3e}")


if __name__ == "__main__":
    main()

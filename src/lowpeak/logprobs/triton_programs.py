"""Triton programs of the passes that `triton_kernels.py` launches, one per token."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _tanh(x: tl.tensor) -> tl.tensor:
    # Every version of Triton has exp. Its argument is at most 0, so it cannot overflow.
    small = tl.exp(-2.0 * tl.abs(x))
    size = (1.0 - small) / (1.0 + small)
    return tl.where(x < 0, -size, size)


@triton.jit
def _load(
    raw: tl.tensor,
    bias: tl.tensor,
    columns: tl.tensor,
    inside: tl.tensor,
    inner: tl.tensor,
    WITH_BIAS: tl.constexpr,
    WITH_CAP: tl.constexpr,
) -> tl.tensor:
    """Return inner * (x + bias), or its tanh; x and bias are 0 where `inside` is False."""
    x = tl.load(raw + columns, mask=inside, other=0.0)
    if WITH_BIAS:
        x += tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)
    x *= inner
    if WITH_CAP:
        x = _tanh(x)
    return x


@triton.jit
def chosen(
    raw: tl.tensor,
    bias: tl.tensor,
    targets: tl.tensor,
    chosen_out: tl.tensor,
    stride: tl.tensor,
    inner: tl.tensor,
    outer: tl.tensor,
    WITH_BIAS: tl.constexpr,
    WITH_CAP: tl.constexpr,
) -> None:
    """Write the target's final logit."""
    row = tl.program_id(0)
    target = tl.load(targets + row)
    raw += row.to(tl.int64) * stride
    tl.store(chosen_out + row, _load(raw, bias, target, target >= 0, inner, WITH_BIAS, WITH_CAP) * outer)


@triton.jit
def statistics(
    raw: tl.tensor,
    bias: tl.tensor,
    max_out: tl.tensor,
    sum_out: tl.tensor,
    dot_out: tl.tensor,
    stride: tl.tensor,
    num_ids: tl.tensor,
    inner: tl.tensor,
    outer: tl.tensor,
    WITH_BIAS: tl.constexpr,
    WITH_CAP: tl.constexpr,
    WITH_DOT: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Write the maximum of the final logits, and the sums relative to it."""
    row = tl.program_id(0)
    raw += row.to(tl.int64) * stride
    # Each lane has a running maximum, to which its sums are relative; lanes are combined once, at the end.
    top = tl.full((BLOCK,), -3.0e38, tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    dot = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, num_ids, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        inside = columns < num_ids
        z = _load(raw, bias, columns, inside, inner, WITH_BIAS, WITH_CAP) * outer
        z = tl.where(inside, z, float("-inf"))
        new_top = tl.maximum(top, z)
        moved = top - new_top
        kept = tl.exp(moved)
        here = tl.exp(z - new_top)
        if WITH_DOT:
            dot = kept * (dot + moved * total) + tl.where(inside, here * (z - new_top), 0.0)
        total = kept * total + here
        top = new_top
    greatest = tl.max(top, 0)
    moved = top - greatest
    kept = tl.exp(moved)
    tl.store(max_out + row, greatest)
    tl.store(sum_out + row, tl.sum(kept * total, 0))
    if WITH_DOT:
        tl.store(dot_out + row, tl.sum(kept * (dot + moved * total), 0))


@triton.jit
def gradient(
    raw: tl.tensor,
    bias: tl.tensor,
    narrow: tl.tensor,
    extra: tl.tensor,
    targets: tl.tensor,
    max_in: tl.tensor,
    a_in: tl.tensor,
    b_in: tl.tensor,
    k_in: tl.tensor,
    stride: tl.tensor,
    narrow_stride: tl.tensor,
    extra_stride: tl.tensor,
    num_ids: tl.tensor,
    num_extra: tl.tensor,
    inner: tl.tensor,
    outer: tl.tensor,
    WITH_BIAS: tl.constexpr,
    WITH_CAP: tl.constexpr,
    WITH_ENTROPY: tl.constexpr,
    WITH_NARROW: tl.constexpr,
    WITH_EXTRA: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Overwrite raw logits with the loss's gradient."""
    row = tl.program_id(0)
    raw += row.to(tl.int64) * stride
    narrow += row.to(tl.int64) * narrow_stride
    extra += row.to(tl.int64) * extra_stride
    target = tl.load(targets + row)
    greatest = tl.load(max_in + row)
    a = tl.load(a_in + row)
    b = tl.load(b_in + row)
    k = tl.load(k_in + row)
    for start in range(0, num_ids, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        inside = columns < num_ids
        level = _load(raw, bias, columns, inside, inner, WITH_BIAS, WITH_CAP)
        shifted = level * outer - greatest
        factor = b + k * shifted if WITH_ENTROPY else b
        grad = tl.exp(shifted) * factor + tl.where(columns == target, a, 0.0)
        if WITH_EXTRA:
            grad += tl.load(extra + columns, mask=columns < num_extra, other=0.0)
        if WITH_CAP:
            grad *= 1.0 - level * level
        tl.store(raw + columns, grad, mask=inside)
        if WITH_NARROW:
            tl.store(narrow + columns, grad.to(tl.bfloat16), mask=inside)


@triton.jit
def _log_mixture(d: tl.tensor, beta: tl.tensor) -> tl.tensor:
    """Return log1p(beta * expm1(d)), by series near 0, where exp and log of GPUs lose it."""
    series = d * (1.0 + d / 2 * (1.0 + d / 3 * (1.0 + d / 4 * (1.0 + d / 5 * (1.0 + d / 6 * (1.0 + d / 7))))))
    x = beta * tl.where(tl.abs(d) < 0.5, series, tl.exp(d) - 1.0)
    s = x / (2.0 + x)
    t = s * s
    near = 2.0 * s * (1.0 + t * (1.0 / 3 + t * (1.0 / 5 + t * (1.0 / 7 + t / 9))))
    return tl.where(tl.abs(x) < 0.25, near, tl.log(1.0 + x))


@triton.jit
def divergences(
    raw: tl.tensor,
    bias: tl.tensor,
    teacher: tl.tensor,
    teacher_bias: tl.tensor,
    log_sum_in: tl.tensor,
    teacher_log_sum_in: tl.tensor,
    divergence_out: tl.tensor,
    center_out: tl.tensor,
    stride: tl.tensor,
    teacher_stride: tl.tensor,
    num_ids: tl.tensor,
    beta: tl.tensor,
    inner: tl.tensor,
    outer: tl.tensor,
    teacher_inner: tl.tensor,
    teacher_outer: tl.tensor,
    WITH_BIAS: tl.constexpr,
    WITH_CAP: tl.constexpr,
    TEACHER_WITH_BIAS: tl.constexpr,
    TEACHER_WITH_CAP: tl.constexpr,
    IS_FORWARD: tl.constexpr,
    IS_MIXTURE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Write the divergence and the center of its gradient."""
    row = tl.program_id(0)
    raw += row.to(tl.int64) * stride
    teacher += row.to(tl.int64) * teacher_stride
    log_sum = tl.load(log_sum_in + row)
    teacher_log_sum = tl.load(teacher_log_sum_in + row)
    of_student = tl.zeros((BLOCK,), tl.float32)
    of_teacher = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, num_ids, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        inside = columns < num_ids
        log_p = _load(raw, bias, columns, inside, inner, WITH_BIAS, WITH_CAP) * outer - log_sum
        log_q = _load(teacher, teacher_bias, columns, inside, teacher_inner, TEACHER_WITH_BIAS, TEACHER_WITH_CAP)
        log_q = log_q * teacher_outer - teacher_log_sum
        p = tl.where(inside, tl.exp(log_p), 0.0)
        q = tl.where(inside, tl.exp(log_q), 0.0)
        if IS_MIXTURE:
            d = tl.minimum(log_q - log_p, 80.0)
            mixture = _log_mixture(d, beta)
            of_student -= p * mixture
            of_teacher += q * (d - mixture)
        elif IS_FORWARD:
            of_teacher += q * (log_q - log_p)
        else:
            of_student += p * (log_p - log_q)
    center = tl.sum(of_student, 0)
    tl.store(center_out + row, center)
    if IS_MIXTURE:
        tl.store(divergence_out + row, beta * tl.sum(of_teacher, 0) + (1.0 - beta) * center)
    elif IS_FORWARD:
        tl.store(divergence_out + row, tl.sum(of_teacher, 0))
    else:
        tl.store(divergence_out + row, center)


@triton.jit
def divergence_gradient(
    raw: tl.tensor,
    bias: tl.tensor,
    teacher: tl.tensor,
    teacher_bias: tl.tensor,
    log_sum_in: tl.tensor,
    teacher_log_sum_in: tl.tensor,
    center_in: tl.tensor,
    gain_in: tl.tensor,
    stride: tl.tensor,
    teacher_stride: tl.tensor,
    num_ids: tl.tensor,
    beta: tl.tensor,
    inner: tl.tensor,
    outer: tl.tensor,
    teacher_inner: tl.tensor,
    teacher_outer: tl.tensor,
    WITH_BIAS: tl.constexpr,
    WITH_CAP: tl.constexpr,
    TEACHER_WITH_BIAS: tl.constexpr,
    TEACHER_WITH_CAP: tl.constexpr,
    IS_FORWARD: tl.constexpr,
    IS_MIXTURE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Overwrite the teacher's raw logits with the loss's gradient by the student's."""
    row = tl.program_id(0)
    raw += row.to(tl.int64) * stride
    teacher += row.to(tl.int64) * teacher_stride
    log_sum = tl.load(log_sum_in + row)
    teacher_log_sum = tl.load(teacher_log_sum_in + row)
    center = tl.load(center_in + row)
    gain = tl.load(gain_in + row)
    for start in range(0, num_ids, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        inside = columns < num_ids
        log_p = _load(raw, bias, columns, inside, inner, WITH_BIAS, WITH_CAP) * outer - log_sum
        log_q = _load(teacher, teacher_bias, columns, inside, teacher_inner, TEACHER_WITH_BIAS, TEACHER_WITH_CAP)
        log_q = log_q * teacher_outer - teacher_log_sum
        p = tl.exp(log_p)
        if IS_MIXTURE:
            d = tl.minimum(log_q - log_p, 80.0)
            grad = (beta - 1.0) * p * (_log_mixture(d, beta) + center)
        elif IS_FORWARD:
            grad = p - tl.exp(log_q)
        else:
            grad = p * (log_p - log_q - center)
        tl.store(teacher + columns, grad * gain, mask=inside)

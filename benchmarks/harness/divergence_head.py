"""One way to a divergence and its gradients, measured: `python -m benchmarks.harness.divergence_head REQUEST`."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from benchmarks.harness.head import HeadCase, make_case, measure
from benchmarks.harness.head import HeadRequest as CaseRequest
from benchmarks.harness.report import print_result
from lowpeak.logprobs.chunked import chunked_logprobs, fused_loss
from lowpeak.logprobs.reference import ChunkSettings, TeacherHead, naive_divergence

VOCABULARY, WIDTH, TEACHER_WIDTH = 151_936, 896, 2_048
TILE_FUNCTIONS = ("_stats_tile", "_jsd_tile", "_backward_tile")  # of TRL's module, in place of its Triton kernels
BLOCK_ROWS = 16


@dataclass(frozen=True)
class DivergenceRequest:
    """The way by name, the divergence, the number of tokens, and lowpeak's tokens of a chunk."""

    way: str
    beta: float
    num_tokens: int
    chunk_size: int


@dataclass(frozen=True)
class DivergenceCase:
    """A student's head with its targets, and a teacher."""

    student: HeadCase
    teacher: TeacherHead
    beta: float

    def settings(self) -> ChunkSettings:
        """As a training step on one device asks: gradients go into `.grad` where they are formed."""
        size = self.student.settings.chunk_size
        return ChunkSettings(size, inplace_grad_scale=1.0, teacher=self.teacher, beta=self.beta)

    def loss(self, divergence_C: Tensor, start: int, stop: int) -> Tensor:
        """The weighted sum of the divergences of tokens [start, stop)."""
        return (divergence_C * self.student.weights_T[start:stop]).sum()


def make_divergence_case(
    request: DivergenceRequest, vocabulary: int = VOCABULARY, width: int = WIDTH, teacher_width: int = TEACHER_WIDTH
) -> DivergenceCase:
    """Seeded random heads in fp32."""
    plain = CaseRequest(request.way, request.num_tokens, "float32", request.chunk_size)
    student, teacher = (make_case(plain, vocabulary, each) for each in (width, teacher_width))
    head = TeacherHead(teacher.hidden_TD.detach(), teacher.weight_VD.detach())
    return DivergenceCase(student, head, request.beta)


def fused(case: DivergenceCase) -> Tensor:
    """lowpeak's one visit."""

    def loss(_: Tensor, entropy_C: Tensor | None, start: int, stop: int, divergence_C: Tensor) -> Tensor:
        return case.loss(divergence_C, start, stop)

    inputs = (case.student.hidden_TD, case.student.weight_VD, None, case.student.targets_T)
    return fused_loss(*inputs, loss, case.settings())[0]


def recomputed(case: DivergenceCase) -> Tensor:
    """lowpeak's second visit in backward."""
    inputs = (case.student.hidden_TD, case.student.weight_VD, None, case.student.targets_T)
    divergence_T = chunked_logprobs(*inputs, case.settings())[2]
    assert divergence_T is not None
    return case.loss(divergence_T, 0, len(divergence_T))


def naive(case: DivergenceCase) -> Tensor:
    """All logits of both."""
    logits_TV = torch.nn.functional.linear(case.student.hidden_TD, case.student.weight_VD)
    teacher_TV = torch.nn.functional.linear(case.teacher.hidden_TE, case.teacher.head)  # type: ignore[arg-type]
    return case.loss(naive_divergence(logits_TV, teacher_TV, case.beta), 0, len(logits_TV))


def peer(case: DivergenceCase) -> Tensor:
    """TRL's chunked function."""
    from trl.kernels.chunked_divergence import ChunkedDivergenceFunction

    inputs = (case.student.hidden_TD, case.student.weight_VD, None, case.teacher.hidden_TE, case.teacher.head, None)
    return case.loss(ChunkedDivergenceFunction.apply(*inputs, case.beta)[0], 0, len(case.teacher.hidden_TE))


def in_blocks(whole: Callable[..., None]) -> Callable[..., None]:
    """TRL's operations on a tile in blocks of rows, without tile-sized temporaries, as its GPU kernels."""

    def run(tile: Tensor, *args: Any, **kwargs: Any) -> None:
        for start in range(0, len(tile), BLOCK_ROWS):
            rows = slice(start, start + BLOCK_ROWS)
            whole(*(x[rows] if isinstance(x, Tensor) else x for x in (tile, *args)), **kwargs)

    return run


def measure_by_blocks(case: DivergenceCase, way: Callable[[DivergenceCase], Tensor]) -> dict[str, Any]:
    """TRL's function with its tiles' operations in blocks of rows."""
    from trl.kernels import chunked_divergence

    by_blocks: dict[str, Any] = {name: in_blocks(getattr(chunked_divergence, name)) for name in TILE_FUNCTIONS}
    with mock.patch.multiple(chunked_divergence, **by_blocks):
        return measure(case.student, lambda _: way(case))


WAYS: dict[str, Callable[[DivergenceCase], Tensor]] = {
    "fused": fused,
    "recompute": recomputed,
    "naive": naive,
    "trl": peer,
    "trl, as on a GPU": peer,
}


def measure_divergence(case: DivergenceCase, way: str) -> dict[str, Any]:
    """What `head.measure` returns, for one of `WAYS`."""
    if way.endswith("GPU"):
        return measure_by_blocks(case, WAYS[way])
    return measure(case.student, lambda _: WAYS[way](case))


def main(request: DivergenceRequest) -> None:
    """A few tokens first, so that what libraries set up once is no way's cost."""
    measure_divergence(make_divergence_case(request, 640, 64, 64), request.way)
    print_result(measure_divergence(make_divergence_case(request), request.way))


if __name__ == "__main__":
    main(DivergenceRequest(**json.loads(sys.argv[1])))

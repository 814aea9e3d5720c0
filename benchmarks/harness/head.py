"""One way to get log-probs and their gradients from a head, measured: `python -m benchmarks.harness.head REQUEST`."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness.process import resident_bytes
from benchmarks.harness.report import print_result
from lowpeak.logprobs.chunked import chunked_logprobs, fused_loss
from lowpeak.logprobs.reference import ChunkSettings

VOCABULARY, WIDTH = 151_936, 1_024
PEER_CHUNK = 32_768  # ids of a chunk with which TRL 1.16's trainers call their function


@dataclass(frozen=True)
class HeadRequest:
    """The way by name, how many tokens, in which dtype, lowpeak's tokens of a chunk, and whether entropies as well."""

    way: str
    num_tokens: int
    dtype: str
    chunk_size: int
    entropy: bool = False


@dataclass(frozen=True)
class HeadCase:
    """Inputs that want gradients: hidden [T, D], head [V, D], targets [T] and the loss's weights [T]."""

    hidden_TD: Tensor
    weight_VD: Tensor
    targets_T: Tensor
    weights_T: Tensor
    settings: ChunkSettings

    def step(self) -> ChunkSettings:
        """As a training step on one device asks: gradients go into `.grad` where they are formed."""
        return replace(self.settings, inplace_grad_scale=1.0)

    def loss(self, logprobs_C: Tensor, start: int, stop: int) -> Tensor:
        """The weighted sum of the log-probs of tokens [start, stop)."""
        return -(logprobs_C * self.weights_T[start:stop]).sum()


def make_case(request: HeadRequest, vocabulary: int = VOCABULARY, width: int = WIDTH) -> HeadCase:
    """Seeded random inputs, drawn in their own dtype so that making them leaves no larger peak behind."""
    torch.manual_seed(0)
    dtype = getattr(torch, request.dtype)
    hidden_TD = torch.empty(request.num_tokens, width, dtype=dtype).normal_().requires_grad_()
    weight_VD = torch.empty(vocabulary, width, dtype=dtype)
    block_RD = torch.empty(4096, width, dtype=dtype).normal_(std=width**-0.5)
    for rows in weight_VD.split(len(block_RD)):  # repeated: drawing them all would take longer than some measurements
        rows.copy_(block_RD[: len(rows)])
    weight_VD.requires_grad_()
    targets_T = torch.randint(vocabulary, (request.num_tokens,))
    settings = ChunkSettings(request.chunk_size, entropy=request.entropy)
    return HeadCase(hidden_TD, weight_VD, targets_T, torch.randn(request.num_tokens), settings)


def naive(case: HeadCase) -> Tensor:
    """All logits, a log-softmax in fp32, one gather."""
    logits_TV = torch.nn.functional.linear(case.hidden_TD, case.weight_VD)
    logprobs_TV = torch.log_softmax(logits_TV, -1, dtype=torch.float32)
    if case.settings.entropy:
        with torch.no_grad():
            -(logprobs_TV.exp() * logprobs_TV).sum(-1)
    return case.loss(logprobs_TV.gather(-1, case.targets_T[:, None])[:, 0], 0, len(case.targets_T))


def visited(case: HeadCase) -> Tensor:
    """lowpeak's one visit."""
    inputs = (case.hidden_TD, case.weight_VD, None, case.targets_T)
    return fused_loss(*inputs, lambda x, _, start, stop: case.loss(x, start, stop), case.step())[0]


def recomputed(case: HeadCase) -> Tensor:
    """lowpeak's second visit in backward."""
    logprobs_T, *_ = chunked_logprobs(case.hidden_TD, case.weight_VD, None, case.targets_T, case.step())
    return case.loss(logprobs_T, 0, len(case.targets_T))


@torch.no_grad()
def values(case: HeadCase) -> Tensor:
    """lowpeak's log-probs alone."""
    return recomputed(case)


def peer(case: HeadCase) -> Tensor:
    """TRL's chunked function."""
    from trl.kernels.chunked_logprob import ChunkedLogProbFunction

    outputs = ("entropy",) if case.settings.entropy else ()
    inputs = (case.hidden_TD, case.weight_VD, None, case.targets_T, 1.0, PEER_CHUNK, None, 1.0, outputs)
    return case.loss(ChunkedLogProbFunction.apply(*inputs)[0], 0, len(case.targets_T))


@torch.no_grad()
def products(case: HeadCase) -> Tensor:
    """The three head products in the inputs' dtype and nothing else, into buffers that stand: the arithmetic alone."""
    weight_VD, size = case.weight_VD, case.settings.chunk_size
    logits_CV, by_hidden_CD = weight_VD.new_empty(size, len(weight_VD)), case.hidden_TD[:size].clone()
    by_weight_VD = torch.empty_like(weight_VD)
    for hidden_CD in case.hidden_TD.split(size):
        rows = slice(0, len(hidden_CD))
        torch.mm(hidden_CD, weight_VD.T, out=logits_CV[rows])
        torch.mm(logits_CV[rows], weight_VD, out=by_hidden_CD[rows])
        torch.mm(logits_CV[rows].T, hidden_CD, out=by_weight_VD)
    return weight_VD.new_zeros(())


WAYS: dict[str, Callable[[HeadCase], Tensor]] = {
    "naive": naive,
    "one visit": visited,
    "recompute": recomputed,
    "no-grad": values,
    "trl": peer,
    "products": products,
}


def measure(case: HeadCase, way: Callable[[HeadCase], Tensor]) -> dict[str, Any]:
    """CPU seconds of forward and of backward, what was resident before, the loss, and the gradients' norms."""
    before = resident_bytes()
    times = [time.process_time()]
    loss = way(case)
    times.append(time.process_time())
    if loss.requires_grad:
        loss.backward()
    times.append(time.process_time())
    norms = [None if x.grad is None else norm(x.grad) for x in (case.hidden_TD, case.weight_VD)]
    return {
        "forward_s": round(times[1] - times[0], 3),
        "backward_s": round(times[2] - times[1], 3),
        "start_rss_mb": None if before is None else round(before / 2**20, 1),
        "loss": float(loss.detach()),
        "grad_norms": norms,
    }


def norm(matrix: Tensor) -> float:
    """The Frobenius norm, without a wide copy of the matrix, which would be the peak."""
    return sum(float(rows.float().norm()) ** 2 for rows in matrix.split(1024)) ** 0.5


def main(request: HeadRequest) -> None:
    """A few tokens first, so that what libraries set up once is no way's cost."""
    way = WAYS[request.way]
    small = make_case(request, vocabulary=640, width=64)
    loss = way(small)
    if loss.requires_grad:
        loss.backward()
    del small, loss
    print_result(measure(make_case(request), way))


if __name__ == "__main__":
    main(HeadRequest(**json.loads(sys.argv[1])))

"""What the log-prob core allocates, and that it waits for nothing: fake tensors, and every output watched."""

from __future__ import annotations

import resource
import time

import pytest
import torch
from test_logprobs_chunked import WAYS, by_module, recomputed, visited, visited_by_module
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lowpeak.logprobs.chunked import chunked_logprobs, fused_loss
from lowpeak.logprobs.reference import ChunkSettings, HeadScale, naive_logprobs
from lowpeak.plan.rehearsal.storage_meter import StorageMeter
from rounding import assert_close_to_largest


class LargestTensor(TorchDispatchMode):
    """Remembers the largest number of elements in any operation's result."""

    def __init__(self):
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        sizes = [x.numel() for x in tree_leaves(result) if isinstance(x, torch.Tensor)]
        self.numel = max([self.numel, *sizes])
        return result


def token_loss(logprobs, entropy, start, stop):
    return logprobs.exp().sum() + (0 if entropy is None else entropy.sum())


def leaves_and_targets(num_tokens, num_ids, width, dtype=torch.float32):
    hidden = torch.randn(num_tokens, width, dtype=dtype).requires_grad_()
    weight = torch.randn(num_ids, width, dtype=dtype).requires_grad_()
    return hidden, weight, torch.randint(num_ids, (num_tokens,))


def run(way, hidden, weight, targets, settings):
    """Forward and backward in one of the core's ways."""
    way([hidden, weight, None], targets, torch.ones(len(targets)), settings)[0].backward()


def peak_bytes(call):
    """The most bytes of results that were alive at once during a call."""
    with StorageMeter(block=1) as meter:
        meter.begin("call")
        call()
        meter.begin(None)
    return meter.peaks["call"].total()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("way", WAYS)
def test_no_tensor_of_all_tokens_by_the_vocabulary_ever_exists(way, dtype):
    num_tokens, num_ids, width, chunk = 200, 301, 3, 16
    settings = ChunkSettings(chunk, 0.9, HeadScale(1.0, 9.0), entropy=True, entropy_grad=True)
    with LargestTensor() as largest:
        run(way, *leaves_and_targets(num_tokens, num_ids, width, dtype), settings)
    assert chunk * num_ids / 2 < largest.numel <= chunk * num_ids


@pytest.mark.parametrize("softcap", [None, 9.0])
@pytest.mark.parametrize("entropy", [False, True], ids=["logprobs", "entropy"])
@pytest.mark.parametrize("way", [recomputed, visited])
def test_the_peak_is_the_gradients_one_chunk_of_logits_and_what_fits_into_the_cache(way, entropy, softcap):
    num_tokens, num_ids, width, chunk = 640, 16_001, 2, 320
    settings = ChunkSettings(chunk, scale=HeadScale(1.0, softcap), entropy=entropy, entropy_grad=entropy)
    hidden, weight, targets = leaves_and_targets(num_tokens, num_ids, width)
    peak = peak_bytes(lambda: run(way, hidden, weight, targets, settings))
    logits, in_cache = 4 * chunk * num_ids, min(2 * 2**20 * torch.get_num_threads(), 2 * 4 * chunk * num_ids // 8)
    given = 4 * (num_ids + num_tokens) * width  # views of the inputs are results, too
    assert logits <= peak <= logits + in_cache + 2 * given + 50_000


@pytest.mark.parametrize("way", [by_module, visited_by_module])
def test_logits_of_a_module_live_for_one_chunk_at_a_time(way):
    num_tokens, num_ids = 256, 4001
    leaves, settings = leaves_and_targets(num_tokens, num_ids, 2), ChunkSettings(16, entropy=True, entropy_grad=True)
    assert peak_bytes(lambda: run(way, *leaves, settings)) < 4 * num_tokens * num_ids / 2


@pytest.mark.parametrize("way", [recomputed, visited])
def test_a_frozen_head_costs_no_memory_for_its_gradient(way):
    num_tokens, num_ids, width, chunk = 16, 501, 64, 4
    hidden, weight, targets = leaves_and_targets(num_tokens, num_ids, width)
    peak = peak_bytes(lambda: run(way, hidden, weight.detach(), targets, ChunkSettings(chunk)))
    # The head itself is counted (views of it are results), and hidden with its gradient, and two chunks.
    assert peak < 4 * (num_ids * width + 3 * num_tokens * width + 2 * chunk * num_ids)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("way", WAYS)
def test_a_huge_pass_runs_on_fake_tensors_in_seconds_without_memory_or_waiting_for_a_value(way, dtype):
    started, resident = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with FakeTensorMode():
        hidden, weight, targets = leaves_and_targets(65_536, 151_936, 1024, dtype)
        run(way, hidden, weight, targets, ChunkSettings(8192, 0.9, entropy=True, entropy_grad=True))
        assert hidden.grad.shape == hidden.shape
        assert weight.grad.shape == weight.shape
    assert time.process_time() - started < 30
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - resident < 200_000  # KB; the logits are 40 GB


@pytest.mark.parametrize("backward_inside", [True, False])
def test_under_autocast_the_head_computes_in_the_dtype_of_autocast_and_sums_in_fp32(backward_inside):
    hidden, weight, targets = leaves_and_targets(11, 37, 5)
    rounded = [hidden.detach().bfloat16().float().requires_grad_(), weight.detach().bfloat16().float().requires_grad_()]
    settings = ChunkSettings(4, 0.8, entropy=True, entropy_grad=True)
    logprobs, entropy = naive_logprobs(*rounded, None, targets, 0.8)
    expected = torch.autograd.grad(token_loss(logprobs, entropy, 0, 11), rounded)
    with torch.autocast("cpu", torch.bfloat16):
        ours, ours_entropy, _ = chunked_logprobs(hidden, weight, None, targets, settings)
        first = token_loss(ours, ours_entropy, 0, 11)
        second, detached, *_ = fused_loss(hidden, weight, None, targets, token_loss, settings)
        assert_close_to_largest(ours, logprobs, 2e-6)
        assert_close_to_largest(detached, logprobs.detach(), 2e-6)
        if backward_inside:
            found = [torch.autograd.grad(loss, [hidden, weight]) for loss in (first, second)]
    if not backward_inside:
        found = [torch.autograd.grad(loss, [hidden, weight]) for loss in (first, second)]
    for by_hidden, by_weight in found:
        assert (by_hidden.dtype, by_weight.dtype) == (torch.float32, torch.float32)
        assert_close_to_largest(by_hidden, expected[0], 2**-8)  # rounded once, as the cast's gradient
        assert_close_to_largest(by_weight, expected[1], 2e-6)


def test_fp64_hidden_states_are_left_alone_by_autocast():
    hidden, weight, targets = leaves_and_targets(5, 7, 3, torch.float64)
    with torch.autocast("cpu", torch.bfloat16):
        logprobs, *_ = chunked_logprobs(hidden, weight, None, targets, ChunkSettings(2))
    torch.testing.assert_close(logprobs, naive_logprobs(hidden, weight, None, targets)[0])

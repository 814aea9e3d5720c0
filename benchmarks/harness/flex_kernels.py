"""FlexAttention's kernels as torch's Inductor compiles `attend_flex` for a GPU that is not there.

Autograd on fake CUDA tensors needs a driver. So `attend_flex` is traced on fake tensors of the CPU, forward and backward, and
Inductor compiles the graphs after they have been moved to CUDA, with the target's answers where torch asks the driver. A CUDA
build of torch is needed, which alone makes fake CUDA tensors.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import triton
from torch import Tensor, fx
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch._inductor.compile_fx import compile_fx_inner
from torch._inductor.runtime.hints import DeviceProperties
from torch._inductor.runtime.triton_heuristics import CachingAutotuner
from torch._inductor.utils import BoxedBool
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention.flex_attention import flex_attention
from torch.utils._pytree import tree_map

from benchmarks.harness.cubins import SHARED_MEMORY, KernelResources, read_resources, target_of
from lowpeak.attention import flex
from lowpeak.records import Forest

KEY_HEADS, QUERIES_PER_KEY = 2, 7
# Inductor compiles the first length by itself, and at the second one kernel for all others.
_LENGTHS = (1100, 1300)


def attention_kernels(capability: str, dtype: torch.dtype, width: int) -> list[KernelResources]:
    """Return the resources of attention's kernels, forward and backward, with lowpeak's options, for any length."""
    found: list[KernelResources] = []
    size = f"{str(dtype).removeprefix('torch.')}, heads of {width}"

    def collect(tuner: CachingAutotuner, *args: Any, **kwargs: Any) -> None:
        if not tuner.compile_results:
            tuner._precompile_worker()
            name = tuner.fn.__name__
            part = "row sums" if "_tem_" not in name else "backward" if "backward" in name else "forward"
            for result in tuner.compile_results:
                names = (f"FlexAttention, {part}", size, str(result.config))
                found.append(read_resources(names, capability, result.kernel))

    with _answers_of(capability), mock.patch.object(CachingAutotuner, "precompile", collect):
        _trace(dtype, width)
    return found


def _trace(dtype: torch.dtype, width: int) -> None:
    torch._dynamo.reset()
    backend = aot_autograd(fw_compiler=_lower, bw_compiler=partial(_lower, is_backward=True))
    compiled = torch.compile(flex_attention, backend=backend)
    device = torch.device("cpu")
    with FakeTensorMode(), mock.patch.object(flex, "_compiled", return_value=compiled):
        for length in _LENGTHS:
            third = length // 4
            mask = flex.block_mask(Forest.of([(-1, 100), *[(0, third)] * 3]).nodes, length, device)
            # As projections give them: heads next to each other.
            query, key, value = (
                torch.empty(1, length, heads, width, dtype=dtype).transpose(1, 2).requires_grad_()
                for heads in (KEY_HEADS * QUERIES_PER_KEY, KEY_HEADS, KEY_HEADS)
            )
            flex.attend_flex(query, key, value, mask, width**-0.5)


def _lower(graph: fx.GraphModule, inputs: Sequence[Any], is_backward: bool = False) -> Callable[..., Any]:
    """Compile a traced graph for CUDA if its lengths are symbols; return what runs it on fake tensors."""
    if any(isinstance(x, torch.SymInt) for x in inputs):
        with torch.no_grad():
            compile_fx_inner(
                _on_cuda(graph), [_fake_cuda(x) for x in inputs], cudagraphs=BoxedBool(False), is_backward=is_backward
            )
    return make_boxed_func(graph.forward)


def _on_cuda(graph: fx.GraphModule) -> fx.GraphModule:
    graph = deepcopy(graph)
    for module in graph.modules():
        for node in module.graph.nodes if isinstance(module, fx.GraphModule) else ():
            node.meta |= {
                key: tree_map(_fake_cuda, node.meta[key]) for key in ("val", "example_value") if key in node.meta
            }
            if node.kwargs.get("device") is not None:
                node.kwargs = {**node.kwargs, "device": torch.device("cuda:0")}
            if node.target is torch.ops.higher_order.flex_attention:
                # On a CPU torch leaves out what the backward reads.
                node.args = tuple(x | {"OUTPUT_LOGSUMEXP": True} if isinstance(x, dict) else x for x in node.args)
    graph.recompile()
    return graph


def _fake_cuda(x: Any) -> Any:
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cuda:0") if isinstance(x, Tensor) else x


@contextmanager
def _answers_of(capability: str) -> Iterator[None]:
    """Let torch and Triton see a GPU of this compute capability."""
    major, minor = (int(part) for part in capability.split("."))
    properties = SimpleNamespace(
        name="", major=major, minor=minor, multi_processor_count=100, regs_per_multiprocessor=65_536, warp_size=32,
        max_threads_per_multi_processor=1536, max_threads_per_block=1024,
        shared_memory_per_block_optin=SHARED_MEMORY[capability],
    )  # fmt: skip
    cuda = {
        "is_available": True, "device_count": 1, "current_device": 0, "_lazy_init": None, "_exchange_device": 0,
        "_maybe_exchange_device": 0, "get_device_capability": (major, minor), "_get_device_properties": properties,
        "get_rng_state": torch.empty(0), "set_rng_state": None,
    }  # fmt: skip
    driver = SimpleNamespace(get_current_target=lambda: target_of(capability), get_current_device=lambda: 0)
    triton.runtime.driver.set_active(driver)
    DeviceProperties.create.cache_clear()
    higher_order = importlib.import_module("torch._higher_order_ops.flex_attention")
    permute_strides = higher_order._permute_strides

    def permute(out: Tensor, strides: tuple[Any, ...]) -> Tensor:
        # A copy of fake CUDA tensors asks the driver in C++.
        on_cpu = permute_strides(torch.empty_like(out, device="cpu"), strides)
        return _fake_cuda(on_cpu) if out.is_cuda else on_cpu

    functions = {
        **{f"torch.cuda.{name}": answer for name, answer in cuda.items()},
        "torch.accelerator.is_available": False,
        "torch._inductor.runtime.triton_helpers.set_driver_to_gpu": None,
        "torch._inductor.fx_utils.FakeTensorUpdater.incremental_update": 0,
        # torch trains with FlexAttention on GPUs alone.
        "torch.nn.attention.flex_attention._validate_device": None,
        "lowpeak.attention.flex._shared_memory": SHARED_MEMORY[capability],
    }
    with (
        ExitStack() as stack,
        mock.patch.object(higher_order, "_permute_strides", permute),
        torch._functorch.config.patch(force_non_lazy_backward_lowering=True),
        torch._inductor.config.patch(compile_threads=1, force_disable_caches=True, use_static_cuda_launcher=False),
    ):
        for name, answer in functions.items():
            stack.enter_context(mock.patch(name, create=name.endswith("_get_device_properties"), return_value=answer))
        yield

"""One rank of `benchmarks.weight_stream`: a sharded model, and each way for its weights to leave."""

from __future__ import annotations

import gc
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from transformers import Qwen2Config, Qwen2ForCausalLM

from lowpeak.checkpoint.export import write_weights

SHAPES = {
    # 109M parameters, 418 MB in fp32; the largest tensor, the embedding, has 94 MB
    "mid": {"vocab_size": 32000, "hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12},
    "quick": {"vocab_size": 4096, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4},
}
MIB = 1 << 20


def main() -> None:
    strategy_name, shape, repeats = sys.argv[1], sys.argv[2], int(sys.argv[3])
    model, strategy, gathers = {"fsdp2": fsdp2, "zero3": zero3}[strategy_name](_model(shape))
    ways = {**slices(strategy, model), **gathers, **files(strategy, model, gathers["gather_all"])}
    found = {name: measured(way, repeats) for name, way in ways.items()}
    mib = sum(torch.Size(shape).numel() * 4 for shape, _ in strategy.layout(model).values()) / MIB
    dist.barrier()
    dist.destroy_process_group()
    print(json.dumps({"model_mib": round(mib, 1), "ways": found}))


def _model(shape: str) -> nn.Module:
    torch.manual_seed(0)
    heads = {"num_attention_heads": 12 if shape == "mid" else 4, "num_key_value_heads": 12 if shape == "mid" else 4}
    return Qwen2ForCausalLM(Qwen2Config(tie_word_embeddings=True, **SHAPES[shape], **heads))


Way = Callable[..., object]
Use = Callable[[Mapping[str, torch.Tensor]], None]
Side = tuple[nn.Module, Any, dict[str, Way]]


def fsdp2(model: Any) -> Side:
    """`fully_shard` by layer as accelerate applies it."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from lowpeak.parallel.fsdp2 import Fsdp2

    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    options = StateDictOptions(full_state_dict=True)
    plugin = SimpleNamespace(mixed_precision_policy=None)
    accelerator: Any = _accelerator(SimpleNamespace(fsdp_plugin=plugin))

    def gather_all(use: Use = lambda tensors: None) -> None:
        use(cast(Mapping[str, torch.Tensor], get_model_state_dict(model, options=options)))

    return (
        model,
        Fsdp2(accelerator),
        {
            "gather_all": gather_all,
            "gather_each": lambda: _each(model, lambda p: p.full_tensor()),
        },
    )


def zero3(model: Any) -> Side:
    """DeepSpeed's stage 3."""
    import deepspeed

    from lowpeak.parallel.zero import Zero

    config = {"train_batch_size": dist_size(), "zero_optimization": {"stage": 3}, "zero_allow_untested_optimizer": True}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config, dist_init_required=True)
    plugin = SimpleNamespace(zero_stage=3)
    accelerator: Any = _accelerator(SimpleNamespace(deepspeed_plugin=plugin), inner=lambda given: given.module)

    def gather_all(use: Use = lambda tensors: None) -> None:
        with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
            use({name: p.detach() for name, p in engine.module.named_parameters()})

    def gather(parameter: nn.Parameter) -> None:
        with deepspeed.zero.GatheredParameters([parameter]):
            pass

    return engine, Zero(accelerator), {"gather_all": gather_all, "gather_each": lambda: _each(engine.module, gather)}


def dist_size() -> int:
    """Ranks of the run, before it has a process group."""
    import os

    return int(os.environ["WORLD_SIZE"])


def _accelerator(state: Any, inner: Callable[[Any], Any] = lambda given: given) -> Any:
    """What a strategy asks of accelerate."""
    return SimpleNamespace(device=torch.device("cpu"), unwrap_model=inner, state=state, parallelism_config=None)


def _each(model: nn.Module, gather: Callable[[Any], object]) -> None:
    for parameter in model.parameters():
        gather(parameter)


def slices(strategy: Any, model: nn.Module) -> dict[str, Way]:
    """Ranges that their owner broadcasts."""

    def drain(max_bytes: int, dtype: torch.dtype | None) -> None:
        for _ in strategy.slices(model, max_bytes, dtype):
            pass

    return {
        "slices_8MiB": lambda: drain(8 * MIB, None),
        "slices_1MiB": lambda: drain(MIB, None),
        "slices_8MiB_bf16": lambda: drain(8 * MIB, torch.bfloat16),
    }


def files(strategy: Any, model: nn.Module, gather_all: Way) -> dict[str, Way]:
    """The same into a file: slice by slice, and all at once after a gather."""
    inner = getattr(model, "module", model)
    layout = strategy.layout(model)

    def export() -> None:
        with tempfile.TemporaryDirectory() as folder:
            into = Path(folder) if dist.get_rank() == 0 else None
            write_weights(into, inner, layout, strategy.slices(model, 8 * MIB, None))

    def save(whole: Mapping[str, torch.Tensor]) -> None:
        if dist.get_rank() == 0:
            with tempfile.TemporaryDirectory() as folder:
                tensors = {name: tensor.contiguous() for name, tensor in whole.items() if name in layout}
                save_file(tensors, Path(folder) / "model.safetensors", metadata={"format": "pt"})
        dist.barrier()

    return {"file_by_slices": export, "file_after_gather": lambda: gather_all(save)}


def measured(way: Way, repeats: int) -> Mapping[str, float]:
    """Median seconds of a way, and the most MiB resident above what was before it, after it has run once."""
    way()
    seconds, peaks = [], []
    for _ in range(repeats):
        gc.collect()
        dist.barrier()
        before = _reset_peak()
        start = time.perf_counter()
        way()
        seconds.append(time.perf_counter() - start)
        peaks.append(_status("VmHWM") - before)
    return {"seconds": round(statistics.median(seconds), 3), "extra_mib": round(max(peaks) / 1024, 1)}


def _reset_peak() -> int:
    """Resident KiB now, from which the kernel's high-water mark counts again."""
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def _status(name: str) -> int:
    return next(_values(name))


def _values(name: str) -> Iterator[int]:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            yield int(line.split()[1])


if __name__ == "__main__":
    main()

"""Isolation of the training process from the vLLM inside: environment, random states, process groups, model classes.

`vllm_model_impl="transformers"` decorates the decoder's class in place (vLLM 0.31 to 0.33,
`compilation/decorators.py`): after that, constructing or calling any model of this class needs a vLLM config.
"""

from __future__ import annotations

import gc
import os
import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import numpy
import torch
from torch import nn

from lowpeak.ranks import has_process_group

# Environment of the build. Without the first variable vLLM's engine runs in a separate process; without the second vLLM binds
# this process's threads to cores on CPUs.
_BUILD_ENVIRONMENT = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
_BUILD_DEFAULTS = {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}
_VLLM_ATTRIBUTE = "vllm_config"  # of the models that vLLM constructed
_RESTORED = "_lowpeak_restored"


@contextmanager
def preserve_process_state() -> Iterator[None]:
    """Restore this process's state after a block that builds a vLLM (0.31 to 0.33).

    vLLM overwrites LOCAL_WORLD_SIZE, LD_PRELOAD and others, seeds all generators, replaces `torch.set_num_threads` by
    a function that only warns, and freezes all objects of the garbage collector, including the trainer's.
    """
    environment = dict(os.environ)
    random_states = random.getstate(), numpy.random.get_state(), torch.get_rng_state()
    device_states = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    set_num_threads, num_threads = torch.set_num_threads, torch.get_num_threads()
    num_frozen = gc.get_freeze_count()
    os.environ.update({**_BUILD_DEFAULTS, **environment, **_BUILD_ENVIRONMENT})
    try:
        yield
    finally:
        for name in set(os.environ) - set(environment):
            del os.environ[name]
        os.environ.update(environment)
        torch.set_num_threads = set_num_threads
        torch.set_num_threads(num_threads)
        random.setstate(random_states[0])
        numpy.random.set_state(random_states[1])
        torch.set_rng_state(random_states[2])
        if device_states:
            torch.cuda.set_rng_state_all(device_states)
        if not num_frozen:
            gc.unfreeze()


@contextmanager
def disable_shared_memory(rank: int) -> Iterator[None]:
    """On CPUs, let a vLLM over several ranks that is built in the block communicate through torch.distributed.

    vLLM would use shared memory, whose name is the same for all launched runs of a host (`VLLM_DIST_IDENT` comes from
    "env://"): runs would overwrite each other's, and a killed run leaves one that raises an error.
    """
    from vllm.distributed.device_communicators.cpu_communicator import _CPUSHMDistributed as Shared

    # vLLM does without shared memory if the ranks have different names for it.
    name_of = Shared.make_group_name
    Shared.make_group_name = staticmethod(lambda communicator: f"{rank}-{name_of(communicator)}")
    try:
        yield
    finally:
        Shared.make_group_name = staticmethod(name_of)


def shut_down_vllm(llm: Any, had_group: bool) -> None:
    """Shut down a vLLM of this process but keep the trainer's process group (`had_group`)."""
    from vllm.v1.engine import core

    # The shutdown would destroy all process groups.
    cleanup = core.cleanup_dist_env_and_memory
    core.cleanup_dist_env_and_memory = lambda *args, **kwargs: None
    try:
        llm.llm_engine.engine_core.shutdown()
    finally:
        core.cleanup_dist_env_and_memory = cleanup
    destroy_vllm_groups(had_group)
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def destroy_vllm_groups(had_group: bool) -> None:
    """Destroy vLLM's process groups; the group of all ranks only if vLLM made it (`had_group` False)."""
    from vllm.distributed import parallel_state

    parallel_state.destroy_model_parallel()
    if not had_group and has_process_group():
        parallel_state.destroy_distributed_environment()


def undo_vllm_class_patch(models: Iterable[nn.Module], is_building: Callable[[], bool]) -> None:
    """Limit vLLM's patches of the classes of `models` to the models that vLLM constructs.

    A model is vLLM's if `is_building()` was true at its construction. Unpatched and already restored classes stay as
    they are.
    """
    for kind in {type(model) for model in models if _is_patched(type(model)) and _VLLM_ATTRIBUTE in vars(model)}:
        _dispatch_by_owner(kind, is_building)


def _is_patched(kind: type) -> bool:
    """Return whether vLLM replaced the methods of a class of transformers or of a model's repository."""
    init = vars(kind).get("__init__")
    return (
        not kind.__module__.startswith("vllm.")
        and "__call__" in vars(kind)
        and getattr(init, "__module__", kind.__module__) != kind.__module__
        and _RESTORED not in vars(kind)
    )


def _dispatch_by_owner(kind: Any, is_building: Callable[[], bool]) -> None:
    vllm_init, vllm_call = kind.__init__, kind.__call__
    original_init = _original_init(vllm_init)

    @wraps(original_init)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        (vllm_init if is_building() else original_init)(self, *args, **kwargs)

    @wraps(nn.Module.__call__)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return (vllm_call if _VLLM_ATTRIBUTE in vars(self) else nn.Module.__call__)(self, *args, **kwargs)

    kind.__init__, kind.__call__ = init, call
    setattr(kind, _RESTORED, True)


def _original_init(init: Any) -> Callable[..., None]:
    """Return the class's original `__init__`, which vLLM's closure stores as `old_init`."""
    closure = dict(zip(init.__code__.co_freevars, init.__closure__ or (), strict=True))
    original: Callable[..., None] = closure["old_init"].cell_contents
    return original

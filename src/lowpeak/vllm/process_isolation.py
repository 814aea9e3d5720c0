"""What building a vLLM in this process does to it, undone: environment, random states, process groups, model classes.

`vllm_model_impl="transformers"` decorates the class of the decoder in place (vLLM 0.31 to 0.33,
`compilation/decorators.py`): from then on making or calling any model of that class needs a config of vLLM's.
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

from lowpeak.ranks import has_group

# Read by vLLM while it is built. Without the first its engine would be a process of its own; without the second it binds
# this process's threads to cores on CPUs.
_WHILE_BUILDING = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
_UNLESS_SET = {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}
_THEIRS = "vllm_config"  # an attribute of the models that vLLM made
_APART = "_lowpeak_apart"


@contextmanager
def preserve_process_state() -> Iterator[None]:
    """A block that builds a vLLM (0.31 to 0.33): environment, random states, threads and frozen objects are as before.

    It overwrites LOCAL_WORLD_SIZE, LD_PRELOAD and others, seeds all generators, replaces `torch.set_num_threads` by
    a function that only warns, and freezes every object that the garbage collector knows, the trainer's too.
    """
    environment = dict(os.environ)
    random_states = random.getstate(), numpy.random.get_state(), torch.get_rng_state()
    device_states = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    set_num_threads, num_threads = torch.set_num_threads, torch.get_num_threads()
    num_frozen = gc.get_freeze_count()
    os.environ.update({**_UNLESS_SET, **environment, **_WHILE_BUILDING})
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
    """On CPUs, a block that builds one vLLM over several ranks: they talk through torch.distributed.

    vLLM would use shared memory, whose name is the same for all runs of a host that a launcher started (their
    `VLLM_DIST_IDENT` comes from "env://"): they would write into each other's, and what a killed one left is an error. Where
    ranks have different names for it vLLM does without.
    """
    from vllm.distributed.device_communicators.cpu_communicator import _CPUSHMDistributed as Shared

    name_of = Shared.make_group_name
    Shared.make_group_name = staticmethod(lambda communicator: f"{rank}-{name_of(communicator)}")
    try:
        yield
    finally:
        Shared.make_group_name = staticmethod(name_of)


def shut_down_vllm(llm: Any, had_group: bool) -> None:
    """End a vLLM of this process; the trainer's process group, which vLLM would end too, stays where there was one."""
    from vllm.v1.engine import core

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
    """Leave the process groups that vLLM has made, of all ranks (`had_group` False) or of parts of them."""
    from vllm.distributed import parallel_state

    parallel_state.destroy_model_parallel()
    if not had_group and has_group():
        parallel_state.destroy_distributed_environment()


def undo_vllm_class_patch(models: Iterable[nn.Module], is_building: Callable[[], bool]) -> None:
    """Let vLLM's changes to the classes of its `models` hold for its own models alone.

    A model is vLLM's where `is_building()` was true when it was made. A class that is apart, or was not changed, is left alone.
    """
    for kind in {type(model) for model in models if _is_changed(type(model)) and _THEIRS in vars(model)}:
        _divide(kind, is_building)


def _is_changed(kind: type) -> bool:
    """Whether it is a class of transformers', or of a model's repository, whose methods were replaced by vLLM's."""
    init = vars(kind).get("__init__")
    return (
        not kind.__module__.startswith("vllm.")
        and "__call__" in vars(kind)
        and getattr(init, "__module__", kind.__module__) != kind.__module__
        and _APART not in vars(kind)
    )


def _divide(kind: Any, is_building: Callable[[], bool]) -> None:
    their_init, their_call = kind.__init__, kind.__call__
    our_init = _wrapped(their_init)

    @wraps(our_init)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        (their_init if is_building() else our_init)(self, *args, **kwargs)

    @wraps(nn.Module.__call__)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return (their_call if _THEIRS in vars(self) else nn.Module.__call__)(self, *args, **kwargs)

    kind.__init__, kind.__call__ = init, call
    setattr(kind, _APART, True)


def _wrapped(init: Any) -> Callable[..., None]:
    """The `__init__` that the class had, which vLLM's holds as `old_init`."""
    held = dict(zip(init.__code__.co_freevars, init.__closure__ or (), strict=True))
    found: Callable[..., None] = held["old_init"].cell_contents
    return found

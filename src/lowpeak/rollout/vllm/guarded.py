"""What building a vLLM in this process does to it, undone: it thinks that the process is its own."""

from __future__ import annotations

import gc
import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy
import torch

from lowpeak.ranks import has_group

# Read by vLLM while it is built. Without the first its engine would be a process of its own; without the second it binds
# this process's threads to cores on CPUs.
_WHILE_BUILDING = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
_UNLESS_SET = {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}


@contextmanager
def guarded_build() -> Iterator[None]:
    """A block that builds a vLLM (0.31 to 0.33): environment, random states, threads and frozen objects are as before.

    It overwrites LOCAL_WORLD_SIZE, LD_PRELOAD and others, seeds all generators, replaces `torch.set_num_threads` by
    a function that only warns, and freezes every object that the garbage collector knows, the trainer's too.
    """
    environment = dict(os.environ)
    random_states = random.getstate(), numpy.random.get_state(), torch.get_rng_state(), _device_states()
    set_num_threads, num_threads = torch.set_num_threads, torch.get_num_threads()
    num_frozen = gc.get_freeze_count()
    os.environ.update({**_UNLESS_SET, **environment, **_WHILE_BUILDING})
    try:
        yield
    finally:
        _restore_environment(environment)
        torch.set_num_threads = set_num_threads
        torch.set_num_threads(num_threads)
        random.setstate(random_states[0])
        numpy.random.set_state(random_states[1])
        torch.set_rng_state(random_states[2])
        if random_states[3]:
            torch.cuda.set_rng_state_all(random_states[3])
        if not num_frozen:
            gc.unfreeze()


@contextmanager
def plain_collectives(rank: int) -> Iterator[None]:
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


def free(llm: Any, had_group: bool) -> None:
    """End a vLLM of this process; the trainer's process group, which vLLM would end too, stays where there was one."""
    from vllm.v1.engine import core

    cleanup = core.cleanup_dist_env_and_memory
    core.cleanup_dist_env_and_memory = lambda *args, **kwargs: None
    try:
        llm.llm_engine.engine_core.shutdown()
    finally:
        core.cleanup_dist_env_and_memory = cleanup
    leave_groups(had_group)
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def leave_groups(had_group: bool) -> None:
    """Leave the process groups that vLLM has made, of all ranks (`had_group` False) or of parts of them."""
    from vllm.distributed import parallel_state

    parallel_state.destroy_model_parallel()
    if not had_group and has_group():
        parallel_state.destroy_distributed_environment()


def _device_states() -> list[torch.Tensor]:
    return torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []


def _restore_environment(environment: dict[str, str]) -> None:
    for name in set(os.environ) - set(environment):
        del os.environ[name]
    os.environ.update(environment)

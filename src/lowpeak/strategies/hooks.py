"""Hooks that an engine put on modules to gather and free parameters, taken off for a while."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

_PACKAGES = ("torch.distributed.", "deepspeed.")
_KINDS = ("_forward_pre_hooks", "_forward_hooks")  # torch's own registries: dicts that handles refer to


@contextmanager
def without_sharding_hooks(model: nn.Module) -> Iterator[None]:
    """Forwards in the block gather nothing by themselves; the hooks come back in their order however it is left."""
    registries = [getattr(module, kind) for module in model.modules() for kind in _KINDS]
    before = [(registry, list(registry.items())) for registry in registries if registry]
    try:
        for registry, hooks in before:
            for key, hook in hooks:
                if _is_of_sharding(hook):
                    del registry[key]
        yield
    finally:
        for registry, hooks in before:
            added = [(key, hook) for key, hook in registry.items() if key not in dict(hooks)]
            registry.clear()
            registry.update(hooks + added)


def _is_of_sharding(hook: Callable[..., Any]) -> bool:
    while hasattr(hook, "func"):  # functools.partial
        hook = hook.func
    return str(getattr(hook, "__module__", "")).startswith(_PACKAGES)

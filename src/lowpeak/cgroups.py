"""Control groups of this process: the folders that have its limits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path


def cgroup_folders(root: Path, controller: str) -> Iterator[Path]:
    """Yield the folders of the cgroups that contain this process: of version 2, and of a controller of version 1."""
    for line in read_lines(root / "proc/self/cgroup"):
        number, controllers, group = (*line.split(":", 2), "", "")[:3]
        mount = root / "sys/fs/cgroup"
        if number != "0":
            if controller not in controllers.split(","):
                continue
            mount /= controller
        # Inside a container this folder may not exist: the mount is then the process's cgroup.
        folder = mount / group.strip("/")
        yield folder
        yield from (parent for parent in folder.parents if parent.is_relative_to(mount))


def read_lines(path: Path) -> list[str]:
    """Return the lines of a file of the system; none if it cannot be read."""
    with suppress(OSError):
        return path.read_text(errors="replace").splitlines()
    return []

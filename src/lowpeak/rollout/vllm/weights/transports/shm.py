"""Workers on this host: the bucket is a file in shared memory that both sides have mapped.

The file's name is gone as soon as every worker has it mapped, so a killed run leaves nothing. What one leaves that was killed
before that is swept by the next: the name holds the process's id.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import re
import secrets
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lowpeak.errors import EngineError
from lowpeak.rollout.vllm.weights.buckets import Bucket
from lowpeak.rollout.vllm.weights.transports.transport import Ask

_NAME = re.compile(r"lowpeak-(\d+)-[0-9a-f]{16}")


def shared_folder() -> Path:
    """Where files are memory: Linux's /dev/shm, else the folder of temporary files."""
    shared = Path("/dev/shm")
    return shared if os.access(shared, os.W_OK) else Path(tempfile.gettempdir())


def new_name() -> str:
    """A name that nobody has, and that says whose it is."""
    return f"lowpeak-{os.getpid()}-{secrets.token_hex(8)}"


def is_ours(path: Path) -> bool:
    """Whether a file has a name that `new_name` makes, where it would be put."""
    return path.parent == shared_folder() and _NAME.fullmatch(path.name) is not None


def sweep(folder: Path) -> None:
    """Remove the files of processes that are gone."""
    for path in folder.glob("lowpeak-*"):
        found = _NAME.fullmatch(path.name)
        if found is not None and not Path(f"/proc/{found[1]}").exists() and Path("/proc/self").exists():
            with contextlib.suppress(OSError):
                path.unlink()


class ShmSender:
    """The trainer's end. EngineError where shared memory has no room for a bucket."""

    name = "shm"

    def __init__(self, bucket_bytes: int, folder: Path | None = None) -> None:
        folder = folder or shared_folder()
        sweep(folder)
        self._path = folder / new_name()
        self._bytes = bucket_bytes
        self._map = _created(self._path, bucket_bytes)

    def invitation(self) -> dict[str, Any]:
        """The file."""
        return {"transport": self.name, "path": str(self._path), "num_bytes": self._bytes}

    def joined(self) -> None:
        """The mapping lives without the name."""
        self._path.unlink(missing_ok=True)

    def buffer(self, device: torch.device) -> Tensor:
        """The mapped bytes, wherever the values are."""
        return torch.frombuffer(self._map, dtype=torch.uint8)

    def deliver(self, bucket: Bucket, ask: Ask) -> None:
        """The bytes are there already."""
        ask({})

    def close(self) -> None:
        """Remove the name; the memory goes with the last tensor that looks at it."""
        self._path.unlink(missing_ok=True)


class ShmInlet:
    """The worker's end."""

    def __init__(self, path: str, num_bytes: int) -> None:
        with open(path, "r+b") as file:
            self._data = torch.frombuffer(mmap.mmap(file.fileno(), num_bytes), dtype=torch.uint8)

    def read(self, arguments: Mapping[str, Any]) -> Tensor:
        """The mapped bytes."""
        return self._data

    def close(self) -> None:
        """Forget the mapping."""
        self._data = torch.empty(0, dtype=torch.uint8)


def _created(path: Path, num_bytes: int) -> mmap.mmap:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, num_bytes)  # a file that is only truncated ends the writer where memory lacks
        return mmap.mmap(descriptor, num_bytes)
    except OSError as error:
        path.unlink(missing_ok=True)
        raise EngineError(
            f"{path.parent} has no room for a bucket of {num_bytes >> 20} MiB ({error.strerror}): set vllm_transport='tcp' "
            "or a smaller bucket, or give the container more shared memory (docker run --shm-size)."
        ) from error
    finally:
        os.close(descriptor)

"""The manifest of a checkpoint: size and digest of each file, verified on resume.

Digests are XXH3 (128 bits), which is as fast as reading the files. They detect damage and are not a signature: anyone who can
write into the folder can write another manifest.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path
from pickle import UnpicklingError
from typing import TYPE_CHECKING

import xxhash
from safetensors import SafetensorError

from lowpeak.errors import CheckpointError

if TYPE_CHECKING:
    from lowpeak.ranks import Ranks

MANIFEST_FILE = "lowpeak_manifest.json"
_NOT_RECORDED = (MANIFEST_FILE, "README.md")  # users edit a card
_REMEDY = "Resume from another checkpoint, or start a new run."
_READ_ON_RESUME = (  # patterns of files that are read on resume if they exist
    *("model*.safetensors*", "pytorch_model*", "adapter_*", "*/adapter_*", "optimizer*", "scheduler.pt", "scaler.pt"),
    *("lowpeak_*", "shards/*", "reference/*", "critic/*"),
)

# Exceptions that reading a damaged file may raise.
_DAMAGE = (ValueError, KeyError, TypeError, AttributeError, RuntimeError, EOFError, UnpicklingError, SafetensorError)

Entries = Mapping[str, tuple[int, str]]  # size in bytes and digest, by the file's path in the checkpoint


@contextmanager
def explain_read_errors(file: Path, missing: str = "") -> Iterator[None]:
    """Raise CheckpointError if the block cannot read a checkpoint's file; with `missing` if it does not exist."""
    try:
        yield
    except CheckpointError:
        raise
    except FileNotFoundError as error:
        raise CheckpointError(
            missing or f"checkpoint {file.parent} has no {file.name}. Resume from another checkpoint."
        ) from error
    except OSError as error:
        raise CheckpointError(f"cannot read {file}: {error.strerror}.") from error
    except _DAMAGE as error:
        raise CheckpointError(f"{file} is damaged (truncated or changed: {type(error).__name__}). {_REMEDY}") from error


def digest_files(folder: Path, ranks: Ranks) -> Entries:
    """Return the entries of this rank's share of a folder's files, after all ranks wrote them."""
    # Rank 0 lists the files for all: hosts may see a shared disk differently.
    names = ranks.call_on_first(lambda: _files(folder))[ranks.rank :: ranks.world_size]
    return {name: ((folder / name).stat().st_size, _digest(folder / name)) for name in names}


def write_manifest(folder: Path, shares: Sequence[Entries]) -> None:
    """Write the manifest of a folder from the ranks' `shares` of its entries."""
    entries = {name: entry for share in shares for name, entry in share.items()}
    manifest = {"digest": _digest_of(entries), "files": entries}
    (folder / MANIFEST_FILE).write_text(json.dumps(manifest, indent=1), encoding="utf-8")


def verify_manifest(checkpoint: Path, ranks: Ranks) -> None:
    """Raise CheckpointError on all ranks if a checkpoint's files changed. Each rank reads a share of them."""
    entries = ranks.call_on_first(lambda: _read_manifest(checkpoint))
    damages = ranks.call_on_all(
        lambda: _find_damage(checkpoint, entries, list(entries)[ranks.rank :: ranks.world_size])
    )
    damage = next((each for each in damages if each is not None), None)
    if damage is not None:
        raise CheckpointError(f"{damage}. {_REMEDY}")


def _read_manifest(checkpoint: Path) -> Entries:
    file = checkpoint / MANIFEST_FILE
    missing = (
        f"{file} is missing (checkpoints of earlier versions have none), so the checkpoint cannot be verified. Resume from "
        "another checkpoint, or start a new run from its weights (model=that folder)."
    )
    with explain_read_errors(file, missing):
        manifest = json.loads(file.read_text(encoding="utf-8"))
        entries = {str(name): (int(size), str(digest)) for name, (size, digest) in manifest["files"].items()}
        if manifest["digest"] != _digest_of(entries):
            raise ValueError("the digest of the entries does not match")
    for name in _files(checkpoint):
        if name not in entries and any(fnmatch(name, read) for read in _READ_ON_RESUME):
            raise CheckpointError(
                f"{checkpoint / name} was not saved by the run. Remove it, or resume from another checkpoint."
            )
    return entries


def _find_damage(checkpoint: Path, entries: Entries, names: Sequence[str]) -> str | None:
    """Describe the first file that is missing or changed, without a full stop; None if there is none."""
    for name in names:
        file, (size, digest) = checkpoint / name, entries[name]
        try:
            if file.stat().st_size != size:
                return f"{file} is damaged: it has {file.stat().st_size:,} bytes, and {size:,} were saved"
            if _digest(file) != digest:
                return f"{file} is damaged: its bytes differ from those that were saved"
        except FileNotFoundError:
            return f"{file} is missing"
        except OSError as error:
            return f"{file} cannot be read ({error.strerror})"
    return None


def _files(folder: Path) -> list[str]:
    """Return a folder's files except the manifest, the card and hidden ones, largest first."""
    files = sorted((f for f in folder.rglob("*") if f.is_file()), key=lambda file: (-file.stat().st_size, file))
    names = [file.relative_to(folder).as_posix() for file in files]
    return [name for name in names if name not in _NOT_RECORDED and not name.startswith(".")]


def _digest_of(entries: Entries) -> str:
    return xxhash.xxh3_128(json.dumps(entries).encode()).hexdigest()


def _digest(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, xxhash.xxh3_128).hexdigest()

"""A sentence to the user, said once where several ranks of a host have it to say."""

from __future__ import annotations

import hashlib
import os
import sys
from pathlib import Path

from lowpeak.errors import show_controls


def tell(sentence: str) -> None:
    """Write a line to stderr, unless another rank that the same torch agent started has written the very same.

    The ranks' folders for errors, which the agent makes side by side, say who was first.
    """
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if file is None or _is_first(Path(file).parent.parent, sentence):
        print(show_controls(sentence), file=sys.stderr, flush=True)


def _is_first(folder: Path, sentence: str) -> bool:
    said = folder / f"lowpeak-{hashlib.sha256(sentence.encode()).hexdigest()[:16]}"
    try:
        said.touch(exist_ok=False)
    except FileExistsError:
        return False
    except OSError:  # no such folder: say it
        return True
    return True

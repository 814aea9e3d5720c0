"""Messages to the user on stderr, said once if several ranks of a host have the same one."""

from __future__ import annotations

import hashlib
import os
import sys
from pathlib import Path

from lowpeak.errors import show_controls


def tell(message: str) -> None:
    """Write a line to stderr, unless another rank that the same torch agent started has written it.

    The agent makes the ranks' folders for errors side by side: a file beside them says who was first.
    """
    folder = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if folder is not None:
        try:
            name = f"lowpeak-{hashlib.sha256(message.encode()).hexdigest()[:16]}"
            (Path(folder).parents[1] / name).touch(exist_ok=False)
        except FileExistsError:
            return
        except OSError:  # no such folder
            pass
    print(show_controls(message), file=sys.stderr, flush=True)

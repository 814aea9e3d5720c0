"""The Chromium or Chrome of this machine: `python tests/with_browser/find_browser.py` prints its path, or ends with status 1."""

from __future__ import annotations

import os
import shutil
import sys

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def find_browser() -> str | None:
    """Return the path of the program that BROWSER_PATH names, or else of the first that is installed."""
    names = (os.environ.get("BROWSER_PATH"), *NAMES)
    return next((path for name in names if name and (path := shutil.which(name))), None)


if __name__ == "__main__":
    found = find_browser()
    print(found or f"no browser: install chromium, or set BROWSER_PATH (looked for {', '.join(NAMES)})")
    sys.exit(found is None)

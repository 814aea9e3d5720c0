"""Makes and saves the warm-started model: `python -m benchmarks.harness.warm REQUEST`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from benchmarks.harness.report import print_result
from benchmarks.harness.task import WARM_STEPS, warm_start


def main(request: dict[str, Any]) -> None:
    """Train from `seed` and save into `folder`."""
    warm_start(Path(request["folder"]), request["seed"], 1 if request.get("quick") else WARM_STEPS)
    print_result({"folder": request["folder"]})


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))

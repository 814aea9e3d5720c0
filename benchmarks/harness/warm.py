"""Makes and saves the warm-started model: `python -m benchmarks.harness.warm REQUEST`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from benchmarks.harness.report import print_result
from benchmarks.harness.task import train_judge, warm_start


def main(request: dict[str, Any]) -> None:
    """Train from `seed` and save into `folder`; below it, in `judge`, a reward model that began there, where it is asked for."""
    folder = Path(request["folder"])
    warm_start(folder, request["seed"])
    if request.get("judge_steps"):
        train_judge(folder, folder / "judge", request["seed"], request["judge_steps"])
    print_result({"folder": request["folder"]})


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))

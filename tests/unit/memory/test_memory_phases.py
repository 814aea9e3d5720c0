"""Phases are names: light to import, and keys as they stand."""

import subprocess
import sys

from lowpeak.memory.phases import Phase


def test_a_phase_is_its_name_in_a_metric_key():
    assert f"peak_memory/{Phase.TRAIN}" == "peak_memory/train"


def test_phases_are_known_without_loading_torch():
    code = "import sys, lowpeak.memory.phases; print('torch' in sys.modules)"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert ended.stdout == "False\n"

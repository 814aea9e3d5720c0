"""Each family trains with the numbers of plain forwards, on the path that docs/families.md has.

One family of each class runs with the other tests, the rest in `make test-families`.
"""

from __future__ import annotations

import pytest
import transformers
from family_checks import TRAINING_FAILS, check_family, skip_unsupported
from packaging.version import Version
from table import documented_rows, documented_version, row_of

from case_selection import mark_extended
from model_families import FAMILIES

# Plain attention with experts, latent keys, windows, sinks, shared keys, linear attention of three kinds, state-space layers of
# two kinds, convolutions, an indexer, chunks, states outside of the cache, no position ids, images.
CLASSES = (
    *(
        "Qwen3-MoE",
        "DeepSeek-V3",
        "Gemma 3",
        "gpt-oss",
        "Gemma 3n",
        "Qwen3.5",
        "Kimi-Linear",
        "OLMo-hybrid",
        "Falcon-H1",
    ),
    *("Jamba", "LFM2", "GLM-5", "Llama 4", "MiniMax", "Bloom", "Mistral 3"),
)


@pytest.mark.parametrize("family", mark_extended(list(FAMILIES), CLASSES, "release"))
def test_a_family_trains_as_the_table_says(tmp_path, family):
    skip_unsupported(family, TRAINING_FAILS)
    report = check_family(family, tmp_path)
    assert not report.problems
    # Older releases of transformers have fewer families on the fast path.
    if Version(transformers.__version__) >= documented_version():
        assert documented_rows()[family].startswith(row_of(family, report)), "run python tests/families/table.py"

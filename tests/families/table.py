"""docs/families.md: what each model family does. `python tests/families/table.py [FAMILY ...]` checks families and writes it.

With names the other rows stay as they are. README.md gets the families by path.
"""

from __future__ import annotations

import contextlib
import io
import multiprocessing
import os
import re
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from packaging.version import Version

TESTS = Path(__file__).parents[1]
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path[:0] = [str(TESTS.parent / "src"), str(TESTS.parent), str(TESTS)]

from model_families import FAMILIES, is_known, make_family  # noqa: E402

if TYPE_CHECKING:
    from family_checks import FamilyReport

PAGE = TESTS.parent / "docs" / "families.md"
README = TESTS.parent / "README.md"
HEADER = "| Family | Model type | Trains | Generation | Layout | LoRA on all linear layers | Plan | vLLM names |"
START, END = "<!-- families, by tests/families/table.py -->\n", "<!-- end of families -->"
GENERATION = {"loop": "decode loop", "generate": "`generate()`", "equal": "`generate()`, equal lengths"}
TEXT = """# Model families

Made by `python tests/families/table.py`, with transformers {version}. For each family a random model
with the structure of the published checkpoints, made small, trains with GRPO on a CPU in float32:
two optimizer steps of one rollout, with a KL to a reference. A family *trains* if these numbers
equal those of plain forwards of each sequence by itself:

| Number | Largest difference allowed |
| -- | -- |
| scored log-probs, of the old policy and of the reference | 1e-5 |
| sampled log-probs | 2e-4 |
| gradient of a step, relative to its norm | 5e-5 |
| greedy tokens of six prompts: logit below the largest one | 2e-3, a near tie |
| weights after saving and loading | 0 |

- **Generation**: by the native engine's decode loop, or by `model.generate()`, which is slower
  because each completion forwards its prompt. With *equal lengths* only prompts of one length are
  in a batch, because padding changes the family's states in transformers: this is slow.
- **Layout**: *shared*: without padding, and a prompt is forwarded once for its completions;
  *padded*: to the longest sequence of a micro-batch. The default is the first that is possible.
- **LoRA**: *without experts*: experts are parameters of three dimensions, which `all-linear` does
  not name; `lora_target_parameters` adapts them. `all-linear` also leaves out Mamba's `out_proj`,
  routers and parts for images.
- **Plan**: whether `lowpeak plan` and `memory_budget` can rehearse the family; otherwise their
  error. The bytes of a sequence's keys, values and states are measured on fake tensors; for each
  family that the decode loop generates for they equal those of the loop's slots within 2 %.
- **vLLM names**: whether weight sync gives vLLM each tensor of the published checkpoint once, with
  its name, shape and values. Whether vLLM can load a family depends on its version.
- In 4 bits only linear layers are quantised: experts of three dimensions keep 16 bits; embeddings,
  norms and the head become fp32 under an adapter, as peft prepares them.

`lowpeak env MODEL` prints a model's generation path, layout, LoRA targets, recurrent kernels and
cache bytes, from its config alone:

```
lowpeak env Qwen/Qwen3-30B-A3B                 # a hub name, a folder or a config.json
lowpeak env Qwen/Qwen3-30B-A3B --format json
```

"recurrent kernels" are the packages whose kernels the model's recurrent layers call here:
`causal_conv1d`, `fla` (flash-linear-attention), `mamba_ssm`, or transformers' reference code.
Recurrent layers run as rows of their own, with states that transformers' interface hands on. Their
kernels' arguments for packed rows (`cu_seqlens`, `seq_idx`) are not used, so these packages change
the speed, and not the layout.

In bf16 (`bf16=True`) one family of each class trains a step: log-probs and gradient differ from
those of plain forwards in bf16 by less than these do from float32, and without experts by at most
0.01 (mean of a log-prob) and 5 % (gradient). Experts are chosen by rounded scores, so with experts
there is no smaller bound.

{table}
{missing}"""


def row_of(family: str, report: FamilyReport) -> str:
    """Return the family's row of the table up to its plan."""
    trains = "; ".join(report.problems + report.remarks) or "yes"
    cells = (family, f"`{FAMILIES[family][0]}`", trains, GENERATION[report.generation], report.layout, report.lora)
    return f"| {' | '.join(cells)} |"


def readme_table(rows: dict[str, str]) -> str:
    """Return README's table: the families of each generation path and layout."""
    paths: dict[str, list[str]] = {}
    for family, row in rows.items():
        _, _, trains, generation, layout, *_ = (cell.strip() for cell in row.strip("|").split("|"))
        words = f"{generation}, {layout}" if trains.startswith("yes") else "does not train"
        paths.setdefault(words, []).append(family)
    lines = [f"| {path} | {len(families)} | {', '.join(families)} |" for path, families in paths.items()]
    return "\n".join(["| Generation and layout | Families | |", "| -- | -- | -- |", *lines, ""])


def documented_rows() -> dict[str, str]:
    """Return the rows of docs/families.md by family."""
    lines = PAGE.read_text(encoding="utf-8").partition(HEADER)[2].splitlines()
    rows = {line.split("|")[1].strip(): line for line in lines if line.startswith("|")}
    return {family: row for family, row in rows.items() if family in FAMILIES}


def documented_version() -> Version:
    """Return the transformers with which docs/families.md was made."""
    found = re.search(r"with transformers ([0-9.]+[0-9])", PAGE.read_text(encoding="utf-8"))
    assert found is not None
    return Version(found[1])


def check(family: str) -> str:
    """Check a family and return its row, also if the check fails."""
    from family_checks import FamilyReport, check_family
    from name_checks import check_weight_names
    from plan_checks import check_plan

    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        try:
            report = check_family(family, Path(folder))
        except Exception as error:
            report = FamilyReport(generation="generate", problems=[f"no: {error!r:.100}"])
        try:
            plan = check_plan(family)
        except Exception as error:
            plan = f"no: {error!r:.100}"
        names = check_weight_names(make_family(family))
    return f"{row_of(family, report)} {plan} | {names} |"


def main() -> None:
    from transformers import __version__ as version

    chosen, known = sys.argv[1:] or list(FAMILIES), [family for family in FAMILIES if is_known(family)]
    rows = documented_rows() if sys.argv[1:] else {}
    checked = [family for family in known if family in chosen]
    # A new process now and then returns what models leave behind.
    workers = int(os.environ.get("WORKERS", "2"))
    with multiprocessing.get_context("spawn").Pool(workers, maxtasksperchild=16) as pool:
        for family, row in zip(checked, pool.imap(check, checked), strict=True):
            print(row, flush=True)
            rows[family] = row
    lacking = ", ".join(family for family in FAMILIES if family not in known)
    missing = f"\ntransformers {version} lacks: {lacking}.\n" if lacking else ""
    table = "\n".join([HEADER, "| -- | -- | -- | -- | -- | -- | -- | -- |", *(rows[family] for family in known)])
    PAGE.write_text(TEXT.format(version=version, table=table, missing=missing), encoding="utf-8")
    before, _, rest = README.read_text(encoding="utf-8").partition(START)
    after = rest.partition(END)[2]
    families = readme_table({family: rows[family] for family in known})
    README.write_text(f"{before}{START}\n{families}\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()

"""Rows that end in every way that rows can."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

from lowpeak.selftest.table import require, row


@row("works", quick=True)
def works(bench):
    bench.record(device=bench.device.type, share=0.5, largest=float("inf"))
    return f"{bench.device.type}, {len(list(bench.folder.glob('*.json')))} | files"


@row("is wrong")
def is_wrong(bench):
    print("what it printed")
    bench.record(found=2)
    require(False, "1 is not 2")


@row("breaks")
def breaks(bench):
    raise ValueError("no such number\nand more")


@row("dies")
def dies(bench):
    os.kill(os.getpid(), signal.SIGSEGV)


@row("leaves")
def leaves(bench):
    print("last words", file=sys.stderr, flush=True)
    os._exit(3)


@row("hangs", seconds=25)
def hangs(bench):
    child = subprocess.Popen(["sleep", "600"])
    with open(os.environ["SELFTEST_CHILD"], "w") as file:
        file.write(str(child.pid))
    time.sleep(600)


@row("lacks", "2 GPUs")
def lacks(bench):
    raise AssertionError("it does not run")


@row("takes long", in_default_run=False)
def takes_long(bench):
    return "quick" if bench.quick else "full"

"""Real vLLM servers for tests: a small model in a folder, `lowpeak serve` beside the test, and what is left of it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from urllib.error import URLError
from urllib.request import Request as UrlRequest
from urllib.request import urlopen

from child_processes import free_port
from lowpeak.arguments.vllm import SERVER_TOKEN
from lowpeak.vllm.server import ServerVllm
from tiny_models import char_tokenizer, tiny_model

SECRET = "only for tests"
OPTIONS = ("--enforce-eager", "--kv-cache-memory-bytes", str(16 << 20), "--max-num-seqs", "32")
START_SECONDS = 240.0


def model_of(**changes):
    """Heads 32 wide, which vLLM's attention wants on CPUs."""
    return tiny_model(**({"hidden": 128, "context": 1024} | changes))


def model_in(folder, **changes):
    model_of(**changes).save_pretrained(folder)
    char_tokenizer().save_pretrained(folder)
    return folder


def environment():
    return {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1] / "src"), SERVER_TOKEN: SECRET}


class Serving:
    """`lowpeak serve` as a process; `group` is the process group of vLLM's own processes, which it leads."""

    def __init__(self, model, log, *options):
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        words = ["--model", str(model), "--port", str(self.port), "--dtype", "float32", *OPTIONS, *options]
        with log.open("wb") as out:
            command = [sys.executable, "-m", "lowpeak", "serve", *words]
            self.process = subprocess.Popen(command, env=environment(), stdout=out, stderr=out, start_new_session=True)

    @property
    def group(self):
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        (leader,) = (int(pid) for pid in children)
        return leader

    def vllm(self):
        found = ServerVllm(self.url, SECRET)
        found.wait(START_SECONDS)
        return found

    def close(self):
        if self.process.poll() is None:
            self.process.terminate()
        self.process.wait(20)


@contextmanager
def serving(model, log, *options):
    made = Serving(model, log, *options)
    try:
        yield made
    finally:
        made.close()


def members(group):
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, its_group = stat.read_text().rpartition(")")[2].split()[:3]
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(its_group) == group and state not in "ZX":
            found.append(int(stat.parent.name))
    return found


def metric(url, name):
    """One of a server's metrics; 0 where it does not answer."""
    request = UrlRequest(f"{url}/metrics", headers={"Authorization": f"Bearer {SECRET}"})
    try:
        text = urlopen(request, timeout=5).read().decode()
    except (URLError, OSError):
        return 0
    lines = [line for line in text.splitlines() if line.startswith(f"vllm:{name}")]
    return int(sum(float(line.rsplit(" ", 1)[1]) for line in lines))


def until(condition, seconds, what):
    """What the condition gives, once it is true."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if found := condition():
            return found
        time.sleep(0.05)
    raise AssertionError(f"not within {seconds} s: {what}")

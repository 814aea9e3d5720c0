"""Bytes and seconds of a completion by each route of a vLLM server: `python -m benchmarks.vllm_routes [--quick]`.

A server of a tiny model generates waves of completions of full length, by one route after the other. `client` and `server` are
seconds of CPU of this process and of the API server, whose engine is another process; `seconds` is the wall time, generation
included. All are per completion, means without the first wave of a route.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.harness.report import mean, print_result, versions
from benchmarks.harness.shapes import make_model, make_tokenizer
from lowpeak.vllm.protocol import Request
from lowpeak.vllm.requests import COMPLETIONS, GENERATE, TOKENS
from lowpeak.vllm.server import ServerVllm
from lowpeak.vllm.serving.command import CPU, ServerSpec, free_ports
from lowpeak.vllm.serving.process import ServerProcess

_TIMEOUT = 600.0
_OPTIONS = ("--enforce-eager", "--kv-cache-memory-bytes", str(256 << 20), "--disable-log-stats")


def cpu_seconds(pid: int) -> float:
    """Return the seconds of CPU that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure_route(vllm: ServerVllm, pid: int, route: Any, count: int, length: int, waves: int) -> dict[str, Any]:
    """Return bytes and seconds of a completion by this route."""
    http, sizes, rows = vllm._http, list[int](), list[dict[str, float]]()
    exchange = http._exchange

    async def counted(*args: Any) -> tuple[int, bytes]:
        status, content = await exchange(*args)
        sizes.append(len(content))
        return status, content

    params = {"max_tokens": length, "min_tokens": length, "ignore_eos": True, "stop_token_ids": [], "logprobs": 0}
    requests = [Request((2 + i % 8, 5, 6), {**params, "seed": i}) for i in range(count)]
    for _ in range(waves + 1):
        vllm._route = route
        began, client, server = time.perf_counter(), time.process_time(), cpu_seconds(pid)
        http._exchange = counted  # type: ignore
        answers = vllm.complete(requests, _TIMEOUT)
        del http._exchange
        assert {len(answer.ids) for answer in answers} == {length}
        ended = time.perf_counter() - began, time.process_time() - client, cpu_seconds(pid) - server
        rows.append(dict(zip(("seconds", "client", "server"), (each / count for each in ended), strict=True)))
    per_token = sorted(sizes)[len(sizes) // 2] / length  # the median: calls to the workers are short
    return {"route": route, "bytes": per_token * length} | {
        name: mean([row[name] for row in rows[1:]]) for name in rows[0]
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one wave of 8 completions of 64 tokens")
    quick = parser.parse_args().quick
    count, length, waves = (8, 64, 1) if quick else (64, 1024, 3)
    with tempfile.TemporaryDirectory() as folder:
        make_model(128, 2, 4096).save_pretrained(folder)
        make_tokenizer(4096).save_pretrained(folder)
        spec = ServerSpec(folder, port=free_ports(1)[0], devices=(CPU,), dtype="float32", options=_OPTIONS)
        process = ServerProcess(spec, os.environ, Path(folder) / "log")
        process.start()
        try:
            vllm = ServerVllm(spec.url, spec.token)
            vllm.info(_TIMEOUT)
            assert process.pid is not None
            for route in (TOKENS, GENERATE, COMPLETIONS):
                row = measure_route(vllm, process.pid, route, count, length, waves)
                print_result({"count": count, "length": length, **row, **versions()})
        finally:
            process.stop()


if __name__ == "__main__":
    main()

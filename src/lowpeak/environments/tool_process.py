"""Calls of tools in processes of their own, which a time limit can end: `tool_isolation="process"`.

A call starts `python -m lowpeak.environments.tool_process`, which loads the tool from its file or module, and gets the arguments
as JSON on its standard input. What the tool prints goes to the log, its result alone comes back.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import inspect
import json
import os
import re
import signal
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from lowpeak.environments.tool_runner import text_of
from lowpeak.errors import ArgumentError

MAX_RESULT = 1 << 20  # bytes
_SECRET = re.compile(r"TOKEN|KEY|SECRET|PASSWORD|CREDENTIAL", re.IGNORECASE)  # in the names of environment variables


def tool_address(name: str, function: Callable[..., Any]) -> dict[str, str]:
    """Return where another process finds a function; ArgumentError if it cannot."""
    module, qualified = getattr(function, "__module__", ""), getattr(function, "__qualname__", "<")
    source = inspect.getsourcefile(inspect.unwrap(function)) if inspect.isfunction(function) else None
    if module == "__main__" or source is None or not qualified.isidentifier():
        raise ArgumentError(
            f"tool_isolation='process' needs tools that another process can load, but {name!r} is not a function at the top of "
            "a module: move it into a file of its own and import it."
        )
    # A module of a package may import its neighbours by relative names.
    return {"name": qualified} | ({"module": module} if "." in module else {"file": source})


async def call_in_process(address: Mapping[str, str], arguments: Mapping[str, Any]) -> str:
    """Return the text of the result of a call in a new process, which ends with this coroutine; RuntimeError if it fails."""
    variables = {name: value for name, value in os.environ.items() if not _SECRET.search(name)}
    paths = os.pathsep.join(path for path in sys.path if path)
    command = (sys.executable, "-m", "lowpeak.environments.tool_process")
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env={**variables, "PYTHONPATH": paths},
        start_new_session=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(json.dumps({**address, "arguments": dict(arguments)}).encode())
        process.stdin.write_eof()
        output = await _read(process.stdout)
        status = None if output else await process.wait()
    finally:
        # The tool may have started processes that still run.
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
    if not output:
        raise RuntimeError(f"the tool's process ended with status {status}")
    answer = json.loads(output)
    if "error" in answer:
        raise RuntimeError(answer["error"])
    return str(answer["result"])


async def _read(stream: asyncio.StreamReader) -> bytes:
    """Return the answer, one line: threads and processes of the tool may keep the stream open."""
    output = b""
    while not output.endswith(b"\n") and (part := await stream.read(1 << 16)):
        output += part
        if len(output) > MAX_RESULT:
            raise RuntimeError(f"the result is longer than {MAX_RESULT} bytes")
    return output


def _load(request: Mapping[str, str]) -> Callable[..., Any]:
    if "module" in request:
        target: Any = importlib.import_module(request["module"])
    else:
        path = Path(request["file"])
        sys.path.insert(0, str(path.parent))
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None
        assert spec.loader is not None
        target = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(target)
    function: Callable[..., Any] = getattr(target, request["name"])
    return function


def main() -> None:
    """Run one call in this process."""
    request = json.load(sys.stdin)
    # A lone surrogate becomes a question mark, as in a result from a thread.
    result_file = os.fdopen(os.dup(1), "w", encoding="utf-8", errors="replace")
    os.dup2(2, 1)
    try:
        result = _load(request)(**request["arguments"])
        answer = {"result": str(asyncio.run(_awaited(result)) if inspect.isawaitable(result) else result)}
    except BaseException as error:
        answer = {"error": text_of(error)}
    print(json.dumps(answer, ensure_ascii=False), file=result_file, flush=True)


async def _awaited(awaitable: Any) -> Any:
    return await awaitable


if __name__ == "__main__":
    main()

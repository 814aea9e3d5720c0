"""Entry point of vLLM's API server: `python -m lowpeak.vllm.serving.entrypoint --model ...`, with vLLM's options.

`vllm serve` is not used, because it looks for a distribution named vllm, which the CPU build lacks.
"""

from __future__ import annotations

import os
import runpy
import sys

from lowpeak.watchdog import PARENT_VARIABLE, exit_with_parent, watch_parent_in_forks

SCALE_OUT = "--enable-scale-out"
_CHUNKED = ("--enable-chunked-prefill", "--no-enable-chunked-prefill")

# Processes that vLLM spawns import this module again as their main module, so they watch their parent too.
if PARENT_VARIABLE in os.environ:
    # In spawned processes the module's name is __mp_main__.
    exit_with_parent(first=__name__ == "__main__")
    watch_parent_in_forks()


def main() -> None:
    """Run vLLM's server with the options in `sys.argv`."""
    if SCALE_OUT in sys.argv and not _has(SCALE_OUT):
        sys.argv.remove(SCALE_OUT)
    if _on_cpu() and not any(word.replace("_", "-").split("=")[0] in _CHUNKED for word in sys.argv):
        sys.argv.append(_CHUNKED[1])
    try:
        from vllm.entrypoints.launchers.api_server.entry import main as serve
    except ImportError:
        # Before vLLM 0.32.
        runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__")
    else:
        serve()


def _on_cpu() -> bool:
    """Return whether vLLM runs on CPUs, whose generators cannot rewind, as chunked prefill needs."""
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())


def _has(option: str) -> bool:
    """Return whether this version of vLLM's server accepts the option."""
    from dataclasses import fields

    try:
        from vllm.entrypoints.launchers.cli_args import FrontendArgs
    except ImportError:
        from vllm.entrypoints.openai.cli_args import FrontendArgs
    return option.removeprefix("--").replace("-", "_") in {field.name for field in fields(FrontendArgs)}


if __name__ == "__main__":
    main()

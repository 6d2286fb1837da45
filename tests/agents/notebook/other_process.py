"""A process that has opened a notebook, for tests to kill."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

_BEGIN = """
import asyncio, json, os, sys
from sandbox_kernel import Notebook

def tell(**facts):
    print(json.dumps(facts), flush=True)

async def main():
"""
_END = """
    await asyncio.sleep(600)

asyncio.run(main())
"""


@contextlib.contextmanager
def caller(code: str, **env: str) -> Iterator[tuple[subprocess.Popen[str], dict[str, Any]]]:
    """A process that runs the code of a coroutine, and what this told of itself."""
    lines = "".join(f"    {line}\n" for line in code.strip().split("\n"))
    with subprocess.Popen(
        [sys.executable, "-c", _BEGIN + lines + _END],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **env},
    ) as process:
        try:
            assert process.stdout is not None
            yield process, json.loads(process.stdout.readline())
        finally:
            process.kill()


@contextlib.contextmanager
def killed_caller(code: str, **env: str) -> Iterator[dict[str, Any]]:
    """What a process told before it was killed with SIGKILL, which has happened."""
    with caller(code, **env) as (process, told):
        process.kill()
        process.wait()
        yield told

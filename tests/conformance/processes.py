"""The processes in a sandbox."""

from __future__ import annotations

from sandbox_kernel.sandboxes.base import SandboxHandle
from tests.helpers.waiting import LIMIT

_RUNNING = """
import os, sys
for pid in filter(str.isdigit, os.listdir("/proc")):
    try:
        words = open(f"/proc/{pid}/cmdline", "rb").read().split(b"\\0")
    except OSError:
        continue
    if sys.argv[1].encode() in words and int(pid) != os.getpid():
        print(pid)
"""


async def running(sandbox: SandboxHandle, word: str) -> list[str]:
    """The processes in the sandbox that have ``word`` as an argument."""
    return (await sandbox.exec("python3", ["-c", _RUNNING, word], timeout=LIMIT)).stdout.split()


async def not_running(sandbox: SandboxHandle, word: str) -> bool:
    return not await running(sandbox, word)

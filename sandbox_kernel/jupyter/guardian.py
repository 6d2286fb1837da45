"""The guardian of a launcher: a process that ends the sandbox when the launcher was killed.

A client kills its kernel's process (SIGKILL) if it takes too long, or is killed itself with all its
children. The launcher cannot clean up then. Its guardian, which it forks before it has threads,
waits for its end and does.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal

from sandbox_kernel.errors import SandboxError
from sandbox_kernel.records import Records
from sandbox_kernel.sandboxes.backends import load_backend
from sandbox_kernel.sandboxes.base import SandboxHandle

_REMOVE_TIMEOUT = 60.0
_SIZE = 64 * 1024


class Guardian:
    """The launcher's side."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    @classmethod
    def start(cls) -> Guardian:
        """To be called before this process has threads."""
        read, write = os.pipe()
        if os.fork():
            os.close(read)
            return cls(write)
        try:
            _wait(_become_guardian(read))
        finally:
            os._exit(0)

    def watch(self, handle: SandboxHandle) -> None:
        """End this sandbox if this process ends without doing so."""
        sandbox = {"backend": handle.backend, "name": handle.name, "sandbox_id": handle.id}
        os.write(self._fd, json.dumps(sandbox).encode() + b"\n")


def _become_guardian(read: int) -> int:
    """Leave the launcher's process group, and keep only the pipe's read end; its descriptor."""
    os.setsid()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    os.chdir("/")
    null = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(null, standard)
    os.dup2(read, 3)
    os.closerange(4, os.sysconf("SC_OPEN_MAX"))
    return 3


def _wait(pipe: int) -> None:
    sandboxes = b""
    while piece := os.read(pipe, _SIZE):
        sandboxes += piece
    for line in sandboxes.splitlines():
        asyncio.run(_remove(**json.loads(line)))


async def _remove(backend: str, name: str, sandbox_id: str) -> None:
    """Ignores errors: nobody reads the output of this process, and the lease ends the sandbox."""
    try:
        if Records().load(backend, name).id == sandbox_id:
            async with asyncio.timeout(_REMOVE_TIMEOUT):
                await load_backend(backend).remove(name)
    except (SandboxError, OSError):
        return

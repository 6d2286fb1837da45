"""The guardian of a launcher: a process that ends the sandbox of one that was killed.

A client ends its kernel's process with SIGKILL if it takes too long, or is killed itself with all
that it has started. Nothing of the launcher's runs then; its guardian, a fork of it that was made
before it had threads, only waits for that.
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
        """End this sandbox, if it is still there when this process is not."""
        facts = {"backend": handle.backend, "name": handle.name, "sandbox_id": handle.id}
        os.write(self._fd, json.dumps(facts).encode() + b"\n")


def _become_guardian(read: int) -> int:
    """Get out of reach of the signals that are meant for the launcher, and hold nothing of its but
    the pipe's end that it is waited at; the number of that."""
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
    told = b""
    while piece := os.read(pipe, _SIZE):
        told += piece
    for line in told.splitlines():
        asyncio.run(_remove(**json.loads(line)))


async def _remove(backend: str, name: str, sandbox_id: str) -> None:
    """An error helps nobody here: nobody reads what this process says, and there is the lease."""
    try:
        if Records().load(backend, name).id == sandbox_id:
            await asyncio.wait_for(load_backend(backend).remove(name), _REMOVE_TIMEOUT)
    except (SandboxError, OSError, asyncio.TimeoutError):
        return

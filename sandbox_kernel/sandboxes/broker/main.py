"""The broker as a process: ``main`` runs it until no client needs it.

Started by startup.py. It holds a lock for its whole life, so each socket has one broker.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import pkgutil
import signal
import socket
import sys
from pathlib import Path

from sandbox_kernel.sandboxes.base import SandboxClient
from sandbox_kernel.sandboxes.broker.server import Broker

IDLE = 120.0
MAX_LOG = 2**20
_LOG_CHECK = 30.0
EXIT_TAKEN = 75


def main(factory: str, path: str, idle: str = str(IDLE)) -> int:
    """Serve the client that ``factory`` ("module:name") makes, on a socket at ``path``.

    Writes a line to stdout when it listens. EXIT_TAKEN if there is such a broker already.
    """
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    lock = os.open(path + ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return EXIT_TAKEN
    client = pkgutil.resolve_name(factory)()
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(path)
    os.chmod(path, 0o600)
    listener.listen(128)
    os.write(1, b"\n")
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 1)
    try:
        asyncio.run(_serve(client, listener, float(idle), Path(path + ".log")))
    finally:
        # While the lock is held, so that it cannot be a successor's.
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
    return 0


async def _serve(client: SandboxClient, listener: socket.socket, idle: float, log: Path) -> None:
    loop = asyncio.get_running_loop()
    async with asyncio.TaskGroup() as group:
        serving = group.create_task(Broker(client, listener, idle).serve())
        trimming = group.create_task(_keep_short(log))
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, serving.cancel)
        await asyncio.wait([serving])
        trimming.cancel()


async def _keep_short(log: Path) -> None:
    """Empty the log, which is this process's stderr, whenever it has grown too long."""
    while True:
        with contextlib.suppress(OSError):
            if os.stat(log).st_size > MAX_LOG:
                os.truncate(log, 0)
        await asyncio.sleep(_LOG_CHECK)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

"""One request to process 1 of a jail, which ``guest/jail/init.py`` serves.

Used by the client and by its streams. Answers are bounded and checked: process 1 is ours, but it
lives among hostile code.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from sandbox_kernel.errors import SandboxTimeout
from sandbox_kernel.guest.commands.process_one import MAX_REQUEST
from sandbox_kernel.sandboxes.channel import Channel, Hangup

SOCKET = "init.sock"
_RETRY = 0.01


def listen(runtime: Path) -> socket.socket:
    """The socket that a jail answers on. Only the host has its path: the jail gets the descriptor,
    so code in the jail cannot put something else in its place."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with _short_path(runtime) as path:
            listener.bind(path)
        listener.listen(512)
    except BaseException:
        listener.close()
        raise
    return listener


async def open_request(
    runtime: Path, message: dict[str, Any], fds: Sequence[int] = (), *, timeout: float
) -> tuple[Channel, dict[str, Any]]:
    """Send a request and wait for the first answer. Hangup if no jail is there to answer;
    SandboxTimeout; SandboxError for a request that is too long."""
    channel = Channel(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM), MAX_REQUEST)
    try:
        async with asyncio.timeout(timeout):
            await _connect(channel.socket, runtime)
            await channel.send(message, fds)
            return channel, await channel.receive()
    except TimeoutError:
        channel.close()
        raise SandboxTimeout(f"The jail did not answer within {timeout:g} s.") from None
    except BaseException:
        channel.close()
        raise


async def _connect(sock: socket.socket, runtime: Path) -> None:
    while True:
        try:
            with _short_path(runtime) as path:
                with contextlib.suppress(PermissionError):
                    os.utime(path)  # keeps programs that delete old temporary files away
                return sock.connect(path)
        except BlockingIOError:
            await asyncio.sleep(_RETRY)  # many others are connecting just now
        except (FileNotFoundError, ConnectionError) as error:
            raise Hangup from error


@contextlib.contextmanager
def _short_path(runtime: Path) -> Iterator[str]:
    """A path of the socket that fits the 107 bytes that a Unix socket's path may have."""
    folder = os.open(runtime, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{SOCKET}"
    finally:
        os.close(folder)

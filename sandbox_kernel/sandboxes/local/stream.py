"""The streams of a command in the local jail.

The command has the far ends of pipes (or of a socket, or a terminal) that the host made, so its
bytes take no way through another process, and a full pipe pushes back on its own.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from sandbox_kernel.errors import ExecFailed, SandboxGone
from sandbox_kernel.sandboxes.async_fd import AsyncFd
from sandbox_kernel.sandboxes.channel import Channel, Hangup
from sandbox_kernel.sandboxes.command import Command
from sandbox_kernel.sandboxes.controlled_stream import (
    START_TIMEOUT,
    ControlledStream,
    check_started,
)
from sandbox_kernel.sandboxes.local.jail_request import open_request
from sandbox_kernel.sandboxes.stream_pairs import stream_ends


class LocalStream(ControlledStream):
    """A command in a jail. Made by ``open_stream``."""

    async def resize(self, rows: int, columns: int) -> None:
        if self._terminal and not self._closed:
            assert isinstance(self._stdout, AsyncFd)
            self._stdout.resize(rows, columns)


async def open_stream(
    runtime: Path,
    command: Command,
    fields: Mapping[str, Any],
    *,
    sandbox: str,
    why_gone: Callable[[], str],
) -> LocalStream:
    """Start a command. ExecFailed if that cannot be done, SandboxGone if the jail has ended."""
    message: dict[str, Any] = {"kind": "exec", **fields}
    terminal = command.tty is not None
    if command.tty is not None:
        message["tty"] = list(command.tty)
    with stream_ends(duplex=command.duplex, terminal=terminal) as (theirs, ours):
        # A socket is both stdin and stdout.
        given = theirs * 2 if len(theirs) == 1 else theirs
        try:
            request, answer = await open_request(runtime, message, given, timeout=START_TIMEOUT)
        except Hangup:
            raise SandboxGone(why_gone()) from None
        try:
            check_started(answer, command, sandbox)
            if terminal:
                ours.append(_take_terminal(request, sandbox))
            ports = [AsyncFd(end) for end in ours]
        except BaseException:
            request.close()
            raise
        sock = next((end for end in ours if isinstance(end, socket.socket)), None)
        ours.clear()
    stdin, stdout, stderr = ports if len(ports) == 3 else (ports[0], ports[0], None)
    return LocalStream(
        request,
        lambda: SandboxGone(why_gone()),
        stdin=stdin,
        stdout=stdout,
        stderr=stderr,
        terminal=terminal,
        sock=sock,
    )


def _take_terminal(request: Channel, sandbox: str) -> int:
    if len(request.fds) != 1 or not os.isatty(request.fds[0]):
        raise ExecFailed(f"Sandbox {sandbox!r} did not give its terminal to the host.")
    return request.fds.pop()

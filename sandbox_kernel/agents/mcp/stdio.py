"""The door on stdin and stdout: one client, which has started this process.

Descriptor 1 carries the protocol's frames and nothing else, from the first moment to the last: what
prints, and what other processes inherit as their stdout, goes to stderr.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import re
import stat
from collections.abc import AsyncIterator, Iterator
from typing import Any

import anyio
from mcp.server.stdio import stdio_server

from sandbox_kernel.agents.mcp.policy import Policy
from sandbox_kernel.agents.mcp.sandboxes import Sandboxes
from sandbox_kernel.agents.mcp.server import SandboxServer

_MARGIN = 16 * 2**20
_ID = re.compile(rb'"id"\s*:\s*(\d{1,15}|"[\w-]{1,100}")')
_ID_WITHIN = 300
"""Bytes at either end of a message in which its id is looked for, if it is too long."""


async def serve_stdio(policy: Policy) -> None:
    """Serve until the client closes our stdin, or we are cancelled."""
    longest = 2 * policy.limits.file_bytes + policy.limits.code_chars * 6 + _MARGIN
    with _private_streams() as (stdin, stdout):
        async with Sandboxes(policy) as sandboxes:
            lines: Any = Lines(stdin, longest)
            writer = anyio.wrap_file(io.TextIOWrapper(stdout, encoding="utf-8"))
            server = SandboxServer(sandboxes)
            low = server._lowlevel_server
            async with stdio_server(lines, writer) as (incoming, outgoing):
                await low.run(incoming, outgoing, low.create_initialization_options())


@contextlib.contextmanager
def _private_streams() -> Iterator[tuple[int, io.BufferedWriter]]:
    """Our stdin and stdout, which nothing else in this process sees meanwhile."""
    stdin, stdout = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    try:
        os.dup2(nothing, 0)
        os.dup2(2, 1)
        with open(stdout, "wb", closefd=False) as writer:
            yield stdin, writer
    finally:
        os.dup2(stdin, 0)
        os.dup2(stdout, 1)
        for fd in (stdin, stdout, nothing):
            os.close(fd)


class Lines:
    """The lines of a descriptor. Unlike a thread that reads, it can be cancelled."""

    def __init__(self, fd: int, longest: int) -> None:
        self._fd = fd
        self._longest = longest

    async def __aiter__(self) -> AsyncIterator[str]:
        loop = asyncio.get_running_loop()
        pipe = os.fdopen(self._fd, "rb", buffering=0, closefd=False)
        if stat.S_ISREG(os.fstat(self._fd).st_mode):  # no loop watches it, and no read waits
            for line in pipe:
                yield line.decode(errors="replace")
            return
        reader = asyncio.StreamReader(limit=self._longest)
        protocol = asyncio.StreamReaderProtocol(reader)
        transport, _ = await loop.connect_read_pipe(lambda: protocol, pipe)
        try:
            while line := await self._line(reader):
                yield line.decode(errors="replace")
        finally:
            transport.close()
            os.set_blocking(self._fd, True)  # others may have it, such as a shell its terminal

    async def _line(self, reader: asyncio.StreamReader) -> bytes:
        """The next line, b"" at the end. For one that is too long, a call of a method that does not
        exist, so that its sender gets an error; the next one is read as usual."""
        ends: list[bytes] = []
        while True:
            try:
                line = await reader.readuntil(b"\n")
            except asyncio.IncompleteReadError as error:
                line = error.partial
            except asyncio.LimitOverrunError as error:
                part = await reader.readexactly(error.consumed)
                ends = [*(ends or [part[:_ID_WITHIN]])[:1], part[-_ID_WITHIN:]]
                continue
            return _too_long(b" ".join(ends) + line[-_ID_WITHIN:]) if ends else line


def _too_long(ends: bytes) -> bytes:
    found = _ID.search(ends)
    request = b'"id": %s, "method": "a message that is too long"' % found[1] if found else b""
    return b"{%s}\n" % (b'"jsonrpc": "2.0", ' + request if request else b"")

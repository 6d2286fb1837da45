"""Feeds a command its input and collects its output, also where it does not end in time."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from sandbox_kernel.sandboxes.exec_stream import ExecStream


@dataclass
class Output:
    """The beginnings of stdout and stderr, as far as they have come."""

    stdout: bytearray = field(default_factory=bytearray)
    stderr: bytearray = field(default_factory=bytearray)
    truncated: bool = False
    """There was more, which is gone."""


async def collected(stream: ExecStream, stdin: bytes, most: int, output: Output) -> None:
    """Fill ``output`` with at most so many bytes of each stream, until both have ended."""

    async def feed() -> None:
        with contextlib.suppress(OSError):  # it may end without reading its input
            await stream.write(stdin)
            await stream.close_stdin()

    async def collect(read: Callable[[], Awaitable[bytes]], kept: bytearray) -> None:
        while chunk := await read():
            room = most - len(kept)
            output.truncated = output.truncated or len(chunk) > room
            kept += chunk[: max(0, room)]

    tasks = [
        asyncio.ensure_future(work)
        for work in (
            feed(),
            collect(stream.read, output.stdout),
            collect(stream.read_stderr, output.stderr),
        )
    ]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

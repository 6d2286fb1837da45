"""Streams files and folders into a sandbox, and out of it; ``guest/copy_stream.py`` is there.

``sandbox-kernel cp`` and ``SandboxFiles`` call this, on the loop of the sandbox's handle. A copy
into an existing folder keeps its own name there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from pathlib import Path
from typing import TypeVar

from sandbox_kernel import audit
from sandbox_kernel.errors import ExecFailed, QuotaExceeded, SandboxTimeout
from sandbox_kernel.guest import copy_stream
from sandbox_kernel.sandboxes.base import ExecStream, SandboxHandle
from sandbox_kernel.sandboxes.command import Command
from sandbox_kernel.untrusted_text import printable
from sandbox_kernel.workspace.copy_out import CopyWriter
from sandbox_kernel.workspace.reports import Quota

PATIENCE = 60.0
"""Seconds without a byte after which a copy fails."""
_MAX_WORDS = 4096
T = TypeVar("T")


async def copy_out(handle: SandboxHandle, path: str, receiver: CopyWriter) -> None:
    """Copy a file or folder of the sandbox to where ``receiver`` writes, which is closed then."""
    try:
        stream = await handle.open_command(_command(handle, "out", path))
        async with stream:
            while True:
                data = await in_time(handle, stream.read())
                if not data:
                    raise ExecFailed(
                        f"Sandbox {handle.name!r} stopped sending files: "
                        f"{await last_output(handle, stream)}"
                    )
                if await asyncio.to_thread(receiver.feed, data):
                    break
    finally:
        await asyncio.shield(asyncio.to_thread(receiver.close))


async def copy_in(handle: SandboxHandle, source: str, path: str, quota: Quota | None = None) -> int:
    """Copy a file or folder of this host to a path of the sandbox. The number of files.

    Beyond ``quota`` nothing is copied.
    """
    path_here = await asyncio.to_thread(Path(source).resolve, strict=True)
    if quota is not None:
        await asyncio.to_thread(_check, str(path_here), quota)
    stream = await handle.open_command(_command(handle, "in", path, path_here.name))
    async with stream:
        pieces = copy_stream.entries(str(path_here))
        try:
            while (piece := await asyncio.to_thread(next, pieces, b"")) != b"":
                await in_time(handle, stream.write(piece))
            await in_time(handle, stream.close_stdin())
        except (BrokenPipeError, ConnectionError):
            pass  # the other side says why it stopped reading
        said = await last_output(handle, stream)
        code = await in_time(handle, stream.wait())
    if code != 0 or not said.isdecimal():
        raise ExecFailed(f"{source} was not copied into sandbox {handle.name!r}: {said}")
    return int(said)


async def last_output(handle: SandboxHandle, stream: ExecStream) -> str:
    """The end of what a command says, on both streams."""
    said = bytearray()
    for read in (stream.read, stream.read_stderr):
        while data := await in_time(handle, read()):
            said += data[: max(0, _MAX_WORDS - len(said))]
    return printable(said.decode(errors="replace")).strip()[-500:]


async def in_time(handle: SandboxHandle, doing: Awaitable[T]) -> T:
    """Await one read or write; SandboxTimeout if the sandbox does nothing for PATIENCE."""
    limit = asyncio.timeout(PATIENCE)
    try:
        async with limit:
            return await doing
    except TimeoutError:
        if not limit.expired():
            raise
        raise SandboxTimeout(
            f"Sandbox {handle.name!r} has neither sent nor accepted a byte for {PATIENCE:g} s."
        ) from None


def _check(path: str, quota: Quota) -> None:
    size = 0
    for files, (_, header) in enumerate(copy_stream.headers(path), 1):
        size += int(header.get("size", 0))
        if files > quota.max_files or size > quota.max_bytes:
            raise QuotaExceeded(
                f"{printable(path)} has more than {quota.max_files} files and folders, or "
                f"{quota.max_bytes} bytes. Nothing was copied. Raise the limits."
            )


def _command(handle: SandboxHandle, way: str, path: str, *names: str) -> Command:
    audit.note(handle, "copied", way=way, path=path)
    program = Path(copy_stream.__file__).read_text(encoding="utf-8")
    return Command([handle.python or "python3", "-I", "-c", program, way, path, *names])

"""What a session's commands and files have in common: work on the background loop with the SDK's
errors, and temporary files of the host's, which are bounded."""

from __future__ import annotations

import asyncio
import io
import tempfile
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import IO, Any, TypeVar, cast

from agents.sandbox.errors import (
    ExecTimeoutError,
    ExecTransportError,
    WorkspaceArchiveReadError,
    WorkspaceArchiveWriteError,
)

from sandbox_kernel.errors import QuotaExceeded, SandboxError, SandboxTimeout, WorkspaceRefused
from sandbox_kernel.tunnel.background import run

T = TypeVar("T")

IN_MEMORY = 2**22
"""Bytes from which on a temporary file is one."""


async def translated(argv: list[str], timeout: float | None, work: Coroutine[Any, Any, T]) -> T:
    """Do work on the background loop; its errors become the SDK's. None of them makes the SDK or
    us start another sandbox."""
    try:
        return await run(work)
    except QuotaExceeded:
        raise
    except SandboxTimeout as error:
        raise ExecTimeoutError(
            command=argv, timeout_s=timeout, context={"reason": str(error)}, cause=error
        ) from error
    except (OSError, SandboxError) as error:
        raise ExecTransportError(
            command=argv, context={"reason": str(error)}, cause=error, message=str(error)
        ) from error


async def judged(
    failure: type[WorkspaceArchiveReadError] | type[WorkspaceArchiveWriteError],
    root: str,
    work: Callable[[IO[bytes]], None],
) -> IO[bytes]:
    """A temporary file that ``work`` has filled, in a thread, for which a cancellation waits."""
    target = tempfile.TemporaryFile()  # noqa: SIM115  (the caller's)
    doing = asyncio.ensure_future(asyncio.to_thread(work, target))
    try:
        await asyncio.shield(doing)
    except (WorkspaceRefused, QuotaExceeded, OSError) as error:
        target.close()
        raise failure(path=Path(root), context={"reason": str(error)}, cause=error) from error
    except BaseException:
        await asyncio.wait([doing])
        target.close()
        raise
    target.seek(0)
    return cast(IO[bytes], target)


def spooled(source: io.IOBase, limit: int) -> IO[bytes]:
    target = tempfile.SpooledTemporaryFile(IN_MEMORY)  # noqa: SIM115  (the caller's)
    copy(cast(IO[bytes], source), cast(IO[bytes], target), limit)
    target.seek(0)
    return cast(IO[bytes], target)


def copy(source: IO[bytes], target: IO[bytes], limit: int) -> None:
    total = 0
    while chunk := source.read(2**18):
        total += len(chunk)
        if total > limit:
            raise QuotaExceeded(f"More than {limit} bytes were given; nothing was written.")
        target.write(chunk)

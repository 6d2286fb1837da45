"""Running a command in a sandbox with bytes in and bytes out, bounded, and killed when it is late.

``SandboxHandle.exec`` gives text, which is not enough for files and archives. All of this runs on
the loop of the sandbox's objects.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import signal
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import IO

from sandbox_kernel.errors import QuotaExceeded, SandboxTimeout
from sandbox_kernel.sandboxes.base import MAX_OUTPUT, ExecStream, SandboxHandle

_CHUNK = 2**18
_MAX_STDERR = 2**16


@dataclass(frozen=True)
class RawResult:
    """Outcome of a command that ran to its end. Signal N gives the exit code -N."""

    stdout: bytes
    stderr: bytes
    exit_code: int
    truncated: bool = False

    @property
    def problem(self) -> str:
        """What it said on stderr, for an error message."""
        return self.stderr.decode(errors="replace").strip()[-500:]


async def run_raw(
    handle: SandboxHandle,
    argv: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    cwd: str | None = None,
    stdin: IO[bytes] | None = None,
    timeout: float | None = None,
    max_output: int = MAX_OUTPUT,
) -> RawResult:
    """Run a command to its end; of each of its streams ``max_output`` bytes are kept. When it is
    late, its process group is killed and SandboxTimeout raised."""
    out, err = _Kept(max_output), _Kept(max_output)
    code = await _run(handle, argv, env, cwd, stdin, timeout, out.take, err.take)
    cut = out.truncated or err.truncated
    return RawResult(bytes(out.data), bytes(err.data), code, cut)


async def run_into(
    handle: SandboxHandle,
    argv: Sequence[str],
    target: IO[bytes],
    *,
    limit: int,
    env: Mapping[str, str] | None = None,
    timeout: float | None = None,
) -> RawResult:
    """Run a command whose stdout goes to a file of the host's. QuotaExceeded, and the command is
    killed, beyond ``limit`` bytes."""
    written = 0

    def take(chunk: bytes) -> None:
        nonlocal written
        written += len(chunk)
        if written > limit:
            raise QuotaExceeded(
                f"Sandbox {handle.name!r} sent more than {limit} bytes, so nothing of it was "
                f"taken. Delete files in it that need not be kept."
            )
        target.write(chunk)

    err = _Kept(_MAX_STDERR)
    code = await _run(handle, argv, env, "/", None, timeout, take, err.take)
    return RawResult(b"", bytes(err.data), code)


class _Kept:
    def __init__(self, limit: int) -> None:
        self.data = bytearray()
        self.truncated = False
        self._limit = limit

    def take(self, chunk: bytes) -> None:
        room = self._limit - len(self.data)
        self.truncated = self.truncated or len(chunk) > room
        self.data += chunk[:room]


async def _run(
    handle: SandboxHandle,
    argv: Sequence[str],
    env: Mapping[str, str] | None,
    cwd: str | None,
    stdin: IO[bytes] | None,
    timeout: float | None,
    take_out: Callable[[bytes], None],
    take_err: Callable[[bytes], None],
) -> int:
    stream: ExecStream | None = None
    try:
        async with asyncio.timeout(timeout):
            stream = await handle.open_stream(argv, env=env, cwd=cwd)
            async with asyncio.TaskGroup() as group:
                group.create_task(_pour(stream.read, take_out))
                group.create_task(_pour(stream.read_stderr, take_err))
                group.create_task(_feed(stream, stdin or io.BytesIO()))
            return await stream.wait()
    except TimeoutError as error:
        if isinstance(error, SandboxTimeout):
            raise
        raise SandboxTimeout(
            f"{argv[0]!r} in sandbox {handle.name!r} did not end within {timeout:g} s and was "
            f"killed. Give a longer timeout if it needs one."
        ) from None
    except BaseExceptionGroup as group_error:
        raise group_error.exceptions[0] from None  # the first failure has cancelled the others
    finally:
        if stream is not None:
            await asyncio.shield(end(stream))


async def end(stream: ExecStream) -> None:
    """End a command, with all of its process group, and free its streams."""
    try:
        with contextlib.suppress(Exception):  # closing it ends the command in any case
            await stream.send_signal(signal.SIGKILL)
    finally:
        await stream.close()


async def _pour(read: Callable[[], Awaitable[bytes]], take: Callable[[bytes], None]) -> None:
    while chunk := await read():
        take(chunk)


async def _feed(stream: ExecStream, stdin: IO[bytes]) -> None:
    # The command may end without reading its input.
    with contextlib.suppress(OSError):
        while chunk := stdin.read(_CHUNK):
            await stream.write(chunk)
        await stream.close_stdin()

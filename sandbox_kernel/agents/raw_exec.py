"""Running a command in a sandbox with bytes in and bytes out, bounded, and killed when it is late.

``SandboxHandle.exec`` gives text, which is not enough for files and archives. All of this runs on
the loop of the sandbox's objects.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import signal
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Any

from sandbox_kernel import audit
from sandbox_kernel.errors import QuotaExceeded, SandboxError, SandboxTimeout
from sandbox_kernel.sandboxes.base import MAX_OUTPUT, Command, ExecStream, SandboxHandle

_CHUNK = 2**18
_DRAIN = 1.0
"""Seconds without output after which an ended command's output is taken to be whole: what it has
left in the background may hold it open."""
_MOST_DRAIN = 60.0
_GRACE = 2.0
_OWN_SESSION = """
command -v setsid >/dev/null 2>&1 || exec "$@"
pid=
stop() { [ -z "$pid" ] || kill -KILL "-$pid" "$pid" 2>/dev/null; exit 143; }
trap stop HUP TERM INT
exec 3<&0
setsid "$@" <&3 3<&- &
pid=$!
exec 3<&-
wait "$pid"
"""
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


def _in_own_session(argv: Sequence[str]) -> list[str]:
    return ["/bin/sh", "-c", _OWN_SESSION, "command", *argv]


async def run_raw(
    handle: SandboxHandle,
    argv: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    cwd: str | None = None,
    stdin: IO[bytes] | None = None,
    timeout: float | None = None,
    max_output: int = MAX_OUTPUT,
    own_session: bool = False,
) -> RawResult:
    """Run a command to its end; of each of its streams ``max_output`` bytes are kept. When it is
    late, its process group is killed and SandboxTimeout raised. With ``own_session``, what it
    leaves in the background goes on; when it is late, that is killed, too."""
    out, err = _Kept(max_output), _Kept(max_output)
    code = await _run(
        handle, argv, env, cwd, stdin, timeout, out.take, err.take, own_session=own_session
    )
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
    *,
    own_session: bool = False,
) -> int:
    stream: ExecStream | None = None
    try:
        async with asyncio.timeout(timeout):
            audit.note_command(handle, argv)
            words = _in_own_session(argv) if own_session else argv
            stream = await handle.open_command(Command(words, env or {}, cwd))
            return await _to_the_end(stream, stdin or io.BytesIO(), take_out, take_err)
    except TimeoutError as error:
        if isinstance(error, SandboxTimeout):
            raise
        raise SandboxTimeout(
            f"{argv[0]!r} in sandbox {handle.name!r} did not end within {timeout:g} s and was "
            f"killed. Give a longer timeout if it needs one."
        ) from None
    finally:
        if stream is not None:
            await asyncio.shield(end(stream))


async def _to_the_end(
    stream: ExecStream,
    stdin: IO[bytes],
    take_out: Callable[[bytes], None],
    take_err: Callable[[bytes], None],
) -> int:
    pieces = 0

    async def pour(read: Callable[[], Awaitable[bytes]], take: Callable[[bytes], None]) -> None:
        nonlocal pieces
        while chunk := await read():
            pieces += 1
            take(chunk)

    out = asyncio.create_task(pour(stream.read, take_out))
    err = asyncio.create_task(pour(stream.read_stderr, take_err))
    feed = asyncio.create_task(_feed(stream, stdin))
    code = asyncio.create_task(stream.wait())
    tasks = {out, err, feed, code}
    try:
        await _first_of({out, err, code}, until=code)
        deadline = time.monotonic() + _MOST_DRAIN
        while not (out.done() and err.done()) and time.monotonic() < deadline:
            seen = pieces
            await asyncio.wait({out, err}, timeout=_DRAIN)
            if pieces == seen:
                break
        for poured in (out, err):
            if poured.done():
                poured.result()  # raises what went wrong
        return code.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _first_of(tasks: set[asyncio.Task[Any]], *, until: asyncio.Task[Any]) -> None:
    """Wait for one task. What another one raises until then ends the wait."""
    while not until.done():
        done, tasks = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()


async def end(stream: ExecStream) -> None:
    """End a command, with all of its process group, and free its streams."""
    try:
        # A sandbox that has ended needs no signal; closing the stream ends the command in any case.
        with contextlib.suppress(SandboxError, OSError, TimeoutError):
            await stream.send_signal(signal.SIGTERM)
            await asyncio.wait_for(stream.wait(), _GRACE)
        with contextlib.suppress(SandboxError, OSError):
            await stream.send_signal(signal.SIGKILL)
    finally:
        await stream.close()


async def _feed(stream: ExecStream, stdin: IO[bytes]) -> None:
    # The command may end without reading its input.
    with contextlib.suppress(OSError):
        while chunk := stdin.read(_CHUNK):
            await stream.write(chunk)
        await stream.close_stdin()

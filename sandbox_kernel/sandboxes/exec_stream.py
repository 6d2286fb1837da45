"""ExecStream: a running command in a sandbox, with its standard streams."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from typing import Self

from sandbox_kernel.sandboxes.results import ExecResult


class ExecStream(ABC):
    """A running command with its standard streams.

    Closing the stream ends the command (and, with some providers, its children too), so what must
    outlive it is started with ``SandboxHandle.spawn_command``.
    """

    socket: socket.socket | None = None
    """A connected, byte-exact duplex socket that *is* the command's stdin and stdout, if the
    backend can give one (``Command.duplex``). Whoever takes it must not use ``read`` and
    ``write``; ``close`` still closes it."""
    write_ahead: int | None = None
    """Most bytes to hand to a slow ``write`` at once: urgent frames wait behind them."""

    @abstractmethod
    async def read(self) -> bytes:
        """The next piece of stdout; ``b""`` at its end."""

    @abstractmethod
    async def read_stderr(self) -> bytes:
        """The next piece of stderr; ``b""`` at its end."""

    @abstractmethod
    async def write(self, data: bytes) -> None:
        """Write to stdin, waiting while the command does not read it."""

    @abstractmethod
    async def close_stdin(self) -> None:
        """End of input for the command."""

    @abstractmethod
    async def wait(self) -> int:
        """Exit code; -N if signal N ended the command."""

    @abstractmethod
    async def send_signal(self, signum: int) -> None:
        """Send a signal to the command's process group. No error if it has ended."""

    @abstractmethod
    async def resize(self, rows: int, columns: int) -> None:
        """Set the size of the terminal of a command with ``tty``."""

    @abstractmethod
    async def close(self) -> None:
        """End the command if it still runs, and free everything. Idempotent."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


async def run_to_end(stream: ExecStream, stdin: bytes, max_output: int) -> ExecResult:
    """Feed a command its input and collect its output, up to ``max_output`` bytes of each."""

    async def feed() -> None:
        # The command may end without reading its input.
        with contextlib.suppress(OSError):
            if stdin:
                await stream.write(stdin)
            await stream.close_stdin()

    (out, cut_out), (err, cut_err), _ = await asyncio.gather(
        _collect(stream.read, max_output), _collect(stream.read_stderr, max_output), feed()
    )
    return ExecResult(
        stdout=out.decode(errors="replace"),
        stderr=err.decode(errors="replace"),
        exit_code=await stream.wait(),
        truncated=cut_out or cut_err,
    )


async def _collect(read: Callable[[], Awaitable[bytes]], limit: int) -> tuple[bytes, bool]:
    kept = bytearray()
    truncated = False
    while chunk := await read():
        room = limit - len(kept)
        truncated = truncated or len(chunk) > room
        kept += chunk[:room]
    return bytes(kept), truncated

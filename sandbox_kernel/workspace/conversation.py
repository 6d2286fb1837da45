"""A conversation with the workspace helper of a sandbox: a stream, a thread, a time limit.

``persist`` and ``hydrate`` hold one each. The sandbox is hostile: its messages are bounded and
parsed here, and its reports of progress extend the time limit only as long as they add up.
"""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from sandbox_kernel.errors import QuotaExceeded, WorkspaceError
from sandbox_kernel.guest.workspace.messages import Ended, Stalled
from sandbox_kernel.tunnel import background
from sandbox_kernel.tunnel.tunnel import Tunnel
from sandbox_kernel.untrusted_text import printable
from sandbox_kernel.wire.mux import BULK
from sandbox_kernel.workspace.reports import OnProgress, Progress, Quota

TARGET = "workspace"
"""The stream target that the agent connects to the helper."""
STALLED_AFTER = 300.0
"""Seconds of silence after which a transfer fails."""
LONGEST = 24 * 3600.0
"""Seconds that a whole transfer may take."""
MOST_PROBLEMS = 200
_CLEARING = 2.0
"""Seconds that a cancelled transfer waits for its thread, which may be blocked in the store."""
_PROGRESS_INTERVAL = 0.1
_FILES, _BYTES = 1000, 64 * 2**20
"""Progress that a sandbox must report to get more time."""
T = TypeVar("T")


class Handle(Protocol):
    """Names a sandbox; ``SandboxHandle`` does."""

    @property
    def backend(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def workdir(self) -> str: ...


class Attached(Protocol):
    """A sandbox whose agent is attached, such as a ``SandboxedKernel``."""

    @property
    def handle(self) -> Handle: ...
    @property
    def tunnel(self) -> Tunnel: ...


@dataclass(frozen=True)
class Talk:
    """The thread's view of a conversation."""

    sock: socket.socket
    progress: OnProgress = lambda progress: None
    cancelled: threading.Event = field(default_factory=threading.Event)

    def check(self) -> None:
        """Raise ``Ended`` if nobody wants the result any more."""
        if self.cancelled.is_set():
            raise Ended("cancelled")


async def converse(
    sandbox: Attached,
    name: str,
    work: Callable[[Talk], T],
    progress: OnProgress | None,
    stalled_after: float | None = None,
) -> T:
    """Run ``work`` in its own thread, over a stream to the sandbox. On the background loop.

    Cancelling closes the stream, which ends the thread unless the store blocks it.
    """
    stalled_after = stalled_after or STALLED_AFTER
    sock = sandbox.tunnel.channel(TARGET, BULK)
    sock.settimeout(stalled_after)
    talk = Talk(sock, _throttled(asyncio.get_running_loop(), progress))
    working = asyncio.ensure_future(background.aside(work, talk))
    try:
        return await asyncio.shield(working)
    except asyncio.CancelledError:
        talk.cancelled.set()
        quiet_close(sock)
        done, _ = await asyncio.wait([working], timeout=_CLEARING)
        if not done:
            working.cancel()
        elif not working.cancelled():
            working.exception()  # mark it as retrieved
        raise
    except Stalled as error:
        raise WorkspaceError(
            f"The transfer of workspace {name!r} failed: sandbox {sandbox.handle.name!r} made no "
            f"progress for {stalled_after:g} s ({error}). "
            f"`sandbox-kernel logs {sandbox.handle.name}` may say why. Try again."
        ) from None
    except Ended:
        if sandbox.tunnel.failure is not None:
            raise sandbox.tunnel.failure from None
        raise WorkspaceError(
            f"Sandbox {sandbox.handle.name!r} closed the transfer of workspace {name!r} without "
            f"giving a reason. `sandbox-kernel logs {sandbox.handle.name}` may say why. Try again."
        ) from None
    finally:
        sock.close()


def _throttled(loop: asyncio.AbstractEventLoop, progress: OnProgress | None) -> OnProgress:
    """Pass progress from a thread to the loop, at most ten times a second."""
    last = 0.0

    def report(value: Progress) -> None:
        nonlocal last
        now = time.monotonic()
        if progress is not None and now - last >= _PROGRESS_INTERVAL:
            last = now
            loop.call_soon_threadsafe(progress, value)

    return report


class Patience:
    """The time limit of one conversation: its socket's timeout, extended by progress.

    The socket itself notices when no bytes flow. A sandbox that only reports progress must report
    enough of it, else it could hold the conversation open for ever.
    """

    def __init__(self, sock: socket.socket, *, files: int = _FILES) -> None:
        self._step = files
        self._limit = sock.gettimeout() or LONGEST
        self._started = self._moved_at = time.monotonic()
        self._files = self._bytes = 0

    def moved(self) -> None:
        """Requested data has arrived."""
        self._moved_at = time.monotonic()
        if self._moved_at - self._started > LONGEST:
            raise Stalled(f"it takes longer than {LONGEST / 3600:g} hours")

    def reported(self, files: int, size: int) -> None:
        """The sandbox reports how far it is. Raises ``Stalled`` if that is too little."""
        if files >= self._files + self._step or size >= self._bytes + _BYTES:
            self._files, self._bytes = max(files, self._files), max(size, self._bytes)
            self.moved()
        elif time.monotonic() - self._moved_at > self._limit:
            raise Stalled("it reports activity, but no progress")


def parse_object(payload: bytes | bytearray) -> dict[str, Any]:
    """Parse a message that must be a JSON object. ValueError."""
    try:
        value = json.loads(bytes(payload))
    except (ValueError, RecursionError):
        raise ValueError("invalid JSON") from None
    if isinstance(value, dict):
        return value
    raise ValueError("JSON that is not an object")


def checked_count(value: Any) -> int:
    """A count that the sandbox reports; 0 if it is invalid."""
    return value if type(value) is int and 0 <= value < 2**63 else 0


def checked_problems(value: Any) -> list[str]:
    """The problems that the sandbox reports, printable and bounded. TypeError."""
    return [printable(str(problem)[:500]) for problem in list(value)[:MOST_PROBLEMS]]


def reported_failure(sandbox: str, message: dict[str, Any], quota: Quota) -> WorkspaceError:
    """The error for a FAILED message."""
    text = printable(str(message.get("message"))[:1000])
    if message.get("kind") != "quota":
        return WorkspaceError(f"In sandbox {sandbox!r}: {text}")
    offenders = message.get("offenders")
    listed = [
        f"{printable(str(item[1])[:300])} ({checked_count(item[0])})"
        for item in (offenders if isinstance(offenders, list) else [])[:10]
        if isinstance(item, list) and len(item) == 2
    ]
    return QuotaExceeded(
        f"The workspace in sandbox {sandbox!r} has {text}; {quota.max_files} files and "
        f"{quota.max_bytes} bytes are allowed. Biggest: {', '.join(listed) or 'unknown'}. Delete "
        f"some, list them in .sandboxignore, or raise the quota."
    )


def quiet_close(sock: socket.socket) -> None:
    """Shut a conversation down from any thread: its reader and writer wake up with ``Ended``."""
    with suppress(OSError):  # already closed
        sock.shutdown(socket.SHUT_RDWR)

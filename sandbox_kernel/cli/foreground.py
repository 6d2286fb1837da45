"""Runs coroutines on the background loop while the main thread gets signals.

Ctrl-C (SIGINT), SIGTERM and SIGHUP cancel the coroutine and wait for its clean-up, up to a limit. A
second signal ends at once. ``each`` does so for several sandboxes in turn.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import signal
import socket
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Sequence
from typing import Any, TypeVar

from sandbox_kernel.cli.formatting import note
from sandbox_kernel.errors import SandboxError, SandboxNotFound, SandboxTimeout
from sandbox_kernel.tunnel.background import submit
from sandbox_kernel.untrusted_text import printable

T = TypeVar("T")

CLEAN_UP = 20.0
"""Seconds that the clean-up of a cancelled coroutine may take."""
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupted(Exception):
    """A signal ended the command. ``at_once``: without waiting for its clean-up."""

    def __init__(self, signum: int, *, at_once: bool = False) -> None:
        super().__init__(f"ended by {signal.Signals(signum).name}")
        self.exit_code = 128 + signum
        self.at_once = at_once


def run(
    coroutine: Coroutine[Any, Any, T],
    *,
    on_signal: Callable[[int], bool] = lambda signum: False,
    also: Sequence[signal.Signals] = (),
) -> T:
    """Run a coroutine on the background loop and return its result.

    ``on_signal`` is called on the loop for the signals above and those in ``also``. If it returns
    False, the coroutine is cancelled, and Interrupted raised after its clean-up.
    """
    wanted = (*_ENDING, *also)
    with _signals(wanted) as arrivals:
        # Signals of other handlers in this process arrive here, too.
        supervised = _supervise(coroutine, arrivals, lambda n: n not in wanted or on_signal(n))
        return submit(supervised).result()


async def _supervise(
    coroutine: Coroutine[Any, Any, T], arrivals: socket.socket, on_signal: Callable[[int], bool]
) -> T:
    """Watch one coroutine on the background loop, and the signals that arrive."""
    loop = asyncio.get_running_loop()
    task = loop.create_task(coroutine)
    caught: list[signal.Signals] = []
    give_up = asyncio.Event()

    def arrived() -> None:
        for signum in arrivals.recv(4096):
            if caught:
                if signum in _ENDING:
                    give_up.set()
            elif not on_signal(signum):
                caught.append(signal.Signals(signum))
                loop.call_later(CLEAN_UP, give_up.set)
                task.cancel()

    giving_up = asyncio.ensure_future(give_up.wait())
    loop.add_reader(arrivals, arrived)
    try:
        await asyncio.wait({task, giving_up}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        loop.remove_reader(arrivals)
        giving_up.cancel()
    if caught and (task.cancelled() or not task.done()):
        raise Interrupted(caught[0], at_once=not task.done())
    return task.result()


@contextlib.asynccontextmanager
async def within(seconds: float | None, problem: str) -> AsyncIterator[None]:
    """Limit the time of a block: SandboxTimeout with this message if it takes longer."""
    limit = asyncio.timeout(seconds)
    try:
        async with limit:
            yield
    except TimeoutError:
        if not limit.expired():
            raise
        raise SandboxTimeout(problem) from None


@contextlib.contextmanager
def _signals(wanted: Sequence[signal.Signals]) -> Iterator[socket.socket]:
    """Deliver these signals as bytes of a socket. A Python handler would run only when the main
    thread wakes up, and a signal that another thread receives does not wake it."""
    arrivals, inlet = socket.socketpair()
    with arrivals, inlet:
        if threading.current_thread() is not threading.main_thread():
            yield arrivals  # only the main thread gets signals
            return
        arrivals.setblocking(False)
        inlet.setblocking(False)
        wakeup = signal.set_wakeup_fd(inlet.fileno(), warn_on_full_buffer=False)
        # Signals that `nohup` or a shell's `&` ignores stay ignored.
        taken = [signum for signum in wanted if signal.getsignal(signum) is not signal.SIG_IGN]
        before = {signum: signal.signal(signum, lambda *_: None) for signum in taken}
        try:
            yield arrivals
        finally:
            for signum, old in before.items():
                signal.signal(signum, old)
            signal.set_wakeup_fd(wakeup)


def named(arguments: argparse.Namespace) -> list[tuple[str, str | None]]:
    """The sandboxes that a command's arguments name."""
    return [(name, arguments.backend) for name in arguments.names]


def each(
    sandboxes: Iterable[tuple[str, str | None]],
    do: Callable[[str, str | None], Coroutine[Any, Any, None]],
    *,
    absent: str = "",
) -> int:
    """Call ``do`` with each sandbox's name and backend in turn, print the names where it worked,
    and return the exit code. With ``absent``, a remark, a missing sandbox is no failure."""
    failed = False
    for name, backend in sandboxes:
        try:
            run(do(name, backend))
        except (SandboxError, OSError) as error:
            if absent and isinstance(error, SandboxNotFound):
                note(f"{error} {absent}")
            else:
                note(str(error))
                failed = True
        else:
            print(printable(name))
    return 1 if failed else 0

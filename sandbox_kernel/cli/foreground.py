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
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from typing import Any, TypeVar

from sandbox_kernel.cli.formatting import note
from sandbox_kernel.errors import SandboxError, SandboxNotFound
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
        supervisor = _Supervisor(arrivals, lambda n: n not in wanted or on_signal(n))
        return submit(supervisor.supervise(coroutine)).result()


class _Supervisor:
    """Watches one coroutine on the background loop, and the signals that arrive."""

    def __init__(self, arrivals: socket.socket, on_signal: Callable[[int], bool]) -> None:
        self._arrivals = arrivals
        self._on_signal = on_signal
        self._caught: signal.Signals | None = None
        self._give_up = asyncio.Event()

    async def supervise(self, coroutine: Coroutine[Any, Any, T]) -> T:
        loop = asyncio.get_running_loop()
        task = loop.create_task(coroutine)
        giving_up = asyncio.ensure_future(self._give_up.wait())
        loop.add_reader(self._arrivals, self._arrived, task)
        try:
            await asyncio.wait({task, giving_up}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            loop.remove_reader(self._arrivals)
            giving_up.cancel()
        if self._caught and not task.done():
            raise Interrupted(self._caught, at_once=True)
        if self._caught and task.cancelled():
            raise Interrupted(self._caught)
        return task.result()

    def _arrived(self, task: asyncio.Task[Any]) -> None:
        for signum in self._arrivals.recv(4096):
            if self._caught:
                if signum in _ENDING:
                    self._give_up.set()
            elif not self._on_signal(signum):
                self._caught = signal.Signals(signum)
                asyncio.get_running_loop().call_later(CLEAN_UP, self._give_up.set)
                task.cancel()


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
    """Call ``do`` with each sandbox's name and backend in turn, and print the names where it
    worked; gives the exit code. A missing sandbox is a failure, unless ``absent`` says why it is
    none."""
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

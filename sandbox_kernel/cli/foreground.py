"""Coroutines on the background loop, for a main thread that is sent signals.

Ctrl-C (SIGINT), SIGTERM and SIGHUP cancel the coroutine and wait, up to a limit, until it has
cleaned up behind itself. A second one ends at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from types import FrameType
from typing import Any, TypeVar

from sandbox_kernel.tunnel.background import background_loop, submit

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
    """Run a coroutine on the background loop and give its result.

    ``on_signal`` is called on the loop for the signals above and those in ``also``; if it gives
    False, the coroutine is cancelled, and Interrupted is raised when it has cleaned up.
    """
    loop = background_loop()
    supervisor = _Supervisor(on_signal)

    def handler(signum: int, _frame: FrameType | None) -> None:
        if supervisor.caught:
            raise Interrupted(signum, at_once=True)
        loop.call_soon_threadsafe(supervisor.signal, signum)

    with _handling((*_ENDING, *also), handler):
        return submit(supervisor.supervise(coroutine)).result()


class _Supervisor:
    """Lives on the background loop, but for ``caught``, which the main thread reads."""

    def __init__(self, on_signal: Callable[[int], bool]) -> None:
        self.caught: signal.Signals | None = None
        self._on_signal = on_signal
        self._task: asyncio.Task[Any] | None = None
        self._overdue = asyncio.Event()

    async def supervise(self, coroutine: Coroutine[Any, Any, T]) -> T:
        self._task = task = asyncio.get_running_loop().create_task(coroutine)
        if self.caught:
            task.cancel()
        overdue = asyncio.ensure_future(self._overdue.wait())
        try:
            await asyncio.wait({task, overdue}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            overdue.cancel()
        if self.caught and not task.done():
            raise Interrupted(self.caught, at_once=True)
        if self.caught and task.cancelled():
            raise Interrupted(self.caught)
        return task.result()

    def signal(self, signum: int) -> None:
        if self.caught or (self._task and self._on_signal(signum)):
            return
        self.caught = signal.Signals(signum)
        asyncio.get_running_loop().call_later(CLEAN_UP, self._overdue.set)
        if self._task:
            self._task.cancel()


@contextlib.contextmanager
def _handling(
    signals: Sequence[signal.Signals], handler: Callable[[int, FrameType | None], None]
) -> Iterator[None]:
    before = {}
    if threading.current_thread() is threading.main_thread():
        for signum in signals:
            # What `nohup` or a shell's `&` has set to be ignored stays ignored.
            if signal.getsignal(signum) is not signal.SIG_IGN:
                before[signum] = signal.signal(signum, handler)
    try:
        yield
    finally:
        for signum, old in before.items():
            signal.signal(signum, old)


async def in_thread(function: Callable[..., T], *arguments: Any) -> T:
    """Call something that may block for ever, such as reading a terminal, off the loop.

    Unlike ``asyncio.to_thread`` it never keeps the process from ending.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if future.cancelled():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # type: ignore[arg-type]

    def work() -> None:
        try:
            result = function(*arguments)
        except Exception as error:  # noqa: BLE001  (it is raised where the result is awaited)
            loop.call_soon_threadsafe(settle, None, error)
        else:
            loop.call_soon_threadsafe(settle, result, None)

    threading.Thread(target=work, daemon=True).start()
    return await future

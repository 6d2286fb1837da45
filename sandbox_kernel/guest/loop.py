"""A small event loop: file descriptors, timers, and callbacks soon.

It has the names of asyncio's loop, so that ``fdlink``, ``peer`` and ``pump`` run on either. All
programs in the sandbox use it, because importing asyncio takes longer than starting the agent.
"""

from __future__ import annotations

import heapq
import itertools
import os
import selectors
import signal
import time
from collections import deque

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable, Deque, Dict, List, Optional, Tuple

    from ..wire.event_loop import Callback


def _print_error(error: BaseException) -> None:
    import traceback

    traceback.print_exception(type(error), error, error.__traceback__)


class Timer:
    def __init__(self, callback: Callback, args: Tuple[Any, ...]) -> None:
        self.callback: Optional[Callback] = callback
        self.args = args

    def cancel(self) -> None:
        self.callback = None


class Loop:
    """Runs until ``stop``. Not thread-safe: a signal handler may only write to a watched fd.

    The default selector is the fastest; a PollSelector also takes plain files.
    """

    def __init__(self, selector: Optional[selectors.BaseSelector] = None) -> None:
        self._selector = selector or selectors.DefaultSelector()
        self._callbacks: Dict[int, Dict[int, Tuple[Callback, Tuple[Any, ...]]]] = {}
        self._soon: Deque[Tuple[Callback, Tuple[Any, ...]]] = deque()
        self._timers: List[Tuple[float, int, Timer]] = []
        self._order = itertools.count()
        self._running = True
        self.on_error: Callable[[BaseException], object] = _print_error

    time = staticmethod(time.monotonic)

    def stop(self) -> None:
        self._running = False

    def add_reader(self, fd: int, callback: Callback, *args: Any) -> None:
        self._set(fd, selectors.EVENT_READ, (callback, args))

    def remove_reader(self, fd: int) -> bool:
        return self._set(fd, selectors.EVENT_READ, None)

    def add_writer(self, fd: int, callback: Callback, *args: Any) -> None:
        self._set(fd, selectors.EVENT_WRITE, (callback, args))

    def remove_writer(self, fd: int) -> bool:
        return self._set(fd, selectors.EVENT_WRITE, None)

    def _set(
        self, fd: int, event: int, callback: Optional[Tuple[Callback, Tuple[Any, ...]]]
    ) -> bool:
        wanted = self._callbacks.setdefault(fd, {})
        had = wanted.pop(event, None) is not None
        before = bool(wanted) or had
        if callback is not None:
            wanted[event] = callback
        mask = sum(wanted)
        if not mask:
            del self._callbacks[fd]
            if before:
                self._selector.unregister(fd)
        elif before:
            self._selector.modify(fd, mask)
        else:
            self._selector.register(fd, mask)
        return had

    def call_soon(self, callback: Callback, *args: Any) -> None:
        self._soon.append((callback, args))

    def call_later(self, delay: float, callback: Callback, *args: Any) -> Timer:
        timer = Timer(callback, args)
        heapq.heappush(self._timers, (self.time() + delay, next(self._order), timer))
        return timer

    def watch_children(self, callback: Callable[[], object]) -> None:
        """Call back when a child may have changed its state, and after other handled signals."""
        read, write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

        def woken() -> None:
            os.read(read, 4096)
            callback()

        signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self.add_reader(read, woken)

    def run(self) -> None:
        while self._running:
            self._turn()

    def close(self) -> None:
        self._selector.close()

    def _turn(self) -> None:
        for key, mask in self._selector.select(self._timeout()):
            for event in (selectors.EVENT_READ, selectors.EVENT_WRITE):
                # An earlier callback of this turn may have removed this one.
                wanted = self._callbacks.get(key.fd, {}).get(event)
                if mask & event and wanted is not None:
                    self._call(*wanted)
        now = self.time()
        while self._timers and self._timers[0][0] <= now:
            timer = heapq.heappop(self._timers)[2]
            if timer.callback is not None:
                self._call(timer.callback, timer.args)
        for _ in range(len(self._soon)):
            self._call(*self._soon.popleft())

    def _call(self, callback: Callback, args: Tuple[Any, ...]) -> None:
        try:
            callback(*args)
        except Exception as error:  # noqa: BLE001  (one callback must not end the daemon)
            self.on_error(error)

    def _timeout(self) -> Optional[float]:
        if self._soon:
            return 0.0
        while self._timers and self._timers[0][2].callback is None:
            heapq.heappop(self._timers)
        return max(0.0, self._timers[0][0] - self.time()) if self._timers else None

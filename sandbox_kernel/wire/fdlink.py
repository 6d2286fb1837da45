"""A link over file descriptors: a socket on the host, the connector's stdio in the sandbox."""

import os
from collections import deque
from itertools import islice
from typing import Callable, Deque, Sequence

from .event_loop import LoopLike
from .frames import Buffer

LINK_BUFFER = 512 * 1024
"""Bytes that may wait for the link in this process; more would only delay urgent data."""

_MIN_READ, _MAX_READ = 16 * 1024, 128 * 1024
"""More at once takes more time, not less, and urgent data on other sockets waits for it."""
_MAX_PIECES = 512


class FdLink:
    """Owns its descriptors, and reads and writes them until either side closes.

    ``on_data`` gets every piece, ``on_room`` is called when a full link has room again, and
    ``on_lost`` is called once, with a reason, if the far end or an error ends the link.
    """

    def __init__(self, loop: LoopLike, in_fd: int, out_fd: int) -> None:
        self.on_data: Callable[[bytes], object] = lambda data: None
        self.on_room: Callable[[], object] = lambda: None
        self.on_lost: Callable[[str], object] = lambda why: None
        self.on_closed: Callable[[], object] = lambda: None
        """Called once, however the link ends."""
        self.closed = False
        self._loop = loop
        self._in, self._out = in_fd, out_fd
        self._pending: Deque[Buffer] = deque()
        self._pending_bytes = 0
        self._read_size = _MIN_READ
        self._held = False
        os.set_blocking(in_fd, False)
        os.set_blocking(out_fd, False)

    def start(self) -> None:
        self._loop.add_reader(self._in, self._readable)

    @property
    def room(self) -> int:
        """Bytes that the link takes now."""
        return 0 if self.closed else max(0, LINK_BUFFER - self._pending_bytes)

    def hold(self) -> None:
        """Read nothing until ``release``."""
        if not self._held and not self.closed:
            self._held = True
            self._loop.remove_reader(self._in)

    def release(self) -> None:
        if self._held and not self.closed:
            self._held = False
            self._loop.add_reader(self._in, self._readable)

    def write(self, buffers: Sequence[Buffer]) -> None:
        """Write now what the descriptor takes, and the rest later."""
        if self.closed:
            return
        was_empty = not self._pending
        self._pending.extend(filter(len, buffers))  # an empty buffer would never be popped
        self._pending_bytes += sum(map(len, buffers))
        if was_empty:
            self._write_some()
            if self._pending and not self.closed:
                self._loop.add_writer(self._out, self._writable)

    def close(self) -> None:
        """Close both descriptors. Idempotent; ``on_lost`` is not called."""
        if self.closed:
            return
        self.closed = True
        self._loop.remove_reader(self._in)
        if self._pending:
            self._loop.remove_writer(self._out)
        self._pending.clear()
        for fd in {self._in, self._out}:
            os.close(fd)
        self.on_closed()

    def _lost(self, why: str) -> None:
        self.close()
        self.on_lost(why)

    def _readable(self) -> None:
        try:
            data = os.read(self._in, self._read_size)
        except BlockingIOError:
            return
        except OSError as error:
            return self._lost(str(error))
        if not data:
            return self._lost("the far end closed the stream")
        self._read_size = min(max(2 * len(data), _MIN_READ), _MAX_READ)
        self.on_data(data)

    def _writable(self) -> None:
        self._write_some()
        if self.closed:
            return
        if not self._pending:
            self._loop.remove_writer(self._out)
        if self.room:
            self.on_room()

    def _write_some(self) -> None:
        pending = self._pending
        try:
            while pending:
                few = len(pending) <= _MAX_PIECES
                sent = os.writev(self._out, list(pending if few else islice(pending, _MAX_PIECES)))
                self._pending_bytes -= sent
                while sent:
                    first = len(pending[0])
                    if sent < first:
                        pending[0] = memoryview(pending[0])[sent:]
                        break
                    pending.popleft()
                    sent -= first
        except BlockingIOError:
            pass
        except OSError as error:
            self._lost(str(error))

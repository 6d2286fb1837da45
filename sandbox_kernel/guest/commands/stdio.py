"""The near ends of a command's streams, on ``guest/loop.py``. Bounded by whoever uses them."""

from __future__ import annotations

import os
from collections import deque

from .start import END_OF_INPUT, open_terminal, resize_terminal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Deque, Sequence, Union

    from ...wire.event_loop import LoopLike

    Buffer = Union[bytes, bytearray, memoryview]

_READ = 48 * 1024


class Ends:
    """Both ends of a command's streams: pipes, or a terminal of the size ``tty``.

    ``theirs`` are for the command; ``stdin`` and ``outputs`` are ours, and belong to a
    CommandInput and to CommandOutputs later. A ``stdin`` or ``stderr`` that the caller has already
    is used instead of a pipe, and stays the caller's.
    """

    def __init__(self, tty: Sequence[int] | None, *, stdin: int = -1, stderr: int = -1) -> None:
        self.stdin = -1
        self.outputs: list[int] = []
        self._own: list[int] = []
        if tty:
            self.stdin, slave = open_terminal(*tty)
            self.outputs.append(os.dup(self.stdin))
            self._own.append(slave)
            self.theirs = [slave] * 3
            return
        if stdin < 0:
            stdin, self.stdin = os.pipe()
            self._own.append(stdin)
        self.theirs = [stdin, self._output(), stderr if stderr >= 0 else self._output()]

    def _output(self) -> int:
        ours, theirs = os.pipe()
        self.outputs.append(ours)
        self._own.append(theirs)
        return theirs

    def close_theirs(self) -> None:
        """The command has its copies."""
        while self._own:
            os.close(self._own.pop())

    def close(self) -> None:
        """Close all: the command was not started."""
        self.close_theirs()
        for fd in (self.stdin, *self.outputs):
            if fd >= 0:
                os.close(fd)


class CommandOutput:
    """Reads what a command writes to one descriptor, which it owns.

    ``on_data`` gets each piece, and ``on_end`` is called once, at the end. After ``pause``, nothing
    is read until ``resume``; the pipe fills, and the command waits.
    """

    def __init__(
        self,
        loop: LoopLike,
        fd: int,
        on_data: Callable[[bytes], object],
        on_end: Callable[[], object],
    ) -> None:
        self.closed = False
        self._loop = loop
        self._fd = fd
        self._on_data = on_data
        self._on_end = on_end
        self._paused = False
        os.set_blocking(fd, False)
        loop.add_reader(fd, self._readable)

    def pause(self) -> None:
        if not self._paused and not self.closed:
            self._paused = True
            self._loop.remove_reader(self._fd)

    def resume(self) -> None:
        if self._paused and not self.closed:
            self._paused = False
            self._loop.add_reader(self._fd, self._readable)

    def close(self) -> None:
        """Read no more. ``on_end`` is not called."""
        if not self.closed:
            self.pause()
            self.closed = True
            os.close(self._fd)

    def _readable(self) -> None:
        try:
            data = os.read(self._fd, _READ)
        except BlockingIOError:
            return
        except OSError:
            data = b""  # EIO: nobody has the terminal open any more
        if data:
            self._on_data(data)
        else:
            self.close()
            self._on_end()


class CommandInput:
    """Writes to a command's stdin, whose descriptor it owns, as fast as the command reads.

    ``on_taken`` is called with the number of bytes that the command has, or will never read.
    ``end`` closes stdin after what was written; on a terminal it types the end of the input.
    """

    def __init__(
        self, loop: LoopLike, fd: int, on_taken: Callable[[int], object], *, terminal: bool = False
    ) -> None:
        self.closed = False
        self.pending = 0
        """Bytes that the command has not read."""
        self._loop = loop
        self._fd = fd
        self._on_taken = on_taken
        self._terminal = terminal
        self._waiting: Deque[Buffer] = deque()
        self._writing = self._ending = False
        os.set_blocking(fd, False)

    def write(self, data: Buffer) -> None:
        if not data:
            return
        self._waiting.append(data)
        self.pending += len(data)
        if not self._writing:
            self._write_some()

    def end(self) -> None:
        if self._terminal:
            return self.write(END_OF_INPUT)
        self._ending = True
        if not self.pending:
            self.close()

    def resize(self, rows: int, columns: int) -> None:
        """Set the size of the terminal, if it is one."""
        if self._terminal and not self.closed:
            resize_terminal(self._fd, rows, columns)

    def close(self) -> None:
        """Drop what was not written."""
        if not self.closed:
            self.closed = True
            if self._writing:
                self._loop.remove_writer(self._fd)
            os.close(self._fd)
            self._waiting.clear()
            self._taken(self.pending)

    def _taken(self, size: int) -> None:
        self.pending -= size
        if size:
            self._on_taken(size)

    def _write_some(self) -> None:
        if self.closed:
            self._waiting.clear()
            return self._taken(self.pending)
        waiting, taken = self._waiting, 0
        try:
            while waiting:
                size = os.write(self._fd, waiting[0])
                taken += size
                if size == len(waiting[0]):
                    waiting.popleft()
                else:
                    waiting[0] = memoryview(waiting[0])[size:]
        except BlockingIOError:
            pass
        except OSError:
            return self.close()  # the command reads no more
        if bool(waiting) != self._writing:
            self._writing = bool(waiting)
            if self._writing:
                self._loop.add_writer(self._fd, self._write_some)
            else:
                self._loop.remove_writer(self._fd)
        self._taken(taken)
        if self._ending and not self.pending:
            self.close()

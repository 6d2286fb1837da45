"""The progress of a long command, as one line on stderr if that is a terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from sandbox_kernel.workspace.reports import Progress

_INTERVAL = 0.2


class Line:
    """The line; at most five times a second it is rewritten."""

    def __init__(self) -> None:
        self._shown = 0.0
        self._width = 0

    def tell(self, text: str) -> None:
        now = time.monotonic()
        if now - self._shown >= _INTERVAL and sys.stderr.isatty():
            self._shown = now
            print(f"\r{text.ljust(self._width)}", end="", file=sys.stderr, flush=True)
            self._width = len(text)

    def files(self, progress: Progress) -> None:
        """For ``import_folder`` and ``export``."""
        self.tell(f"{progress.files} files, {progress.bytes / 1e6:.0f} MB")

    def clear(self) -> None:
        if self._width:
            print(f"\r{' ' * self._width}\r", end="", file=sys.stderr, flush=True)
            self._width = 0


@contextmanager
def shown() -> Iterator[Line]:
    """A line that is erased when the block ends."""
    line = Line()
    try:
        yield line
    finally:
        line.clear()

"""Which cell ran when something left the sandbox, for the audit.

Nobody but the kernel knows which cell runs, and the kernel is the guest's: what is here is marked
as told by it. ``jupyter.cell_listener`` hears the kernel's messages, and the server's extension
knows the ids that the browser gives to its cells.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sandbox_kernel.audit import Event, Sink

LATE = 0.5
"""Seconds that the kernel's word about a cell may come after what the cell does."""
_MOST_CELLS, _MOST_IDS, _MOST_WAITING = 64, 256, 256
_MOST_TEXT = 200
_OF_CELLS = ("egress", "secret")
"""Kinds of events that code in the sandbox causes."""


@dataclass
class _Cell:
    began: float
    ended: float | None = None
    count: int | None = None


class Cells:
    """The latest cells of one kernel, and the sink of its gateway. Lives on the background loop,
    but for ``name``."""

    def __init__(self, write: Sink, clock: Callable[[], float] = time.monotonic) -> None:
        self.heard = False
        """Somebody hears the kernel's messages."""
        self.notebook = ""
        """The path of the kernel's notebook, if that is known."""
        self._write = write
        self._clock = clock
        self._cells: OrderedDict[str, _Cell] = OrderedDict()
        self._ids: OrderedDict[str, str] = OrderedDict()
        self._waiting: list[tuple[Event, float]] = []

    # --- what is told

    def began(self, request: str, count: object = None, *, ago: float = 0.0) -> None:
        """A cell runs, for ``ago`` seconds already; ``request`` is the id of the message that asked
        for it."""
        request = request[:_MOST_TEXT]
        cell = self._cells.get(request)
        if cell is None:
            cell = self._cells[request] = _Cell(self._clock() - ago)
            if len(self._cells) > _MOST_CELLS:
                self._cells.popitem(last=False)
        if type(count) is int and 0 <= count < 2**31:
            cell.count = count

    def ended(self, request: str, *, ago: float = 0.0) -> None:
        cell = self._cells.get(request[:_MOST_TEXT])
        if cell is not None and cell.ended is None:
            cell.ended = self._clock() - ago

    def name(self, request: str, cell_id: str) -> None:
        """The browser's id of the cell that a request is about. From any thread."""
        self._ids[request[:_MOST_TEXT]] = cell_id[:_MOST_TEXT]
        while len(self._ids) > _MOST_IDS:
            self._ids.popitem(last=False)

    # --- what is asked

    def __call__(self, event: Event) -> None:
        """Write an event that is just over, with the cell that ran when it began, if any. Waits a
        moment for the kernel's word, which takes another way."""
        now = self._clock()
        start = now - float(event.get("seconds") or 0.0)
        wait = start + LATE - now
        if event.get("kind") not in _OF_CELLS:
            self._write(event)
        elif not self.heard or wait <= 0 or len(self._waiting) >= _MOST_WAITING:
            self._write_one(event, start)
        else:
            self._waiting.append((event, start))
            asyncio.get_running_loop().call_later(wait, self._write_due)

    def flush(self) -> None:
        """Write what still waits."""
        waiting, self._waiting = self._waiting, []
        for event, start in waiting:
            self._write_one(event, start)

    def _write_due(self) -> None:
        latest, waiting, self._waiting = self._clock() - 0.9 * LATE, self._waiting, []
        for event, start in waiting:
            if start <= latest:
                self._write_one(event, start)
            else:
                self._waiting.append((event, start))

    def _at(self, moment: float) -> dict[str, Any] | None:
        """The latest of the cells that ran then; if none did, the first that began soon after."""
        found = ""
        for request, cell in self._cells.items():
            if cell.ended is not None and cell.ended < moment:
                continue
            if cell.began <= moment or (not found and cell.began <= moment + LATE):
                found = request
        if not found or self._cells[found].count is None:
            return None
        told = {"told_by": "guest", "execution_count": self._cells[found].count}
        return {**told, "id": self._ids[found]} if found in self._ids else told

    def _write_one(self, event: Event, start: float) -> None:
        cell = self._at(start)
        notebook = {"notebook": self.notebook} if self.notebook else {}
        self._write({**event, **notebook, **({"cell": cell} if cell else {})})

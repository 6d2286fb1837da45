"""What the server itself says in a notebook: why its kernel died, that its files are not saved.

Jupyter has no other place for this than the output of cells. So it becomes output, on stderr, of
the cell that runs in a tab or ran there last; if there is none, of the next cell that runs.
"""

from __future__ import annotations

from typing import Any, Protocol

_MOST_TABS, _MOST_CELLS, _MOST_WAITING = 100, 1000, 5


class Tab(Protocol):
    """A connection to a browser's tab."""

    @property
    def tab_id(self) -> str:
        """Stays the same when the tab connects again."""

    def show(self, text: str, cell: dict[str, Any]) -> None:
        """Show this as output of the cell that the request with this header runs."""


class _Cells:
    """The cells that one tab has sent to the kernel."""

    def __init__(self) -> None:
        self._waiting: dict[str, dict[str, Any]] = {}
        self._last: dict[str, Any] | None = None
        self.said = ""
        """The last notice since the last cell was sent."""

    def sent(self, request: dict[str, Any]) -> None:
        if len(self._waiting) < _MOST_CELLS:
            self._waiting[request["msg_id"]] = request
        self.said = ""

    def waiting(self, message_id: str) -> dict[str, Any] | None:
        return self._waiting.get(message_id)

    def ended(self, message_id: str) -> None:
        found = self._waiting.pop(message_id, None)
        self._last = found or self._last

    def died(self) -> None:
        """None of them runs any more."""
        self._last = self.current
        self._waiting.clear()

    @property
    def current(self) -> dict[str, Any] | None:
        """The one that runs, else the one that ran last: a kernel runs them in their order."""
        return next(iter(self._waiting.values()), self._last)


class Notices:
    """The notices in the notebooks of one kernel. All of it runs on the server's loop."""

    def __init__(self) -> None:
        self._connected: set[Tab] = set()
        self._tabs: dict[str, _Cells] = {}
        self._waiting: list[str] = []

    @property
    def has_tabs(self) -> bool:
        """Whether any tab is connected."""
        return bool(self._connected)

    def join(self, tab: Tab) -> None:
        self._connected.add(tab)

    def leave(self, tab: Tab) -> None:
        self._connected.discard(tab)

    def cell_sent(self, tab: Tab, request: dict[str, Any]) -> None:
        """A tab sends a cell, with this header of its request."""
        if not isinstance(request.get("msg_id"), str):
            return
        if tab.tab_id not in self._tabs and len(self._tabs) >= _MOST_TABS:
            del self._tabs[next(iter(self._tabs))]
        self._tabs.setdefault(tab.tab_id, _Cells()).sent(request)
        waiting, self._waiting = self._waiting, []
        for text in waiting:
            tab.show(text, request)

    def cell(self, tab: Tab, message_id: str) -> dict[str, Any] | None:
        """The header of the request with this id, while its cell runs for this tab."""
        cells = self._tabs.get(tab.tab_id)
        return cells.waiting(message_id) if cells is not None else None

    def cell_ended(self, tab: Tab, message_id: str) -> None:
        if tab.tab_id in self._tabs:
            self._tabs[tab.tab_id].ended(message_id)

    def kernel_died(self, tab: Tab, text: str) -> None:
        """Each connection calls this before it announces the restart to its tab."""
        self._say(text, [tab])
        if tab.tab_id in self._tabs:
            self._tabs[tab.tab_id].died()

    def say(self, text: str) -> None:
        """Show a text in every tab; not twice in a row, if no cell was sent meanwhile."""
        self._say(text, list(self._connected))

    def _say(self, text: str, tabs: list[Tab]) -> None:
        for tab in tabs:
            cells = self._tabs.get(tab.tab_id)
            if cells is not None and cells.current is not None and cells.said != text:
                tab.show(text, cells.current)
                cells.said = text
        said = any(cells.said == text for cells in self._tabs.values())
        if not said and text not in self._waiting:
            self._waiting = [*self._waiting, text][-_MOST_WAITING:]

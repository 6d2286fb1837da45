"""What the server itself says in a notebook: why its kernel died, that its files are not saved.

Jupyter has no place for that but the output of cells. So it becomes output, on stderr, of the cell
that runs in a tab or ran there last; where there is none, it waits for the next cell that is run.
"""

from __future__ import annotations

from typing import Any, Protocol

_MOST_TABS, _MOST_CELLS, _MOST_WAITING = 100, 1000, 5


class Speaker(Protocol):
    """A connection to a tab."""

    @property
    def tab(self) -> str:
        """Names the tab; the same when it connects again."""

    def speak(self, text: str, cell: dict[str, Any]) -> None:
        """Show this as output of the cell that the request with this header runs."""


class _Cells:
    """The cells that one tab has sent to the kernel."""

    def __init__(self) -> None:
        self._waiting: dict[str, dict[str, Any]] = {}
        self._last: dict[str, Any] | None = None
        self.said = ""
        """What was said last, since the last of them was sent."""

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
        """None of them is run any more."""
        self._last = self.current
        self._waiting.clear()

    @property
    def current(self) -> dict[str, Any] | None:
        """The one that runs, else the one that ran last: a kernel runs them in their order."""
        return next(iter(self._waiting.values()), self._last)


class Voice:
    """In the notebooks of one kernel. All of it runs on the server's loop."""

    def __init__(self) -> None:
        self._speakers: set[Speaker] = set()
        self._tabs: dict[str, _Cells] = {}
        self._waiting: list[str] = []

    @property
    def heard(self) -> bool:
        """Whether any tab is connected."""
        return bool(self._speakers)

    def join(self, speaker: Speaker) -> None:
        self._speakers.add(speaker)

    def leave(self, speaker: Speaker) -> None:
        self._speakers.discard(speaker)

    def cell_sent(self, speaker: Speaker, request: dict[str, Any]) -> None:
        """A tab sends a cell; the header of its request."""
        if not isinstance(request.get("msg_id"), str):
            return
        if speaker.tab not in self._tabs and len(self._tabs) >= _MOST_TABS:
            del self._tabs[next(iter(self._tabs))]
        self._tabs.setdefault(speaker.tab, _Cells()).sent(request)
        waiting, self._waiting = self._waiting, []
        for text in waiting:
            speaker.speak(text, request)

    def cell(self, speaker: Speaker, message_id: str) -> dict[str, Any] | None:
        """The header of a request that this tab has sent, while its cell runs."""
        cells = self._tabs.get(speaker.tab)
        return cells.waiting(message_id) if cells is not None else None

    def cell_ended(self, speaker: Speaker, message_id: str) -> None:
        if speaker.tab in self._tabs:
            self._tabs[speaker.tab].ended(message_id)

    def kernel_died(self, speaker: Speaker, text: str) -> None:
        """Told by each connection, before it tells its tab of the restart."""
        self._say(text, [speaker])
        if speaker.tab in self._tabs:
            self._tabs[speaker.tab].died()

    def say(self, text: str) -> None:
        """In every tab; not twice in a row, if no cell has been sent meanwhile."""
        self._say(text, list(self._speakers))

    def _say(self, text: str, speakers: list[Speaker]) -> None:
        for speaker in speakers:
            cells = self._tabs.get(speaker.tab)
            if cells is not None and cells.current is not None and cells.said != text:
                speaker.speak(text, cells.current)
                cells.said = text
        said = any(cells.said == text for cells in self._tabs.values())
        if not said and text not in self._waiting:
            self._waiting = [*self._waiting, text][-_MOST_WAITING:]

"""Server-sent events, cut out of pieces of any size. No I/O."""

from __future__ import annotations

import json
from typing import NamedTuple

MAX_EVENT = 8 * 2**20
"""Most bytes of one event, and of one line."""


class Event(NamedTuple):
    """One event: its name, and its data as text."""

    name: str
    data: str

    @property
    def text(self) -> str:
        """The output in a stdout or stderr event. Islo's SDK does not document its form, so plain
        text, a JSON string and a JSON object with a string are accepted."""
        found = _parsed(self.data)
        if not isinstance(found, str):
            found = _string(found, "data", "output", "text", "chunk", "message")
        return self.data if found is None else found


class EventParser:
    """Feed it bytes; it returns the complete events. ValueError for one that is too long."""

    def __init__(self) -> None:
        self._rest = b""
        self._name = ""
        self._data: list[str] = []
        self._size = 0

    def feed(self, piece: bytes) -> list[Event]:
        *lines, self._rest = (self._rest + piece).split(b"\n")
        self._size += len(piece)
        if len(self._rest) > MAX_EVENT or (self._size > MAX_EVENT and self._data):
            raise ValueError(f"an event of more than {MAX_EVENT} bytes")
        events = []
        for raw in lines:
            line = raw.decode(errors="replace").rstrip("\r")
            if not line:
                if self._data:
                    data = "\n".join(self._data)
                    name = self._name or _string(_parsed(data), "type", "event") or ""
                    events.append(Event(name, data))
                self._name, self._data, self._size = "", [], len(self._rest)
                continue
            field, _, value = line.partition(":")
            value = value.removeprefix(" ")
            if field == "event":
                self._name = value
            elif field == "data":
                self._data.append(value)
        return events


def _parsed(data: str) -> object:
    """A JSON string or object; None for other text."""
    try:
        return json.loads(data) if data[:1] in ('"', "{") else None
    except ValueError:
        return None


def _string(found: object, *keys: str) -> str | None:
    """The first string that a JSON object has under one of the keys."""
    values = [found.get(key) for key in keys] if isinstance(found, dict) else []
    return next((value for value in values if isinstance(value, str)), None)

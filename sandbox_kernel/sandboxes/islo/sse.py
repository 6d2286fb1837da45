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
        found = self._parsed()
        if isinstance(found, dict):
            for key in ("data", "output", "text", "chunk", "message"):
                if isinstance(found.get(key), str):
                    return str(found[key])
        return found if isinstance(found, str) else self.data

    def _parsed(self) -> object:
        if self.data[:1] not in ('"', "{"):
            return None
        try:
            return json.loads(self.data)
        except ValueError:
            return None


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
                    events.append(self._event())
                self._name, self._data, self._size = "", [], len(self._rest)
                continue
            field, _, value = line.partition(":")
            value = value.removeprefix(" ")
            if field == "event":
                self._name = value
            elif field == "data":
                self._data.append(value)
        return events

    def _event(self) -> Event:
        data = "\n".join(self._data)
        return Event(self._name or _type_in(data), data)


def _type_in(data: str) -> str:
    """The name of an event whose data contains it."""
    if data[:1] == "{":
        try:
            found = json.loads(data)
        except ValueError:
            return ""
        for key in ("type", "event"):
            if isinstance(found.get(key), str):
                return str(found[key])
    return ""

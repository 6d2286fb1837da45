"""The outputs of one cell, as its kernel's messages tell them: bounded, and valid in a notebook.

``CellOutputs`` does no I/O. Readers follow it by a cursor while the cell runs; the notebook takes
the outputs in whole, with streams merged. Everything comes from the sandbox: what does not fit
nbformat 4 is made to fit, and what is too much is left out from the middle, with a note.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Mapping
from typing import Any

LIMIT = 16 * 2**20
"""Bytes that are kept of a cell's outputs."""
OVERHEAD = 256
"""What an output counts at least."""
_MAX_WORDS = 4096
_TEXT_KINDS = ("display_data", "execute_result")


class Output:
    """One output message. ``shown`` is false for what only a reader with a cursor gets: the new
    content of a display, which the notebook shows where the display is."""

    __slots__ = ("index", "shown", "size", "value")

    def __init__(self, index: int, value: dict[str, Any], size: int, shown: bool) -> None:
        self.index = index
        self.value = value
        self.size = size
        self.shown = shown


class CellOutputs:
    """Outputs are numbered from 0 in the order in which they came; a cursor is such a number.

    The first half of ``limit`` bytes stays; the other half is for the latest outputs, so a reader
    that keeps up gets all of them, however many there are.
    """

    def __init__(self, limit: int = LIMIT) -> None:
        self.limit = limit
        self.next = 0
        self.version = 0
        """Changes with every change of the outputs."""
        self._head: list[Output] = []
        self._tail: deque[Output] = deque()
        self._head_size = self._tail_size = 0
        self._lost: tuple[int, int] = (0, 0)
        """Numbers of the outputs that were left out."""
        self._lost_bytes = 0
        self._clear_next = False
        self._updates: dict[str, Output] = {}

    @property
    def size(self) -> int:
        return self._head_size + self._tail_size

    def add(self, value: dict[str, Any], size: int) -> Output:
        """An output in nbformat 4 (``as_output``) that took so many bytes on the wire."""
        if self._clear_next:
            self._clear_now()
        return self._add(value, size, shown=True)

    def _add(self, value: dict[str, Any], size: int, *, shown: bool) -> Output:
        half = self.limit // 2
        if size + OVERHEAD > half:
            value, size = _shortened(value, size, half // 2)
        output = Output(self.next, value, size + OVERHEAD, shown)
        self.next += 1
        self.version += 1
        if not self._tail and self._head_size + output.size <= half:
            self._head.append(output)
            self._head_size += output.size
            return output
        self._tail.append(output)
        self._tail_size += output.size
        while self._tail_size > half and len(self._tail) > 1:
            gone = self._tail.popleft()
            self._tail_size -= gone.size
            first = self._lost[0] if self._lost[1] else gone.index
            self._lost = first, gone.index + 1
            self._lost_bytes += gone.size
        return output

    def clear(self, *, wait: bool) -> None:
        """``clear_output``: now, or when the next output comes."""
        if wait:
            self._clear_next = True
        else:
            self._clear_now()

    def _clear_now(self) -> None:
        self._clear_next = False
        self._head.clear()
        self._tail.clear()
        self._updates.clear()
        self._head_size = self._tail_size = self._lost_bytes = 0
        self._lost = (0, 0)
        self.version += 1

    def replace(self, output: Output, data: dict[str, Any], metadata: dict[str, Any]) -> None:
        """``update_display_data`` for an output of this cell."""
        output.value = {**output.value, "data": data, "metadata": metadata}
        self.version += 1

    def tell_update(self, display: str, data: dict[str, Any], size: int) -> None:
        """Give the new content of a display to readers with a cursor, instead of the one before."""
        former = self._updates.pop(display, None)
        if former is not None and self._tail and self._tail[-1] is former:
            self._tail.pop()
            self._tail_size -= former.size
        elif former is not None and self._head and self._head[-1] is former:
            self._head.pop()
            self._head_size -= former.size
        value = {"output_type": "display_data", "data": data, "metadata": {}}
        self._updates[display] = self._add(value, size, shown=False)

    def page(self, after: int) -> tuple[int, list[dict[str, Any]], int]:
        """Cursor, outputs from number ``after`` on, and how many of them are left out."""
        begin, end = self._lost
        dropped = max(0, end - max(begin, after))
        items = [o.value for part in (self._head, self._tail) for o in part if o.index >= after]
        return self.next, items, dropped

    def merged(self) -> list[dict[str, Any]]:
        """All outputs for a notebook: texts of one stream that follow each other are one output,
        and a note stands where some were left out. New dictionaries, whose values are shared."""
        found: list[dict[str, Any]] = []
        texts: list[str] = []

        def flush() -> None:
            if texts:
                found[-1]["text"] = "".join(texts)
                texts.clear()

        def append(value: Mapping[str, Any]) -> None:
            is_stream = value["output_type"] == "stream"
            if not (is_stream and texts and found[-1]["name"] == value["name"]):
                flush()
                found.append(dict(value))
            if is_stream:
                texts.append(value["text"])

        for output in self._head:
            if output.shown:
                append(output.value)
        if self._lost_bytes:
            flush()
            append(self._note())
            flush()
        for output in self._tail:
            if output.shown:
                append(output.value)
        flush()
        return found

    def _note(self) -> dict[str, Any]:
        count, kept = self._lost[1] - self._lost[0], _in_bytes(self.limit)
        what = f"{count} outputs ({_in_bytes(self._lost_bytes)})"
        text = f"[... {what} left out here: {kept} of a cell's outputs are kept ...]\n"
        return {"output_type": "stream", "name": "stderr", "text": text}

    def load(self, outputs: list[dict[str, Any]]) -> None:
        """What a notebook's file has of a cell that ended earlier."""
        for value in outputs:
            kind = str(value.get("output_type"))
            content = dict(value)
            content["text"] = _joined(value.get("text", ""))
            if (output := as_output(kind, content)) is not None:
                self.add(output, len(json.dumps(output)))


def as_output(kind: str, content: Mapping[str, Any]) -> dict[str, Any] | None:
    """The output of a message's content in nbformat 4; None if that kind is no output."""
    if kind == "stream":
        name = "stderr" if content.get("name") == "stderr" else "stdout"
        return {"output_type": "stream", "name": name, "text": str(content.get("text", ""))}
    if kind in _TEXT_KINDS:
        data, metadata = bundle(content.get("data")), json_object(content.get("metadata"))
        output: dict[str, Any] = {"output_type": kind, "data": data, "metadata": metadata}
        if kind == "execute_result":
            output["execution_count"] = count_of(content)
        return output
    if kind == "error":
        lines = content.get("traceback")
        lines = [str(line) for line in lines] if isinstance(lines, list) else []
        words = {name: str(content.get(name, "")) for name in ("ename", "evalue")}
        return {"output_type": "error", **words, "traceback": lines}
    return None


def bundle(data: object) -> dict[str, Any]:
    """A MIME bundle that is valid in a notebook: JSON only where the type says so."""
    found = json_object(data)
    for mime, value in found.items():
        if isinstance(value, str) or mime == "application/json" or mime.endswith("+json"):
            continue
        found[mime] = _joined(value) if isinstance(value, list) else json.dumps(value)
    return found


def json_object(value: object) -> dict[str, Any]:
    """A JSON object as strict parsers read it, too: without NaN. Empty if it is none."""
    if not isinstance(value, dict):
        return {}
    found: dict[str, Any] = dict(value)
    try:
        json.dumps(found, allow_nan=False)
    except ValueError:
        found = json.loads(json.dumps(found), parse_constant=lambda _: None)
    except RecursionError:
        return {}
    return found


def count_of(content: Mapping[str, Any]) -> int | None:
    """A message's execution count."""
    count = content.get("execution_count")
    return count if type(count) is int and 0 <= count < 2**53 else None


def _joined(value: object) -> str:
    if isinstance(value, list):
        return "".join(str(part) for part in value)
    return str(value)


def _shortened(value: dict[str, Any], size: int, room: int) -> tuple[dict[str, Any], int]:
    """An output that is too big for itself, in about ``room`` bytes, and how many it has now."""
    if value["output_type"] == "stream":
        text = value["text"]
        kept = text[-max(1, int(len(text) * room / size)) :]
        note = f"[... {_in_bytes(size - room)} left out here ...]\n"
        return {**value, "text": note + kept}, room + len(note)
    note = f"[an output of {_in_bytes(size)} left out]"
    if value["output_type"] == "error":
        words = {name: value[name][:_MAX_WORDS] for name in ("ename", "evalue")}
        return {"output_type": "error", **words, "traceback": [note]}, 3 * _MAX_WORDS
    return {**value, "data": {"text/plain": note}, "metadata": {}}, len(note)


def _in_bytes(count: int) -> str:
    return f"{count / 2**20:.1f} MiB" if count >= 2**20 else f"{count / 2**10:.0f} KiB"

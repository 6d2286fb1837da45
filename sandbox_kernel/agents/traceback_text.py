"""The part of a traceback that matters to who wrote the cell: its own frames and the error.

IPython's tracebacks are understood. Those of other kernels are kept as they are, within bounds.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from sandbox_kernel.agents.terminal_text import ends_of, terminal_text

_MOST_TEXT = 2**18
_MOST_FRAMES = 12
_LONGEST_LINE = 300
_FRAME = re.compile(r"(?:Cell In\s?\[|Input In |File )[^\n]*")
_PLACE = re.compile(r"File (.{1,1000}?):([0-9]{1,9})(?:, in (.{0,200}))?$")
_LIBRARY = re.compile(
    r"(?:/lib(?:64)?/(?:python|pypy)[0-9.]{0,9})?/(?:site|dist)-packages/"
    r"|/lib(?:64)?/(?:python|pypy)[0-9.]{0,9}/|^<frozen "
)
_HEADER = re.compile(r"-{20,}|[\w.]{1,200} {5,}Traceback \(most recent call last\)")


def traceback_text(line: str, traceback: Sequence[object]) -> str:
    """A traceback without its frames in libraries, ending with the error's ``line``."""
    parts: list[str] = []
    folded: list[str] = []
    room = _MOST_TEXT
    for element in traceback:
        if not isinstance(element, str):
            continue
        element = ends_of(element, max(room, 0))
        room -= len(element)
        if room < 0:
            break
        for part in _parts(terminal_text(element)):
            place = _library_place(part)
            if place:
                folded.append(place)
                continue
            if folded:
                parts.append(_fold(folded))
                folded = []
            parts.append(part)
    if folded:
        parts.append(_fold(folded))
    error = terminal_text(line).strip()
    if error and (not parts or error not in parts[-1]):
        parts.append(error)
    return "\n".join(_within(parts))


def _parts(element: str) -> list[str]:
    """An element as frames and what is between them, without headers."""
    parts: list[list[str]] = [[]]
    for text in element.split("\n"):
        if _HEADER.fullmatch(text):
            continue
        if _FRAME.match(text):
            parts.append([])
        if len(text) > _LONGEST_LINE:
            text = text[:_LONGEST_LINE] + " [...]"
        parts[-1].append(text)
    return [joined for part in parts if (joined := "\n".join(part).strip("\n"))]


def _library_place(part: str) -> str:
    """Where a frame in a library is; empty for any other part."""
    found = _PLACE.match(part.split("\n", 1)[0])
    if found is None or not _LIBRARY.search(found.group(1)):
        return ""
    path = _LIBRARY.split(found.group(1))[-1]
    return f"{path}:{found.group(2)}"


def _fold(places: list[str]) -> str:
    if len(places) == 1:
        return f"[in a library: {places[0]}]"
    return f"[{len(places)} frames in libraries: {places[0]} ... {places[-1]}]"


def _within(parts: list[str]) -> list[str]:
    """The first and the last parts of too many."""
    if len(parts) <= _MOST_FRAMES:
        return parts
    first, last = _MOST_FRAMES // 3, _MOST_FRAMES - _MOST_FRAMES // 3
    note = f"[... {len(parts) - first - last} frames left out ...]"
    return [*parts[:first], note, *parts[-last:]]

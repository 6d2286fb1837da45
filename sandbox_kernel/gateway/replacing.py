"""Replaces byte strings in data that passes by in pieces. No I/O.

What comes out does not depend on where the pieces are cut: the leftmost match is replaced, the
longest of those that begin there. So the end of a piece may have to wait for the next piece.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

_PRINTABLE = bytes(range(0x20, 0x7F))
OnMatch = Callable[[bytes], object]


class Replacements:
    """What is replaced by what, compiled. Its repr shows neither.

    Without ``hold``, what waits for the next piece is a possible beginning of a match. That would
    tell whoever can have guesses echoed in pieces how secret text begins. With ``hold``, as many
    bytes wait whatever they are, but none before a byte that is not printable ASCII, such as a line
    end: no match has one, and messages that end with one flow on.
    """

    def __init__(self, pairs: Mapping[bytes, bytes], *, hold: int = 0) -> None:
        if hold and any(len(n) > hold or n.strip(_PRINTABLE) for n in pairs):
            raise ValueError("a match may be longer than what is held back")
        self._hold = hold
        needles = sorted((needle for needle in pairs if needle), key=len, reverse=True)
        self._pairs = dict(pairs)
        self._needles = needles
        self._pattern = re.compile(b"|".join(map(re.escape, needles)) if needles else b"(?!)")
        self._first = frozenset(needle[0] for needle in needles)
        self.longest = max(map(len, needles), default=0)

    def __repr__(self) -> str:
        return f"<{len(self._needles)} replacements>"

    def __bool__(self) -> bool:
        return bool(self._needles)

    def found_in(self, data: bytes) -> bool:
        return any(needle in data for needle in self._needles)

    def in_whole(self, data: bytes, on_match: OnMatch = lambda needle: None) -> bytes:
        """The replacement in data that is complete."""
        if not self.found_in(data):
            return data

        def replaced(found: re.Match[bytes]) -> bytes:
            on_match(found[0])
            return self._pairs[found[0]]

        return self._pattern.sub(replaced, data)

    def in_part(self, data: bytes, on_match: OnMatch = lambda needle: None) -> tuple[bytes, bytes]:
        """What is certain of the replaced data, and the rest, which more data may change."""
        open_from = self._open_from(data)
        if open_from == len(data):
            return self.in_whole(data, on_match), b""
        done, at = [], 0
        while found := self._pattern.search(data, at):
            start, end = found.span()
            if open_from <= start:
                break
            on_match(found[0])
            done += [data[at:start], self._pairs[found[0]]]
            at = end
            if open_from < at:
                open_from = at + self._open_from(data[at:])
        done.append(data[at:open_from])
        return b"".join(done), data[open_from:]

    def _open_from(self, data: bytes) -> int:
        """Where the first possible beginning of a match is that the end of the data cuts."""
        if self._hold:
            before = max(0, len(data) - self._hold + 1)
            return before + len(data[before:].rstrip(_PRINTABLE))
        for at in range(max(0, len(data) - self.longest + 1), len(data)):
            if data[at] in self._first:
                rest = data[at:]
                if any(len(n) > len(rest) and n.startswith(rest) for n in self._needles):
                    return at
        return len(data)


class Replacer:
    """A filter (rewriting.Filter): replaces in a stream."""

    def __init__(self, replacements: Replacements, on_match: OnMatch = lambda needle: None) -> None:
        self._replacements = replacements
        self._on_match = on_match
        self._held = b""

    def feed(self, data: bytes) -> bytes:
        done, self._held = self._replacements.in_part(self._held + data, self._on_match)
        return done

    def end(self) -> bytes:
        held, self._held = self._held, b""
        return self._replacements.in_whole(held, self._on_match)

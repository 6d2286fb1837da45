"""Makes text from a sandbox safe to print and to log."""

from __future__ import annotations

import re

_CONTROL = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u200e\u200f\u202a-\u202e\u2066-\u2069]"
)


def printable(text: str) -> str:
    """Escape control characters but newlines and tabs: the text cannot control a terminal."""
    return _CONTROL.sub(lambda found: ascii(found.group())[1:-1], text)


def last_lines(text: str, count: int | None) -> str:
    """The last ``count`` lines of the text; None: all of it."""
    if count is None:
        return text
    return "".join(text.splitlines(keepends=True)[-count:]) if count > 0 else ""

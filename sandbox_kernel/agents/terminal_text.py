"""What a terminal shows in the end of what was printed to it: without colours, progress bars in
their last state, and nothing that could control another terminal or hide text.

The time is linear in the length of the text, whatever it holds.
"""

from __future__ import annotations

import re

from sandbox_kernel.untrusted_text import printable

MOST_TEXT = 2 * 2**20
"""Characters of one output that are looked at: of a longer one, its beginning and its end."""
_MOST_UP = 1000
_SEQUENCE = re.compile(
    r"\x1b\[([0-9;:<=>?]{0,64})[ -/]{0,8}([@-~])"  # CSI
    r"|\x1b\][^\x07\x1b]{0,4096}(?:\x07|\x1b\\)"  # OSC: titles, links
    r"|\x1b[PX^_][^\x1b]{0,4096}\x1b\\"
    r"|\x1b[ -/]{0,8}[0-~]?"
)
_MOVES = re.compile(r"(\n|\x1b\[[0-9]{0,4}A)")
_HIDDEN = re.compile("[\U000e0000-\U000e007f\ud800-\udfff]")
_ERASE_LINE, _ERASE_REST = "\x01", "\x02"


def terminal_text(text: str) -> str:
    """The text as it is seen at last; of a very long one, the middle is left out."""
    text = ends_of(text, MOST_TEXT)
    for mark in (_ERASE_LINE, _ERASE_REST):
        text = text.replace(mark, plain(mark))
    if "\x1b" in text:
        text = _SEQUENCE.sub(_kept, text)
        rows = _rows(text) if "\x1b" in text else text.split("\n")
    else:
        rows = text.split("\n")
    if "\r" in text or "\b" in text or _ERASE_LINE in text or _ERASE_REST in text:
        rows = [_last_state(row) for row in rows]
    return plain("\n".join(rows))


def plain(text: str) -> str:
    """Characters that control a terminal, that are invisible by design, or that UTF-8 cannot carry
    are written as escapes."""
    return _HIDDEN.sub(lambda found: ascii(found.group())[1:-1], printable(text))


def ends_of(text: str, limit: int) -> str:
    """A text, or if it is longer than ``limit`` its beginning and its end."""
    if len(text) <= limit:
        return text
    tail = limit * 3 // 4
    left_out = len(text) - limit
    return f"{text[: limit - tail]}\n[... {left_out} characters left out ...]\n{text[-tail:]}"


def _kept(found: re.Match[str]) -> str:
    """What remains of an escape sequence: moves upwards, and erasing."""
    parameters, final = found.group(1), found.group(2)
    if final == "K":
        return {"2": _ERASE_LINE, "1": ""}.get(parameters, _ERASE_REST)
    if final == "A" and (not parameters or (parameters.isdecimal() and len(parameters) < 5)):
        return found.group()
    return ""


def _rows(text: str) -> list[str]:
    """The rows of a text that moves upwards, each with all that was written to it."""
    rows: list[list[str]] = [[]]
    at = 0
    for part in _MOVES.split(text):
        if part == "\n":
            at += 1
            if at == len(rows):
                rows.append([])
            rows[at].append("\r")
        elif part.startswith("\x1b"):
            at = max(0, at - min(int(part[2:-1] or 1), _MOST_UP))
        else:
            rows[at].append(part)
    return ["".join(parts).removeprefix("\r") for parts in rows]


def _last_state(row: str) -> str:
    """A row after all that was written over it."""
    shown = ""
    for part in reversed(row.split("\r")):
        erased = max(part.rfind(_ERASE_LINE), part.rfind(_ERASE_REST))
        if _ERASE_LINE in part:
            part = part[part.rfind(_ERASE_LINE) + 1 :]
        written = _without_erased(part.replace(_ERASE_REST, ""))
        shown += written[len(shown) :]
        if erased >= 0:
            break
    return shown.rstrip(" ") if "\r" in row else shown


def _without_erased(text: str) -> str:
    """A text in which each backspace has removed the character before it."""
    if "\b" not in text:
        return text
    kept: list[str] = []
    for character in text:
        if character != "\b":
            kept.append(character)
        elif kept:
            kept.pop()
    return "".join(kept)

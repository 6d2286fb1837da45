"""Output for people and for programs: tables, ages, notes, JSON, progress."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from sandbox_kernel.untrusted_text import printable

if TYPE_CHECKING:  # lazy: start-up time
    from sandbox_kernel.workspace.reports import Progress

_NUMBER = re.compile(r"\d+(\.\d+)?")
_INTERVAL = 0.2


def table(rows: Sequence[Sequence[str]]) -> str:
    """Left-aligned columns, with the heading as first row. Cells are made safe to print."""
    cells = [[printable(cell).replace("\n", " ") for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = (
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        for row in cells
    )
    return "\n".join(line.rstrip() for line in lines)


def age(seconds: float) -> str:
    """A duration in its largest unit: 42s, 7m, 3h, 12d."""
    seconds = max(0.0, seconds)
    for limit, size, unit in ((120, 1, "s"), (7200, 60, "m"), (172800, 3600, "h")):
        if seconds < limit:
            return f"{int(seconds // size)}{unit}"
    return f"{int(seconds // 86400)}d"


def limit(words: str) -> float | int | None:
    """The number in the text of a limit ("512 MiB (cgroup v2)"), if there is one."""
    found = _NUMBER.search(words.partition(" (")[0])
    return None if found is None else float(found[0]) if found[1] else int(found[0])


def used(count: int | None, most: str) -> str:
    """Memory in use (bytes) and its limit (text), in MiB."""
    number = limit(most)
    if count is None and number is None:
        return "-"
    spent = "?" if count is None else f"{count / 2**20:.0f}"
    return f"{spent}/{number} MiB" if number is not None else f"{spent} MiB"


def short_path(path: str) -> str:
    """A path relative to the working folder or the home folder, where that is shorter."""
    try:
        here = os.getcwd()
    except FileNotFoundError:
        here = ""  # it was deleted
    for folder, name in ((here, ""), (os.path.expanduser("~"), "~/")):
        if folder and path.startswith(folder.rstrip("/") + "/"):
            return name + path[len(folder.rstrip("/")) + 1 :]
    return path


def shown_size(count: float) -> str:
    """A number of bytes in its largest unit."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"


def shown_path(path: str) -> str:
    """A path in printable form, on one line."""
    plain = path.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
    return printable(plain).replace("\n", "\\n").replace("\t", "\\t")


def note(text: str) -> None:
    """Print a problem to stderr; the command continues."""
    print(f"sandbox-kernel: {printable(' '.join(text.split()))}", file=sys.stderr)


def print_json(value: Any) -> None:
    """Print for programs: escaped ASCII, so it is safe on a terminal, too."""
    print(json.dumps(value, indent=2))


class ProgressLine:
    """The progress of a long command: one line on stderr, if that is a terminal, rewritten at most
    five times a second and erased when the ``with`` block ends."""

    _shown = 0.0
    _width = 0

    def tell(self, text: str) -> None:
        now = time.monotonic()
        if now - self._shown >= _INTERVAL and sys.stderr.isatty():
            self._shown = now
            print(f"\r{text.ljust(self._width)}", end="", file=sys.stderr, flush=True)
            self._width = len(text)

    def files(self, progress: Progress) -> None:
        """For ``import_folder`` and ``export``."""
        self.tell(f"{progress.files} files, {progress.bytes / 1e6:.0f} MB")

    def __enter__(self) -> ProgressLine:
        return self

    def __exit__(self, *_: object) -> None:
        if self._width:
            print(f"\r{' ' * self._width}\r", end="", file=sys.stderr, flush=True)

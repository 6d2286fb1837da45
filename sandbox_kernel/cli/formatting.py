"""Output for people and for programs: tables, ages, notes, JSON."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Sequence
from typing import Any

from sandbox_kernel.untrusted_text import printable


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


_NUMBER = re.compile(r"\d+(\.\d+)?")


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
    for folder, name in ((os.getcwd(), ""), (os.path.expanduser("~"), "~/")):
        if path.startswith(folder.rstrip("/") + "/"):
            return name + path[len(folder.rstrip("/")) + 1 :]
    return path


def note(text: str) -> None:
    """Print a problem to stderr; the command continues."""
    print(f"sandbox-kernel: {printable(' '.join(text.split()))}", file=sys.stderr)


def print_json(value: Any) -> None:
    """Print for programs: escaped ASCII, so it is safe on a terminal, too."""
    print(json.dumps(value, indent=2))

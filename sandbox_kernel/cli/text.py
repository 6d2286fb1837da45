"""Text for people and for programs: tables, ages, notes, JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any

from sandbox_kernel.text import printable


def table(rows: Sequence[Sequence[str]]) -> str:
    """Left-aligned columns; the first row is the heading. Each cell is made safe to print."""
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


def note(text: str) -> None:
    """A problem that does not keep the command from doing its work."""
    print(f"sandbox-kernel: {printable(' '.join(text.split()))}", file=sys.stderr)


def print_json(value: Any) -> None:
    """For programs: escaped ASCII, so it is safe to print as well."""
    print(json.dumps(value, indent=2))

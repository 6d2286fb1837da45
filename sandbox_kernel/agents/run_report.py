"""What became of a notebook's run, and what is told while it goes on.

Made by ``notebook_run`` and ``pipeline``; shown, or written as JSON, by the command.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


class Ending(enum.Enum):
    """How a run ended, with the exit code of ``sandbox-kernel run``."""

    PASSED = ("passed", 0)
    SANDBOX_FAILED = ("sandbox failed", 1)
    """It could not be made, or was lost; or the output could not be written."""
    REFUSED = ("refused", 2)
    """The file, a parameter or a setting is wrong; nothing ran."""
    CELL_FAILED = ("cell failed", 3)
    TIMED_OUT = ("timed out", 4)
    """A cell, or the whole run."""
    KERNEL_DIED = ("kernel died", 5)
    INTERRUPTED = ("interrupted", None)
    """By a signal, which decides the code of the process."""

    def __init__(self, words: str, exit_code: int | None) -> None:
        self.words = words
        self.exit_code = exit_code


@dataclass(frozen=True)
class FailedCell:
    """The cell at which a run ended, or one that failed before."""

    number: int
    """Of the cells that run, from 1."""
    source: str
    error: str
    """In one line."""
    traceback: tuple[str, ...] = ()


@dataclass(frozen=True)
class RunReport:
    """What became of one notebook."""

    notebook: Path
    output: Path
    """The notebook as far as it ran."""
    ending: Ending
    message: str
    """What happened, where, and what to do next; empty if it passed."""
    cells: int
    """How many cells there are to run, ..."""
    done: int
    """... and how many ran to their end."""
    seconds: float
    sandbox: str = ""
    failed: tuple[FailedCell, ...] = ()
    written: bool = True
    """Whether there is an output."""

    def to_dict(self) -> dict[str, Any]:
        """For ``--json``."""
        return {
            "event": "ended",
            "notebook": str(self.notebook),
            "outcome": self.ending.words,
            "exit_code": self.ending.exit_code,
            "message": self.message,
            "output": str(self.output) if self.written else None,
            "cells": self.cells,
            "done": self.done,
            "seconds": round(self.seconds, 3),
            "sandbox": self.sandbox,
            "failed_cells": [
                {"cell": one.number, "error": one.error, "traceback": list(one.traceback)}
                for one in self.failed
            ],
        }


@dataclass(frozen=True)
class RunEvent:
    """A step of a run: ``started``, ``cell`` (it begins), ``cell_done``, ``notice``."""

    kind: str
    notebook: Path
    cells: int = 0
    cell: int = 0
    details: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        found = {"event": self.kind, "notebook": str(self.notebook), "cells": self.cells}
        return {**found, **({"cell": self.cell} if self.cell else {}), **self.details}

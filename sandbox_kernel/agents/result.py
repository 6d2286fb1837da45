"""What a cell came to: its outputs, its error, and the same as text for a model.

``Job.wait`` and ``Notebook.run`` return a Result. Its ``outputs`` come from the sandbox: they are
the dictionaries of nbformat 4, but what is in them was written by the cell's code.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from sandbox_kernel.agents.images import Image, images_in
from sandbox_kernel.agents.model_text import (
    Reading,
    error_text,
    join_parts,
    outputs_text,
    shortened,
)
from sandbox_kernel.agents.terminal_text import plain
from sandbox_kernel.errors import CellFailed, CellTimeout

__all__ = ["CellError", "ChangedFile", "Image", "OutputPage", "Result", "Status"]

Status = Literal["ok", "error", "timeout", "cancelled", "died", "lost"]
TEXT_LIMIT = 20_000
"""Characters of ``Result.text``: some five thousand tokens."""
_STATUS_LINES = {
    "timeout": "The cell did not end within its time",
    "cancelled": "The cell was cancelled",
    "died": "The kernel died while the cell ran",
    "lost": "It is not known how the cell ended",
}


@dataclass(frozen=True)
class CellError:
    """The exception that ended a cell, as its kernel told it."""

    name: str
    value: str = ""
    traceback: list[str] = field(default_factory=list)
    """Of the kernel's own making, with ANSI colours; ``Result.text`` has what matters of it."""

    @property
    def line(self) -> str:
        """Name and value in one line, as Python prints them last."""
        return f"{self.name}: {self.value}" if self.value else self.name


@dataclass(frozen=True)
class ChangedFile:
    """A file of the workspace that a cell made, changed or deleted."""

    path: str
    """Relative to the workspace."""
    kind: Literal["created", "changed", "deleted"]
    size: int
    """Bytes; 0 for a deleted file."""


@dataclass(frozen=True)
class OutputPage:
    """A part of a job's output: what came after the cursor that was given."""

    cursor: int
    """Give it as ``after`` to get what comes next."""
    items: list[dict[str, Any]]
    """Outputs in nbformat 4, in order."""
    done: bool
    """Whether the job has ended and nothing comes after this page."""
    dropped: int = 0
    """How many outputs before this page are gone: more was printed than is kept."""

    @property
    def text(self) -> str:
        """The page as text for a model, in full but for what terminals do not show either."""
        return outputs_text(self.items, None)


@dataclass(frozen=True)
class Result:
    """How a cell ended, and what it put out."""

    status: Status
    execution_count: int | None = None
    duration: float = 0.0
    """Seconds from the start of the cell in its kernel to its end."""
    outputs: list[dict[str, Any]] = field(default_factory=list)
    error: CellError | None = None
    files: list[ChangedFile] = field(default_factory=list)
    """What the cell changed in the workspace, where that was asked for."""
    job_id: str = ""
    why: str = ""
    """Why the cell did not end by itself, or did not work, and what to do, where that is known."""
    sandbox: str = ""

    @property
    def ok(self) -> bool:
        return self.status == "ok"

    @property
    def text(self) -> str:
        """All of it as text for a model, in at most TEXT_LIMIT characters."""
        return self.text_for(TEXT_LIMIT)

    def text_for(self, limit: int) -> str:
        """Outputs, then how the cell ended if not well, then changed files. At most ``limit``
        characters: the middle of what is longer is left out, with a note how to read it."""
        endings = [self.error_text(limit // 2), self._status_line(), self._files_line(limit // 4)]
        ending = join_parts(endings)
        outputs = [each for each in self.outputs if not self._is_error(each)]
        reading = Reading(self.job_id)
        shown = outputs_text(outputs, max(0, limit - len(ending) - 1), reading)
        return shortened(join_parts([shown, ending]), limit, reading)

    def error_text(self, limit: int = TEXT_LIMIT) -> str:
        """The error with the frames of its traceback that matter; empty if there is none."""
        error = self.error
        return error_text(error.line, error.traceback, limit) if error else ""

    @property
    def images(self) -> list[Image]:
        """The pictures among the outputs; those whose data is no picture are left out."""
        return images_in(self.outputs)

    def raise_for_error(self) -> Result:
        """Itself if the cell ended well; CellFailed otherwise, CellTimeout if its time was over."""
        if self.ok:
            return self
        what = self.error_text(2000) or self._status_line()
        message = f"A cell failed in sandbox {self.sandbox!r}: {what}"
        raise (CellTimeout if self.status == "timeout" else CellFailed)(message, self)

    def _is_error(self, output: dict[str, Any]) -> bool:
        """Whether an output is the cell's error, which is told apart."""
        return self.error is not None and output.get("output_type") == "error"

    def _status_line(self) -> str:
        words = [each for each in (_STATUS_LINES.get(self.status, ""), plain(self.why)) if each]
        return f"[{': '.join(words)}]" if words else ""

    def _files_line(self, limit: int) -> str:
        return files_text(self.files, limit)


def files_text(files: Sequence[ChangedFile], limit: int) -> str:
    """Changed files as one line for a model."""
    words: list[str] = []
    room = limit
    for file in files:
        size = "" if file.kind == "deleted" else f", {file.size} bytes"
        words.append(f"{file.path!r} ({file.kind}{size})")
        room -= len(words[-1]) + 2
        if room < 0:
            words[-1] = f"and {len(files) - len(words) + 1} more"
            break
    return f"[files: {', '.join(words)}]" if words else ""

"""Runs a notebook from its first cell to its last in a sandbox of its own.

For ``sandbox-kernel run``, ``policy learn`` and pipelines (``pipeline``). Whatever happens, the
notebook is written as far as it ran, and the sandbox is removed.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sandbox_kernel.agents.notebook import Notebook
from sandbox_kernel.agents.prepared_notebook import PlannedCell, PreparedNotebook, prepare
from sandbox_kernel.agents.result import Result
from sandbox_kernel.agents.run_kernel import check_language, language_of
from sandbox_kernel.agents.run_report import Ending, FailedCell, RunEvent, RunReport
from sandbox_kernel.errors import SandboxError, SpecError, SpecRefused
from sandbox_kernel.kernel_death import advice
from sandbox_kernel.untrusted_text import printable

Tell = Callable[[RunEvent | RunReport], None]
"""Hears each step of a run, and at the end its report. Called on the run's event loop."""
_MOST_ERROR = 500
"""Characters of an error in one line."""
_ASKED = "StdinNotImplementedError"
_ENDINGS = {
    "error": Ending.CELL_FAILED,
    "cancelled": Ending.CELL_FAILED,
    "timeout": Ending.TIMED_OUT,
    "died": Ending.KERNEL_DIED,
    "lost": Ending.SANDBOX_FAILED,
}


@dataclass(frozen=True)
class RunOptions:
    """What the runs of several notebooks have in common."""

    parameters: Mapping[str, Any] = field(default_factory=dict)
    cell_timeout: float | None = None
    deadline: float | None = None
    """Seconds from ``began``, for all of them together."""
    kernel: str | None = None
    """Name of a kernelspec of ours."""
    backend: str | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Of the sandbox and the kernel, by name (``spec.py``)."""
    keep_going: bool = False
    """Also run what comes after a cell that failed."""
    began: float = field(default_factory=time.monotonic)


async def run_notebook(
    path: Path, output: Path, options: RunOptions, tell: Tell = lambda step: None
) -> RunReport:
    """Run one notebook, and write it to ``output`` (which may be ``path``). If it is cancelled, it
    cleans up first, and ``tell`` hears how far it came; it raises nothing else that can go wrong in
    a run, but says it in the report."""
    return await _Run(path, output, options, tell).go()


class _Run:
    """One run of one notebook."""

    def __init__(self, path: Path, output: Path, options: RunOptions, tell: Tell) -> None:
        self._path, self._output = path, output
        self._options, self._tell = options, tell
        self._began = time.monotonic()
        self._before = self._version()
        self._prepared: PreparedNotebook | None = None
        self._sandbox = ""
        self._cell: PlannedCell | None = None
        """The cell that runs."""
        self._done = 0
        self._failed: list[FailedCell] = []
        self._ended: tuple[Ending, str] | None = None

    async def go(self) -> RunReport:
        options = self._options
        left = None if options.deadline is None else options.began + options.deadline
        limit = asyncio.timeout(None if left is None else left - time.monotonic())
        try:
            async with limit:
                await self._run()
            ending, message = self._ended or (Ending.PASSED, "")
        except asyncio.CancelledError:
            self._end(Ending.INTERRUPTED, f"{self._where()} was interrupted.")
            raise
        except TimeoutError as error:
            if not limit.expired():
                ending, message = Ending.SANDBOX_FAILED, str(error)
            else:
                words = f"{self._where()} had not ended when the time for all was over"
                ending = Ending.TIMED_OUT
                message = f"{words} ({options.deadline:g} s; --deadline gives it more)."
        except SpecRefused as error:
            ending, message = Ending.SANDBOX_FAILED, f"{self._path.name}: {error}"
        except SpecError as error:
            ending, message = Ending.REFUSED, str(error)
        except (SandboxError, OSError) as error:
            ending, message = Ending.SANDBOX_FAILED, f"{self._where()} failed: {error}"
        return self._end(ending, message)

    async def _run(self) -> None:
        options = self._options
        language = await asyncio.to_thread(language_of, options.kernel) if options.kernel else ""
        prepared = await asyncio.to_thread(
            prepare, self._path, options.parameters, language=language
        )
        if not options.kernel:
            check_language(prepared)
        self._prepared = prepared
        for notice in prepared.notices:
            self._tell(self._event("notice", message=notice))
        async with Notebook.open(
            self._path,
            content=prepared.content,
            output=self._output,
            kernel=options.kernel,
            backend=options.backend,
            **options.settings,
        ) as notebook:
            self._sandbox = notebook.sandbox
            self._tell(self._event("started", sandbox=self._sandbox, output=str(self._output)))
            await self._run_cells(notebook, prepared)

    async def _run_cells(self, notebook: Notebook, prepared: PreparedNotebook) -> None:
        for cell in prepared.cells:
            self._cell = cell
            self._tell(self._event("cell", cell=cell.number))
            result = await notebook.run(
                cell.source, cell_id=cell.id, timeout=self._options.cell_timeout
            )
            self._cell = None
            self._tell(
                self._event(
                    "cell_done",
                    cell=cell.number,
                    status=result.status,
                    seconds=round(result.duration, 3),
                )
            )
            if not result.ok and not (cell.may_fail and result.status == "error"):
                self._note_failure(cell, result)
                if not (self._options.keep_going and result.status in ("error", "cancelled")):
                    return
            self._done += 1

    def _note_failure(self, cell: PlannedCell, result: Result) -> None:
        error = printable(" ".join((result.error.line if result.error else result.why).split()))
        traceback = tuple(result.error.traceback) if result.error else ()
        self._failed.append(FailedCell(cell.number, cell.source, error[:_MOST_ERROR], traceback))
        if self._ended is not None:
            return
        where = self._where(cell)
        if result.status == "timeout":
            limit = self._options.cell_timeout or 0
            words = f"{where} did not end within {limit:g} s (--timeout gives it more)."
        elif result.error is not None and result.error.name == _ASKED:
            words = (
                f"{where} asks for input, and nobody can answer while a notebook runs by itself. "
                f"Give the value as a parameter (-p NAME VALUE)."
            )
        elif result.status in ("died", "lost"):
            cause = error[:_MOST_ERROR].rstrip(".")
            words = f"{where} ended with its kernel: {cause}. {advice(cause)}".rstrip()
        else:
            words = f"{where} failed: {error[:_MOST_ERROR].rstrip('.')}."
        self._ended = _ENDINGS[result.status], words

    def _where(self, cell: PlannedCell | None = None) -> str:
        cell, prepared = cell or self._cell, self._prepared
        if cell is None or prepared is None:
            return self._path.name
        return f"{self._path.name}, cell {cell.number} of {len(prepared.cells)},"

    def _event(self, kind: str, *, cell: int = 0, **details: Any) -> RunEvent:
        cells = len(self._prepared.cells) if self._prepared else 0
        return RunEvent(kind, self._path, cells, cell, details)

    def _version(self) -> tuple[int, int] | None:
        """Of the output: another one when it was written."""
        try:
            found = self._output.stat()
        except OSError:
            return None
        return found.st_ino, found.st_mtime_ns

    def _end(self, ending: Ending, message: str) -> RunReport:
        cell = self._cell
        if cell is not None and not any(one.number == cell.number for one in self._failed):
            self._failed.append(FailedCell(cell.number, cell.source, "did not end"))
        report = RunReport(
            notebook=self._path,
            output=self._output,
            ending=ending,
            message=message,
            cells=len(self._prepared.cells) if self._prepared else 0,
            done=self._done,
            seconds=time.monotonic() - self._began,
            sandbox=self._sandbox,
            failed=tuple(self._failed),
            written=self._version() not in (None, self._before),
        )
        self._tell(report)
        return report

"""What ``sandbox-kernel run`` shows of notebooks that run: a bar, lines, or JSON."""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

from sandbox_kernel.agents.model_text import error_text
from sandbox_kernel.agents.run_report import Ending, FailedCell, RunEvent, RunReport
from sandbox_kernel.cli.formatting import note, shown_path
from sandbox_kernel.untrusted_text import printable

T = TypeVar("T")
_TICK = 0.5
_BAR = 20
_MOST_SOURCE, _MOST_TRACEBACK = 4_000, 10_000


class RunProgress:
    """Hears the steps of runs, and keeps their reports. This one shows a line for each cell."""

    def __init__(self, notebooks: int) -> None:
        self.reports: list[RunReport] = []
        self._notebooks = notebooks
        self._began = time.monotonic()

    async def during(self, work: Coroutine[Any, Any, T]) -> T:
        """Do the work, and show how it goes on."""
        return await work

    def tell(self, step: RunEvent | RunReport) -> None:
        if isinstance(step, RunReport):
            self.reports.append(step)
            if step.ending is Ending.PASSED:
                self._passed(step)
        elif step.kind == "notice":
            note(str(step.details["message"]))
        else:
            self._step(step)

    def _step(self, event: RunEvent) -> None:
        if event.kind == "cell":
            self._say(f"{_name(event.notebook)}: cell {event.cell} of {event.cells}")

    def _passed(self, report: RunReport) -> None:
        cells = f"{report.cells} cell{'s' * (report.cells != 1)}"
        self._say(f"{_name(report.notebook)} passed: {cells} in {report.seconds:.1f} s")
        print(shown_path(str(report.output)), flush=True)

    def _say(self, text: str) -> None:
        print(f"[{_clock(self._began)}] {text}", file=sys.stderr, flush=True)


class ProgressBar(RunProgress):
    """For a terminal: one line that is rewritten, with what runs at present."""

    def __init__(self, notebooks: int) -> None:
        super().__init__(notebooks)
        self._running: dict[Path, tuple[int, int]] = {}
        """Cells done, and all cells."""
        self._width = 0

    async def during(self, work: Coroutine[Any, Any, T]) -> T:
        ticking = asyncio.create_task(self._tick())
        try:
            return await work
        finally:
            ticking.cancel()
            self._erase()

    async def _tick(self) -> None:
        while True:
            self._show()
            await asyncio.sleep(_TICK)

    def _step(self, event: RunEvent) -> None:
        begun = event.kind == "cell"
        self._running[event.notebook] = (event.cell - begun, event.cells)
        self._show()

    def tell(self, step: RunEvent | RunReport) -> None:
        if isinstance(step, RunReport):
            self._running.pop(step.notebook, None)
        if isinstance(step, RunReport) or step.kind == "notice":
            self._erase()
        super().tell(step)

    def _show(self) -> None:
        parts = [_clock(self._began)]
        if self._notebooks > 1:
            parts.append(f"{len(self.reports)} of {self._notebooks} notebooks")
        for path, (done, cells) in self._running.items():
            filled = _BAR * done // max(1, cells)
            bar = "" if self._notebooks > 1 else f"[{'#' * filled}{'.' * (_BAR - filled)}] "
            parts.append(f"{bar}{_name(path)} {done}/{cells}")
        text = "  ".join(parts)[: shutil.get_terminal_size().columns - 1]
        print(f"\r{text.ljust(self._width)}", end="", file=sys.stderr, flush=True)
        self._width = len(text)

    def _erase(self) -> None:
        if self._width:
            print(f"\r{' ' * self._width}\r", end="", file=sys.stderr, flush=True)
            self._width = 0


class JsonSteps(RunProgress):
    """For programs: each step is a line on stdout, with the seconds since the begin."""

    def tell(self, step: RunEvent | RunReport) -> None:
        if isinstance(step, RunReport):
            self.reports.append(step)
        at = round(time.monotonic() - self._began, 3)
        print(json.dumps({"at": at, **step.to_dict()}), flush=True)


def progress_for(notebooks: int, *, as_json: bool) -> RunProgress:
    if as_json:
        return JsonSteps(notebooks)
    return ProgressBar(notebooks) if sys.stderr.isatty() else RunProgress(notebooks)


def tell_failures(reports: list[RunReport]) -> None:
    """Say on stderr which notebooks did not pass and why; the cell and its traceback come last."""
    for report in reports:
        if report.ending is Ending.PASSED:
            continue
        written = f"As far as it ran, it is in {report.output}." if report.written else ""
        note(f"{report.message} {written}")
        for cell in report.failed:
            print(_failed_cell(report, cell), file=sys.stderr)


def _failed_cell(report: RunReport, cell: FailedCell) -> str:
    source = cell.source.rstrip()[:_MOST_SOURCE]
    lines = [f"--- {_name(report.notebook)}, cell {cell.number}", *source.splitlines(), "---"]
    if cell.traceback:
        lines.append(error_text(cell.error, list(cell.traceback), _MOST_TRACEBACK))
    return printable("\n".join(lines))


def _name(path: Path) -> str:
    return shown_path(path.name)


def _clock(began: float) -> str:
    elapsed = int(time.monotonic() - began)
    return f"{elapsed // 60}:{elapsed % 60:02d}"

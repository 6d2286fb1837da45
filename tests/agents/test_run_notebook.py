"""A notebook runs from its first cell to its last in a sandbox of its own, whatever is in it."""

from __future__ import annotations

import asyncio
import json
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sandbox_kernel.agents.notebook_run import RunOptions, run_notebook
from sandbox_kernel.agents.pipeline import exit_code, run_notebooks
from sandbox_kernel.agents.run_report import Ending, RunEvent, RunReport
from sandbox_kernel.sandboxes.local import bubblewrap
from tests.helpers.own_folders import own_folders
from tests.kernels.live import Leftovers

from .notebooks import printed, valid_notebook, write_notebook

SMALL = {"memory_mib": 384}


@pytest.fixture(scope="module", autouse=True)
def _first_of_all(tmp_path_factory: pytest.TempPathFactory) -> None:
    """What a process keeps for good, such as its background loop, is nothing left behind."""
    if not bubblewrap.why_not():
        with own_folders():
            asyncio.run(ran(tmp_path_factory.mktemp("first"), "1"))


@pytest.fixture(autouse=True)
def folder() -> Iterator[Path]:
    """A folder of the test's own, in whose sandboxes nothing is left."""
    if problem := bubblewrap.why_not():
        pytest.skip(problem)
    with own_folders() as made:
        leftovers = Leftovers(made)
        yield made
        leftovers.check()


class Heard:
    """What was told of runs."""

    def __init__(self) -> None:
        self.events: list[RunEvent] = []
        self.reports: list[RunReport] = []

    def tell(self, step: RunEvent | RunReport) -> None:
        if isinstance(step, RunReport):
            self.reports.append(step)
        else:
            self.events.append(step)

    def kinds(self) -> list[str]:
        return [event.kind for event in self.events]


async def ran(tmp_path: Path, *sources: str, tags: Any = (), **options: Any) -> RunReport:
    """Run a notebook of these cells."""
    path = write_notebook(tmp_path / "in.ipynb", *sources, tags=tags)
    given = {"settings": SMALL, **options}
    report = await run_notebook(path, tmp_path / "out.ipynb", RunOptions(**given))
    json.dumps(report.to_dict())
    return report


async def test_a_notebook_that_passes(tmp_path: Path) -> None:
    """Its outputs and counts are those of Jupyter; the notebook itself is left alone; each step is
    told."""
    sources = ("x = 20", "print(a + x)", "{'sum': a + x}")
    path = write_notebook(tmp_path / "in.ipynb", *sources, tags=[["parameters"]])
    before = path.read_bytes()
    heard = Heard()
    options = RunOptions(parameters={"a": 22}, settings=SMALL)
    report = await run_notebook(path, tmp_path / "out.ipynb", options, heard.tell)
    assert (report.ending, report.message, report.done) == (Ending.PASSED, "", 4)
    assert path.read_bytes() == before
    cells = valid_notebook(tmp_path / "out.ipynb").cells
    assert [cell.execution_count for cell in cells] == [1, 2, 3, 4]
    assert cells[1].metadata.tags == ["injected-parameters"]
    assert printed(cells[2]) == "42\n"
    assert cells[3].outputs[0].data["text/plain"] == "{'sum': 42}"
    assert heard.kinds() == ["started", *["cell", "cell_done"] * 4]
    assert heard.reports == [report]


async def test_a_cell_that_fails(tmp_path: Path) -> None:
    """The run ends there, with the cell, its error and traceback; what ran before is written."""
    report = await ran(tmp_path, "print('before')", "def f():\n    return 1 / 0\nf()", "print(3)")
    assert (report.ending, report.ending.exit_code, report.done) == (Ending.CELL_FAILED, 3, 1)
    message = "in.ipynb, cell 2 of 3, failed: ZeroDivisionError: division by zero."
    assert report.message == message
    (failed,) = report.failed
    assert failed.number == 2
    assert "f()" in failed.source
    assert any(
        "1 / 0" in line.replace("\x1b", "") or "ZeroDiv" in line for line in failed.traceback
    )
    cells = valid_notebook(report.output).cells
    assert printed(cells[0]) == "before\n"
    assert cells[1].outputs[-1].ename == "ZeroDivisionError"
    assert (cells[2].outputs, cells[2].execution_count) == ([], None)


async def test_errors_that_are_wanted_and_cells_that_are_not(tmp_path: Path) -> None:
    """By nbclient's tags; and a caller may go on after errors, too."""
    tags = [["raises-exception"], ["skip-execution"]]
    report = await ran(tmp_path, "1 / 0", "exit()", "print(3)", tags=tags)
    assert (report.ending, report.cells) == (Ending.PASSED, 2)
    report = await ran(tmp_path, "1 / 0", "nothing", "print(3)", keep_going=True)
    assert [one.number for one in report.failed] == [1, 2]
    assert (report.ending, report.done) == (Ending.CELL_FAILED, 3)
    assert printed(valid_notebook(report.output).cells[2]) == "3\n"


async def test_a_cell_that_takes_too_long(tmp_path: Path) -> None:
    source = "import time\nprint('begun', flush=True)\ntime.sleep(600)"
    report = await ran(tmp_path, source, "2", cell_timeout=5)
    assert (report.ending, report.ending.exit_code) == (Ending.TIMED_OUT, 4)
    assert "cell 1 of 2, did not end within 5 s (--timeout" in report.message
    assert printed(valid_notebook(report.output).cells[0]) == "begun\n"


async def test_a_run_that_takes_too_long(tmp_path: Path) -> None:
    """The deadline is for all notebooks: what has not begun is not begun."""
    slow = write_notebook(tmp_path / "slow.ipynb", "while True: pass")
    late = write_notebook(tmp_path / "late.ipynb", "1")
    runs = [(slow, tmp_path / "a.ipynb"), (late, tmp_path / "b.ipynb")]
    first, second = await run_notebooks(runs, RunOptions(deadline=8, settings=SMALL))
    assert (first.ending, second.ending) == (Ending.TIMED_OUT, Ending.TIMED_OUT)
    assert " had not ended when the time for all was over (8 s" in first.message
    assert valid_notebook(first.output).cells[0].source == "while True: pass"
    assert (second.sandbox, second.written) == ("", False)


@pytest.mark.parametrize(
    ("death", "words"),
    [("os._exit(3)", "3"), ("os.kill(os.getpid(), 9)", "SIGKILL")],
)
async def test_a_kernel_that_dies(tmp_path: Path, death: str, words: str) -> None:
    """The cell that ran and the reason are named, and what it had printed is kept."""
    # A kernel of any kind takes with it what it has not yet sent.
    source = f"import os, time\nprint('last words', flush=True)\ntime.sleep(1)\n{death}"
    report = await ran(tmp_path, "1", source, "3")
    assert (report.ending, report.ending.exit_code) == (Ending.KERNEL_DIED, 5)
    assert "in.ipynb, cell 2 of 3, ended with its kernel" in report.message
    assert words in report.message
    assert "last words" in printed(valid_notebook(report.output).cells[1])


async def test_a_cell_that_fills_the_memory(tmp_path: Path) -> None:
    """The message says which limit it was, and how to raise it."""
    source = "blocks = []\nwhile True:\n    blocks.append(bytearray(b'x' * 10_000_000))"
    report = await ran(tmp_path, source, settings={"memory_mib": 256})
    if report.ending is Ending.CELL_FAILED:  # the limit of each process came first
        assert "MemoryError" in report.message
        return
    assert report.ending is Ending.KERNEL_DIED
    assert "memory" in report.message
    assert "256" in report.message
    assert "memory_mib" in report.message
    valid_notebook(report.output)


async def test_a_cell_that_asks_for_input(tmp_path: Path) -> None:
    """It does not wait for anybody, and the message says what to do."""
    report = await ran(tmp_path, "name = input('your name? ')")
    assert report.ending is Ending.CELL_FAILED
    assert "cell 1 of 1, asks for input" in report.message
    assert "(-p NAME VALUE)" in report.message


@pytest.mark.parametrize(
    ("content", "words"),
    [("# a script\n", "is no notebook"), ('{"nbformat": 4, "cells": 3}', "a damaged notebook")],
)
async def test_what_is_no_notebook(tmp_path: Path, content: str, words: str) -> None:
    """Nothing is started or written."""
    (tmp_path / "in.ipynb").write_text(content)
    report = await run_notebook(tmp_path / "in.ipynb", tmp_path / "out.ipynb", RunOptions())
    assert (report.ending.exit_code, report.written) == (2, False)
    assert words in report.message
    assert not (tmp_path / "out.ipynb").exists()


async def test_a_sandbox_that_cannot_be(tmp_path: Path) -> None:
    """Wrong settings are wrong usage; what the backend cannot do is a failure of the sandbox."""
    report = await ran(tmp_path, "1", settings={"memory_mib": "many"})
    assert report.ending is Ending.REFUSED
    assert "memory_mib" in report.message
    report = await ran(tmp_path, "1", settings={"image": "python:3.12"})
    assert report.ending is Ending.SANDBOX_FAILED
    assert "in.ipynb" in report.message
    assert "image" in report.message
    assert valid_notebook(report.output).cells[0].source == "1"
    report = await ran(tmp_path, "1", kernel="python3")
    assert report.ending is Ending.REFUSED
    assert "'python3' does not run in a sandbox" in report.message


async def test_an_output_that_cannot_be_written(tmp_path: Path) -> None:
    """That is known before anything runs."""
    path = write_notebook(tmp_path / "in.ipynb", "1")
    report = await run_notebook(path, tmp_path / "none" / "out.ipynb", RunOptions())
    assert (report.ending, report.written, report.sandbox) == (Ending.REFUSED, False, "")
    assert "its folder does not exist" in report.message
    (tmp_path / "out.ipynb").mkdir()
    report = await run_notebook(path, tmp_path / "out.ipynb", RunOptions())
    assert (report.ending, report.written, report.sandbox) == (Ending.SANDBOX_FAILED, False, "")


async def test_another_language_is_refused_by_name(tmp_path: Path) -> None:
    path = write_notebook(tmp_path / "in.ipynb", "1", language="julia")
    report = await run_notebook(path, tmp_path / "out.ipynb", RunOptions())
    assert report.ending is Ending.REFUSED
    assert "its language is 'julia'" in report.message


async def test_what_is_cancelled_is_written(tmp_path: Path) -> None:
    """As by Ctrl-C; the cell that ran is told."""
    path = write_notebook(tmp_path / "in.ipynb", "print('before')", "import time; time.sleep(600)")
    heard = Heard()
    work = run_notebook(path, tmp_path / "out.ipynb", RunOptions(settings=SMALL), heard.tell)
    task = asyncio.create_task(work)
    while heard.kinds().count("cell") < 2:
        await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    (report,) = heard.reports
    assert report.ending is Ending.INTERRUPTED
    assert "cell 2 of 2, was interrupted" in report.message
    assert printed(valid_notebook(tmp_path / "out.ipynb").cells[0]) == "before\n"


async def test_in_place(tmp_path: Path) -> None:
    """The output may be the notebook; its earlier outputs are gone."""
    path = write_notebook(tmp_path / "in.ipynb", "print(1)")
    options = RunOptions(settings=SMALL)
    for _ in range(2):
        report = await run_notebook(path, path, options)
        assert report.ending is Ending.PASSED
    (cell,) = valid_notebook(path).cells
    assert printed(cell) == "1\n"


async def test_the_folder_follows_files(tmp_path: Path) -> None:
    """With files=copy the kernel works on a copy of the notebook's folder, and results come back;
    wherever the output goes."""
    (tmp_path / "data.txt").write_text("from the host")
    (tmp_path / "elsewhere").mkdir()
    path = write_notebook(
        tmp_path / "in.ipynb", "text = open('data.txt').read()", "open('r.txt', 'w').write(text)"
    )
    options = RunOptions(settings={**SMALL, "files": "copy"})
    report = await run_notebook(path, tmp_path / "elsewhere" / "out.ipynb", options)
    assert (report.ending, report.message) == (Ending.PASSED, "")
    assert (tmp_path / "r.txt").read_text() == "from the host"
    report = await ran(tmp_path, "open('data.txt')")
    assert "FileNotFoundError" in report.message


@pytest.mark.slow
async def test_several_at_once(tmp_path: Path) -> None:
    """Ten notebooks, three at a time; one fails, and the others pass. Reports are in order."""
    runs = []
    for number in range(10):
        source = "1 / 0" if number == 4 else f"print({number})"
        path = write_notebook(tmp_path / f"n{number}.ipynb", source)
        runs.append((path, tmp_path / f"out{number}.ipynb"))
    heard = Heard()
    reports = await run_notebooks(runs, RunOptions(settings=SMALL), jobs=3, tell=heard.tell)
    assert [report.notebook for report in reports] == [path for path, _ in runs]
    endings = [report.ending for report in reports]
    assert endings.pop(4) is Ending.CELL_FAILED
    assert set(endings) == {Ending.PASSED}
    assert exit_code(reports) == 3
    running, most = 0, 0
    for event in heard.events:
        running += event.kind == "started"
        running -= event.kind == "cell_done"
        most = max(most, running)
    assert most <= 3
    for number in (0, 9):
        assert printed(valid_notebook(runs[number][1]).cells[0]) == f"{number}\n"


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_ten_at_once(tmp_path: Path) -> None:
    """All ten at the same time, and nothing is left (the fixture looks)."""
    runs = [
        (write_notebook(tmp_path / f"n{n}.ipynb", f"print({n})"), tmp_path / f"out{n}.ipynb")
        for n in range(10)
    ]
    reports = await run_notebooks(runs, RunOptions(settings=SMALL), jobs=10)
    assert [report.message for report in reports] == [""] * 10


@pytest.mark.long
@pytest.mark.timeout(900)
async def test_fifty_after_each_other(tmp_path: Path) -> None:
    """No process, socket, file or descriptor more than after the first ten, and memory is flat."""
    path = write_notebook(tmp_path / "in.ipynb", "print(1)", "1 / 0")
    after_ten = 0
    for number in range(50):
        report = await run_notebook(path, tmp_path / "o.ipynb", RunOptions(settings=SMALL))
        assert report.ending is Ending.CELL_FAILED
        if number == 9:
            after_ten = memory()
    assert memory() - after_ten < 20_000_000


def memory() -> int:
    """Bytes that this process has in memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


@pytest.mark.slow
@pytest.mark.timeout(400)
async def test_a_cell_that_prints_without_end(tmp_path: Path) -> None:
    """200 MB: memory and notebook stay small, and the notebook says that something is missing."""
    source = "line = 'x' * 999\nfor _ in range(200_000):\n    print(line)\nprint('the end')"
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    report = await ran(tmp_path, source, "print('after')")
    assert (report.ending, report.message) == (Ending.PASSED, "")
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 300_000, f"{grown} KiB"
    assert report.output.stat().st_size < 40_000_000
    cells = valid_notebook(report.output).cells
    text = "".join(one.text for one in cells[0].outputs if one.output_type == "stream")
    assert "left out" in text
    assert text.rstrip().endswith("the end")
    assert printed(cells[1]) == "after\n"

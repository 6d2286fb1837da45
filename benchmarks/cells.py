"""A notebook of a hundred trivial cells, in whole processes: part of ``python -m benchmarks
programs``.

From the start of the process to its end, with everything that it imports and starts.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import nbformat

from benchmarks.report import Check
from sandbox_kernel.spec import SETTINGS

CELLS = 100
LIMIT = 120.0
SETTLE = 5.0
"""Seconds in which the next sandbox gets ready, where there is a pool."""
_NBCLIENT = """
import sys, nbformat
from nbclient import NotebookClient
path, kernel = sys.argv[1:]
notebook = nbformat.read(path, as_version=4)
NotebookClient(notebook, kernel_name=kernel).execute()
nbformat.write(notebook, path + ".out")
"""
_API = """
import asyncio, sys
from sandbox_kernel import Notebook
async def main():
    async with Notebook.open(sys.argv[1]) as notebook:
        for number in range(int(sys.argv[2])):
            (await notebook.run(f"{number} + 1")).raise_for_error()
asyncio.run(main())
"""
BASE = "nbclient, python3"


@dataclass(frozen=True)
class Way:
    """One way to run the cells."""

    command: Callable[[Path], list[str]]
    pool: bool = True
    aim: float | None = None
    """Of the base's time, at most."""


def _python(program: str, *arguments: str) -> list[str]:
    return [sys.executable, "-c", program, *arguments]


def _run(path: Path) -> list[str]:
    return [sys.executable, "-m", "sandbox_kernel", "run", str(path)]


def _api(path: Path) -> list[str]:
    return _python(_API, str(path.with_name("api.ipynb")), str(CELLS))


WAYS = {
    BASE: Way(lambda path: _python(_NBCLIENT, str(path), "python3")),
    "nbclient, sandbox": Way(lambda path: _python(_NBCLIENT, str(path), "sandbox")),
    "sandbox-kernel run": Way(_run, aim=1.05),
    "sandbox-kernel run, no pool": Way(_run, pool=False, aim=1.15),
    "the API": Way(_api, aim=0.9),
}

Seconds = dict[str, list[float]]
"""Way -> seconds of each round."""


def measure(folder: Path, rounds: int, progress: Callable[[str], object]) -> Seconds:
    """All ways, in turns. The environment names sandbox-kernel's and Jupyter's folders."""
    path = folder / "cells.ipynb"
    cells = [nbformat.v4.new_code_cell(f"{number} + 1") for number in range(CELLS)]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), path)
    seconds: Seconds = {name: [] for name in WAYS}
    # A first round that does not count leaves a spare, and the machine's caches are warm.
    try:
        for number in range(rounds + 1):
            for name in list(WAYS) if number % 2 else reversed(WAYS):
                progress(f"round {number} of {rounds}: {CELLS} cells, {name}")
                time.sleep(SETTLE)
                took = _time(WAYS[name], path, folder)
                if number:
                    seconds[name].append(took)
    finally:
        warm = [sys.executable, "-m", "sandbox_kernel", "rm", "--warm"]
        subprocess.run(warm, check=True, capture_output=True, timeout=LIMIT)
    return seconds


def _time(way: Way, path: Path, folder: Path) -> float:
    environ = dict(os.environ)
    if not way.pool:
        environ[SETTINGS["warm_spares"].variable] = "0"
    path.with_name("api.ipynb").unlink(missing_ok=True)
    command = way.command(path)
    begin = time.perf_counter()
    subprocess.run(command, cwd=folder, env=environ, check=True, capture_output=True, timeout=LIMIT)
    return time.perf_counter() - begin


def lines(seconds: Seconds) -> list[list[str]]:
    """The table of medians and ratios, its heading first."""
    base = median(seconds[BASE])
    found = [[f"{CELLS} trivial cells, from process start to end", "s", ""]]
    for name, values in seconds.items():
        found.append([name, f"{median(values):.3f}", f"{median(values) / base:.2f}x"])
    return found


def checks(seconds: Seconds) -> Iterator[Check]:
    """Whether the aims are met."""
    base = median(seconds[BASE])
    for name, way in WAYS.items():
        if way.aim is not None:
            ratio = median(seconds[name]) / base
            yield Check(f"{CELLS} cells, {name}", f"{ratio:.2f} x", ratio <= way.aim)

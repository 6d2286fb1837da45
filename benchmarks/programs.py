"""What a person waits for, in whole programs: ``python -m benchmarks programs``.

A pipeline that runs papermill again and again, and a Jupyter Server in which a notebook is opened.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

import nbformat

from tests.server.running import JupyterServer, Tab

KERNELS = ("python3", "sandbox")
"""The first is the base of the ratios."""
SETTLE = 5.0
"""Seconds between the start of a server, or a notebook, and the next notebook."""
LIMIT = 120.0

ROWS = {
    "papermill": "papermill, a notebook of one cell: the second within ten minutes",
    "run": "the same with jupyter execute",
    "first": "a new notebook to its first idle, server just started",
    "second": "... the second notebook",
}

Samples = dict[str, dict[str, list[float]]]
"""Row -> kernel -> seconds."""


def measure(folder: Path, rounds: int, progress: Callable[[str], object]) -> Samples:
    """All rows, in turns. ``folder`` is for everything that the programs write."""
    for name in ("data", "run", "jupyter", "ipython"):
        (folder / name).mkdir()
    os.environ["SANDBOX_KERNEL_DATA_DIR"] = str(folder / "data")
    os.environ["SANDBOX_KERNEL_RUNTIME_DIR"] = str(folder / "run")
    os.environ["JUPYTER_DATA_DIR"] = os.environ["JUPYTER_RUNTIME_DIR"] = str(folder / "jupyter")
    os.environ["IPYTHONDIR"] = str(folder / "ipython")
    samples: Samples = {row: {kernel: [] for kernel in KERNELS} for row in ROWS}
    try:
        # A first run that does not count leaves its spare, and the machine's caches are warm.
        for number in range(rounds + 1):
            order = KERNELS if number % 2 else KERNELS[::-1]
            for row, command in _commands(folder).items():
                progress(f"round {number} of {rounds}: {row}")
                for kernel in order:
                    time.sleep(SETTLE)
                    seconds = _run(command(kernel), folder)
                    if number:
                        samples[row][kernel].append(seconds)
            progress(f"round {number} of {rounds}: server")
            for kernel in order:
                first, second = _notebooks(folder, kernel, number)
                if number:
                    samples["first"][kernel].append(first)
                    samples["second"][kernel].append(second)
    finally:
        _run([sys.executable, "-m", "sandbox_kernel", "rm", "--warm"], folder)
    return samples


def _commands(folder: Path) -> dict[str, Callable[[str], Sequence[str]]]:
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("6 * 7")])
    notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "", "language": "python"}
    path = str(folder / "one.ipynb")
    nbformat.write(notebook, path)
    papermill = [sys.executable, "-m", "papermill", path, str(folder / "out.ipynb")]
    execute = [sys.executable, "-m", "jupyter", "execute", path]
    return {
        "papermill": lambda kernel: [*papermill, "--no-progress-bar", "-k", kernel],
        "run": lambda kernel: [*execute, f"--kernel_name={kernel}"],
    }


def _run(command: Sequence[str], folder: Path) -> float:
    begin = time.perf_counter()
    subprocess.run(command, cwd=folder, check=True, capture_output=True, timeout=LIMIT)
    return time.perf_counter() - begin


def _notebooks(folder: Path, kernel: str, number: int) -> tuple[float, float]:
    """Start a server and open two notebooks; the seconds from each request to the kernel's idle."""
    root = folder / f"notebooks-{number}-{kernel}"
    root.mkdir()
    server = JupyterServer(folder, root)
    server.start()
    try:
        times, sessions = [], []
        for name in ("first", "second"):
            server.notebook(f"{name}.ipynb")
            time.sleep(SETTLE)
            begin = time.perf_counter()
            session = server.session(f"{name}.ipynb", kernel)
            tab = Tab(server, session["kernel"]["id"])
            asked = tab.send("kernel_info_request", {})
            while not _idle(tab.read(LIMIT), asked):
                pass
            times.append(time.perf_counter() - begin)
            tab.close()
            sessions.append(session["id"])
        for session_id in sessions:  # a server that is only stopped leaves its kernels behind
            server.request("DELETE", f"/api/sessions/{session_id}")
        return times[0], times[1]
    finally:
        server.end()


def _idle(message: dict[str, object], request: str) -> bool:
    content = message["content"]
    assert isinstance(content, dict)
    return message["parent"] == request and content.get("execution_state") == "idle"


def lines(samples: Samples) -> list[list[str]]:
    """The table of medians and ratios, its heading first."""
    base, *others = KERNELS
    found = [["", "unit", base, *(cell for name in others for cell in (name, ""))]]
    for row, about in ROWS.items():
        local = median(samples[row][base])
        cells = [about, "s", f"{local:.3f}"]
        for name in others:
            value = median(samples[row][name])
            cells += [f"{value:.3f}", f"{value / local:.2f}x"]
        found.append(cells)
    return found

"""What a small change of a large file moves: ``python -m benchmarks workspace --changes``.

The same scripts make and change the files in a sandbox and in a folder of the host, where restic
and borg, if they are installed, save them as well: both cut files where their contents say so.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.columns import COLUMNS
from benchmarks.livekernel import LiveKernel
from benchmarks.report import figure
from sandbox_kernel.kernels import SandboxedKernel
from sandbox_kernel.tunnel import background
from sandbox_kernel.workspace import Store, persist

LIMIT = 900.0
CLEAR = """
import os
for name in os.listdir():
    if os.path.isfile(name):
        os.remove(name)
"""


Steps = Iterator[tuple[float, float]]
"""Bytes moved and seconds taken by each save."""


@dataclass(frozen=True)
class Change:
    """Two scripts, for which ``size`` is defined."""

    about: str
    make: str
    change: str


# As Parquet: compressed groups of rows, and their places in a footer. A change writes all of it
# again, and behind the changed group every byte has moved.
COLUMNS_FILE = """
import json, random, zlib
draw = random.Random(3)
groups = size // 2**19
places = []
with open("columns.bin", "wb") as file:
    for number in range(groups):
        group = bytearray(draw.randbytes(2**19) + bytes(2**19))
        if CHANGED and number == groups // 4:
            group[:1000] = bytes(1000)
        places.append(file.tell())
        file.write(zlib.compress(group, 1))
    file.write(json.dumps(places).encode())
"""

CHANGES = (
    Change(
        "a row inserted at the top of a CSV",
        """
import random
draw = random.Random(1)
with open("table.csv", "w") as file:
    for row in range(size // 100):
        file.write("%010d,%s,%s\\n" % (row, draw.randbytes(22).hex(), draw.randbytes(22).hex()))
""",
        """
import os
with open("table.csv", "rb") as old, open("new.csv", "wb") as new:
    new.write(b"header,first,second\\n")
    while data := old.read(2**20):
        new.write(data)
os.rename("new.csv", "table.csv")
""",
    ),
    Change(
        "a row changed in SQLite",
        """
import random, sqlite3
draw = random.Random(2)
base = sqlite3.connect("base.sqlite")
base.execute("create table facts (id integer primary key, value blob)")
rows = ((row, draw.randbytes(200)) for row in range(size // 210))
base.executemany("insert into facts values (?, ?)", rows)
base.commit()
base.close()
""",
        """
import sqlite3
base = sqlite3.connect("base.sqlite")
middle = base.execute("select max(id) / 2 from facts").fetchone()[0]
base.execute("update facts set value = zeroblob(200) where id = ?", (middle,))
base.commit()
base.close()
""",
    ),
    Change(
        "a value changed in a rewritten column file",
        COLUMNS_FILE.replace("CHANGED", "False"),
        COLUMNS_FILE.replace("CHANGED", "True"),
    ),
)


def measure(folder: Path, size: int, progress: Callable[[str], object]) -> list[list[str]]:
    """A table: for each change and program, megabytes moved and seconds taken."""
    rows = [["megabytes moved (seconds)", "sandbox-kernel", *(tool.name for tool in TOOLS)]]
    live, _ = LiveKernel.start(COLUMNS["sandbox"])
    try:
        sandbox = live.manager.provisioner.kernel  # type: ignore[union-attr]
        assert isinstance(sandbox, SandboxedKernel)
        for number, change in enumerate(CHANGES):
            progress(change.about)
            place = folder / f"change{number}"
            place.mkdir()
            store = Store.open(str(place / "store"))
            steps: list[Steps | None] = [_in_sandbox(live, sandbox, store, change, size)]
            steps += [_with_tool(tool, place, change, size) for tool in TOOLS]
            rows.append([change.about, *(_shown(step) for step in steps)])
            live._run(CLEAR)
            shutil.rmtree(place)
    finally:
        live.discard()
    return rows


def _shown(steps: Steps | None) -> str:
    if steps is None:
        return "not installed"
    _, (moved, seconds) = steps
    return f"{figure(moved / 1e6)} ({figure(seconds)})"


def _in_sandbox(
    live: LiveKernel, sandbox: SandboxedKernel, store: Store, change: Change, size: int
) -> Steps:
    for script in (change.make, change.change):
        live._run(f"size = {size}\n{script}")
        time.sleep(0.3)  # cells count as running for a moment
        begin = time.perf_counter()
        report = background.submit(persist(sandbox, store, "changes")).result(LIMIT)
        yield report.moved_bytes, time.perf_counter() - begin


@dataclass(frozen=True)
class Tool:
    name: str
    init: tuple[str, ...]
    save: tuple[str, ...]
    """Run in the folder with the files; ``{repo}`` and ``{n}`` are replaced."""


TOOLS = (
    Tool("restic", ("restic", "init"), ("restic", "backup", "-q", ".")),
    Tool(
        "borg",
        ("borg", "init", "-e", "none", "{repo}"),
        ("borg", "create", "-C", "none", "{repo}::{n}", "."),
    ),
)


def _with_tool(tool: Tool, place: Path, change: Change, size: int) -> Steps | None:
    if shutil.which(tool.name) is None:
        return None
    return _steps_of(tool, place / tool.name, change, size)


def _steps_of(tool: Tool, place: Path, change: Change, size: int) -> Steps:
    files, repo = place / "files", place / "repo"
    files.mkdir(parents=True)
    environment = {
        **os.environ,
        "RESTIC_REPOSITORY": str(repo),
        "RESTIC_PASSWORD": "benchmark",
        "RESTIC_CACHE_DIR": str(place / "cache"),
        "BORG_BASE_DIR": str(place),
    }

    def run(command: tuple[str, ...], number: int = 0) -> None:
        made = [part.format(repo=repo, n=number) for part in command]
        subprocess.run(made, cwd=files, env=environment, check=True, capture_output=True)

    run(tool.init)
    for number, script in enumerate((change.make, change.change)):
        code = f"size = {size}\n{script}"
        subprocess.run([sys.executable, "-c", code], cwd=files, check=True)
        before, begin = _size_of(repo), time.perf_counter()
        run(tool.save, number)
        yield _size_of(repo) - before, time.perf_counter() - begin


def _size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())

"""Many notebooks in one process: nothing accumulates, and nothing outlives a caller's crash."""

from __future__ import annotations

import asyncio
import gc
import os
from pathlib import Path

import pytest

from sandbox_kernel import Notebook
from tests.helpers.waiting import LIMIT, wait_until
from tests.kernels.live import descriptors, files_in, jail_processes
from tests.kernels.other_process import forget_endpoints

from .other_process import killed_caller


def resident() -> int:
    """KiB of memory of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") // 1024


async def one(path: Path | None = None) -> None:
    async with Notebook.open(path) as notebook:
        result = await notebook.run("print('x' * 10**6)")
        assert result.status == "ok"


@pytest.mark.long
@pytest.mark.timeout(900)
async def test_fifty_notebooks_one_after_the_other(folder: Path) -> None:
    """No process, file, descriptor or task stays, and memory is flat."""
    for _ in range(5):
        await one()
    gc.collect()
    memory, open_files, tasks = resident(), len(descriptors()), len(asyncio.all_tasks())
    for number in range(50):
        await one(folder / f"{number}.ipynb" if number % 2 else None)
    gc.collect()
    print(f"memory: {memory} KiB before, {resident()} KiB after")
    assert resident() < memory + 20 * 1024
    assert len(descriptors()) <= open_files
    assert len(asyncio.all_tasks()) <= tasks
    assert not jail_processes(folder)
    assert not files_in(folder / "jupyter")


@pytest.mark.slow
async def test_ten_notebooks_at_once() -> None:
    """They do not disturb each other."""
    await asyncio.gather(*(one() for _ in range(10)))


def test_a_crash_leaves_nothing_beyond_the_lease(folder: Path) -> None:
    """The sandbox of a killed caller ends with its lease; the next look at notebooks deletes its
    files, and the next sandbox its record."""
    code = """
nb = await Notebook.open(lease_seconds=2)
await nb.run("1")
tell(sandbox=nb.sandbox)
"""
    with killed_caller(code):
        wait_until(lambda: not jail_processes(folder), "the end of the lease", LIMIT)
        assert not Notebook.live()
        assert not files_in(folder / "data" / "notebooks")
        assert not files_in(folder / "jupyter")
        asyncio.run(one())
        forget_endpoints(folder)

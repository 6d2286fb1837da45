"""What cells change in a notebook's workspace, and packages that are installed from it."""

from __future__ import annotations

import asyncio

import pytest

from sandbox_kernel import Notebook
from sandbox_kernel.agents.result import ChangedFile
from sandbox_kernel.errors import SandboxError, SpecError
from tests.helpers.package_index import wheel


async def test_a_result_tells_which_files_a_cell_changed() -> None:
    """If it is asked to: not what was written from outside, or by cells before; also of a cell
    that fails, and after a restart."""
    async with Notebook.open() as notebook:
        await notebook.write("old.txt", "1")
        cell = "open('new.txt', 'w').write('abc'); import os; os.remove('old.txt'); 1 / 0"
        result = await notebook.run(cell, files=True)
        changed = [ChangedFile("new.txt", "created", 3), ChangedFile("old.txt", "deleted", 0)]
        assert (result.status, result.files) == ("error", changed)
        assert "[files: 'new.txt' (created, 3 bytes), 'old.txt' (deleted)]" in result.text
        await notebook.run("open('between.txt', 'w')")
        assert (await notebook.run("1", files=True)).files == []
        assert (await notebook.run("open('a', 'w')")).files == []
        assert await notebook.changed_files() == [ChangedFile("a", "created", 0)]
        await notebook.restart()
        dying = "open('last', 'w').write('x'); import os; os._exit(1)"
        assert [each.path for each in (await notebook.run(dying, files=True)).files] == ["last"]


async def test_packages_are_installed_by_a_cell() -> None:
    """From a wheel in the workspace, wherever the cells have gone; options are none."""
    async with Notebook.open() as notebook:
        await notebook.write("wheels/made-1.0-py3-none-any.whl", wheel("made"))
        await notebook.run("import os; os.chdir('/')")
        installed = await notebook.install("wheels/made-1.0-py3-none-any.whl", timeout=120)
        assert installed.ok, installed.text
        assert (await notebook.run("import made; made.NAME")).text == "'made'"
        with pytest.raises(SpecError):
            await notebook.install("--pre")
    with pytest.raises(SandboxError, match="cannot be used here"):
        await notebook.read("wheels")


UNTIL_GONE = """
import subprocess, time
while subprocess.run("grep -l 'MOST_CHANGE[S]' /proc/[0-9]*/cmdline", shell=True).returncode == 0:
    time.sleep(0.1)
"""


async def test_looks_at_files_leave_nothing_when_a_notebook_is_detached() -> None:
    """The program that looks ends with the notebook's use here."""
    notebook = await Notebook.open()
    await notebook.changed_files()
    sandbox = notebook.sandbox
    await notebook.detach()
    async with Notebook.attach(sandbox) as again:
        assert (await again.run(UNTIL_GONE, timeout=60)).ok
        results = await asyncio.gather(*(again.run(f"{n}", files=True) for n in range(5)))
        assert [result.text for result in results] == [str(n) for n in range(5)]

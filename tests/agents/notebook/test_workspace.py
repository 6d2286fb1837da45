"""What a notebook does with its sandbox beside cells: files, changes, packages, variables."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from sandbox_kernel import BlockingNotebook, Notebook
from sandbox_kernel.agents.result import ChangedFile
from sandbox_kernel.errors import FileMissing, SandboxError, SandboxTimeout, SpecError
from tests.helpers.package_index import wheel


async def test_files_go_in_and_out(tmp_path: Path) -> None:
    """The kernel reads what was written, and writes what is read; also while a cell runs."""
    (tmp_path / "in.csv").write_text("a,b\n1,2\n")
    async with Notebook.open() as notebook:
        await notebook.write("data/x.txt", "hello")
        running = await notebook.start("input()")
        await running.until_asked(60)
        await notebook.upload(tmp_path / "in.csv")
        assert [each.path for each in await notebook.list()] == ["data", "in.csv"]
        await running.input("")
        told = await notebook.run(
            "open('data/y.txt', 'w').write(open('data/x.txt').read()[::-1])\nopen('in.csv').read()"
        )
        assert told.text == repr("a,b\n1,2\n")
        assert await notebook.read("/workspace/data/y.txt") == b"olleh"
        copied = await notebook.download("data", tmp_path)
        assert copied.files == 2
        assert (tmp_path / "data" / "y.txt").read_text() == "olleh"
        with pytest.raises(FileMissing):
            await notebook.read("none")
        with pytest.raises(SpecError):
            await notebook.write("../x", b"")
    with pytest.raises(SandboxError, match="cannot be used here"):
        await notebook.read("data/x.txt")


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
    """From a wheel in the workspace; what cannot be had says what to do."""
    async with Notebook.open() as notebook:
        await notebook.write("wheels/made-1.0-py3-none-any.whl", wheel("made"))
        installed = await notebook.install("wheels/made-1.0-py3-none-any.whl", timeout=120)
        assert installed.ok, installed.text
        assert (await notebook.run("import made; made.NAME")).text == "'made'"
        failed = await notebook.install("no-such-package>=1", timeout=120)
        assert failed.status == "error"
        assert 'egress=["@pip"]' in failed.why
        assert failed.why in failed.text
        with pytest.raises(SpecError):
            await notebook.install("--pre")


async def test_variables_are_listed_after_the_cells_before() -> None:
    """In order with the cells; nothing of it is in the notebook; a busy kernel is not waited for
    without end, and goes on."""
    async with Notebook.open() as notebook:
        cell = await notebook.start("x = [1, 2]\ntext = 'hello'")
        found = {each.name: each for each in await notebook.variables()}
        assert cell.is_over
        assert set(found) == {"x", "text"}
        assert (found["x"].type, found["x"].shape, found["x"].text) == ("list", (2,), "[1, 2]")
        busy = await notebook.start("input()")
        await busy.until_asked(60)
        with pytest.raises(SandboxTimeout):
            await notebook.variables(timeout=0.1)
        assert list(notebook.jobs) == [cell.id, busy.id]
        await busy.input("")
        assert (await busy.wait(60)).ok
        assert len(await notebook.variables()) == 2
        assert (await notebook.run("1")).execution_count == 3


def test_the_same_without_a_loop(tmp_path: Path) -> None:
    """BlockingNotebook has the same methods."""
    with BlockingNotebook.open() as notebook:
        notebook.write("a/b", b"x")
        assert notebook.read("a/b") == b"x"
        assert [each.path for each in notebook.list("a")] == ["a/b"]
        assert notebook.listing("a", 0).more == 1
        assert notebook.upload(__file__) == 1
        assert notebook.download("a", tmp_path).files == 1
        assert notebook.changed_files() == []
        result = notebook.run("y = 1; open('c', 'w')", files=True)
        assert result.files == [ChangedFile("c", "created", 0)]
        assert [each.name for each in notebook.variables()] == ["y"]
        with pytest.raises(SpecError):
            notebook.install("a b")


async def test_looks_at_files_leave_nothing_when_a_notebook_is_detached() -> None:
    """The program that looks ends with the notebook's use here."""
    notebook = await Notebook.open()
    await notebook.changed_files()
    sandbox = notebook.sandbox
    await notebook.detach()
    async with Notebook.attach(sandbox) as again:
        seen = await again.run(
            "import glob\nsum(b'MOST_CHANGES' in open(p, 'rb').read()"
            " for p in glob.glob('/proc/[0-9]*/cmdline'))"
        )
        assert seen.text == "0"
        results = await asyncio.gather(*(again.run(f"{n}", files=True) for n in range(5)))
        assert [result.text for result in results] == [str(n) for n in range(5)]

"""What a notebook can do besides running cells."""

from __future__ import annotations

from pathlib import Path

import pytest

from sandbox_kernel import Notebook
from sandbox_kernel.errors import FileMissing, SandboxTimeout, Unsupported, WorkspaceError


async def test_files_go_in_and_out(folder: Path) -> None:
    """Also while a cell runs."""
    async with Notebook.open() as notebook:
        job = await notebook.start("input()")
        await notebook.write("data/a.txt", "text")
        assert await notebook.read("data/a.txt") == b"text"
        (entry,) = await notebook.list("data")
        assert (entry.path, entry.size) == ("data/a.txt", 4)
        (folder / "b.txt").write_text("from the host")
        assert await notebook.upload(folder / "b.txt") == 1
        copied = await notebook.download("data", folder / "copy")
        assert copied.files == 1
        with pytest.raises(FileMissing):
            await notebook.read("missing")
        await job.cancel()
        assert (await notebook.run("open('b.txt').read()")).text == "'from the host'"
    assert (folder / "copy" / "a.txt").read_text() == "text"


async def test_a_result_tells_which_files_have_changed() -> None:
    """If that is asked for."""
    async with Notebook.open() as notebook:
        await notebook.run("open('old', 'w').write('1'); open('gone', 'w').write('')")
        result = await notebook.run(
            "import os; os.remove('gone')\n"
            "open('new', 'w').write('22'); open('old', 'a').write('1')",
            files=True,
        )
        unasked = await notebook.run("open('more', 'w')")
    found = {(file.path, file.kind) for file in result.files}
    assert found == {("new", "created"), ("old", "changed"), ("gone", "deleted")}
    assert unasked.files == []


async def test_variables_are_listed_without_a_trace() -> None:
    """With type and value, in no job and no history; a busy kernel is waited for, not forever."""
    async with Notebook.open() as notebook:
        await notebook.run("number = 5\nwords = ['a', 'b']")
        found = {variable.name: variable for variable in await notebook.variables()}
        assert (found["number"].type, found["number"].text) == ("int", "5")
        assert found["words"].shape == (2,)
        assert len(notebook.jobs) == 1
        job = await notebook.start("input()")
        with pytest.raises(SandboxTimeout, match="busy"):
            await notebook.variables(timeout=0.1)
        await job.cancel()
        assert (await notebook.run("1")).execution_count == 3


async def test_without_a_way_out_install_says_what_to_do() -> None:
    """The result of pip's failure names the setting."""
    async with Notebook.open() as notebook:
        result = await notebook.install("tinynetrc")
    assert result.status == "error"
    assert "egress" in result.why


async def test_files_are_saved_and_restored_under_a_name() -> None:
    """In this notebook and in another one."""
    async with Notebook.open() as notebook:
        with pytest.raises(WorkspaceError, match="Name a workspace"):
            await notebook.persist()
        await notebook.run("open('a', 'w').write('first')")
        first = await notebook.persist("shared")
        await notebook.run("open('a', 'w').write('second'); open('b', 'w').write('')")
        second = await notebook.persist("shared")
        assert first != second
        assert await notebook.restore("shared", at=first) == 1
        assert (await notebook.run("import os; open('a').read(), os.path.exists('b')")).text == (
            "('first', False)"
        )
    async with Notebook.open() as other:
        assert await other.restore("shared") == 2
        assert (await other.run("open('a').read()")).text == "'second'"
        with pytest.raises(WorkspaceError, match="no save"):
            await other.restore("nothing")


async def test_a_notebook_finds_its_files_again(folder: Path) -> None:
    """They are saved with the notebook when it is closed, and are there when it is opened, as in
    JupyterLab; not if it is closed without saving them."""
    path = folder / "mine.ipynb"
    async with Notebook.open(path) as notebook:
        await notebook.run("open('kept', 'w').write('once')")
        assert await notebook.persist()
        await notebook.run("open('kept', 'a').write(' twice')")
    notebook = await Notebook.open(path)
    assert (await notebook.run("open('kept').read()")).text == "'once twice'"
    await notebook.run("open('kept', 'a').write(' thrice')")
    await notebook.close(save=False)
    async with Notebook.open(path) as third:
        assert (await third.run("open('kept').read()")).text == "'once twice'"


async def test_what_the_backend_cannot_is_refused_by_name() -> None:
    """Forks and checkpoints of a local jail."""
    async with Notebook.open() as notebook:
        with pytest.raises(Unsupported, match="'local'"):
            await notebook.fork()
        with pytest.raises(Unsupported, match="'local'"):
            await notebook.checkpoint("then")
        assert (await notebook.run("1")).text == "1"

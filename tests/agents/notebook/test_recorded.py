"""The .ipynb that a notebook leaves: valid, complete, bounded, and shared with other programs."""

from __future__ import annotations

import asyncio
import json
import stat
import threading
from pathlib import Path
from typing import Any

import nbformat
import pytest

from sandbox_kernel import Notebook
from sandbox_kernel.agents.job_state import JobState
from sandbox_kernel.agents.recorded import RecordedNotebook
from sandbox_kernel.errors import SandboxExists, SpecError


def read(path: Path) -> Any:
    """The notebook, which must be valid as it is."""
    raw = json.loads(path.read_text())
    nbformat.validate(raw)
    assert (raw["nbformat"], raw["nbformat_minor"]) == (4, 5)
    return nbformat.read(path, 4)


async def test_cells_are_recorded_as_they_end(folder: Path) -> None:
    """Sources, counts, merged streams, results, errors and rich outputs, in a valid notebook."""
    path = folder / "all.ipynb"
    cells = [
        "print('a')\nprint('b')\nimport sys; print('c', file=sys.stderr)\n7",
        "1 / 0",
        "from IPython.display import display, HTML, JSON\ndisplay(HTML('<b>x</b>'))\n"
        "JSON({'list': [1]})",
    ]
    async with Notebook.open(path) as notebook:
        for cell in cells:
            await notebook.run(cell)
        await notebook.save()
        during = read(path)
    after = read(path)
    assert during == after
    assert [cell.source for cell in after.cells] == cells
    assert [cell.execution_count for cell in after.cells] == [1, 2, 3]
    first, second, third = (cell.outputs for cell in after.cells)
    assert [(o.output_type, o.get("text", "")) for o in first] == [
        ("stream", "a\nb\n"),
        ("stream", "c\n"),
        ("execute_result", ""),
    ]
    assert second[0].ename == "ZeroDivisionError"
    assert third[0].data["text/html"] == "<b>x</b>"
    assert third[1].data["application/json"] == {"list": [1]}
    assert after.metadata.kernelspec.name == "sandbox"
    assert after.metadata.language_info.name == "python"
    assert stat.S_IMODE(path.stat().st_mode) & 0o600 == 0o600


async def test_displays_are_updated_and_outputs_cleared(folder: Path) -> None:
    """As JupyterLab shows them at the end."""
    path = folder / "displays.ipynb"
    async with Notebook.open(path) as notebook:
        await notebook.run(
            "from IPython.display import display, clear_output\n"
            "shown = display('before', display_id=True)"
        )
        await notebook.run("shown.update('after')")
        await notebook.run("print('old')\nclear_output(wait=True)\nprint('new')")
        await notebook.run("print('gone')\nclear_output()")
    first, second, third, fourth = (cell.outputs for cell in read(path).cells)
    assert [o.data["text/plain"] for o in first] == ["'after'"]
    assert second == []
    assert [o.text for o in third] == ["new\n"]
    assert fourth == []


async def test_a_slow_write_does_not_replace_a_later_one(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The notebook is closed while a thread writes it: what comes afterwards is in the file."""
    began, may_go_on, ended = threading.Event(), threading.Event(), threading.Event()
    replace = RecordedNotebook._replace

    def slowly(record: RecordedNotebook, *args: Any) -> None:
        if began.is_set():
            return replace(record, *args)
        began.set()
        may_go_on.wait(60)
        replace(record, *args)
        ended.set()

    monkeypatch.setattr(RecordedNotebook, "_replace", slowly)
    record = RecordedNotebook.open(folder / "slow.ipynb")
    for name in ("first", "second"):
        job = JobState(name, f"print('{name}')", name)
        record.place(job)
        record.changed(job)
        assert await asyncio.to_thread(began.wait, 60)
    closing = asyncio.create_task(record.close())
    await asyncio.wait({closing}, timeout=0.2)  # time for it to go wrong
    may_go_on.set()
    await closing
    assert await asyncio.to_thread(ended.wait, 60)
    assert [cell.id for cell in read(folder / "slow.ipynb").cells] == ["first", "second"]


async def test_cells_that_were_there_stay(folder: Path) -> None:
    """New ones come after them; one that is named is run again in its place."""
    path = folder / "old.ipynb"
    old = nbformat.v4.new_notebook(
        cells=[
            nbformat.v4.new_markdown_cell("# Title", id="title"),
            nbformat.v4.new_code_cell("1 + 1", id="sum"),
        ],
        metadata={"kernelspec": {"name": "mine", "display_name": "Mine"}, "mine": 1},
    )
    nbformat.write(old, path)
    async with Notebook.open(path) as notebook:
        await notebook.run("2 + 2", cell_id="sum")
        await notebook.run("3 + 3")
    found = read(path)
    assert [cell.source for cell in found.cells] == ["# Title", "2 + 2", "3 + 3"]
    assert [cell.get("execution_count") for cell in found.cells] == [None, 1, 2]
    assert (found.metadata.mine, found.metadata.kernelspec.name) == (1, "mine")


async def test_an_output_leaves_the_notebook_alone(folder: Path) -> None:
    """The copy begins with the notebook's cells, and has the new ones."""
    path, output = folder / "in.ipynb", folder / "out.ipynb"
    nbformat.write(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("a = 1")]), path)
    before = path.read_bytes()
    async with Notebook.open(path, output=output) as notebook:
        assert notebook.path == output
        await notebook.run("2")
    assert path.read_bytes() == before
    assert [cell.source for cell in read(output).cells] == ["a = 1", "2"]


async def test_what_others_change_meanwhile_stays(folder: Path) -> None:
    """A person edits in JupyterLab: new cells, moved and deleted ones are as they were left."""
    path = folder / "shared.ipynb"
    async with Notebook.open(path) as notebook:
        for number in range(3):
            await notebook.run(f"{number}", cell_id=f"cell-{number}")
        await notebook.save()
        edited = nbformat.read(path, 4)
        edited.cells = [
            nbformat.v4.new_markdown_cell("note", id="note"),
            edited.cells[2],
            edited.cells[0],
        ]
        nbformat.write(edited, path)
        await notebook.run("'more'")
    found = read(path)
    assert [cell.source for cell in found.cells] == ["note", "2", "0", "'more'"]


async def test_endless_output_is_bounded(folder: Path) -> None:
    """The beginning and the end are kept, and a note says what was left out."""
    path = folder / "big.ipynb"
    code = "for n in range(60):\n    print(str(n) * 400_000, flush=True)\nprint('the end')"
    async with Notebook.open(path) as notebook:
        job = await notebook.start(code)
        result = await job.wait(120)
        page = job.output()
    assert result.status == "ok"
    kept = "".join(output["text"] for output in result.outputs)
    assert kept.startswith("0" * 400_000)
    assert kept.endswith("the end\n")
    assert len(kept) < 17 * 2**20
    note = next(o for o in read(path).cells[0].outputs if o.name == "stderr")
    assert "left out here" in note.text
    assert page.dropped > 0


async def test_files_that_are_no_notebooks_are_refused(folder: Path) -> None:
    """They are left as they are, and nothing is started."""
    path = folder / "bad.ipynb"
    for content, words in (
        ("not json", "not JSON"),
        ('{"nbformat": 3}', "nbconvert"),
        ('{"nbformat": 4, "cells": 1}', "list of cells"),
    ):
        path.write_text(content)
        with pytest.raises(SpecError, match=words):
            await Notebook.open(path)
        assert path.read_text() == content


async def test_one_notebook_is_not_open_twice(folder: Path) -> None:
    """The second one is told where it is."""
    path = folder / "once.ipynb"
    async with Notebook.open(path) as notebook:
        with pytest.raises(SandboxExists, match=notebook.sandbox):
            await Notebook.open(path)


async def test_hostile_output_gives_a_valid_notebook(folder: Path) -> None:
    """Messages that no kernel of good faith sends are made to fit, or left out."""
    path = folder / "hostile.ipynb"
    code = """
kernel = get_ipython().kernel
def send(kind, **content):
    kernel.session.send(kernel.iopub_socket, kind, content, parent=kernel.get_parent())
send("stream", name=1, text=["a", 2])
send("stream", name="stdout", text="\\ud800 alone")
send("display_data", data={"text/plain": 5, "image/png": ["a", "b"], "x": None}, metadata=[1])
send("display_data", data="nothing", metadata={}, transient={"display_id": ["no"]})
send("execute_result", data={}, metadata={}, execution_count="many")
send("error", ename=None, evalue=3, traceback="no list")
send("clear_output", wait="perhaps")
send("update_display_data", data={"a": 1}, transient={"display_id": "unknown"})
send("status", execution_state=5)
send("status", execution_state="idle")
send("execute_input", execution_count=-1, code="")
print("still here")
"""
    async with Notebook.open(path) as notebook:
        result = await notebook.run(code)
        assert (await notebook.run("'next'")).text == "'next'"
    assert result.status in ("ok", "error")
    assert read(path).cells[1].outputs[0].data["text/plain"] == "'next'"

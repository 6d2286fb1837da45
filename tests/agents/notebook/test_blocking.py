"""BlockingNotebook: the same, for programs without an event loop."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from sandbox_kernel import BlockingNotebook
from sandbox_kernel.agents.notebook import Notebook
from sandbox_kernel.errors import SandboxError


def test_a_program_without_a_loop_runs_cells(folder: Path) -> None:
    """Results, jobs, files and the end."""
    path = folder / "blocking.ipynb"
    with BlockingNotebook.open(path) as notebook:
        assert notebook.run("6 * 7").text == "42"
        job = notebook.start("print('asks')\nprint(input())")
        page = job.changed()
        while job.prompt is None:
            page = job.changed(page.cursor)
        job.input("answer")
        assert [page.text for page in job.follow() if page.items] == ["asks", "answer"]
        assert job.wait(60).status == "ok"
        notebook.write("a", b"1")
        assert notebook.read("a") == b"1"
        assert [variable.name for variable in notebook.variables()] == []
        notebook.restart()
        assert notebook.state == "idle"
        assert list(notebook.jobs) == [next(iter(notebook.jobs)), job.id]
    notebook.close()
    assert path.exists()
    with pytest.raises(SandboxError, match="was closed"):
        notebook.run("1")
    with pytest.raises(SandboxError, match="was closed"):
        job.cancel()


def test_threads_share_one_notebook() -> None:
    """Each gets its own result."""
    with BlockingNotebook.open() as notebook, ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda n: notebook.run(f"{n} * 2").text, range(24)))
    assert results == [str(2 * n) for n in range(24)]


def test_one_process_hands_a_notebook_to_the_next() -> None:
    """Detached, and attached again."""
    first = BlockingNotebook.open()
    first.run("x = 1")
    first.detach()
    (live,) = BlockingNotebook.live()
    with BlockingNotebook.attach(live.sandbox) as second:
        assert second.run("x").text == "1"


def test_a_failed_start_leaves_no_thread() -> None:
    """The loop's thread ends with it."""
    before = threading.active_count()
    with pytest.raises(SandboxError):
        BlockingNotebook.open(kernel="nonesuch")
    assert threading.active_count() == before


def test_it_has_what_a_notebook_has() -> None:
    """Every public method and attribute of Notebook, but for what belongs to coroutines."""
    assert vars_of(Notebook) <= vars_of(BlockingNotebook)


def vars_of(kind: type) -> set[str]:
    return {name for name in dir(kind) if not name.startswith("_")}

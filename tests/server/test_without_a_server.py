"""Without a server a kernel's files are saved when it is shut down, and there for the next."""

from __future__ import annotations

from pathlib import Path

import nbformat
import papermill
import pytest
from jupyter_client import KernelManager
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

from sandbox_kernel.workspace import Store, export, name_for_notebook
from tests.kernels.live import PATIENCE, run_cell


def run_notebook(*cells: str) -> list[str]:
    """What the cells printed, each."""
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(c) for c in cells])
    NotebookClient(notebook, kernel_name="sandbox", timeout=int(PATIENCE)).execute()
    return ["".join(o.get("text", "") for o in cell.outputs) for cell in notebook.cells]


@pytest.mark.usefixtures("folder")
def test_nbclient_with_a_named_workspace(monkeypatch: pytest.MonkeyPatch) -> None:
    """SANDBOX_KERNEL_WORKSPACE=name is all that it takes, also if a cell fails."""
    monkeypatch.setenv("SANDBOX_KERNEL_WORKSPACE", "work")
    with pytest.raises(CellExecutionError):
        run_notebook("open('file', 'w').write('kept')", "1 / 0")
    assert run_notebook("print(open('file').read())") == ["kept\n"]
    assert [save.files for save in Store.open().saves("work")] == [1]


def test_a_folder_without_a_workspace(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SANDBOX_KERNEL_UPLOAD needs no name: the folder in which a kernel would run is there, whether
    the client names it or is in it. Nothing is saved, unless it is mirrored: then results come
    back, and the workspace that they came by is over."""
    (folder / "root" / "data.csv").write_text("beside")
    monkeypatch.chdir(folder / "root")
    monkeypatch.setenv("SANDBOX_KERNEL_UPLOAD", "folder")
    assert run_notebook("print(open('data.csv').read())") == ["beside\n"]
    monkeypatch.chdir(folder)
    manager = KernelManager(kernel_name="sandbox")
    monkeypatch.setenv("SANDBOX_KERNEL_MIRROR", "true")
    manager.start_kernel(cwd=str(folder / "root"))
    client = manager.client()
    client.start_channels()
    client.wait_for_ready(timeout=PATIENCE)
    try:
        assert run_cell(client, "print(open('data.csv').read())").text() == "beside\n"
        run_cell(client, "open('result.txt', 'w').write('back')")
    finally:
        client.stop_channels()
        manager.shutdown_kernel()
    assert (folder / "root" / "result.txt").read_text() == "back"
    assert not Store.open().names()


def test_papermill(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pipeline's runs share the workspace of a notebook, named by its path: with each other, and
    with a server that opens it."""
    notebook = folder / "root" / "step.ipynb"
    monkeypatch.setenv("SANDBOX_KERNEL_WORKSPACE", str(notebook))
    code = (
        "runs = open('runs').read() if os.path.exists('runs') else ''",
        "open('runs', 'w').write(runs + name + ' ')",
    )
    cells = [nbformat.v4.new_code_cell("name = ''", metadata={"tags": ["parameters"]})]
    cells += [nbformat.v4.new_code_cell("\n".join(("import os", *code)))]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), notebook)
    for name in ("first", "second"):
        papermill.execute_notebook(
            str(notebook),
            str(folder / f"{name}.ipynb"),
            parameters={"name": name},
            kernel_name="sandbox",
            language="python",
            progress_bar=False,
        )
    store = Store.open()
    save = store.find(name_for_notebook(str(notebook)))
    assert save.notebook == str(notebook)
    export(store, save.workspace, folder / "out")
    assert (folder / "out" / "runs").read_text() == "first second "


def test_the_notebooks_path(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that is started for a notebook has its workspace, unless the user does not want
    it; a console has none."""
    notebook = str(folder / "root" / "n.ipynb")

    def run(code: str, session: str = notebook) -> str:
        manager = KernelManager(kernel_name="sandbox")
        manager.start_kernel(env={"JPY_SESSION_NAME": session})
        client = manager.client()
        client.start_channels()
        client.wait_for_ready(timeout=PATIENCE)
        try:
            return run_cell(client, code).text()
        finally:
            client.stop_channels()
            manager.shutdown_kernel()

    run("open('file', 'w').write('kept')")
    assert Store.open().names() == [name_for_notebook(notebook)]
    assert run("print(open('file').read())") == "kept\n"
    look = "import os; print(os.listdir())"
    assert run(look, str(folder / "root" / "console-1")) == "[]\n"
    monkeypatch.setenv("SANDBOX_KERNEL_PERSIST", "false")
    assert run(look) == "[]\n"
    assert Store.open().names() == [name_for_notebook(notebook)]

"""Notebooks in a server see the files beside them."""

from __future__ import annotations

import pytest

from sandbox_kernel.workspace import Store
from tests.emulators.running import Running
from tests.helpers.waiting import wait_until

from .conftest import StartServer, statuses
from .running import JupyterServer, open_notebook

CODE = "import helpers; print(open('data.csv').read(), helpers.word)"


def with_files(make_server: StartServer) -> JupyterServer:
    server = make_server()
    server.start()
    (server.root / "work").mkdir()
    (server.root / "work" / "data.csv").write_text("1,2")
    (server.root / "work" / "helpers.py").write_text("word = 'module'")
    server.notebook("work/n.ipynb")
    return server


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["mount-ro", "mount"])
def test_a_mount(make_server: StartServer, monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    """The notebook's own folder; a save of the notebook saves nothing else."""
    monkeypatch.setenv("SANDBOX_KERNEL_FILES", mode)
    server = with_files(make_server)
    _, tab = open_notebook(server, "work/n.ipynb")
    assert tab.run(CODE) == "1,2 module\n"
    if mode == "mount":
        tab.run("open('result.txt', 'w').write('x')")
        assert (server.root / "work" / "result.txt").read_text() == "x"
    server.notebook("work/n.ipynb", ("1 + 1",))
    assert tab.run(CODE) == "1,2 module\n"
    assert not Store.open().names()
    request = tab.begin("open('nowhere.csv')")
    assert tab.until_done(request)["status"] == "error"
    assert not tab.text(request)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["mount-ro", "mount"])
def test_a_service_gets_a_copy(
    make_server: StartServer, service: Running, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    """Where no folder of this machine can be shown. The notebook says so, and runs all the same."""
    monkeypatch.setenv("SANDBOX_KERNEL_FILES", mode)
    server = with_files(make_server)
    work = server.root / "work"
    (work / ".env").write_text("secret")
    session, tab = open_notebook(server, "work/n.ipynb")
    said = tab.run(f"import os; {CODE}; print(os.path.exists('.env'))")
    assert said.endswith("\n1,2 module\nFalse\n")
    assert f"files={mode} gives each new sandbox a copy" in said
    tab.run("open('result.txt', 'w').write('x')")
    server.request("DELETE", f"/api/sessions/{session}")
    wait_until(lambda: not statuses(service), "the end of the sandbox")
    assert (work / "result.txt").exists() == (mode == "mount")


@pytest.mark.slow
def test_a_copy(make_server: StartServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Results are in the folder after a save of the notebook, and after its kernel is shut down.
    What both sides have changed is left, and named in the notebook."""
    monkeypatch.setenv("SANDBOX_KERNEL_FILES", "copy")
    server = with_files(make_server)
    work = server.root / "work"
    session, tab = open_notebook(server, "work/n.ipynb")
    assert tab.run(CODE) == "1,2 module\n"
    tab.run("open('result.txt', 'w').write('saved')")
    server.notebook("work/n.ipynb", ("1 + 1",))
    wait_until(lambda: (work / "result.txt").exists(), "the results of the save")
    (work / "data.csv").write_text("by hand")
    (work / "later.csv").write_text("new")
    request = tab.begin("open('data.csv', 'w').write('by the kernel')")
    tab.until_done(request)
    server.notebook("work/n.ipynb", ("1 + 1", "2 + 2"))
    while "data.csv: changed on the host" not in tab.text(request):
        tab.read()
    tab.run("open('result.txt', 'w').write('at the end')")
    server.request("DELETE", f"/api/sessions/{session}")
    wait_until(lambda: (work / "result.txt").read_text() == "at the end", "the last results")
    assert (work / "data.csv").read_text() == "by hand"
    _, tab = open_notebook(server, "work/n.ipynb")
    request = tab.begin("print(open('later.csv').read(), open('data.csv').read())")
    assert tab.until_done(request)["status"] == "ok"
    assert "new by the kernel\n" in tab.text(request)
    assert "1 files have changed in" in tab.text(request)


@pytest.mark.slow
def test_a_notebook_with_a_saved_workspace(
    make_server: StartServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a mount it is left as it was, the notebook says so, and it is used again without."""
    server = with_files(make_server)
    server.notebook("work/n.ipynb", ("import os",))
    session, tab = open_notebook(server, "work/n.ipynb")
    tab.run("open('kept.txt', 'w').write('saved')")
    server.request("DELETE", f"/api/sessions/{session}")
    server.end()
    [name] = Store.open().names()
    before = Store.open().latest(name)

    monkeypatch.setenv("SANDBOX_KERNEL_FILES", "mount")
    server.start()
    session, tab = open_notebook(server, "work/n.ipynb")
    said = tab.run("import os; print(os.path.exists('kept.txt'))")
    assert "False\n" in said
    assert f"workspace export {name}" in " ".join(said.split())
    server.notebook("work/n.ipynb", ("import os", "1 + 1"))
    server.request("DELETE", f"/api/sessions/{session}")
    server.end()
    assert Store.open().latest(name) == before

    monkeypatch.setenv("SANDBOX_KERNEL_FILES", "none")
    server.start()
    _, tab = open_notebook(server, "work/n.ipynb")
    assert tab.run("print(open('kept.txt').read())") == "saved\n"

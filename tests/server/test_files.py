"""Notebooks in a server see the files beside them."""

from __future__ import annotations

import pytest

from sandbox_kernel.workspace import Store

from .conftest import StartServer
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

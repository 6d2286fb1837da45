"""Sandboxes that can be paused, and what a server does with them: with Superserve's emulator."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from sandbox_kernel.records import Records
from sandbox_kernel.workspace import Store, name_for_notebook
from tests.emulators.running import Running
from tests.helpers.waiting import wait_until

from .conftest import StartServer, statuses
from .running import JupyterServer, Tab


def saves(server: JupyterServer, path: str) -> int:
    return len(Store.open().saves(name_for_notebook(str(server.root / path))))


@pytest.mark.slow
def test_a_server_that_pauses(make_server: StartServer, service: Running) -> None:
    """Shut down, it saves the files and pauses the sandboxes; the next one goes on with them."""
    server = make_server("--SandboxServer.on_shutdown=pause")
    server.start()
    server.notebook("n.ipynb")
    tab = Tab(server, server.session("n.ipynb")["kernel"]["id"])
    tab.run("x = 41; open('file', 'w').write('unsaved')")
    tab.close()
    server.end(signal.SIGTERM)
    assert statuses(service) == ["paused"]
    assert saves(server, "n.ipynb") == 1

    server.start()
    [session] = server.get("/api/sessions")
    tab = Tab(server, session["kernel"]["id"])
    assert tab.run("print(x + 1, open('file').read())") == "42 unsaved\n"
    assert statuses(service) == ["active"]
    server.request("DELETE", f"/api/kernels/{session['kernel']['id']}")
    wait_until(lambda: not statuses(service), "the end of the sandbox")


@pytest.mark.slow
def test_an_idle_kernel_is_saved_before_it_is_paused(
    make_server: StartServer, service: Running
) -> None:
    """A notebook that is saved later does not resume it: nothing has changed since."""
    server = make_server("--SandboxProvisioner.idle_pause_seconds=2")
    server.start()
    server.notebook("n.ipynb")
    kernel = server.session("n.ipynb")["kernel"]["id"]
    tab = Tab(server, kernel)
    tab.run("open('file', 'w').write('unsaved')")
    wait_until(lambda: statuses(service) == ["paused"], "the pause")
    assert saves(server, "n.ipynb") == 1
    server.notebook("n.ipynb", ("x",))
    assert statuses(service) == ["paused"]
    tab.close()
    server.request("DELETE", f"/api/kernels/{kernel}")
    wait_until(lambda: not statuses(service), "the end of the sandbox")
    assert saves(server, "n.ipynb") == 1


@pytest.mark.slow
def test_a_sandbox_that_somebody_else_has_paused(
    make_server: StartServer, service: Running
) -> None:
    """The save of a notebook does not resume it, and says so; the end of its kernel does."""
    server = make_server()
    server.start()
    server.notebook("n.ipynb")
    kernel = server.session("n.ipynb")["kernel"]["id"]
    tab = Tab(server, kernel)
    tab.run("open('file', 'w').write('unsaved')")
    tab.close()
    [record] = Records().list("superserve")
    subprocess.run([sys.executable, "-m", "sandbox_kernel", "pause", record.name], check=True)
    assert statuses(service) == ["paused"]
    wait_until(lambda: "Its kernel waits." in server.log, "the server notices")
    server.notebook("n.ipynb", ("x",))
    store, name = Store.open(), name_for_notebook(str(server.root / "n.ipynb"))
    [failure] = wait_until(lambda: store.failures(name), "the save that fails")
    assert "is paused, and its files were not saved" in failure.message
    assert statuses(service) == ["paused"]
    server.request("DELETE", f"/api/kernels/{kernel}")
    wait_until(lambda: not statuses(service), "the end of the sandbox")
    assert saves(server, "n.ipynb") == 1

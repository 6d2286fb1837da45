"""A server ends: its kernels end with it, or wait for the next one, but not without bounds."""

from __future__ import annotations

import asyncio
import os
import pty
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from jupyter_server.serverapp import ServerApp

from sandbox_kernel.jupyter import observers
from sandbox_kernel.records import Records
from sandbox_kernel.workspace import Store, name_for_notebook
from tests.helpers.waiting import wait_until
from tests.kernels.live import PATIENCE, jail_processes

from .conftest import StartServer
from .running import JupyterServer, Tab


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-I", "-m", "sandbox_kernel", *arguments],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=True,
    )


STUBBORN = """
import signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("begun", flush=True)
while True:
    try:
        while True: pass
    except KeyboardInterrupt:
        pass
"""


def kernels() -> list[str]:
    return [record.name for record in Records().list("local")]


@pytest.mark.slow
@pytest.mark.parametrize("how", ["stop", "ctrl-c"])
def test_who_asks_a_server_to_end_means_its_kernels(
    make_server: StartServer, folder: Path, how: str
) -> None:
    """`jupyter server stop` and the quit button (POST /api/shutdown), or Ctrl-C and yes at a
    terminal. Both notebooks' sandboxes end, after their files were saved, and the server does not
    forget to end itself."""
    server = make_server()
    terminal, server.stdin = pty.openpty()
    server.start()
    server.notebook("n.ipynb")
    tab = Tab(server, server.session("n.ipynb")["kernel"]["id"])
    tab.run("open('kept.txt', 'w').write('kept')")
    server.session("other.ipynb")
    assert len(kernels()) == 2
    assert server.process is not None
    if how == "stop":
        server.request("POST", "/api/shutdown")
    else:
        server.process.send_signal(signal.SIGINT)
        os.write(terminal, b"y\n")
    server.process.wait(PATIENCE)
    os.close(terminal)
    os.close(server.stdin)
    assert kernels() == [], server.log
    assert jail_processes(folder) == []
    assert not list((folder / "data" / "servers").iterdir())
    latest = Store.open().latest(name_for_notebook(str(server.root / "n.ipynb")))
    assert latest is not None
    assert latest.files == 1


@pytest.mark.slow
def test_what_a_stopped_service_leaves(make_server: StartServer) -> None:
    """SIGTERM, as a service manager sends it. Of three kernels, one has run no cell, though a tab
    is open and has asked for its name, and ends; and one ends because no more than one may wait,
    and it has been idle for longer. Of the one that is left the next command says a word, and ends
    it."""
    server = make_server("--SandboxServer.max_left=1")
    server.start()
    unused = Tab(server, server.session("unused.ipynb")["kernel"]["id"])
    asked = unused.send("kernel_info_request", {})
    while unused.read()["parent"] != asked:
        pass
    for name in ("earlier.ipynb", "later.ipynb"):
        tab = Tab(server, server.session(name)["kernel"]["id"])
        tab.run("x = 1")
    last = kernels()[-1]
    server.end(signal.SIGTERM)
    assert kernels() == [last], server.log
    assert server.log.count("it has been idle for longest") == 1
    assert "it has been idle for longest" in server.log
    said = command("ps")
    assert "sandbox-kernel rm --left" in said.stderr
    assert "1 sandbox waits" in said.stderr
    assert command("rm", "--left").stdout == f"{last}\n"
    assert kernels() == []
    assert command("ps").stderr == ""


@pytest.mark.slow
def test_a_kernel_that_is_given_up_leaves_no_sandbox(
    make_server: StartServer, folder: Path
) -> None:
    """A kernel dies and is not restarted any more: the server forgets it ("removing from map").
    Its sandbox, in which nothing of use runs, goes as well."""
    server = make_server("--KernelRestarter.restart_limit=0")
    server.start()
    Tab(server, server.session("n.ipynb")["kernel"]["id"]).begin("import os; os._exit(1)")
    wait_until(lambda: kernels() == [], "the end of the sandbox")
    wait_until(lambda: not jail_processes(folder), "the end of its processes")
    assert server.get("/api/kernels") == []


@pytest.mark.slow
def test_a_server_in_a_program_takes_its_kernels_along(folder: Path) -> None:
    """A program starts a server in itself, as the tests of Jupyter's own projects do, and ends it
    in an orderly way, many times. No sandbox stays."""

    class App(ServerApp):
        def init_signal(self) -> None:
            """The signals are the program's."""

    async def once() -> None:
        app = App(root_dir=str(folder / "root"), token="", open_browser=False)
        app.initialize(["--port=0", "--allow-root"], new_httpserver=False)
        assert len(observers.observers) == 1
        for _ in range(2):
            await app.kernel_manager.start_kernel(kernel_name="sandbox")
        assert len(kernels()) == 2
        await app._cleanup()

    for _ in range(2):
        try:
            asyncio.run(once())
        finally:
            ServerApp.clear_instance()
        assert kernels() == []
        assert jail_processes(folder) == []
        assert observers.observers == []


@pytest.mark.slow
def test_a_signal_during_the_end_changes_nothing(server: JupyterServer) -> None:
    """`jupyter server stop` sends SIGTERM to a server that takes more than five seconds to end,
    because a save is under way, or a kernel does not want to end. It has been asked to end by then,
    and that is carried through."""
    tab = Tab(server, server.session("n.ipynb")["kernel"]["id"])
    tab.run("import os; open('large', 'wb').write(os.urandom(2**29)); None")
    server.notebook("n.ipynb")
    cell = tab.begin(STUBBORN)
    while "begun" not in tab.text(cell):
        tab.read()
    tab.close()
    assert server.process is not None
    with ThreadPoolExecutor() as pool:
        asked = pool.submit(server.request, "POST", "/api/shutdown")
        wait_until(lambda: "Saving their files ..." in server.log, "the end has begun")
        server.process.send_signal(signal.SIGTERM)
        server.process.wait(PATIENCE)
        asked.exception()  # it may have ended before it could answer
    assert kernels() == [], server.log


def killed_server(make_server: StartServer) -> tuple[JupyterServer, str]:
    """A server that was killed when a cell of its notebook had written a file, and the sandbox that
    has the file."""
    server = make_server()
    server.start()
    server.notebook("n.ipynb")
    tab = Tab(server, server.session("n.ipynb")["kernel"]["id"])
    tab.run("open('kept.txt', 'w').write('kept')")
    server.end(signal.SIGKILL)
    [name] = kernels()
    return server, name


@pytest.mark.slow
@pytest.mark.parametrize("who", ["rm", "count", "memory"])
def test_what_a_killed_server_has_left_is_saved_before_it_ends(
    make_server: StartServer, folder: Path, who: str
) -> None:
    """A server is killed, so nobody saves what a cell has written since. `rm --left`, or a server
    for another folder that is stopped and may leave no kernel, or no memory, ends that sandbox: its
    files are saved first."""
    server, name = killed_server(make_server)
    assert "1 sandbox waits" in command("run", "--", "true").stderr
    if who == "rm":
        assert command("rm", "--left").stdout == f"{name}\n"
    else:
        (folder / "other").mkdir()
        bound = {"count": "max_left=0", "memory": "max_left_mib=1"}[who]
        other = JupyterServer(folder, folder / "other", f"--SandboxServer.{bound}")
        other.start("--SandboxServer.adopt=False")
        assert "1 sandbox waits" in other.log
        other.end(signal.SIGTERM)
        assert f"Sandbox {name}, which an earlier server left, ends" in other.log
    assert kernels() == []
    latest = Store.open().latest(name_for_notebook(str(server.root / "n.ipynb")))
    assert latest is not None
    assert latest.files == 1


@pytest.mark.slow
def test_what_cannot_be_saved_is_not_ended(make_server: StartServer, folder: Path) -> None:
    """The store's disk is full, or it is not there: `rm --left` leaves the sandbox, and says how to
    end it all the same."""
    _, name = killed_server(make_server)
    store = folder / "data" / "store"
    store.rename(folder / "away")
    store.touch()
    refused = subprocess.run(
        [sys.executable, "-I", "-m", "sandbox_kernel", "rm", "--left"],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert refused.returncode == 1
    assert f"`sandbox-kernel rm --force {name}`" in refused.stderr
    assert kernels() == [name]
    assert command("rm", "--left", "--force").stdout == f"{name}\n"
    assert kernels() == []

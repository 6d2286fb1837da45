"""The kernels of a Jupyter Server outlive it: the next one goes on with them."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
from pathlib import Path

import pytest

from sandbox_kernel.records import Records
from sandbox_kernel.sandboxes.local import LocalClient
from tests.helpers.waiting import wait_until
from tests.kernels.conftest import KernelStarter
from tests.kernels.other_process import attach

from .conftest import StartServer
from .running import JupyterServer, Tab, in_the_sandbox, the_sandbox

LINES = 600
PRINTING = f"""
import time
for i in range({LINES}):
    print("line", i, flush=True)
    time.sleep(0.01)
"""


@pytest.mark.slow
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGKILL], ids=["SIGTERM", "SIGKILL"])
def test_three_kernels_survive(server: JupyterServer, signum: signal.Signals) -> None:
    """Kernels, sessions and variables are there again, and every line that was printed, before,
    while and after there was no server, is seen once."""
    sessions, tabs = [], []
    for number in range(3):
        server.notebook(f"n{number}.ipynb")
        sessions.append(server.session(f"n{number}.ipynb"))
        tabs.append(Tab(server, sessions[-1]["kernel"]["id"]))
        tabs[-1].run(f"x = {number}")
    busy = tabs[2]
    cell = busy.begin(PRINTING)
    while "line 50\n" not in busy.text(cell):
        busy.read()

    server.end(signum)
    if signum == signal.SIGTERM:  # what waits, for how long, and how to end it
        assert re.search(
            r"goes on without the server, in sandbox (\S+): for 1 h at most, or until a server "
            rf"for {re.escape(str(server.root))} takes it over. `sandbox-kernel rm \1` ends it",
            server.log,
        )
    for tab in tabs:
        tab.drain()
    before = busy.text(cell).count("\n")
    server.start()

    found = {s["id"]: (s["path"], s["kernel"]["id"]) for s in server.get("/api/sessions")}
    assert found == {s["id"]: (s["path"], s["kernel"]["id"]) for s in sessions}
    states = {k["id"]: k["execution_state"] for k in server.get("/api/kernels")}
    assert [states[tab.kernel_id] for tab in tabs[:2]] == ["idle", "idle"]
    for tab in tabs:
        tab.connect()
    assert busy.until_done(cell)["status"] == "ok"
    assert busy.text(cell) == "".join(f"line {i}\n" for i in range(LINES))
    assert 50 <= before < LINES
    assert [tab.run("print(x)") for tab in tabs] == ["0\n", "1\n", "2\n"]
    # What the killed server had given to the system, but not yet noted, is sent again.
    assert len(busy.doubles()) <= (1 if signum == signal.SIGKILL else 0), busy.doubles()


@pytest.mark.slow
def test_a_cell_that_ends_without_a_server(server: JupyterServer) -> None:
    """The client that comes back gets its output, and how it ended."""
    tab = Tab(server, server.session("n.ipynb")["kernel"]["id"])
    cell = tab.begin(
        "import os, time\nprint('begun', flush=True)\n"
        "while not os.path.exists('go'): time.sleep(0.01)\n"
        "print('ending', flush=True); open('gone', 'w')\n1 / 0"
    )
    while tab.text(cell) != "begun\n":
        tab.read()
    server.end(signal.SIGKILL)
    tab.drain()
    script = "touch go; until [ -e gone ]; do sleep 0.05; done"
    in_the_sandbox(script)
    server.start()
    tab.connect()
    reply = tab.until_done(cell)
    assert (reply["ename"], reply["execution_count"]) == ("ZeroDivisionError", 1)
    assert tab.text(cell) == "begun\nending\n"
    assert tab.run("print(_oh)") == "{}\n"


@pytest.mark.slow
def test_after_adoption(server: JupyterServer, folder: Path) -> None:
    """An adopted kernel is like any other: it can be interrupted, restarted and shut down. The
    first client gets the output that nobody got, whoever it is; the second does not."""
    session = server.session("n.ipynb")
    kernel = session["kernel"]["id"]
    tab = Tab(server, kernel)
    tab.run("x = 1; open('kept.txt', 'w').write('kept')")
    server.end(signal.SIGKILL)
    server.start()
    assert "was not adopted" not in server.log
    reports = server.get("/sandbox-kernel/api/adoption")
    assert [(r["kernel_id"], r["adopted"]) for r in reports] == [(kernel, True)]

    tab.connect()
    cell = tab.begin("while True: pass")
    while not any(m["kind"] == "execute_input" and m["parent"] == cell for m in tab.messages):
        tab.read()
    server.request("POST", f"/api/kernels/{kernel}/interrupt")
    assert tab.until_done(cell)["ename"] == "KeyboardInterrupt"
    server.request("POST", f"/api/kernels/{kernel}/restart")
    assert tab.run("print('x' in globals(), open('kept.txt').read())") == "False kept\n"

    # A second life: what is known about the kernel was kept again.
    tab.close()
    server.end(signal.SIGKILL)
    server.start()
    other = Tab(server, kernel)
    assert other.run("print(open('kept.txt').read())") == "kept\n"
    server.request("DELETE", f"/api/sessions/{session['id']}")
    assert Records().list("local") == []
    assert not list((folder / "data" / "servers").glob("*.json"))


@pytest.mark.slow
def test_what_cannot_be_adopted_is_listed(server: JupyterServer) -> None:
    """A sandbox that ended meanwhile: the log and the REST API say so, and the server starts."""
    kernel = server.session("n.ipynb")["kernel"]["id"]
    server.end(signal.SIGKILL)
    name = the_sandbox()
    asyncio.run(LocalClient().remove(name))
    server.start()
    assert server.get("/api/kernels") == []
    [report] = server.get("/sandbox-kernel/api/adoption")
    assert (report["kernel_id"], report["sandbox"], report["adopted"]) == (kernel, name, False)
    assert f"No sandbox named '{name}'" in report["reason"]
    assert f"Kernel {kernel} in sandbox {name} (local) was not adopted: No sandbox" in server.log


@pytest.mark.slow
def test_a_server_that_lives_keeps_its_kernels(
    server: JupyterServer, make_server: StartServer
) -> None:
    """A second server of the same user, for the same folder, does not take them."""
    tab = Tab(server, server.session("n.ipynb")["kernel"]["id"])
    second = make_server()
    second.start()
    assert second.get("/api/kernels") == []
    [report] = second.get("/sandbox-kernel/api/adoption")
    assert report["reason"] == "another server has it"
    assert tab.run("print(1)") == "1\n"


@pytest.mark.slow
def test_shutdown_that_deletes(make_server: StartServer) -> None:
    """By policy a server that is shut down takes its sandboxes along."""
    server = make_server("--SandboxServer.on_shutdown=delete")
    server.start()
    server.session("n.ipynb")
    assert the_sandbox()
    server.end(signal.SIGTERM)
    wait_until(lambda: not Records().list("local"), "the end of the sandbox")


@pytest.mark.slow
def test_what_has_the_name_only_is_not_adopted(server: JupyterServer, folder: Path) -> None:
    """While there is no server, its sandbox is removed and somebody else makes one of the same
    name, with a kernel in it. The next server does not take it, and that kernel goes on. Nor does
    it touch, or forget, the kernel of a server on another host that has the same home folder."""
    kernel = server.session("n.ipynb")["kernel"]["id"]
    server.end(signal.SIGKILL)
    name = the_sandbox()
    asyncio.run(LocalClient().remove(name))
    [kept] = (folder / "data" / "servers").glob("*.json")
    away = {**json.loads(kept.read_text()), "kernel_id": "away", "server": "0" * 16}
    away["place"] = {"host": "other-host", "machine": "m", "boot": "b", "pids": "p"}
    (folder / "data" / "servers" / "away.json").write_text(json.dumps(away))
    starter = KernelStarter()
    try:
        live = starter(name=name)
        live.ok("x = 1")
        server.start()
        reports = {r["kernel_id"]: r["reason"] for r in server.get("/sandbox-kernel/api/adoption")}
        assert server.get("/api/kernels") == []
        assert "another one" in reports[kernel]
        assert "has its name" in reports[kernel]
        assert reports["away"] == "it belongs to the host other-host"
        assert (folder / "data" / "servers" / "away.json").exists()
        assert live.ok("x").value == "1"
    finally:
        starter.shut_down()


@pytest.mark.slow
def test_what_another_process_uses_is_not_adopted(server: JupyterServer, folder: Path) -> None:
    """After a crash of the server somebody goes on with its kernel in a script. The next server
    leaves it to that."""
    tab = Tab(server, server.session("n.ipynb")["kernel"]["id"])
    tab.run("x = 1")
    server.end(signal.SIGKILL)
    [kept] = (folder / "data" / "servers").glob("*.json")
    starter = KernelStarter()
    try:
        live = attach(starter, json.loads(kept.read_text())["provisioner"])
        assert live.ok("x").value == "1"
        server.start()
        [report] = server.get("/sandbox-kernel/api/adoption")
        assert report["reason"] == f"process {os.getpid()} has taken it over, and uses it"
        assert server.get("/api/kernels") == []
        assert live.ok("x").value == "1"
    finally:
        starter.shut_down()

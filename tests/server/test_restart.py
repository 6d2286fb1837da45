"""The kernels of a Jupyter Server outlive it: the next one goes on with them."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from sandbox_kernel.records import Records

from .conftest import StartServer
from .running import JupyterServer, Tab

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
    print(f"{before} lines before, {busy.doubles()} messages twice")
    assert busy.doubles() <= 1


@pytest.mark.slow
def test_a_cell_that_ends_without_a_server(server: JupyterServer) -> None:
    """Its output and its end, with the error, are told to the client that comes back."""
    kernel = server.session("n.ipynb")["kernel"]["id"]
    tab = Tab(server, kernel)
    tab.run("import os, time")
    cell = tab.begin("print('begun', flush=True)\nwhile not os.path.exists('go'): time.sleep(.01)\n1 / 0")
    while tab.text(cell) != "begun\n":
        tab.read()
    server.end(signal.SIGKILL)
    tab.drain()
    [record] = Records().list("local")
    print(record)

"""Notebooks of the API, opened in a server: the same live kernel."""

from __future__ import annotations

import asyncio
import json
import signal
from pathlib import Path

import pytest

from sandbox_kernel import BlockingNotebook, Notebook
from sandbox_kernel.records import Records
from tests.agents.notebook.other_process import caller, killed_caller

from .running import JupyterServer, Tab, the_sandbox

OPEN = """
nb = await Notebook.open(os.environ["TEST_PATH"])
await nb.run("x = 41; print('from the program')")
await nb.save()
tell(sandbox=nb.sandbox)
"""


@pytest.mark.slow
def test_a_notebook_whose_program_died_is_open_with_its_kernel(
    server: JupyterServer, folder: Path
) -> None:
    """The session has the same kernel in the same sandbox, with its variables, and the recorded
    cells; a restart in the server keeps the sandbox, and shutting it down ends it."""
    path = folder / "root" / "left.ipynb"
    with killed_caller(OPEN, TEST_PATH=str(path)) as told:
        shown = server.get("/api/contents/left.ipynb")["content"]["cells"]
        assert "from the program" in shown[0]["outputs"][0]["text"]
        session = server.session("left.ipynb")
        tab = Tab(server, session["kernel"]["id"])
        assert tab.run("print(x + 1)") == "42\n"
        assert the_sandbox() == told["sandbox"]
        assert server.session("left.ipynb")["kernel"]["id"] == session["kernel"]["id"]
        server.request("POST", f"/api/kernels/{tab.kernel_id}/restart")
        assert tab.run("print('x' in globals())") == "False\n"
        assert the_sandbox() == told["sandbox"]
        server.request("DELETE", f"/api/sessions/{session['id']}")
        assert not Records().list("local")
        assert not Notebook.live()


@pytest.mark.slow
def test_a_notebook_in_use_is_not_opened_beside_its_program(
    server: JupyterServer, folder: Path
) -> None:
    """The person is told which process has it; when that lets go, the kernel is the same."""
    path = folder / "root" / "used.ipynb"
    detaches = OPEN + "await asyncio.to_thread(sys.stdin.readline)\nawait nb.detach()\ntell(left=1)"
    with caller(detaches, TEST_PATH=str(path)) as (process, told):
        body = {"path": "used.ipynb", "name": "used.ipynb", "type": "notebook"}
        asked = {**body, "kernel": {"name": "sandbox"}}
        status, text = server.refused("POST", "/api/sessions", asked)
        assert (status, str(process.pid) in text) == (500, True)
        assert told["sandbox"] in text
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write("\n")
        process.stdin.flush()
        assert json.loads(process.stdout.readline()) == {"left": 1}
        tab = Tab(server, server.session("used.ipynb")["kernel"]["id"])
        assert tab.run("print(x)") == "41\n"


@pytest.mark.slow
def test_a_program_goes_on_after_the_server(server: JupyterServer, folder: Path) -> None:
    """What a server took over can be attached to again when the server has ended."""
    path = folder / "root" / "back.ipynb"
    with killed_caller(OPEN, TEST_PATH=str(path)):
        tab = Tab(server, server.session("back.ipynb")["kernel"]["id"])
        tab.run("y = 1")
        server.end(signal.SIGTERM)
        with BlockingNotebook.attach(path) as notebook:
            assert notebook.run("x + y").text == "42"


@pytest.mark.slow
def test_a_notebook_that_has_ended_gets_a_new_kernel(server: JupyterServer, folder: Path) -> None:
    """Nothing is waited for, and nothing is refused."""
    path = folder / "root" / "ended.ipynb"

    async def run() -> None:
        async with Notebook.open(path) as notebook:
            await notebook.run("1")

    asyncio.run(run())
    tab = Tab(server, server.session("ended.ipynb")["kernel"]["id"])
    assert tab.run("print('new')") == "new\n"

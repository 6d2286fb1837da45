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
from tests.helpers.waiting import wait_until

from .running import JupyterServer, Tab, the_sandbox

OPEN = """
nb = await Notebook.open(os.environ["TEST_PATH"])
await nb.run("x = 41; print('from the program')")
await nb.save()
tell(sandbox=nb.sandbox)
"""


SHARED = """
while code := (await asyncio.to_thread(sys.stdin.readline)).strip():
    tell(text=(await nb.run(code)).text)
await nb.detach()
tell(left="yes")
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
def test_a_notebook_in_use_is_shared_with_its_program(server: JupyterServer, folder: Path) -> None:
    """Both run cells in one kernel, and interrupt it; only the program restarts it. When the
    program lets go of the notebook, the server has the same kernel, with all that servers do."""
    path = folder / "root" / "used.ipynb"
    with caller(OPEN + SHARED, TEST_PATH=str(path)) as (process, told):
        assert process.stdin is not None
        assert process.stdout is not None

        def ask(code: str) -> dict[str, str]:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(code + "\n")
            process.stdin.flush()
            answer: dict[str, str] = json.loads(process.stdout.readline())
            return answer

        session = server.session("used.ipynb")
        tab = Tab(server, session["kernel"]["id"])
        assert tab.run("print(x); y = 2") == "41\n"
        assert ask("x + y")["text"] == "43"
        assert server.refused("POST", f"/api/kernels/{tab.kernel_id}/restart")[0] == 500
        assert "a program has this notebook open" in server.log
        sleeping = tab.begin("import time\nprint('sleeps')\ntime.sleep(600)")
        while "sleeps" not in tab.text(sleeping):
            tab.read()
        server.request("POST", f"/api/kernels/{tab.kernel_id}/interrupt")
        assert tab.until_done(sleeping)["ename"] == "KeyboardInterrupt"
        assert ask("y")["text"] == "2"
        assert ask("")["left"]
        wait_until(lambda: "Took over kernel" in server.log, "the server has the kernel")
        tab.until_heard()
        assert tab.run("print(x + y)") == "43\n"
        assert the_sandbox() == told["sandbox"]
        server.request("POST", f"/api/kernels/{tab.kernel_id}/restart")
        assert tab.run("print('x' in globals())") == "False\n"


@pytest.mark.slow
def test_the_end_of_a_server_leaves_a_shared_kernel_alone(
    server: JupyterServer, folder: Path
) -> None:
    """Neither its shutdown nor a session's end touches the program's kernel; the program's end is
    seen in the server."""
    path = folder / "root" / "kept.ipynb"
    with caller(OPEN + SHARED, TEST_PATH=str(path)) as (process, _):
        assert process.stdin is not None
        assert process.stdout is not None
        session = server.session("kept.ipynb")
        server.request("DELETE", f"/api/sessions/{session['id']}")
        server.session("kept.ipynb")
        server.end(signal.SIGTERM)
        process.stdin.write("x\n")
        process.stdin.flush()
        assert json.loads(process.stdout.readline()) == {"text": "41"}


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

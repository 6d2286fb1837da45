"""What goes wrong is said in the notebook, where the person looks."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from sandbox_kernel.jupyter.server.kernel_events import DEATH_EVENTS
from sandbox_kernel.jupyter.server.save_hooks import SAVE_EVENTS
from tests.helpers.waiting import wait_until
from tests.kernels.live import PATIENCE

from .conftest import StartServer
from .running import Events, JupyterServer, Tab, in_the_sandbox, kill_the_sandbox, open_notebook


@pytest.fixture
def small(make_server: StartServer) -> JupyterServer:
    server = make_server("--SandboxProvisioner.memory_mib=256")
    server.start()
    return server


def until_restarted(tab: Tab) -> dict[str, Any]:
    """Read until the server says that it restarts the kernel; what it says then."""
    while True:
        message = tab.read()
        if message["content"].get("execution_state") == "restarting":
            content: dict[str, Any] = message["content"]
            return content


def until_said(tab: Tab, request: str, text: str) -> str:
    deadline = time.monotonic() + PATIENCE
    while text not in tab.text(request):
        tab.read(deadline - time.monotonic())
    return tab.text(request)


@pytest.mark.slow
def test_why_a_kernel_died(small: JupyterServer) -> None:
    """A cell ends its own kernel; the next one takes too much memory; a third is killed by its own
    signal. Each time the cell that ran has the cause as its last output, on stderr, before the
    browser hears of the restart; never the cause of the death before. The event has it, too."""
    _, tab = open_notebook(small, "n.ipynb")
    events = Events(small)
    for code, cause in (
        ("import os; os._exit(3)", "exit code 3"),
        ("hoard = []\nwhile True: hoard.append(bytearray(2**20))", "out of memory: "),
        ("import os; os.kill(os.getpid(), 9)", "killed by signal 9 (SIGKILL)"),
    ):
        request = tab.begin(code)
        restarting = until_restarted(tab)
        said = tab.text(request)
        assert said.startswith(f"The kernel died: {cause}"), said
        assert ("memory_mib" in said) == cause.startswith("out of memory")
        assert restarting["reason"] + "\n" == said
        assert tab.messages[-2]["content"]["name"] == "stderr"
        event = events.next(DEATH_EVENTS)
        assert (event["kernel_id"], event["message"] + "\n") == (tab.kernel_id, said)
        assert tab.run("print(6 * 7)") == "42\n"
    memory = next(m for m in tab.messages if "out of memory" in m["content"].get("text", ""))
    assert " MiB of 256 MiB" in memory["content"]["text"]
    assert "Ctrl-C" not in small.log
    events.close()


@pytest.mark.slow
def test_why_a_kernel_died_while_nothing_ran(server: JupyterServer) -> None:
    """A sandbox that is removed under an idle kernel: the cell that ran last tells. Nobody is there
    when the next kernel dies: the first cell that is run afterwards tells."""
    _, tab = open_notebook(server, "n.ipynb")
    request = tab.begin("print('fine')")
    tab.until_done(request)
    kill_the_sandbox()
    said = until_restarted(tab)["reason"]
    assert tab.text(request) == f"fine\n{said}\n"
    assert said.startswith("The kernel died with its sandbox.\nSandbox 'kernel-")
    assert said.endswith("The next kernel starts in a new one, with the files of the last save.")

    tab.until_heard()
    assert tab.run("1") == ""
    tab.begin("import os, time\nwhile not os.path.exists('go'): time.sleep(0.01)\nos._exit(5)")
    tab.close()
    in_the_sandbox("touch go")
    wait_until(lambda: "died: exit code 5" in server.log, "the second death")
    other = Tab(server, tab.kernel_id)
    request = other.begin("print('again')")
    assert until_said(other, request, "again").startswith("The kernel died: exit code 5.\n")


@pytest.mark.slow
def test_files_that_are_not_saved(server: JupyterServer, folder: Path) -> None:
    """The store cannot be written. The notebook is saved every time, and says once, below the cell
    that ran last, that its files are not; and once that they are again. Then the sandbox is lost,
    and the kernel cannot be restarted without its files: that is said, too."""
    server.notebook("n.ipynb")
    _, tab = open_notebook(server, "n.ipynb")
    events = Events(server)
    request = tab.begin("print(open('file', 'w').write('1'))")
    tab.until_done(request)
    store, away = folder / "data" / "store", folder / "data" / "away"
    store.rename(away)
    store.write_text("no folder")
    for number in range(2):
        server.notebook("n.ipynb", (f"x = {number}",))
        while events.next(SAVE_EVENTS)["status"] != "failed":
            pass
    store.unlink()
    away.rename(store)
    server.notebook("n.ipynb", ("x = 2",))
    said = until_said(tab, request, "are saved again")
    assert said.count("not the files that its cells wrote") == 1
    assert "store" in said
    events.close()

    store.rename(away)
    store.write_text("no folder")
    kill_the_sandbox()
    said = until_said(tab, request, "could not be restarted")
    assert said.index("The kernel died with its sandbox.") < said.index("could not be restarted")
    store.unlink()
    away.rename(store)


@pytest.mark.slow
def test_start_errors_have_lines(make_server: StartServer) -> None:
    """A kernel cannot be started: JupyterLab's dialog, which breaks no lines, gets short ones."""
    server = make_server("--SandboxProvisioner.image=an-image")
    server.start()
    kernel = {"name": "sandbox"}
    session = {"path": "n.ipynb", "name": "n.ipynb", "type": "notebook", "kernel": kernel}
    for path, body in (("/api/kernels", kernel), ("/api/sessions", session)):
        _, message = server.refused("POST", path, body)
        assert message.startswith("Sandbox 'kernel-"), message
        assert "enforce image=" in message
        assert message.count("\n") >= 2
        assert max(map(len, message.splitlines())) <= 76


@pytest.mark.slow
def test_only_sandboxes(make_server: StartServer, folder: Path) -> None:
    """A notebook names a kernelspec that is not of a sandbox, or one that asks for the local
    provisioner by name, which JUPYTER_DEFAULT_PROVISIONER_NAME does not change. Neither is started,
    and the message says why; kernels in sandboxes are."""
    spec = {
        "argv": ["python3", "-c", f"open({str(folder / 'ran')!r}, 'w')", "{connection_file}"],
        "display_name": "Out",
        "language": "python",
    }
    local = {"metadata": {"kernel_provisioner": {"provisioner_name": "local-provisioner"}}}
    for name, more in (("plain", {}), ("named", local)):
        kernel = folder / "share" / "kernels" / name
        kernel.mkdir(parents=True)
        (kernel / "kernel.json").write_text(json.dumps({**spec, **more}))
    server = make_server("--SandboxServer.only=True")
    server.start()
    assert {"plain", "named"} <= set(server.get("/api/kernelspecs")["kernelspecs"])
    for name in ("plain", "named"):
        status, message = server.refused("POST", "/api/kernels", {"name": name})
        assert status >= 400
        assert "outside of" in message
        assert "SandboxServer.only" in message
    assert not (folder / "ran").exists()
    _, tab = open_notebook(server, "n.ipynb")
    assert tab.run("print(6 * 7)") == "42\n"


@pytest.mark.slow
def test_files_beside_the_notebook(server: JupyterServer, folder: Path) -> None:
    """A cell opens a file, or imports a module, that lies beside the notebook on the host. After
    the traceback stands that the sandbox does not see it, and what to do. Nothing is said of what
    is not there, lies elsewhere, is a link or is hidden: a cell can ask for any name."""
    root = server.root / "work"
    (root / "sub").mkdir(parents=True)
    for name in ("work/data.csv", "work/sub/more.csv", "out.csv", "work/.env", "work/helper.py"):
        (server.root / name).write_text("1")
    (root / "link.csv").symlink_to("data.csv")
    server.notebook("work/n.ipynb")
    _, tab = open_notebook(server, "work/n.ipynb")
    for code, named in (
        ("open('data.csv')", "'data.csv' lies beside the notebook"),
        ("open('/workspace/sub/more.csv')", "'sub/more.csv' lies beside"),
        (f"open({str(root / 'data.csv')!r})", "'data.csv' lies beside the notebook"),
        (f"open({str(server.root / 'out.csv')!r})", ""),
        ("%run helper.py", "'helper.py' lies beside the notebook"),
        ("%load helper.py", "'helper.py' lies beside the notebook"),
        ("%run nowhere.py", ""),
        ("import numpy_is_not_here", ""),
        ("import helper.part", "'helper.py' lies beside the notebook"),
        ("open('nowhere.csv')", ""),
        ("open('../out.csv')", "leads out of the notebook's folder"),
        ("open('../nowhere.csv')", "leads out of the notebook's folder"),
        ("open('link.csv')", ""),
        ("open('.env')", ""),
        ("open('x' * 10000)", ""),
    ):
        request = tab.begin(code)
        assert tab.until_done(request)["status"] == "error"
        said = tab.text(request)
        assert bool(said) == bool(named), (code, said)
        assert named in said
        assert ("SANDBOX_KERNEL_FILES=mount-ro" in said) == ("lies beside" in named)
    shown = [m["kind"] for m in tab.messages if m["kind"] in ("error", "stream")]
    assert shown[:4] == ["error", "stream", "error", "stream"]
